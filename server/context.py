"""What every route needs, made once per app."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from engine.client import EngineClient
from engine.text import Tokenizer
from server.errors import ApiError
from server.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The served model and the way to it.

    Attributes:
        client: the engine.
        tokenizer: None where the model has none: then prompts are token ids and texts empty.
        model_id: the name under which clients know the model.
        metrics: this app's counters.
        created: Unix seconds, shown as the model's time of creation.
    """

    client: EngineClient
    tokenizer: Tokenizer | None
    model_id: str
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, model: str | None) -> None:
        """Refuse a model that is not the served one.

        Raises:
            ApiError: 404, code model_not_found.
        """
        if model is not None and model != self.model_id:
            message = f"The model {model!r} does not exist; this server serves {self.model_id!r}."
            raise ApiError(404, message, param="model", code="model_not_found")


def get_service(request: Request) -> Service:
    """The app's service, as a FastAPI dependency."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(get_service)]
