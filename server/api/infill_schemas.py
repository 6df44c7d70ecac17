"""The HTTP bodies of /infill and /apply-template, in llama.cpp's shapes."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from server.api.base import Body
from server.api.chat_schemas import Messages
from server.api.fields import Name, at_most
from server.api.schemas import GenerationBody, Timings
from server.api.template_fields import TemplateFields

MAX_FILES = 256


class InfillFile(BaseModel):
    """A further file, as context."""

    filename: Name = ""
    text: str


class InfillRequest(GenerationBody):
    """Body of POST /infill. Null means the default, for every field but the first two."""

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after the gap.")
    input_extra: Annotated[list[InfillFile], at_most(MAX_FILES, "files")] | None = Field(
        None, description="Other files that the model should know."
    )
    prompt: str | None = Field(None, description="Continues the prefix: the beginning of the filled-in text.")
    n_predict: int | None = Field(None, ge=-1, description="llama.cpp's name of max_tokens; -1: as many as fit.")


class InfillResponse(BaseModel):
    """Answer of POST /infill, and one event of its stream; fields after the first four come only at the end."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    truncated: bool | None = None
    stop_type: str | None = None
    stopping_word: str | None = None
    timings: Timings | None = None


class ApplyTemplateRequest(TemplateFields, Body):
    """Body of POST /apply-template: the fields of /v1/chat/completions that affect the prompt."""

    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")
    messages: Messages = Field(description="Messages, as for /v1/chat/completions.")


class ApplyTemplateResponse(BaseModel):
    """Answer of POST /apply-template."""

    prompt: str
