"""The engines of all models as one client, for the parts of a service that serve no single model: health, the front
door and shared parts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from engine import CacheMap, EngineDeadError, EngineInfo, EngineStats
from engine.process.client import EngineClient, Progress
from engine.process.predict import MemoryPrediction

# For no model: it has no tasks, and its sizes limit nothing.
NO_MODEL = EngineInfo(
    model="", model_path="", dtype="", kv_cache_dtype="", device="", max_model_len=1 << 20, vocab_size=0, block_size=0,
    num_blocks=0, full_requests=0.0, max_num_seqs=1, max_num_beams=1, tasks=(), encoder_only=True,
)  # fmt: skip


def expected_info(source: str, found: MemoryPrediction) -> EngineInfo:
    """The known facts about a model that has never been loaded, from its prediction.

    Args:
        source: the folder, GGUF file or hub id.
    """
    file = str(Path(source).expanduser()) if source.endswith(".gguf") else None
    return replace(
        NO_MODEL, model=source, model_path=found.path, model_file=file, dtype=found.dtype,
        quantization=found.quantization, max_model_len=found.max_model_len,
    )  # fmt: skip


class AllEngines(EngineClient):
    """An engine client that accepts no requests.

    Args:
        clients: returns the clients of the currently loaded models.
        close: ends all models.
    """

    def __init__(self, clients: Callable[[], Collection[EngineClient]], close: Callable[[], Any]):
        self.info = NO_MODEL
        self._clients = clients
        self._close = close

    def submit(self, *request: Any, **terms: Any) -> NoReturn:
        """Refuse a request, which must go to a model's engine."""
        raise EngineDeadError("no model was selected")

    def abandon(self, request_id: str) -> None:
        """Do nothing: there are no requests."""

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Do nothing: there are no requests."""

    async def settled(self) -> None:
        """Return at once: there are no requests to wait for."""

    def stats(self) -> EngineStats:
        """Empty statistics. Each model has its own."""
        return EngineStats()

    async def cache_map(self) -> CacheMap:
        """Refuse: there is no cache of all models."""
        raise EngineDeadError("no model was selected")

    @property
    def is_alive(self) -> bool:
        """Whether the service can load models, regardless of failed ones."""
        return True

    @property
    def progress(self) -> Progress:
        """The progress of the engine that has shown none for the longest time."""
        busy = [client.progress for client in self._clients() if not client.progress.idle]
        return max(busy, key=lambda progress: progress.seconds, default=Progress(idle=True, seconds=0.0))

    def give_up(self, cause: str) -> None:
        """Each engine is watched separately."""

    async def close(self) -> None:
        """End all models."""
        await self._close()
