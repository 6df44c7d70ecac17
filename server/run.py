"""The life of the service: bind, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI

from engine import EngineConfig, EngineInfo, default_topic
from engine.host.logs import LogFormat, adopt_libraries
from engine.process.client import EngineClient, RestartPolicy, start_engine
from engine.text.processor import Tokenizer, load_tokenizer
from server import logs
from server.answering.endpoints import served_endpoints
from server.answering.long_texts import leave_to_worker
from server.app import create_app
from server.config.settings import DEMOS, ServerSettings
from server.door.accepting import Acceptor
from server.door.connection import LAST_WORDS, close_connections, drain_connections
from server.door.drain import Drain
from server.door.keys import KeyRing, read_api_keys
from server.door.listening import Listener, check_certificate, is_public, raise_file_limit
from server.door.protocol import HEAD_TIMEOUT, http_protocol
from server.door.rates import check_storage
from server.door.reload import KeyReload
from server.door.root_path import RootPath
from server.door.slots import FEW, Slot, Slots, count_slots
from server.memory import MemoryGuard, find_limit
from server.response_store import open_store
from server.tracing.start import start_tracing
from server.watchdog import LoopWatchdog, restart_when_stuck
from server.workers.pool import shared_workers

# What clients call a bundled model, and what the log says of it.
DEMO_IDS = {DEMOS["chat"]: "octavo-demo", DEMOS["seq2seq"]: "octavo-demo-seq2seq"}
_DEMO_NOTES = {
    DEMOS["chat"]: "a tiny model that tells little stories and answers questions about Octavo and transformers",
    DEMOS["seq2seq"]: "a tiny encoder-decoder that translates a toy language into English",
}
KEEP_ALIVE = 75  # seconds; longer than clients and gateways keep an idle connection, so that they end it, not we

# Times the liveness timeout: a monitor of /health/live from outside comes first.
_STUCK = 3
_LOOK = 2.0  # seconds between two looks at a Unix socket's file

logger = logging.getLogger("octavo.server")


def serve(config: EngineConfig, settings: ServerSettings, version: str, *, notes: Sequence[str] = ()) -> int:
    """Load the model, serve until SIGTERM or Ctrl-C, stop cleanly; returns the exit status, which is 1 if
    the engine died too often.

    Args:
        config: the engine's settings.
        settings: the service's.
        version: shown in the API's documentation.
        notes: what the log is to say first, as warnings.

    Raises:
        StartupError: the address cannot be bound, or the certificate cannot be used.
        OctavoError: the model cannot be loaded, or the file with API keys cannot be read.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nothing has been read yet that could be read again
    log_format = _set_up_logging(settings)
    if log_format == "json":
        config = replace(config, show_progress=False)  # a progress bar is no log line
    for note in notes:
        logger.warning(note)
    check_certificate(settings)
    raise_file_limit()
    # Bound before the model loads, so that a taken port is known at once; until uvicorn listens,
    # connections are refused.
    with Listener(settings) as listener:
        if is_public(settings) and not (settings.api_key or settings.api_key_file):
            logger.warning(
                "%s is open to other machines, and every client that reaches it may use it: no API key is set. "
                "Set --api-key (OCTAVO_API_KEY) or --api-key-file, or listen on 127.0.0.1.",
                listener.url,
            )
        return _run(_prepare(config, settings, version, listener, log_format), listener)


def _set_up_logging(settings: ServerSettings) -> LogFormat:
    log_format = logs.choose_format(settings.log_format)
    logs.configure(settings.log_level, log_format, log_prompts=settings.log_prompts)
    return log_format


def _run(server: _Server, listener: Listener) -> int:
    # For the moment before uvicorn's own handlers stand; and after them, because uvicorn raises the
    # signal that stopped it once more, which has been obeyed by then.
    def stop(signum: int, frame: FrameType | None) -> None:
        server.should_exit = True

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listener.socket]))
        status = _say_end(server)
        # All is closed by now but what threads still compute in vain, such as a long text's tokens.
        end = threading.Timer(LAST_WORDS, _end_at_once, [status, listener])
        end.daemon = True
        end.start()
    return status


def _say_end(server: _Server) -> int:
    """The last lines of the log; returns the exit status."""
    logger.info("Stopped.")
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Python gives its own handlers up while it exits; a late signal would make that look like a crash.
        signal.signal(signum, signal.SIG_IGN)
    if server.failure is not None:
        cause = " ".join(line.strip() for line in server.failure.splitlines())  # CUDA's have several
        print(f"octavo: the engine keeps failing: {cause}", file=sys.stderr, flush=True)
        return 1
    return 0


