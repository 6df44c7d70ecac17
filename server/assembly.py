"""A service in one process, without its web server: the engine, the app, and their shared parts."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine import EngineConfig
from engine.host.loading import Tell
from engine.host.logs import LogFormat
from engine.host.resident import give_back_code
from engine.process.client import ProcessEngineClient
from engine.process.known import Known
from server.config.settings import ServerSettings
from server.door.keys import KeyRing
from server.early import ask_known, import_app, read_early
from server.facts import EarlyTokenizer, log_facts, read_tokenizer
from server.life import load
from server.response_store import open_store
from server.tracing.start import start_tracing
from server.workers.pool import shared_workers

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.door.drain import Drain


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts that a server runs."""

    app: FastAPI  # its lifespan closes the client at the end
    client: ProcessEngineClient
    drain: Drain  # tells the app to stop


def assemble(
    config: EngineConfig,
    settings: ServerSettings,
    model_id: str,
    version: str,
    log_format: LogFormat,
    api_keys: KeyRing,
    tell: Tell = lambda percent: None,
) -> Assembly:
    """Load the model and build the app; blocks until it can serve. Raises OctavoError if the model cannot be loaded, or
    a setting is invalid.

    Args:
        settings: the service's settings.
        model_id: the model's name for clients.
        version: version shown in the API's documentation.
        log_format: format of the engine's log lines.
        api_keys: read at each request, so that they may change.
        tell: called with the percentage of the loaded weights.
    """
    tracing = start_tracing(settings, version)
    response_store = open_store(settings)
    workers = shared_workers()
    early: list[EarlyTokenizer | None] = []

    def known() -> Known:
        workers.start()
        # In parallel with the worker that reads the config: the engine waits for the worker, not for the app.
        threading.Thread(target=import_app, name="octavo-app", daemon=True).start()
        return ask_known(config, workers)

    client = load(config, settings, log_format, known, tell, lambda: early.append(read_early(config, settings)))
    from server.app import create_app
    from server.door.drain import Drain
    from server.memory import MemoryGuard, find_limit

    tokenizer = read_tokenizer(config, client.info, *early)
    log_facts(client.info, tokenizer, model_id)
    if tokenizer is None or tokenizer.chat_template is None:
        workers.close()  # workers for chat templates are ready for the first conversation
    drain = Drain()
    app = create_app(
        client,
        tokenizer,
        model_id,
        version=version,
        settings=settings,
        drain=drain,
        api_keys=api_keys,
        tracing=tracing,
        memory=MemoryGuard(find_limit(settings.max_api_memory)),
        response_store=response_store,
    )
    give_back_code()
    return Assembly(app, client, drain)
