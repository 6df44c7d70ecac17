"""The FastAPI app over an engine client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from engine import EngineInfo
from engine.client import EngineClient
from engine.text import Tokenizer
from server import errors
from server.admission import Admission
from server.context import Service
from server.drain import Drain, DrainGate
from server.head import HeadMiddleware
from server.loop_lag import watch_event_loop
from server.metrics import Metrics
from server.routes import chat, completions, models, operations, tokenize
from server.settings import ServerSettings

QUEUED_CACHES = 4


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    model_id: str,
    *,
    version: str = "0",
    settings: ServerSettings | None = None,
    drain: Drain | None = None,
) -> FastAPI:
    """Build the app.

    Args:
        client: a started engine; the app's lifespan closes it at the end.
        tokenizer: the model's, or None: then prompts are token ids and texts empty.
        model_id: the model's name to clients.
        version: shown in the API's documentation.
        settings: of the service (default: all defaults; the environment is not read).
        drain: through which the service is told to stop.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with watch_event_loop(metrics.event_loop_lag.observe):
            yield
        await client.close()

    settings, drain, metrics = settings or ServerSettings(), drain or Drain(), Metrics(client, model_id, version)
    admission = make_admission(client.info, settings, metrics)
    metrics.show_admission(admission)
    app = FastAPIOffline(  # the documentation's scripts come with it, and not from elsewhere at each visit
        redoc_url=None,
        static_url="/docs/static",
        title="Octavo",
        version=version,
        summary="An OpenAI-compatible model server.",
        lifespan=lifespan,
        redirect_slashes=False,  # clients do not follow with a body; an unknown route says what is wrong
    )
    app.state.service = Service(
        client=client,
        tokenizer=tokenizer,
        model_id=model_id,
        metrics=metrics,
        admission=admission,
        tokenizing=make_admission(client.info, settings, metrics),
        drain=drain,
        settings=settings,
    )
    app.add_middleware(DrainGate, drain=drain, rejected=metrics.rejected)
    errors.install(app)
    app.add_middleware(HeadMiddleware)
    for module in (completions, chat, models, operations, tokenize):
        app.include_router(module.router)
    return app


def make_admission(info: EngineInfo, settings: ServerSettings, metrics: Metrics) -> Admission:
    """The bounds that the settings ask for; by default as many prompt tokens may wait as fill the KV cache
    `QUEUED_CACHES` times."""
    tokens = settings.max_num_queued_tokens
    if tokens is None:
        tokens = QUEUED_CACHES * info.num_blocks * info.block_size
    return Admission(
        max_running=info.max_num_seqs,
        max_queued=settings.max_num_queued_reqs,
        max_queued_tokens=tokens,
        rejected=metrics.rejected,
    )
