"""Work done while the engine's process imports torch and loads the model, to shorten the start."""

from __future__ import annotations

import asyncio
import logging

from engine import ConfigError, EngineConfig, ModelLoadError
from engine.process.known import Known, decode_known, known_folder
from engine.text.processor import load_tokenizer
from server.config.settings import ServerSettings
from server.facts import EarlyTokenizer
from server.workers.pool import RefusedError, WorkerLostError, WorkerPool, WorkerStuckError

logger = logging.getLogger("octavo.server")

_TIME_LIMIT = 60.0  # maximum seconds for a config


def import_app() -> None:
    """Import the routes and the server, which takes half a second."""
    from server import app, lone  # noqa: F401


def ask_known(config: EngineConfig, workers: WorkerPool) -> Known:
    """Facts about the model that a worker finds; empty if only the engine can find them."""
    folder = known_folder(config.model, config.mmproj)
    if config.distributed_executor_backend != "uni" or folder is None:
        return Known()
    try:
        return decode_known(asyncio.run(workers.run("config", str(folder), bytes, _TIME_LIMIT)))
    except (OSError, RefusedError, RuntimeError, WorkerLostError, WorkerStuckError) as error:  # or a TimeoutError
        logger.debug("the engine will read the config itself: %s", error)
        return Known()


def read_early(config: EngineConfig, settings: ServerSettings) -> EarlyTokenizer | None:
    """The tokenizer that the model will probably have. None if it is unknown or cannot be read; the error is then
    raised once the engine has loaded."""
    from server.app import make_reader

    source = config.tokenizer or known_folder(config.model, config.mmproj)
    if source is None or config.skip_tokenizer_init:
        return None
    try:
        tokenizer = load_tokenizer(
            source,
            revision=None if config.tokenizer else config.revision,
            hf_token=config.hf_token,
            chat_template=config.chat_template,
            alone=True,
        )
        make_reader(tokenizer, settings)
    except (ConfigError, ModelLoadError) as error:
        logger.debug("the tokenizer will be read later: %s", error)
        return None
    return EarlyTokenizer(str(source), tokenizer)
