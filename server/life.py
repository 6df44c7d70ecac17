"""The stages of every service, however many processes it has: load, announce, end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from engine import EngineConfig
from engine.host.loading import Tell
from engine.host.logs import LogFormat
from engine.process.client import ProcessEngineClient, RestartPolicy
from engine.process.known import Known
from server.config.settings import DEMOS, ServerSettings
from server.door.listening import Listener

if TYPE_CHECKING:
    from server.door.drain import Drain

_DEMO_NOTES = {
    DEMOS["chat"]: "a tiny model that tells short stories and answers questions about Octavo and transformers",
    DEMOS["seq2seq"]: "a tiny encoder-decoder that translates a toy language into English",
}
_LOOK = 2.0  # seconds between two checks of a Unix socket's file

logger = logging.getLogger("octavo.server")


def announcement(settings: ServerSettings, listener: Listener, model_id: str) -> str:
    """The address of the listening service, for the log."""
    page = f"playground: {listener.url}/, " if settings.enable_playground else ""
    hints = "" if settings.uds else f" ({page}API docs: {listener.url}/docs)"
    return f"Serving {model_id} on {listener.url}{hints}"


def load(
    config: EngineConfig,
    settings: ServerSettings,
    log_format: LogFormat,
    known: Callable[[], Known],
    tell: Tell,
    meanwhile: Callable[[], object] = lambda: None,
) -> ProcessEngineClient:
    """Start the engine; blocks until it can serve. Raises OctavoError if the model cannot be loaded.

    Args:
        known: finds facts about the model for the engine; called while the engine imports its modules.
        tell: called with the percentage of the loaded weights.
        meanwhile: called while the engine loads.
    """
    if note := _DEMO_NOTES.get(Path(config.model)):
        logger.info("This is the bundled demo: %s. To serve another model: octavo serve MODEL.", note)
    is_here = Path(config.model).expanduser().exists()
    logger.info("Loading %s%s.", config.model, "" if is_here else " from the Hugging Face hub or its local cache")
    policy = RestartPolicy(max_failures=settings.max_engine_failures)
    return ProcessEngineClient(config, policy, log_format, meanwhile, known=known, tell=tell)


def say_end(failure: str | None) -> int:
    """Log the last lines; returns the exit status. `failure`: the reason if the engine was abandoned."""
    logger.info("Stopped.")
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Python removes its own handlers while it exits, so a late signal would look like a crash.
        signal.signal(signum, signal.SIG_IGN)
    if failure is not None:
        cause = " ".join(line.strip() for line in failure.splitlines())  # CUDA's messages have several lines
        print(f"octavo: the engine keeps failing: {cause}", file=sys.stderr, flush=True)
        return 1
    return 0


def end_at_once(status: int, listener: Listener) -> NoReturn:
    """End the process and remove its socket's file."""
    listener.close()
    os._exit(status)


def end_at_second_signal(listener: Listener) -> NoReturn:
    """Log the second signal and end the process."""
    print("octavo: second signal: stopped immediately.", file=sys.stderr, flush=True)
    end_at_once(1, listener)


async def tell_when_unreachable(listener: Listener, drain: Drain) -> None:
    """Wait until clients can no longer connect, and log it."""
    while listener.is_reachable():
        await asyncio.sleep(_LOOK)
    if not drain.draining:
        logger.error(
            "%s has been removed or replaced: open connections still work, but clients cannot open new ones. "
            "Restart the service.",
            listener.url.removeprefix("unix:"),
        )
