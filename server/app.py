"""The FastAPI app over an engine client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.middleware import Middleware
from starlette.types import ASGIApp

from engine import DEFAULT_NUM_SEQS, EngineInfo, parse_bytes
from engine.client import EngineClient
from engine.text import Tokenizer
from server import errors
from server.admission import Admission
from server.answering.turns import Turns
from server.api import documentation, openapi
from server.config.settings import ServerSettings
from server.context import Service
from server.door.auth import AuthMiddleware, read_api_keys
from server.door.drain import Drain, DrainGate
from server.door.head import HeadMiddleware
from server.door.limits import BodyLimitMiddleware
from server.door.request_id import RequestIdMiddleware
from server.live import LiveFeed
from server.metrics.loop_lag import watch_event_loop
from server.metrics.registry import Metrics
from server.routes import (
    chat,
    classify,
    completions,
    embeddings,
    fill_mask,
    live,
    models,
    operations,
    playground,
    scoring,
    tokenize,
)

QUEUED_CACHES = 4


class OctavoApp(FastAPI):
    """FastAPI behind the front door.

    From the outside in: the request's id, Starlette's handler of unexpected exceptions, HEAD, the drain, the
    API key, the body's limits, the handlers of expected errors, the routes. So every answer carries the id, and nobody
    without a key gets to send a body.
    """

    def build_middleware_stack(self) -> ASGIApp:
        """The whole stack, the id outermost, where FastAPI lets no middleware be."""
        return RequestIdMiddleware(super().build_middleware_stack())

    def openapi(self) -> dict[str, Any]:
        """The document, with what the front door adds."""
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
    api_keys: Iterable[str] | None = None,
) -> FastAPI:
    """Build the app.

    Args:
        client: a started engine; the app's lifespan closes it at the end.
        tokenizer: the model's, or None: then prompts are token ids and texts empty.
        model_id: the model's name to clients.
        version: shown in the API's documentation.
        settings: of the service (default: all defaults; the environment is not read).
        drain: through which the service is told to stop.
        api_keys: those of the settings, if they have been read already.

    Raises:
        ConfigError: the file with API keys cannot be read.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with watch_event_loop(metrics.event_loop_lag.observe):
            yield
        await client.close()

    settings, drain, metrics = settings or ServerSettings(), drain or Drain(), Metrics(client, model_id, version)
    admission = make_admission(client.info, settings, metrics)
    pooling = make_admission(client.info, settings, metrics)
    turns = Turns(client.info.max_num_seqs, client.info.max_num_batched_tokens)
    metrics.show_admission(admission, pooling)
    metrics.engine.also_waiting, metrics.engine.stepped = lambda: turns.num_waiting, turns.stepped
    keys = tuple(read_api_keys(settings) if api_keys is None else api_keys)
    app = OctavoApp(
        docs_url=None,  # `documentation` adds its own
        redoc_url=None,
        title="Octavo",
        version=version,
        summary="An OpenAI-compatible model server.",
        lifespan=lifespan,
        redirect_slashes=False,  # clients do not follow with a body; an unknown route says what is wrong
        middleware=[
            Middleware(HeadMiddleware),
            Middleware(DrainGate, drain=drain, rejected=metrics.rejected),
            Middleware(
                AuthMiddleware,
                keys=keys,
                public_metrics=settings.public_metrics,
                also_open=playground.open_paths() if settings.enable_playground else (),
            ),
            Middleware(BodyLimitMiddleware, max_body_size=parse_bytes(settings.max_body_size, "max_body_size")),
        ],
    )
    app.state.service = Service(
        client=client,
        tokenizer=tokenizer,
        model_id=model_id,
        metrics=metrics,
        admission=admission,
        pooling=pooling,
        turns=turns,
        live=LiveFeed(client, drain, settings.stream_keepalive),
        tokenizing=make_admission(client.info, settings, metrics),
        drain=drain,
        settings=settings,
    )
    errors.install(app)
    documentation.install(app)
    for module in (completions, chat, embeddings, scoring, classify, fill_mask, models, operations, live, tokenize):
        app.include_router(module.router)
    if settings.enable_playground:
        app.include_router(playground.make_router(feed=settings.enable_cache_map, key=bool(keys)))
    return app


def make_admission(info: EngineInfo, settings: ServerSettings, metrics: Metrics) -> Admission:
    """The bounds that the settings ask for; by default as many prompt tokens may wait as fill the KV cache
    `QUEUED_CACHES` times, or, where a model has none, the largest that one might have."""
    running = min(info.max_num_seqs, DEFAULT_NUM_SEQS) if info.whole_inputs else info.max_num_seqs
    tokens = settings.max_num_queued_tokens
    if tokens is None:
        held = running * info.max_model_len if info.whole_inputs else info.num_blocks * info.block_size
        tokens = QUEUED_CACHES * held
    return Admission(
        max_running=running,
        max_queued=settings.max_num_queued_reqs,
        max_queued_tokens=tokens,
        rejected=metrics.rejected,
    )
