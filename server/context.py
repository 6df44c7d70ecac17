"""The objects that every route needs, made once per app."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request

from engine import EngineDeadError, RequestFailedError
from engine.process.client import EngineClient
from engine.text.pictures import Pictures
from engine.text.processor import Tokenizer
from server.answering.chat_images import ChatImages
from server.answering.fair_slots import FairSlots
from server.answering.formats import Formats
from server.answering.grammars import GrammarChecks
from server.answering.images import ImageReading
from server.answering.parsing import AnswerReader
from server.answering.prompt import Prompt, Room
from server.answering.rendering import ChatRenderer, ImageMarks, Rendering
from server.answering.terms import Terms
from server.answering.turns import Turns
from server.batches.store import BatchStore
from server.commons import Commons
from server.config.settings import ServerSettings
from server.door.drain import Drain
from server.errors import ApiError, shown
from server.gates import Gate, Place
from server.live import LiveFeed
from server.memory import MemoryGuard
from server.metrics.requests import RequestMetrics
from server.models.status import ModelStatus
from server.response_store import ResponseStore

# What clients of servers with a single model call it: llama.cpp's, text-generation-inference's and others.
ANY_MODEL = frozenset({"", "default", "dummy", "tgi"})


class Cancellable(Protocol):
    """An answer that a client may end before it is complete."""

    terms: Terms

    def cancel(self) -> dict[str, Any]:
        """End it; it as far as it is."""


class Followed(Protocol):
    """An answer that is made whether its client stays or not; see `server.answering.background`."""

    events: list[str]
    done: bool

    async def changed(self) -> None:
        """Wait until there are further events, or there will be none."""


class Batches(Protocol):
    """The files and batches of /v1/files and /v1/batches; see `server.batches`."""

    store: BatchStore

    def wake(self) -> None:
        """There is a new batch, or one was cancelled."""


class Models(Protocol):
    """The models of a service with several; see `server.models`. `server.models.one.models_of` gives a service's."""

    def opened(self) -> AbstractAsyncContextManager[None]:
        """A context in which models are loaded and unloaded."""

    def statuses(self) -> list[ModelStatus]:
        """All of them, the default one first."""

    def find(self, name: str) -> ModelStatus | None:
        """The model that a request with this `model` gets: by its name, an alias, or the name of an adapter; None if
        there is none."""

    async def serve(self, request: Request) -> Service:
        """The service of the model that a request names, which is loaded first if it is not. The model stays loaded
        until the request has been answered.

        Raises:
            ApiError: 404, there is no such model; 403, the API key may not use it; 503, it cannot be loaded, or not in
                time.
        """

    async def load(self, name: str) -> ModelStatus:
        """Load a model, and wait until it serves; one that has failed is tried again.

        Raises:
            ApiError: 404, there is no such model; 503, it cannot be loaded.
        """

    async def unload(self, name: str) -> ModelStatus:
        """Unload a model, if it is loaded.

        Raises:
            ApiError: 404, there is no such model; 409, requests use it, or it is loading.
        """

    def keep(self, name: str, seconds: float | None) -> None:
        """Unload a loaded model when no request has used it for so many seconds, until it is loaded again; None:
        never, if its memory is not needed."""

    def service_of(self, name: str) -> Service | None:
        """The service of a loaded model; None if it is not loaded, or there is none of this name."""

    def able(self, endpoint: str) -> list[str]:
        """The names of the loaded models that serve an endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The served model and the way to it.

    Attributes:
        client: the engine.
        tokenizer: None if the model has none: then prompts are token ids and texts empty.
        model_id: the name under which clients know the model.
        metrics: this app's counters.
        commons: what is counted over all processes that answer HTTP.
        turns: hands inputs for vectors, classes and masked tokens to the engine.
        live: what clients of the live feed are shown.
        response_store: keeps answers of /v1/responses; None if none are kept.
        batches: keeps files and batches; None if there are none.
        running_responses: its streams, by their ids.
        background: its answers that this process makes in the background, by their ids.
        drain: whether the service stops.
        memory: whether the process has too much.
        renderer: renders chat messages.
        answers: the object that reads the model's answers.
        grammars: tries what answers must look like, before the engine is asked.
        images: reads those of requests; None if that is not needed.
        chat_images: reads those of conversations; None: the model reads none there.
        reading: held while a large body is read, so that memory is needed for one at a time.
        decoding: held while a part of a sound is decoded, which takes the memory of the file several times.
        queueing: held by the background responses that ask for room next; the others wait behind them.
        settings: of the service.
        created: Unix seconds, shown as the model's time of creation.
        version: of the service.
        aliases: other names of the model.
        using: a context in which the model stays loaded, for work that outlives its request.
        models: of a service with several; None if there is one.
    """

    client: EngineClient
    tokenizer: Tokenizer | None
    model_id: str
    metrics: RequestMetrics
    commons: Commons
    turns: Turns
    live: LiveFeed
    response_store: ResponseStore | None = None
    batches: Batches | None = None
    running_responses: dict[str, Cancellable] = field(default_factory=dict)
    background: dict[str, Followed] = field(default_factory=dict)
    drain: Drain = field(default_factory=Drain)
    memory: MemoryGuard = field(default_factory=MemoryGuard)
    renderer: ChatRenderer = field(default_factory=ChatRenderer)
    answers: AnswerReader = field(default_factory=lambda: AnswerReader(Formats()))
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    images: ImageReading | None = None
    chat_images: ChatImages | None = None
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    decoding: FairSlots = field(default_factory=lambda: FairSlots(2))
    queueing: FairSlots = field(default_factory=lambda: FairSlots(2))
    settings: ServerSettings = field(default_factory=ServerSettings)
    created: int = 0
    version: str = "0"
    aliases: frozenset[str] = frozenset()
    using: Callable[[], AbstractContextManager[object]] = nullcontext
    models: Models | None = None

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of answers: by which server they were made."""
        return f"octavo-{self.version}"

    @property
    def admission(self) -> Gate:
        """Bounds requests that generate text."""
        return self.commons.generating

    @property
    def pooling(self) -> Gate:
        """Bounds requests for vectors, classes and masked tokens."""
        return self.commons.pooling

    @property
    def tokenizing(self) -> Gate:
        """Bounds calls of /tokenize and /detokenize."""
        return self.commons.tokenizing

    async def admit(self, prompts: int, tokens: int, terms: Terms, *, patient: bool = False) -> Place:
        """Slots for so many prompts with about so many tokens.

        Args:
            patient: the request waits and asks again, so that a refusal does not count as one.

        Raises:
            EngineDeadError: nothing can be served at the moment.
            ApiError: there is no room, or none in time.
        """
        self._check_alive(counts=not patient)
        place = await self.admission.admit(prompts, tokens, terms.tenant, terms.deadline, patient=patient)
        self.metrics.admitted(terms.adapter)
        return place

    async def admit_pooling(self, tokens: int, terms: Terms) -> Place:
        """A place for a request whose inputs, however many, have about so many tokens together.

        Raises:
            EngineDeadError: nothing can be served at the moment.
            ApiError: there is no room.
        """
        self._check_alive()
        place = await self.pooling.admit(1, tokens, terms.tenant)
        self.metrics.admitted(terms.adapter)
        return place

    def _check_alive(self, *, counts: bool = True) -> None:
        if not self.client.is_alive:
            if counts:
                self.metrics.rejected("engine_dead")
            raise EngineDeadError("the engine is not running")

    def check_model(self, model: str | None, *, exactly: bool = False) -> None:
        """Refuse a model that is not the served one; `exactly`: by its id alone.

        Raises:
            ApiError: 404, code model_not_found.
        """
        if model is None or model == self.model_id or model in self.client.adapters or model in self.aliases:
            return
        if exactly or self.settings.strict_model_name or model not in ANY_MODEL:
            adapters = f" and the adapters {', '.join(map(shown, self.client.adapters))}" * bool(self.client.adapters)
            message = f"The model {shown(model)} does not exist; this server serves {self.model_id!r}{adapters}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request means by its model; None: the base model."""
        return model if model in self.client.adapters else None

    def failure(self, reason: str, adapter: str | None) -> Exception:
        """The error of a request that has failed in the engine."""
        if adapter is None or adapter in self.client.adapters:
            return RequestFailedError(reason)
        message = f"The adapter {shown(adapter)} was unloaded while the request ran."
        return ApiError(404, message, param="model", code="model_not_found")

    def name_of(self, terms: Terms) -> str:
        """The model's name in the answer to a request: that of its adapter, if it has one."""
        return terms.adapter or self.model_id

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        room: Room,
        rendering: Rendering | None = None,
        terms: Terms | None = None,
        pictures: Pictures | None = None,
    ) -> Prompt:
        """Chat messages as a prompt.

        Args:
            rendering: what the template is given besides (default: nothing).
            terms: of a request that the conversation may go on from: its tokens are remembered.
            pictures: the images in the messages; None: there are none.

        Raises:
            ApiError: there is no tokenizer, its chat template takes too much time or memory or refuses these messages,
                or they are far longer than there is room.
            InvalidRequestError: there is no template.
        """
        if self.tokenizer is None:
            message = (
                f"{self.model_id} has no tokenizer, so it cannot read messages; send token ids to /v1/completions."
            )
            raise ApiError(400, message, param="messages", code="no_tokenizer")
        formats, reading = self.answers.formats, self.chat_images
        if pictures is None or not pictures.images or reading is None:
            return await self.renderer.prompt(self.tokenizer, messages, room, rendering, formats, terms)
        images = await reading.read(pictures)
        token = self.tokenizer.written(reading.vision.token_id)
        marks = ImageMarks(pictures.mark, token, partial(reading.expand, token=token, images=images))
        prompt = await self.renderer.prompt(self.tokenizer, messages, room, rendering, formats, terms, marks)
        ids, placed = reading.place(prompt.token_ids, images)
        return replace(prompt, token_ids=ids, images=tuple(placed))


async def get_service(request: Request) -> Service:
    """The app's service, as a FastAPI dependency. (One that is not async would be run in a thread.)"""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service if service.models is None else await service.models.serve(request)


async def get_house(request: Request) -> Service:
    """The app's service for requests that no model works for: of a service with several models, it has an engine of
    none (`server.models.engines`)."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(get_service)]
HouseDep = Annotated[Service, Depends(get_house)]
