"""Trial compilation of answer formats before they reach the engine, within limits of time and memory.

A schema of a few lines can take seconds to compile, and the compiler cannot be interrupted. So a worker process
compiles it first and is killed when its time is up. A grammar that compiles there is then compiled in the engine's
process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from hashlib import blake2b

from engine import InvalidRequestError, StructuredOutputsParams
from server.workers.pool import RefusedError, WorkerLostError, WorkerPool, shared_workers

logger = logging.getLogger("octavo.server")

MAX_AT_ONCE = 2  # workers
MAX_KNOWN = 4096  # formats that passed and need no second trial


class GrammarChecks:
    """Tries new formats; use it from one event loop only. `workers`: the pool (default: the process's shared pool)."""

    def __init__(self, workers: WorkerPool | None = None) -> None:
        self._workers = workers or shared_workers()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._known: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, params: StructuredOutputsParams, seconds: float) -> None:
        """Check whether the format can be compiled. `seconds`: the time limit. Raises InvalidRequestError if it cannot
        be compiled, or takes too much time or memory."""
        key = blake2b(repr(params).encode(), digest_size=32).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return
        code = "invalid_grammar"
        async with self._slots:
            try:
                await self._workers.run("grammar", params, type(None), seconds)
            except RefusedError as problem:
                message = str(problem)
            except TimeoutError:
                message = (
                    f"{params.kind} takes more than {seconds:g} seconds to compile (grammar_timeout). Simplify it, or "
                    "raise --grammar-timeout."
                )
                code = "grammar_timeout"
            except WorkerLostError:
                message, code = f"{params.kind} takes too much memory to compile. Simplify it.", "grammar_memory"
            else:
                self._known[key] = None
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
                return
        if code != "invalid_grammar":
            logger.warning(
                "Compiling the %s of a request (%d characters) took too long and was stopped.", params.kind, params.size
            )
        raise InvalidRequestError(message, param=f"structured_outputs.{params.kind}", code=code)
