"""SIGHUP: the file with API keys is read again."""

from __future__ import annotations

import asyncio
import logging
import signal
from types import FrameType

from engine import ConfigError
from server.config.settings import ServerSettings
from server.door.keys import KeyRing, read_api_keys

NO_FILE = "SIGHUP: there is no file of API keys to reload (api_key_file is not set)."

logger = logging.getLogger("octavo.server")


class KeyReload:
    """Reads the file again at each SIGHUP from `listen` on, and puts its keys in place of the old ones at once. A file
    that cannot be used leaves the keys as they are.

    Signals that come before `run`, while the model loads, or while the file is being read, lead to one more reading.

    Args:
        settings: with the file's name.
        keys: what is to be changed.
    """

    def __init__(self, settings: ServerSettings, keys: KeyRing):
        self._settings = settings
        self._keys = keys
        self._asked = asyncio.Event()
        self._heard = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self) -> None:
        """Take SIGHUP from now on, which would end the process."""
        signal.signal(signal.SIGHUP, self._hear)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self.hear()

    def hear(self) -> None:
        """Read the file again, once it can be; safe in a signal's handler."""
        if self._loop is None:
            self._heard = True  # `run` finds it when it begins
        else:
            self._loop.call_soon_threadsafe(self._asked.set)

    async def run(self) -> None:
        """Obey until cancelled."""
        self._loop = asyncio.get_running_loop()
        if self._heard:
            self._asked.set()
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                await self._reload()
        finally:
            self._loop = None

    async def _reload(self) -> None:
        if self._settings.api_key_file is None:
            logger.warning(NO_FILE)
            return
        try:
            # In a thread: the file may lie where reading takes its time.
            keys = await asyncio.to_thread(read_api_keys, self._settings)
        except ConfigError as problem:
            logger.error("SIGHUP: the API keys were not reloaded: %s", problem)
        else:
            self._keys.replace(keys)
            logger.info("SIGHUP: reloaded the API keys; there are %d.", len(keys))
