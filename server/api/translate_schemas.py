"""The HTTP bodies of /translate and /languages, in LibreTranslate's shape."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from server.api.fields import Name, at_most
from server.api.schemas import MAX_PROMPTS, ServedBody

Texts = Annotated[Annotated[list[str], Field(min_length=1, fail_fast=True)], at_most(MAX_PROMPTS, "texts")]


class TranslateRequest(ServedBody):
    """Body of POST /translate. All fields but q, source and target may be null, which means the default."""

    q: str | Texts = Field(description="One text or several.")
    source: Name = Field(
        description="Language of the texts, by its code in GET /languages; auto if the model detects it."
    )
    target: Name = Field(description="Language to translate to.")
    format: Name | None = Field(None, description="text; html is not supported.")
    alternatives: int | None = Field(None, ge=0, description="Maximum number of alternative translations per text (0).")
    api_key: Name | None = Field(None, description="Ignored; send API keys in the header Authorization.")
    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")


class TranslateResponse(BaseModel):
    """Answer of POST /translate: a text if q is a text, a list if q is a list."""

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] | None = Field(
        None, description="Alternative translations, best first and without duplicates, if requested."
    )


class Language(BaseModel):
    """A source language with its target languages."""

    code: str
    name: str = Field(description="Same as the code, because tokenizers do not contain names.")
    targets: list[str]
