"""How one row decodes on a GPU: with the library's products, as many rows do, or with kernels that take along what lies
around a product (`engine.model.triton_row`), each of which may begin while the one before it ends.

Which is faster depends on the GPU and on the model's shapes, so nothing is guessed: all are recorded at start and
timed, and one is kept. A way whose results are others than those of the library's products is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine import gpu
from engine.execution.recording import Recorder
from engine.model.layers import Linear
from engine.model.transformer import Transformer

if TYPE_CHECKING:
    from engine.model.triton_executor import TritonExecutor

logger = logging.getLogger("octavo.execution")

# Of numbers in 16 bits, which each layer rounds anew; kernels that are wrong are further away than this.
_ALIKE = 0.1


class Way(NamedTuple):
    """A way of computing one row.

    Attributes:
        name: for the log.
        fused: with our kernels around products.
        overlapping: which begin while the ones before them end.
    """

    name: str
    fused: bool = False
    overlapping: bool = False


LIBRARY = Way("the library's products")
FUSED = Way("fused products", fused=True)
OVERLAPPING = Way("overlapping fused products", fused=True, overlapping=True)


class OneRow:
    """Records what is done for one row in all ways, and keeps the fastest.

    Args:
        record: makes a graph of a function.
        seconds: what a graph takes. None: nothing is timed, and the library's products are taken.

    Attributes:
        timed: the seconds of each way by its name, by the name of what was recorded; kept: which way was.
    """

    def __init__(self, model: Transformer, record: Recorder, seconds: Callable[[Callable[[], None]], float] | None):
        self._model, self._record, self._seconds = model, record, seconds
        self.timed: dict[str, dict[str, float]] = {}
        self.kept: dict[str, str] = {}

    def recorder(self, name: str, outcome: Callable[[], Tensor]) -> Recorder:
        """What records a function for one row.

        Args:
            name: of the function, for the log.
            outcome: its results, once it has run, which are to be the same in all ways.
        """
        return lambda function: self._fastest(name, function, outcome)

    def _fastest(self, name: str, function: Callable[[], None], outcome: Callable[[], Tensor]) -> Callable[[], None]:
        kept = self._in(LIBRARY, function)
        if self._seconds is None or not _switches(self._model):
            return kept
        with gpu.current(self._model.device):
            wanted = self._results(LIBRARY, kept, outcome)
            times = {LIBRARY.name: self._seconds(kept)}
            best = LIBRARY.name
            for way in self._ours():
                try:
                    replay = self._in(way, function)
                    taken = self._seconds(replay)
                    difference = _difference(self._results(way, replay, outcome), wanted)
                except Exception as error:  # of torch and Triton all kinds: there is another way
                    logger.warning("%s of one row: %s cannot be used (%s)", name, way.name, error)
                    break
                if not difference <= _ALIKE:
                    logger.warning("%s of one row: %s are off by %.2g, and not used", name, way.name, difference)
                    break
                times[way.name] = taken
                if taken < times[best]:
                    kept, best = replay, way.name
        self.timed[name], self.kept[name] = times, best
        told = ", ".join(f"{1e3 * seconds:.3f} ms with {way}" for way, seconds in times.items())
        logger.info("%s of one row: %s; kept: %s", name, told, best)
        return kept

    def _ours(self) -> list[Way]:
        from engine.gpu import matvec

        return [FUSED, OVERLAPPING] if matvec.can_overlap(self._model.device) else [FUSED]

    def _in(self, way: Way, function: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with _chosen(self._model, way):
                function()

        return self._record(run)

    def _results(self, way: Way, replay: Callable[[], None], outcome: Callable[[], Tensor]) -> Tensor:
        with _chosen(self._model, way):
            replay()
            return outcome().double()


def _difference(found: Tensor, wanted: Tensor) -> float:
    """How far results are from others, relative to their size."""
    size = torch.linalg.vector_norm(wanted).clamp(min=torch.finfo(torch.float32).tiny)
    return float(torch.linalg.vector_norm(found - wanted) / size)


def _switches(model: Transformer) -> list[TritonExecutor | Linear]:
    """What computes one row otherwise than many, if the decoder does."""
    if not gpu.serves(model.device):
        return []
    from engine.model.triton_executor import TritonExecutor

    executor = None if model.decoder is None else model.decoder.executor
    if not isinstance(executor, TritonExecutor):
        return []
    return [executor, model.head] if isinstance(model.head, Linear) else [executor]


@contextmanager
def _chosen(model: Transformer, way: Way) -> Iterator[None]:
    """One way is taken while this lasts; what is recorded keeps to it."""
    parts = _switches(model)
    before = [part.by_row for part in parts]
    overlap: AbstractContextManager[None] = nullcontext()
    if way.overlapping:
        from engine.gpu import matvec

        overlap = matvec.overlapping(True)
    for part in parts:
        part.by_row = way.fused
    try:
        with overlap:
            yield
    finally:
        for part, was in zip(parts, before, strict=True):
            part.by_row = was
