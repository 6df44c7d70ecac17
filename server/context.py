"""The objects that every route needs, made once per app."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request

from engine import EngineDeadError, RequestFailedError, decoder_tokens
from engine.process.client import EngineClient
from engine.text.image_tasks import encode_task
from engine.text.pictures import Pictures, only_image
from engine.text.processor import Tokenizer
from server.answering.chat_images import ChatImages
from server.answering.endpoints import Reason, served_endpoints
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
from server.door.keys import ApiKey
from server.errors import ApiError, shown
from server.gates import Gate, Reservation
from server.live import LiveFeed
from server.memory import MemoryGuard
from server.metrics.requests import RequestMetrics
from server.models.status import ModelStatus
from server.response_store import ResponseStore

# Names for the model that clients of single-model servers send: llama.cpp's, text-generation-inference's and others.
ANY_MODEL = frozenset({"", "default", "dummy", "tgi"})


class Cancellable(Protocol):
    """An answer that a client may end before it is complete."""

    terms: Terms

    def cancel(self) -> dict[str, Any]:
        """End the answer; returns the answer so far."""


class Followed(Protocol):
    """An answer that does not depend on its client; see `server.answering.background`."""

    events: list[str]
    done: bool

    async def changed(self) -> None:
        """Wait until there are new events or the answer has ended."""


class Batches(Protocol):
    """The files and batches of /v1/files and /v1/batches; see `server.batches`."""

    store: BatchStore

    def wake(self) -> None:
        """Look for new batches and cancelled ones."""


class Models(Protocol):
    """The models of a service with several; see `server.models`."""

    def opened(self) -> AbstractAsyncContextManager[None]:
        """A context in which models are loaded and unloaded."""

    def statuses(self) -> list[ModelStatus]:
        """The statuses of all models, the default one first."""

    def find(self, name: str) -> ModelStatus | None:
        """The model that a request with this `model` gets: by its name, an alias, or the name of an adapter; None if
        there is none."""

    def choose(self, request: Request, name: str) -> ModelStatus:
        """The model that a request with this `model` would get. It is not loaded.

        Raises:
            ApiError: 404, there is no such model; 403, the API key may not use it.
        """

    async def foreseen(self, name: str) -> None:
        """Wait until the abilities of a model are known, or cannot be known before its first load."""

    async def serve(self, request: Request) -> Service:
        """The service of the model that a request names, which is loaded first if it is not. The model stays loaded
        until the request has been answered. Raises ApiError: 404, there is no such model; 403, the API key may not use
        it; 503, it cannot be loaded, or not in time."""

    async def load(self, name: str) -> ModelStatus:
        """Load a model, and wait until it serves; one that has failed is tried again. Raises ApiError: 404, there is no
        such model; 503, it cannot be loaded."""

    async def unload(self, name: str) -> ModelStatus:
        """Unload a model, if it is loaded. Raises ApiError: 404, there is no such model; 409, requests use it, or it is
        loading."""

    def keep(self, name: str, seconds: float | None) -> None:
        """Unload a loaded model when no request has used it for this many seconds, until it is loaded again; None:
        never, unless its memory is needed."""

    def service_of(self, name: str) -> Service | None:
        """The service of a loaded model; None if it is not loaded, or there is none of this name."""

    def able(self, endpoint: str) -> list[str]:
        """The names of the loaded models that serve an endpoint."""

    def seen_by(self, allowed: Collection[str]) -> Models:
        """Only the models of these names: no list and no message names another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The served model and everything needed to serve it."""

    client: EngineClient  # the engine
    tokenizer: Tokenizer | None  # the tokenizer; None: prompts are token ids and texts are empty
    model_id: str  # the model's name for clients
    metrics: RequestMetrics  # this app's counters
    commons: Commons  # the counts over all processes that answer HTTP
    turns: Turns  # submits inputs for vectors, classes and masked tokens to the engine
    live: LiveFeed  # the live feed
    response_store: ResponseStore | None = None  # stores answers of /v1/responses; None if none are stored
    batches: Batches | None = None  # keeps files and batches; None if there are none
    running_responses: dict[str, Cancellable] = field(default_factory=dict)  # its streams, by id
    background: dict[str, Followed] = field(default_factory=dict)  # its background answers in this process, by id
    drain: Drain = field(default_factory=Drain)  # whether the service is stopping
    memory: MemoryGuard = field(default_factory=MemoryGuard)  # whether the process uses too much memory
    renderer: ChatRenderer = field(default_factory=ChatRenderer)  # renders chat messages
    answers: AnswerReader = field(default_factory=lambda: AnswerReader(Formats()))  # parses the model's answers
    # tries formats of answers before they reach the engine
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    images: ImageReading | None = None  # decodes images in requests; None if the model takes none
    chat_images: ChatImages | None = None  # reads those of conversations; None: the model reads none there
    # held while a large body is parsed, so that only one needs memory at a time
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    # held while a part of a sound is decoded, which takes several times the memory of the file
    decoding: FairSlots = field(default_factory=lambda: FairSlots(2))
    # held by the background responses that ask for room next; the others wait
    queueing: FairSlots = field(default_factory=lambda: FairSlots(2))
    settings: ServerSettings = field(default_factory=ServerSettings)  # the service's settings
    endpoints: Mapping[str, Reason]  # by endpoint, the reason why the model cannot serve it
    created: int = 0  # the model's creation time in Unix seconds
    version: str = "0"  # the service's version
    aliases: frozenset[str] = frozenset()  # other names of the model
    # a context in which the model stays loaded, for work that outlives its request
    using: Callable[[], AbstractContextManager[object]] = nullcontext
    models: Models | None = None  # the models of a service with several; None if there is one

    @property
    def sees(self) -> bool:
        """Whether the model reads images of conversations."""
        return self.chat_images is not None or self.client.info.writes_of_images

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of answers: it identifies the server."""
        return f"octavo-{self.version}"

    @property
    def admission(self) -> Gate:
        """Limits requests that generate text."""
        return self.commons.generating

    @property
    def pooling(self) -> Gate:
        """Limits requests for vectors, classes and masked tokens."""
        return self.commons.pooling

    @property
    def tokenizing(self) -> Gate:
        """Limits calls of /tokenize and /detokenize."""
        return self.commons.tokenizing

    async def admit(self, prompts: int, tokens: int, terms: Terms, *, patient: bool = False) -> Reservation:
        """Slots for prompts with an estimated number of tokens. `patient`: the request waits and asks again, so a
        refusal does not count. Raises EngineDeadError if nothing can be served now; ApiError if there is no room, or
        none before the deadline."""
        self._check_alive(counts=not patient)
        gate = self.commons.lines if terms.in_batch else self.admission
        reservation = await gate.admit(prompts, tokens, terms.tenant, terms.deadline, patient=patient)
        self.metrics.admitted(terms.adapter)
        return reservation

    async def admit_pooling(self, tokens: int, terms: Terms) -> Reservation:
        """A slot for a request whose inputs, however many, have this many tokens in total (estimated). Raises
        EngineDeadError if nothing can be served now. ApiError if there is no room."""
        self._check_alive()
        gate = self.commons.lines if terms.in_batch else self.pooling
        reservation = await gate.admit(1, tokens, terms.tenant)
        self.metrics.admitted(terms.adapter)
        return reservation

    def _check_alive(self, *, counts: bool = True) -> None:
        if not self.client.is_alive:
            if counts:
                self.metrics.rejected("engine_dead")
            raise EngineDeadError("the engine is not running")

    def check_model(self, model: str | None, *, exactly: bool = False) -> None:
        """Refuse a model that is not the served one; `exactly` accepts only its id. Raises ApiError: 404, code
        model_not_found."""
        if model is None or model == self.model_id or model in self.client.adapters or model in self.aliases:
            return
        if exactly or self.settings.strict_model_name or model not in ANY_MODEL:
            adapters = f" and the adapters {', '.join(map(shown, self.client.adapters))}" * bool(self.client.adapters)
            message = f"The model {shown(model)} does not exist; this server serves {self.model_id!r}{adapters}."
            raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def served_endpoints(self) -> list[str]:
        """Paths of the endpoints that the model can serve, without /tokenize and endpoints about the service."""
        return served_endpoints(self.endpoints, self.client.info, self.tokenizer)

    def require(self, endpoint: str) -> None:
        """Refuse a request to an endpoint that the model cannot serve. Raises ApiError: 400, code unsupported_endpoint,
        with the reason and the supported endpoints."""
        reason = self.endpoints[endpoint](self.client.info, self.tokenizer)
        if reason is None:
            return
        served = ", ".join(self.served_endpoints) or "none of this kind"
        message = f"{self.model_id} cannot serve {endpoint}: {reason}. Endpoints that it serves: {served}."
        if self.models is not None:
            able = ", ".join(self.models.able(endpoint)) or "none"
            message += f" Loaded models that serve {endpoint}: {able}."
        raise ApiError(400, message, param="model", code="unsupported_endpoint")

    def seen_by(self, key: ApiKey | None) -> Service:
        """The service without the models that an API key may not use."""
        if self.models is None or key is None or key.models is None:
            return self
        return replace(self, models=self.models.seen_by(key.models))

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request's model names; None for the base model."""
        return model if model in self.client.adapters else None

    def failure(self, reason: str, adapter: str | None) -> Exception:
        """The error of a request that has failed in the engine."""
        if adapter is None or adapter in self.client.adapters:
            return RequestFailedError(reason)
        message = f"The adapter {shown(adapter)} was unloaded while the request ran."
        return ApiError(404, message, param="model", code="model_not_found")

    def name_of(self, terms: Terms) -> str:
        """The model's name in an answer: the adapter's, if the request has one."""
        return terms.adapter or self.model_id

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        room: Room,
        rendering: Rendering | None = None,
        terms: Terms | None = None,
        pictures: Pictures | None = None,
    ) -> Prompt:
        """Chat messages as a prompt. Raises ApiError if there is no tokenizer, the template takes too much time or
        memory or refuses these messages, or the conversation is far too long; InvalidRequestError if there is no
        template.

        Args:
            rendering: further inputs of the template (default: none).
            terms: the terms of a request that may continue the conversation; its tokens are remembered.
            pictures: the images in the messages; None: there are none.
        """
        if self.tokenizer is None:
            message = (
                f"{self.model_id} has no tokenizer, so it cannot read messages; send token ids to /v1/completions."
            )
            raise ApiError(400, message, param="messages", code="no_tokenizer")
        if pictures is not None and self.client.info.writes_of_images:
            return await self._render_image(self.tokenizer, messages, pictures, rendering)
        formats, reading = self.answers.formats, self.chat_images
        if pictures is None or not pictures.images or reading is None:
            return await self.renderer.prompt(self.tokenizer, messages, room, rendering, formats, terms)
        images = await reading.read(pictures)
        token = self.tokenizer.written(reading.vision.token_id)
        marks = ImageMarks(
            pictures.mark, reading.vision.mark(token), partial(reading.expand, token=token, images=images)
        )
        prompt = await self.renderer.prompt(self.tokenizer, messages, room, rendering, formats, terms, marks)
        ids, placed = reading.place(prompt.token_ids, images)
        return replace(prompt, token_ids=ids, images=tuple(placed))

    async def _render_image(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        pictures: Pictures,
        rendering: Rendering | None,
    ) -> Prompt:
        """The prompt of an encoder-decoder model that reads one image: the decoder's first tokens. The text of the
        message is among them, unless the encoder reads it after the image."""
        info = self.client.info
        for name in ("tools", "documents"):
            if rendering is not None and getattr(rendering, name) is not None:
                message = f"This model reads one image and no {name}. Leave {name} out."
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        assert self.images is not None
        assert info.signal is not None
        image, text = only_image(messages, pictures)
        (pixels,) = await self.images.read([image], "messages")
        positions, begin = info.signal.positions, list[int]()
        if info.signal.texts:
            read = await asyncio.to_thread(encode_task, tokenizer, text)
            pixels, positions = replace(pixels, encoder_token_ids=read), positions + len(read)
        elif text:
            begin = await asyncio.to_thread(tokenizer.encode_answer, text)
            pixels = replace(pixels, decoder_token_ids=begin)
        return Prompt(
            list(decoder_tokens(begin, info.decoder_start_token_id)), text, pixels=pixels, positions=positions
        )


def key_of(request: Request) -> ApiKey | None:
    """The API key of a request; None if the service has none."""
    key = request.scope.get("state", {}).get("api_key")
    assert key is None or isinstance(key, ApiKey)
    return key


async def get_service(request: Request) -> Service:
    """The app's service, as a FastAPI dependency. (A dependency that is not async would run in a thread.)"""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service if service.models is None else (await service.models.serve(request)).seen_by(key_of(request))


async def get_house(request: Request) -> Service:
    """The app's service for requests that need no model: in a service with several models, its client is no model's
    engine (`server.models.engines`)."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service.seen_by(key_of(request))


ServiceDep = Annotated[Service, Depends(get_service)]
HouseDep = Annotated[Service, Depends(get_house)]
