"""The FastAPI app over an engine client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.middleware import Middleware
from starlette.types import ASGIApp

from engine import EngineInfo, parse_bytes
from engine.process.client import EngineClient
from engine.text.processor import Tokenizer
from server import errors
from server.answering.chat_images import ChatImages
from server.answering.formats import Formats, reading_formats
from server.answering.images import ImageReading
from server.answering.parsing import AnswerReader
from server.answering.prompt import MAX_TOKENIZED, Room
from server.api import documentation, openapi
from server.batches.backdoor import BackDoor
from server.batches.runner import BatchRunner
from server.batches.store import BatchStore, open_batches
from server.commons import Commons, own_commons
from server.config.settings import ServerSettings
from server.context import Batches, Models, Service
from server.door.auth import AuthMiddleware
from server.door.drain import Drain, DrainGate
from server.door.full import Check, FullGate
from server.door.head import HeadMiddleware
from server.door.hosts import HostGate
from server.door.key_limits import KeyLimitsMiddleware
from server.door.keys import KeyRing, read_api_keys
from server.door.limits import BodyLimitMiddleware
from server.door.message_errors import MessageErrors
from server.door.request_id import RequestIdMiddleware
from server.door.shedding import MemoryGate
from server.live import LiveFeed
from server.memory import MemoryGuard
from server.metrics.loop_lag import watch_event_loop
from server.models.using import UseGate
from server.response_store import ResponseStore, open_store
from server.routes import (
    adapters,
    batches,
    conversations,
    generate,
    live,
    messages,
    models,
    ollama_models,
    ollama_several,
    operations,
    playground,
    responses,
    several_models,
    text_embeddings,
    tokenize,
    translate,
)
from server.routes.task_router import paths_of
from server.routes.tasks import LACKS, PATHS, TASKS
from server.tracing.start import start_tracing

if TYPE_CHECKING:
    from server.tracing.otlp import Tracing

BODY_BYTES_PER_TOKEN = 32  # a token of text has about 4 characters; escapes and the JSON around texts take more


class OctavoApp(FastAPI):
    """FastAPI behind the service's middleware.

    From the outside in: the request's id, the shape of errors, the host and the origin, Starlette's handler of
    unexpected exceptions, HEAD, the drain, the API key, the request's trace if tracing is on, the key's limits, the
    memory limit, refusals while the service is full, the body's limits, the handlers of expected errors, the routes. So
    every response has the id, an allowed web page can read all responses, and no body is read without a key.
    """

    gate: Callable[[ASGIApp], ASGIApp]

    def build_middleware_stack(self) -> ASGIApp:
        """The whole stack, with the id outermost, where FastAPI does not allow middleware."""
        return RequestIdMiddleware(MessageErrors(self.gate(super().build_middleware_stack())))

    def openapi(self) -> dict[str, Any]:
        """The document, with the middleware's additions."""
        if self.openapi_schema is None:
            self.openapi_schema = openapi.with_front_door(super().openapi(), self.state.service.settings)
        return self.openapi_schema


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    model_id: str,
    *,
    version: str = "0",
    settings: ServerSettings | None = None,
    drain: Drain | None = None,
    api_keys: KeyRing | None = None,
    tracing: Tracing | None = None,
    memory: MemoryGuard | None = None,
    response_store: ResponseStore | None = None,
    batch_store: BatchStore | None = None,
    commons: Commons | None = None,
    created: int | None = None,
    several: Models | None = None,
) -> FastAPI:
    """Build the app. Raises ConfigError if the file with API keys cannot be read, Redis or tracing cannot be used,
    answers cannot be stored, or a parser is unknown.

    Args:
        client: a started engine; the app's lifespan closes it at the end.
        tokenizer: the model's tokenizer; None: prompts are token ids and texts are empty.
        model_id: the model's name for clients.
        version: version shown in the API's documentation.
        settings: the service's settings (default: all defaults; the environment is not read).
        drain: tells the service to stop.
        api_keys: the keys from the settings, if they are already read.
        tracing: the tracing from the settings, if it is already started; the app's lifespan closes it.
        memory: the memory limit of the process (default: none).
        response_store: the store from the settings, if it is already open; the app's lifespan closes it.
        batch_store: likewise, of batches.
        commons: the state shared with other processes that answer HTTP (default: there are none); the app's lifespan
            closes it.
        created: the model's creation time in Unix seconds (default: now).
        several: the models of a service that has several; `client` is then `server.models.engines.AllEngines`, and
            `commons` must be given.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service: Service = app.state.service
        async with (
            watch_event_loop(metrics.event_loop_lag.observe),
            service.memory.watched(lambda: service.drain.num_running),
            response_store.opened() if response_store is not None else nullcontext(),
            several.opened() if several is not None else nullcontext(),
            _running(service.batches),
        ):
            yield
        await client.close()
        await common.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    settings, drain, door = settings or ServerSettings(), drain or Drain(), BackDoor()
    common = commons or own_commons(client, settings, model_id, version)
    metrics = common.metrics
    memory = memory or MemoryGuard()
    response_store = response_store or open_store(settings)
    batch_store = batch_store or open_batches(settings)
    turns = common.make_turns(client.info)
    keys = KeyRing(read_api_keys(settings)) if api_keys is None else api_keys
    tracing = tracing or start_tracing(settings, version)
    traced = []
    if tracing is not None:
        from server.tracing.middleware import TracingMiddleware

        traced.append(Middleware(TracingMiddleware, tracing=tracing, paths=PATHS))
    app = OctavoApp(
        docs_url=None,  # `documentation` adds its own
        redoc_url=None,
        title="Octavo",
        version=version,
        summary="An OpenAI-compatible model server.",
        responses=errors.ERROR_RESPONSES,  # of every route that has no others
        lifespan=lifespan,
        redirect_slashes=False,  # clients would drop the body; a 404 is clearer
        middleware=[
            Middleware(HeadMiddleware),
            Middleware(DrainGate, drain=drain, rejected=metrics.rejected),
            Middleware(
                AuthMiddleware,
                keys=keys,
                public_metrics=settings.public_metrics,
                also_open=playground.open_paths() if settings.enable_playground else (),
                model=model_id if several is None else None,
            ),
            *traced,
            Middleware(KeyLimitsMiddleware, counts=common.keys, rejected=metrics.rejected),
            Middleware(MemoryGate, guard=memory, rejected=metrics.rejected),
            Middleware(FullGate, checks={} if several else full_checks(common, response_store)),
            Middleware(
                BodyLimitMiddleware,
                max_body_size=parse_bytes(settings.max_body_size, "max_body_size"),
                needed={} if several else needed_bodies(client.info),
            ),
            Middleware(door),
            *([Middleware(UseGate)] if several else []),
        ],
    )
    app.gate = partial(HostGate, settings=settings, keys=bool(keys))
    service = Service(
        client=client,
        tokenizer=tokenizer,
        model_id=model_id,
        metrics=metrics,
        commons=common,
        turns=turns,
        live=LiveFeed(client, drain, settings.stream_keepalive),
        answers=make_reader(tokenizer, settings),
        response_store=response_store,
        drain=drain,
        memory=memory,
        images=None if client.info.signal is None else ImageReading(client.info, settings),
        chat_images=None if client.info.vision is None else ChatImages(client.info, settings),
        settings=settings,
        endpoints=LACKS,
        created=int(time.time()) if created is None else created,
        version=version,
        models=several,
    )
    if batch_store is not None:
        runner = BatchRunner(app, service, batch_store, door, settings.batch_max_running)
        service = replace(service, batches=runner)
    app.state.service = service
    errors.install(app, PATHS)
    documentation.install(app)
    for router in (
        *TASKS,
        models.router if several is None else several_models.router,
        operations.router,
        live.router,
        tokenize.router,
        responses.counting,
        responses.stored,
        conversations.router,
        conversations.plain,
        messages.counting,
        generate.rendering,
        translate.listing,
        text_embeddings.facts,
        batches.router,
        batches.bodies,
        ollama_models.router,
        *((ollama_models.listing, ollama_models.serving) if several is None else ollama_several.routers),
    ):
        app.include_router(router)
    if settings.enable_lora_loading is not None:
        app.include_router(adapters.router)
    if settings.enable_playground:
        app.include_router(playground.make_router(feed=settings.enable_cache_map and several is None, key=bool(keys)))
    else:
        app.include_router(ollama_models.home)
    return app


@asynccontextmanager
async def _running(batches: Batches | None) -> AsyncIterator[None]:
    if not isinstance(batches, BatchRunner):
        yield
        return
    task = asyncio.create_task(batches.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(batches.store.close)


def make_reader(tokenizer: Tokenizer | None, settings: ServerSettings) -> AnswerReader:
    """The object that parses the answers of a model with this tokenizer. Raises ConfigError if the settings name an
    unknown format."""
    if tokenizer is None:
        return AnswerReader(Formats())
    formats = reading_formats(
        tokenizer.all_chat_templates,
        settings.tool_call_parser,
        settings.reasoning_parser,
        settings.tool_prompt,
        tokenizer.response_template,
    )
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return AnswerReader(formats, tokenizer.special_texts(), tokenizer.token_id, encode)


def needed_bodies(info: EngineInfo) -> dict[str, int]:
    """The maximum bytes of a body, by path, for bodies with a single text. The limit grows with the number of tokens
    that the model reads."""
    longest = max(Room.of_prompt(info).tokens, MAX_TOKENIZED)
    others = (responses.counting, messages.counting, generate.rendering, tokenize.router)
    routers = [*(task for task in TASKS if task.one_text), *others]
    return dict.fromkeys(paths_of(*routers), BODY_BYTES_PER_TOKEN * longest)


def full_checks(commons: Commons, store: ResponseStore | None) -> dict[str, Check]:
    """The checks, by path, that refuse a request if no request to the path would be admitted. With a store, a response
    may wait in the background; only its body tells, so its path has no check."""
    gates = {"generating": commons.generating, "pooling": commons.pooling}
    checked = [task for task in TASKS if task is not responses.router or store is None]
    return {path: gates[task.gate].look for task in checked for path in paths_of(task)}
