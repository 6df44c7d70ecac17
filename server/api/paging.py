"""The query parameters of routes that list items in pages, as at OpenAI."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

MAX_LISTED = 100  # default items of a page

After = Annotated[str | None, Query(max_length=256, description="Start after the item with this id.")]
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]
Order = Annotated[str, Query(pattern="^(asc|desc)$", description="asc or desc (default)")]
