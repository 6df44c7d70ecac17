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
from server.settings import ServerSettings


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    model_id: str,
    *,
    version: str = "0",
    settings: ServerSettings | None = None,
) -> FastAPI:
    """Build the app.

    Args:
        client: a started engine; the app's lifespan closes it at the end.
        tokenizer: the model's, or None: then prompts are token ids and texts empty.
        model_id: the model's name to clients.
        version: shown in the API's documentation.
        settings: of the service (default: all defaults; the environment is not read).
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
        settings=settings or ServerSettings(),
    )
    errors.install(app)
    for module in (completions, chat, models, operations, tokenize):
        app.include_router(module.router)
    return app