def _end_at_once(status: int, listener: Listener) -> None:
    listener.close()
    os._exit(status)


def _prepare(
    config: EngineConfig, settings: ServerSettings, version: str, listener: Listener, log_format: LogFormat
) -> _Server:
    check_storage(settings.rate_limit_storage)
    api_keys = KeyRing()
    reload = KeyReload(settings, api_keys)
    reload.listen()  # before the file is read, so that no change of it is missed
    api_keys.replace(read_api_keys(settings))
    tracing = start_tracing(settings, version)
    response_store = open_store(settings)
    model_id = served_model_id(config.model, settings.served_model_name)
    config = config.with_kv_topic(default_topic(model_id, None if settings.uds else settings.port, os.environ))
    client, tokenizer = _load(config, RestartPolicy(max_failures=settings.max_engine_failures), log_format)
    _log_facts(client, tokenizer, model_id)
    if tokenizer is not None and tokenizer.chat_template is not None:
        shared_workers().start()  # they are ready when the first conversation comes
    drain = Drain()
    memory = MemoryGuard(find_limit(settings.max_api_memory))
    app = create_app(
        client,
        tokenizer,
        model_id,
        version=version,
        settings=settings,
        drain=drain,
        api_keys=api_keys,
        tracing=tracing,
        memory=memory,
        response_store=response_store,
    )
    page = "in a browser: a playground; " if settings.enable_playground else ""
    hints = "" if settings.uds else f" ({page}API documentation: {listener.url}/docs)"
    announce = f"Serving {model_id} on {listener.url}{hints}"
    stuck_after = _STUCK * settings.liveness_timeout
    metrics = app.state.service.metrics
    slots = Slots(settings.root_path, metrics.rejected, metrics.connection_dropped)
    metrics.show_connections(lambda: slots.num_open)
    return _Server(
        client, drain, uvicorn_config(app, settings), listener, announce, stuck_after, reload, settings, slots
    )


def uvicorn_config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    """uvicorn with the service's protocol and logs, on uvloop where there is one, without websockets."""
    return uvicorn.Config(
        RootPath(app, settings.root_path),
        http=http_protocol(settings),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_keyfile_password=settings.ssl_keyfile_password,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=settings.shutdown_timeout,
    )


def served_model_id(model: str, served_model_name: str | None) -> str:
    """The model's name to clients: as set, else the folder's last name, else the hub id."""
    if served_model_name:
        return served_model_name
    path = Path(model)
    if path in DEMO_IDS:
        return DEMO_IDS[path]
    return path.resolve().name if path.is_dir() else model


def _load(config: EngineConfig, policy: RestartPolicy, log_format: LogFormat) -> tuple[EngineClient, Tokenizer | None]:
    if note := _DEMO_NOTES.get(Path(config.model)):
        logger.info("The bundled demo serves: %s. For another model: octavo serve MODEL.", note)
    logger.info("Loading %s.", config.model)
    client = start_engine(config, policy, log_format)
    if config.skip_tokenizer_init:
        return client, None
    own = config.tokenizer is None
    source = client.info.model_path if own else config.tokenizer
    revision = config.revision if own else None
    lower_case = client.info.lower_case
    tokenizer = load_tokenizer(source or "", revision=revision, hf_token=config.hf_token, lower_case=lower_case)
    adopt_libraries()
    if tokenizer is not None:
        leave_to_worker(tokenizer)
    return client, tokenizer


def _log_facts(client: EngineClient, tokenizer: Tokenizer | None, model_id: str) -> None:
    info = client.info
    endpoints = ", ".join(served_endpoints(info, tokenizer)) or "no endpoint"
    if tokenizer is None:
        logger.warning("The model has no tokenizer: prompts are token ids, and texts are empty.")
    if info.encoder_only:
        _log_encoder(info, model_id)
    else:
        _log_decoder(info, model_id)
    logger.info("Served: %s.", endpoints)


def _log_encoder(info: EngineInfo, model_id: str) -> None:
    logger.info(
        "Model %s from %s: %s on %s, encoder-only, %s, inputs of up to %d tokens.",
        model_id, info.model_path, info.format, info.device, ", ".join(info.tasks), info.max_model_len,
    )  # fmt: skip
    logger.info(
        "No KV cache: an input is read whole, in one step, which holds at most %d inputs of %d tokens together, or one "
        "that is longer.",
        info.max_num_seqs, info.max_num_batched_tokens,
    )  # fmt: skip


