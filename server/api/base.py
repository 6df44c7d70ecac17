"""The common base of all HTTP bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from server.api.fields import refuse_unsupported, unknown_fields

MAX_FIELDS = 1024  # maximum fields of a body, including unknown ones


class JsonBody(BaseModel):
    """The common base of all bodies."""

    # Strict: "16" is no integer and 1 is no boolean. Unknown fields are kept, to be reported.
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("limit", f"may have at most {MAX_FIELDS} fields, got {len(value)}")
        return value

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the answer and are not supported. Raises ApiError: names the first such
        field."""
        refuse_unsupported(self.model_extra or {})

    def ignored_fields(self) -> list[str]:
        """Names of unknown fields that the client may have expected to change the answer."""
        return unknown_fields(self.model_extra or {})
