"""What every route needs, made once per app."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from engine import EngineDeadError
from engine.client import EngineClient
from engine.text import Tokenizer
from server.admission import Admission, Ticket
from server.answering.prompt import Prompt
from server.answering.rendering import ChatRenderer
from server.answering.turns import Turns
from server.config.settings import ServerSettings
from server.door.drain import Drain
from server.errors import ApiError, shown
from server.live import LiveFeed
from server.metrics.registry import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The served model and the way to it.

    Attributes:
        client: the engine.
        tokenizer: None where the model has none: then prompts are token ids and texts empty.
        model_id: the name under which clients know the model.
        metrics: this app's counters.
        admission: bounds what generates.
        pooling: bounds requests for vectors, classes and masked tokens; each counts as one, whatever it holds.
        turns: hands their inputs to the engine.
        live: what those who watch the engine are shown.
        tokenizing: bounds calls of /tokenize and /detokenize.
        drain: whether the service stops.
        renderer: renders chat messages.
        settings: of the service.
        created: Unix seconds, shown as the model's time of creation.
    """

    client: EngineClient
    tokenizer: Tokenizer | None
    model_id: str
    metrics: Metrics
    admission: Admission
    pooling: Admission
    turns: Turns
    live: LiveFeed
    tokenizing: Admission
    drain: Drain = field(default_factory=Drain)
    renderer: ChatRenderer = field(default_factory=ChatRenderer)
    settings: ServerSettings = field(default_factory=ServerSettings)
    created: int = field(default_factory=lambda: int(time.time()))

    def admit(self, prompts: int, tokens: int) -> Ticket:
        """Slots for so many prompts with about so many tokens.

        Raises:
            EngineDeadError: nothing can be served at the moment.
            ApiError: there is no room.
        """
        self._check_alive()
        return self.admission.reserve(prompts, tokens)

    def admit_pooling(self, tokens: int) -> Ticket:
        """A place for a request whose inputs, however many, have about so many tokens together.

        Raises:
            EngineDeadError: nothing can be served at the moment.
            ApiError: there is no room.
        """
        self._check_alive()
        return self.pooling.reserve(1, tokens)

    def _check_alive(self) -> None:
        if not self.client.is_alive:
            self.metrics.rejected("engine_dead")
            raise EngineDeadError("the engine is not running")

    def check_model(self, model: str | None) -> None:
        """Refuse a model that is not the served one.

        Raises:
            ApiError: 404, code model_not_found.
        """
        if model is not None and model != self.model_id:
            message = f"The model {shown(model)} does not exist; this server serves {self.model_id!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True, longest: int | None = None
    ) -> Prompt:
        """Chat messages as a prompt; `longest` is the context's length, where they are to fit into it.

        Raises:
            ApiError: there is no tokenizer, its chat template takes too long, or the messages are far too long.
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        if self.tokenizer is None:
            message = (
                f"{self.model_id} has no tokenizer, so it cannot read messages; send token ids to /v1/completions."
            )
            raise ApiError(400, message, param="messages", code="no_tokenizer")
        return await self.renderer.prompt(
            self.tokenizer, messages, add_generation_prompt=add_generation_prompt, longest=longest
        )


async def get_service(request: Request) -> Service:
    """The app's service, as a FastAPI dependency. (One that is not async would be run in a thread.)"""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(get_service)]