def _log_decoder(info: EngineInfo, model_id: str) -> None:
    # Of shorter ones at least as many as of the longest, whose pages outside a sliding window are free again.
    longest, least = info.max_model_len, info.full_requests
    room = f"prompt and answer of up to {longest} tokens together"
    if "generate" not in info.tasks:
        room = f"{', '.join(info.tasks)}, inputs of up to {longest} tokens"
    if info.max_encoder_len is not None:  # its tokens have pages, too
        room = f"encoder-decoder, prompts of up to {info.max_encoder_len} tokens, answers of up to {longest}"
        longest, least = longest + info.max_encoder_len, 0.0
    logger.info("Model %s from %s: %s on %s, %s.", model_id, info.model_path, info.format, info.device, room)
    tokens = info.num_blocks * info.block_size
    lengths = [longest] + [1024] * (longest > 1024)
    fit = ", or ".join(f"{max(tokens / length, least):.1f} of {length} tokens" for length in lengths)
    logger.info(
        "KV cache: %d pages of %d tokens hold %d tokens in %s; requests that fit at a time: %s; at most %d run in one "
        "step.",
        info.num_blocks, info.block_size, tokens, info.kv_cache_dtype, fit, info.max_num_seqs,
    )  # fmt: skip


class _Server(uvicorn.Server):
    """uvicorn, saying when it listens, answering while it drains, stopping at once at the second signal, and
    when the engine has failed for good.

    Attributes:
        failure: why the engine was given up, if it was.
    """

    def __init__(
        self,
        client: EngineClient,
        drain: Drain,
        config: uvicorn.Config,
        listener: Listener,
        announce: str,
        stuck_after: float,
        reload: KeyReload,
        settings: ServerSettings,
        slots: Slots,
    ):
        super().__init__(config)
        self._client = client
        self._drain = drain
        self._listener = listener
        self._announce = announce
        self._stuck_after = stuck_after
        self._reload = reload
        self._watchdog = LoopWatchdog(settings.loop_timeout)
        self._max_connections = settings.max_connections
        self._slots = slots
        self._watches: list[asyncio.Task[None]] = []
        self.failure: str | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        # What is here now stays: a full collection that looked through it would hold up every stream.
        gc.collect()
        gc.freeze()
        self._watchdog.start()
        self._watches = [
            asyncio.create_task(self._stop_on_failure()),
            asyncio.create_task(restart_when_stuck(self._client, self._stuck_after)),
            asyncio.create_task(self._reload.run()),
            asyncio.create_task(self._tell_when_unreachable()),
        ]
        self._slots.sizes = count_slots(self._max_connections)
        self._say_slots()
        for listener in sockets or []:
            acceptor = Acceptor(listener, self._slots, self._make_protocol, self.config.ssl, HEAD_TIMEOUT)
            acceptor.start(self.config.backlog)
            self.servers.append(cast("asyncio.base_events.Server", acceptor))
        logger.info(self._announce)

    def _make_protocol(self, slot: Slot) -> asyncio.Protocol:
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state, slot=slot)

    def _say_slots(self) -> None:
        sizes, wanted = self._slots.sizes, self._max_connections
        limit = "The limit of open files (ulimit -n) leaves room for %d connections at a time"
        if wanted is not None and wanted > sizes.fitting:
            logger.warning(f"{limit}, not for max_connections (%d).", sizes.fitting, wanted)
        elif wanted is None and sizes.fitting < FEW:
            logger.warning(f"{limit}; beyond those, health and metrics alone are answered.", sizes.fitting)

    async def _stop_on_failure(self) -> None:
        self.failure = await self._client.wait_failed()
        self.should_exit = True

    async def _tell_when_unreachable(self) -> None:
        while self._listener.is_reachable():
            await asyncio.sleep(_LOOK)
        if not self.should_exit:
            logger.error(
                "%s has been removed or replaced: open connections are served, and no client can open another. "
                "Restart the service.",
                self._listener.url.removeprefix("unix:"),
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        limit = float(self.config.timeout_graceful_shutdown or 0)
        deadline = time.monotonic() + limit
        logger.info(
            "Stopping; %d running requests get up to %g seconds. A second signal stops at once.",
            self._drain.num_running,
            limit,
        )
        await drain_connections(self._drain, self.server_state.connections, limit)
        # Nothing runs any more; what is left is to close what listens, and the bytes on their way.
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        await close_connections(self.server_state.connections, max(deadline - time.monotonic(), LAST_WORDS))
        self.config.timeout_graceful_shutdown = 1
        await super().shutdown(sockets)
        self._watchdog.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            # Neither the engine's step nor a client is waited for.
            print("octavo: second signal: stopped at once.", file=sys.stderr, flush=True)
            _end_at_once(1, self._listener)
        self._drain.begin()
        super().handle_exit(sig, frame)
