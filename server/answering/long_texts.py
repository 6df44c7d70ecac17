"""Tokenises long texts in a worker, so that the process that answers HTTP does not need the memory."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from pathlib import Path

from engine import InvalidRequestError
from engine.text.processor import Tokenizer
from server.workers.pool import WorkerLostError, WorkerPool
from server.workers.texts import TextInput

logger = logging.getLogger("octavo.server")

LONG = 262144  # characters for which a tokenizer may need about 50 MB
TIME_LIMIT = 60.0  # seconds; a million tokens take about one


class LongTexts:
    """Tokenises one text at a time; safe to use from several threads without an event loop.

    Args:
        tokenizer: a tokenizer of the tokenizers library.
        workers: a pool (default: a new one that starts with the first long text).
    """

    def __init__(self, tokenizer: Tokenizer, workers: WorkerPool | None = None):
        self._tokenizer = tokenizer
        self._workers = workers or WorkerPool()
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def encode(self, text: str, special: bool) -> list[int]:
        """The text's token ids, with special tokens if requested. Raises InvalidRequestError if tokenising takes too
        much time or memory."""
        with self._lock:
            job = TextInput(self._file(), text, special)
            try:
                return asyncio.run(self._workers.run("tokenize", job, list[int], TIME_LIMIT))
            except TimeoutError:
                reason = f"took more than {TIME_LIMIT:g} seconds"
            except WorkerLostError:
                reason = "took too much memory"
        logger.warning("A tokenizer was stopped: %d characters %s.", len(text), reason)
        message = f"Tokenising the text of {len(text)} characters {reason}. Shorten it, or send token ids."
        raise InvalidRequestError(message, param="prompt", code="text_too_costly")

    def _file(self) -> str:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="octavo-tokenizer-")
            self._tokenizer.save(Path(self._folder.name) / "tokenizer.json")
        return str(Path(self._folder.name) / "tokenizer.json")


def leave_to_worker(tokenizer: Tokenizer) -> None:
    """Let a worker tokenise texts of more than `LONG` characters from now on, if the tokenizer can be sent to it."""
    if tokenizer.is_fast:
        tokenizer.encode_long = (LONG, LongTexts(tokenizer).encode)
