"""The FastAPI app over an engine client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from engine.client import EngineClient
from engine.text import Tokenizer
from server import errors
from server.context import Service
from server.metrics import Metrics
from server.routes import chat, completions, models, operations, tokenize


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    model_id: str,
    *,
    version: str = "0",
    liveness_timeout: float = 60.0,
) -> FastAPI:
    """Build the app.

    Args:
        client: a started engine; the app's lifespan closes it at the end.
        tokenizer: the model's, or None: then prompts are token ids and texts empty.
        model_id: the model's name to clients.
        version: shown in the API's documentation.
        liveness_timeout: seconds without a step after which a working engine counts as stuck.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await client.close()

    app = FastAPI(title="Octavo", version=version, summary="An OpenAI-compatible model server.", lifespan=lifespan)
    app.state.service = Service(
        client=client,
        tokenizer=tokenizer,
        model_id=model_id,
        metrics=Metrics(client),
        liveness_timeout=liveness_timeout,
    )
    errors.install(app)
    for module in (completions, chat, models, operations, tokenize):
        app.include_router(module.router)
    return app
