"""How the server talks to the engine: one interface, whichever thread or process the engine runs in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.outputs import EngineStats, RequestDelta
from engine.request import EngineInput, PoolingParams, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a loaded engine that do not change."""

    model: str
    model_path: str
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_beams: int


class EngineClient(ABC):
    """Submit requests, receive deltas.

    Use from one event loop only. All methods are safe to call after the engine died: they raise
    `EngineDeadError`.
    """

    info: EngineInfo

    @abstractmethod
    def generate(
        self,
        request_id: str,
        input: EngineInput,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> AsyncIterator[RequestDelta]:
        """Submit a request and iterate over its deltas; the first, without choices, says that it was
        accepted, the last one has `finished` set.

        The request is aborted, and its pages freed, when the iterator is closed early or its task is
        cancelled. Deltas that pile up while nobody reads are handed out one by one, none is lost.

        Raises:
            InvalidRequestError: from the first `__anext__`, if the request is impossible.
            EngineDeadError: the engine died before the request finished.
        """

    @abstractmethod
    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices, soon; unknown or finished ids are ignored."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """The latest counters and gauges."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """The engine can serve."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and free what it holds; idempotent."""


def start_engine(config: EngineConfig) -> EngineClient:
    """Load an engine and return a client for it; blocks until it can serve.

    Raises:
        ModelLoadError, UnsupportedModelError, ConfigError: the engine cannot start.
    """
    from engine.thread_client import ThreadEngineClient  # it implements this module's interface

    return ThreadEngineClient(config)
