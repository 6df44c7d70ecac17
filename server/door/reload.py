"""Reloads the key file on SIGHUP."""

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
    """Reads the file again at each SIGHUP after `listen`, and replaces the keys at once. An invalid file leaves the
    keys unchanged.

    Signals before `run`, while the model loads, or while the file is being read, cause one more reload. `settings`: the
    settings with the file's name.
    """

    def __init__(self, settings: ServerSettings, keys: KeyRing):
        self._settings = settings
        self._keys = keys
        self._asked = asyncio.Event()
        self._heard = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self) -> None:
        """Handle SIGHUP from now on, which would otherwise end the process."""
        signal.signal(signal.SIGHUP, self._hear)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self.hear()

    def hear(self) -> None:
        """Request a reload; safe in a signal handler."""
        if self._loop is None:
            self._heard = True  # `run` finds it when it begins
        else:
            self._loop.call_soon_threadsafe(self._asked.set)

    async def run(self) -> None:
        """Reload on request until cancelled."""
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
            # In a thread, because reading the file may be slow.
            keys = await asyncio.to_thread(read_api_keys, self._settings)
        except ConfigError as problem:
            logger.error("SIGHUP: the API keys were not reloaded: %s", problem)
        else:
            self._keys.replace(keys)
            logger.info("SIGHUP: reloaded the API keys; there are %d.", len(keys))
