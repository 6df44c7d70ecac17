"""The life of the service: bind, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn

from engine import EngineConfig
from engine.client import EngineClient, RestartPolicy, start_engine
from engine.text import Tokenizer, load_tokenizer
from server.app import create_app
from server.settings import ServerSettings

DEMO_MODEL = Path(__file__).parent / "demo_model"
DEMO_MODEL_ID = "octavo-demo"

logger = logging.getLogger("octavo.server")


class StartupError(Exception):
    """The service cannot start, for a reason that one paragraph explains."""


def serve(config: EngineConfig, settings: ServerSettings, version: str) -> int:
    """Load the model, serve until SIGTERM or Ctrl-C, stop cleanly; returns the exit status, which is 1 if
    the engine died too often.

    Raises:
        StartupError: the address cannot be bound.
        OctavoError: the model cannot be loaded.
    """
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    if settings.log_level == "info":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # what it says at info, we say ourselves
    # Bound before the model loads, so that a taken port is known at once; until uvicorn listens,
    # connections are refused.
    listener = bind(settings.host, settings.port)
    server = _prepare(config, settings, version, url(listener))

    # For the moment before uvicorn's own handlers stand; and after them, because uvicorn raises the
    # signal that stopped it once more, which has been obeyed by then.
    def stop(signum: int, frame: FrameType | None) -> None:
        server.should_exit = True

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    asyncio.run(server.serve(sockets=[listener]))
    logger.info("Stopped.")
    for signum in (signal.SIGTERM, signal.SIGINT):
        # Python gives its own handlers up while it exits; a late signal would make that look like a crash.
        signal.signal(signum, signal.SIG_IGN)
    if server.failure is not None:
        print(f"octavo: the engine keeps failing: {server.failure}", file=sys.stderr)
        return 1
    return 0


def _prepare(config: EngineConfig, settings: ServerSettings, version: str, address: str) -> _Server:
    client, tokenizer = _load(config, RestartPolicy(max_failures=settings.max_engine_failures))
    model_id = served_model_id(config.model, settings.served_model_name)
    _log_facts(client, tokenizer, model_id)
    app = create_app(client, tokenizer, model_id, version=version, settings=settings)
    return _Server(
        client,
        uvicorn.Config(app, log_config=None, server_header=False, timeout_graceful_shutdown=settings.shutdown_timeout),
        announce=f"Serving {model_id} on {address} (API documentation: {address}/docs)",
    )


def served_model_id(model: str, served_model_name: str | None) -> str:
    """The model's name to clients: as set, else the folder's last name, else the hub id."""
    if served_model_name:
        return served_model_name
    path = Path(model)
    if path == DEMO_MODEL:
        return DEMO_MODEL_ID
    return path.resolve().name if path.is_dir() else model


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        StartupError: unknown host, or the port is taken or not allowed.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as problem:
        if listener is not None:
            listener.close()
        raise StartupError(
            f"cannot listen on {host}, port {port}: {problem.strerror or problem}. "
            "Choose another with --host and --port (OCTAVO_HOST, OCTAVO_PORT)."
        ) from problem
    return listener


def url(listener: socket.socket) -> str:
    """Where a client on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _load(config: EngineConfig, policy: RestartPolicy) -> tuple[EngineClient, Tokenizer | None]:
    if Path(config.model) == DEMO_MODEL:
        logger.warning("No model was named, so the bundled demo serves: it is UNTRAINED and writes noise.")
    logger.info("Loading %s.", config.model)
    client = start_engine(config, policy)
    if config.skip_tokenizer_init:
        return client, None
    own = config.tokenizer is None
    source = client.info.model_path if own else config.tokenizer
    return client, load_tokenizer(source or "", revision=config.revision if own else None, hf_token=config.hf_token)


def _log_facts(client: EngineClient, tokenizer: Tokenizer | None, model_id: str) -> None:
    info = client.info
    logger.info("Model %s from %s: %s on %s.", model_id, info.model_path, info.dtype, info.device)
    if tokenizer is None:
        logger.warning("The model has no tokenizer: prompts are token ids, and texts are empty.")


class _Server(uvicorn.Server):
    """uvicorn, saying when it listens, stopping at once at the second signal, and when the engine has failed
    for good.

    Attributes:
        failure: why the engine was given up, if it was.
    """

    def __init__(self, client: EngineClient, config: uvicorn.Config, announce: str):
        super().__init__(config)
        self._client = client
        self._announce = announce
        self._watch: asyncio.Task[None] | None = None
        self.failure: str | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watch = asyncio.create_task(self._stop_on_failure())
        if self.started:
            logger.info(self._announce)

    async def _stop_on_failure(self) -> None:
        self.failure = await self._client.wait_failed()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        running, limit = len(self.server_state.tasks), self.config.timeout_graceful_shutdown
        logger.info(
            "Stopping; %d running requests get up to %s seconds. A second signal stops at once.", running, limit
        )
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            # Neither the engine's step nor a client is waited for.
            print("octavo: second signal: stopped at once.", file=sys.stderr, flush=True)
            os._exit(1)
        super().handle_exit(sig, frame)
