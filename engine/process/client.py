"""The server's connection to the engine: one interface, wherever the engine runs.

`ProcessEngineClient` runs the engine in a separate process (`engine.process.main`) and starts it again if it dies.
`AttachedEngineClient` is another client of an engine that another process started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import OctavoError
from engine.host.loading import Tell
from engine.host.logs import LogFormat
from engine.process.attached import AttachedEngineClient
from engine.process.client_interface import Deliver, EngineClient, Progress
from engine.process.connection import ConnectedClient
from engine.process.launch import EngineProcess, kept_folder, make_folder, remove_folder
from engine.process.messages import Dismiss, Known, Ready, encode

__all__ = [
    "AttachedEngineClient", "Deliver", "EngineClient", "ProcessEngineClient", "Progress", "RestartPolicy",
    "start_engine",
]  # fmt: skip

logger = logging.getLogger("octavo.client")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The rules for starting an engine again after it died."""

    # after this many deaths in a row, the engine is not started again; 1 means after the first death
    max_failures: int = 3
    healthy_seconds: float = 60.0  # after an engine has served this long, its next death begins a new row
    first_delay: float = 0.5  # seconds before the first restart; doubled for each later restart in the row
    max_delay: float = 30.0  # the longest delay, in seconds


class ProcessEngineClient(ConnectedClient):
    """Loads an engine in a separate process, and starts it again when it has died. Raises OctavoError if the engine
    cannot start; this is the error raised in its process.

    Args:
        config: the engine's settings.
        policy: what happens when the engine dies.
        log_format: the format of the lines that the engine's process logs on stderr; None sets up no logging.
        meanwhile: called while the engine loads, to do other slow work of the start.
        known: finds facts about the model while the engine's process imports torch.
        tell: called with the percentage of the weights that are loaded; not called when the engine is started again.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: RestartPolicy | None = None,
        log_format: LogFormat | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        *,
        known: Callable[[], Known] = Known,
        tell: Tell = lambda percent: None,
    ):
        super().__init__(b"server")
        self._config = config
        self._log_format = log_format
        self._policy = policy or RestartPolicy()
        self._supervisor: asyncio.Task[None] | None = None
        self._served_since = time.monotonic()
        self.on_change: Callable[[], None] = lambda: None  # called when the engine has died, and when it serves again
        self._failures = 0
        self._launches = 0
        self._folder = make_folder()
        try:
            self._process = self._next_process()
            try:
                self._process.start(known)
                meanwhile()
                self._adopt(self._process.wait_ready(tell))
            except BaseException:  # a signal handler may raise anything
                self._process.stop()
                raise
        except BaseException:
            remove_folder(self._folder)
            raise

    async def wait_failed(self) -> str:
        self._attach()
        await self._given_up.wait()
        assert self._death is not None
        return self._death

    def give_up(self, cause: str) -> None:
        if self.is_alive:
            self._attach()
            self._died(cause)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._supervisor is not None and not self._supervisor.done():
            self._supervisor.cancel()
        self._disconnect()
        self._end_streams("the engine is shut down")
        await asyncio.to_thread(self._process.stop)
        remove_folder(self._folder)
        self._context.term()

    @property
    def address(self) -> str:
        """The engine's ZeroMQ address for other clients on this machine; it changes with each restart."""
        return self._process.address

    @property
    def folder(self) -> Path:
        """A folder for this user only. The engine's process removes it if this one ends without closing the client."""
        return self._folder

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return self._process.pid

    def dismiss(self, name: bytes) -> None:
        """End the requests of another client that is gone, and accept nothing more from it."""
        if self.is_alive:
            self._send(encode(Dismiss(name)))

    # ------------------------------------------------------------ the process and its successors

    def _next_process(self) -> EngineProcess:
        self._launches += 1
        self._folder = kept_folder(self._folder)
        config, adapters = self._config, {}
        if self._launches > 1 and self.info.max_loras:  # load the adapters of the last process again
            rank = self.info.max_lora_rank
            config = replace(config, lora_modules=(), max_loras=self.info.max_loras, max_lora_rank=rank)
            adapters = {adapter.name: adapter.path for adapter in self.adapters.values()}
        return EngineProcess(config, self._folder, self._launches, self._log_format, adapters)

    def _adopt(self, ready: Ready) -> None:
        self._served_since = time.monotonic()
        self._connect(self._process.address, ready.info, ready.stats)

    def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._unwatch()
        self._loop, self._given_up = loop, asyncio.Event()
        if self._socket is not None:
            self._watch(loop)
        elif not self._closed:
            self._supervisor = loop.create_task(self._revive())

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(self._process.line, self._on_lifeline)
        super()._watch(loop)

    def _unwatch(self) -> None:
        super()._unwatch()
        if self._loop is not None and not self._loop.is_closed() and self._socket is not None:
            self._loop.remove_reader(self._process.line)

    def _on_lifeline(self) -> None:
        while self._deliver_some():
            pass
        if self._socket is not None:
            self._died(self._process.last_words() or self._process.epitaph())

    def _died(self, cause: str) -> None:
        logger.error("The engine crashed: %s", cause)
        self._lose(cause)
        if time.monotonic() - self._served_since >= self._policy.healthy_seconds:
            self._failures = 0
        self._failures += 1
        self._supervisor = asyncio.get_running_loop().create_task(self._revive())
        self.on_change()

    async def _revive(self) -> None:
        while True:
            await asyncio.to_thread(self._process.stop)
            if self._failures >= self._policy.max_failures:
                self._given_up.set()
                return
            delay = min(self._policy.first_delay * 2 ** (self._failures - 1), self._policy.max_delay)
            logger.warning("Restarting the engine in %.1f s (restart %d).", delay, self._failures)
            await asyncio.sleep(delay)
            try:
                self._process = self._next_process()
                self._process.start()
                self._adopt(await asyncio.to_thread(self._process.wait_ready))
            except Exception as error:  # for example, no more file descriptors
                known = isinstance(error, OctavoError)
                self._death = str(error) if known else f"{type(error).__name__}: {error}"
                logger.error("The engine could not be restarted: %s", self._death, exc_info=not known)
                self._disconnect()
                self._failures += 1
            else:
                self.num_restarts += 1
                logger.info("The engine is running again.")
                self.on_change()
                return


def start_engine(
    config: EngineConfig, policy: RestartPolicy | None = None, log_format: LogFormat | None = None
) -> EngineClient:
    """Load an engine in a separate process and return a client for it; blocks until the engine can serve. Raises
    ModelLoadError, UnsupportedModelError, ConfigError if the engine cannot start. EngineDeadError if the engine's
    process ended while it loaded."""
    return ProcessEngineClient(config, policy, log_format)
