"""The HTTP bodies of /translate and /languages, which are LibreTranslate's."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from server.api.fields import Name, at_most
from server.api.schemas import MAX_PROMPTS, ServedBody

Texts = Annotated[Annotated[list[str], Field(min_length=1, fail_fast=True)], at_most(MAX_PROMPTS, "texts")]


class TranslateRequest(ServedBody):
    """Body of POST /translate. Null means the default, for every field but the first three."""

    q: str | Texts = Field(description="The text, or several.")
    source: Name = Field(
        description="Language of the texts, by its code in GET /languages; auto for models that need not be told."
    )
    target: Name = Field(description="Language to translate to.")
    format: Name | None = Field(None, description="text; html is not supported.")
    alternatives: int | None = Field(None, ge=0, description="At most so many further translations of each text (0).")
    api_key: Name | None = Field(None, description="Not read: keys come in the header Authorization.")
    model: str | None = Field(None, description="The served model's id; may be left out.")


class TranslateResponse(BaseModel):
    """Answer of POST /translate: a text for a text, a list for a list."""

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] | None = Field(
        None, description="Further translations, best first and each once, where some were asked for."
    )


class Language(BaseModel):
    """A language that the model reads, and those that it translates it to."""

    code: str
    name: str = Field(description="The code again: tokenizers hold no names.")
    targets: list[str]
