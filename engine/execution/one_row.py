"""How one row decodes on a GPU: with the library's products, as many rows do, or with kernels that take along what lies
around a product (`engine.model.fused_row`).

Which is faster depends on the GPU and on the model's shapes, and nobody has to guess: both are recorded at start and
timed, and one is kept. A way whose results are others than those of the library's products is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import gpu
from engine.execution.recording import Recorder
from engine.model.layers import Linear
from engine.model.transformer import Transformer

logger = logging.getLogger("octavo.execution")

# Of numbers in 16 bits, which each layer rounds anew; kernels that are wrong are further away than this.
_ALIKE = 0.1


@dataclass(frozen=True, slots=True)
class Timed:
    """What was found out about one row.

    Attributes:
        library, fused: seconds with the library's products, and with kernels of our own.
    """

    library: float
    fused: float

    @property
    def fused_kept(self) -> bool:
        """Ours were faster."""
        return self.fused < self.library


class OneRow:
    """Records what is done for one row in both ways, and keeps the faster.

    Args:
        record: makes a graph of a function.
        seconds: what a graph takes. None: nothing is timed, and the library's products are taken.

    Attributes:
        timed: what was found, by the name of what was recorded.
    """

    def __init__(self, model: Transformer, record: Recorder, seconds: Callable[[Callable[[], None]], float] | None):
        self._model, self._record, self._seconds = model, record, seconds
        self.timed: dict[str, Timed] = {}

    def recorder(self, name: str, outcome: Callable[[], Tensor]) -> Recorder:
        """What records a function for one row.

        Args:
            name: of the function, for the log.
            outcome: its results, once it has run, which are to be the same in both ways.
        """
        return lambda function: self._faster(name, function, outcome)

    def _faster(self, name: str, function: Callable[[], None], outcome: Callable[[], Tensor]) -> Callable[[], None]:
        library = self._record(_way(self._model, function, fused=False))
        decoder = self._model.decoder
        if self._seconds is None or decoder is None or decoder.fused is None:
            return library
        try:
            difference = self._difference(function, outcome)
            if not difference <= _ALIKE:
                logger.warning("%s of one row: our kernels' results are off by %.2g, and not used", name, difference)
                return library
            fused = self._record(_way(self._model, function, fused=True))
        except Exception as error:  # of torch and Triton all kinds: there is another way
            logger.warning("%s of one row: our kernels cannot be used (%s)", name, error)
            return library
        found = self.timed[name] = Timed(self._seconds(library), self._seconds(fused))
        logger.info(
            "%s of one row: %.3f ms with our kernels around products, %.3f ms with the library's products: %s are used",
            name,
            1e3 * found.fused,
            1e3 * found.library,
            "ours" if found.fused_kept else "the library's",
        )
        return fused if found.fused_kept else library

    def _difference(self, function: Callable[[], None], outcome: Callable[[], Tensor]) -> float:
        """How far results are from those of the library's products, relative to their size."""
        results = []
        for fused in (False, True):
            with _chosen(self._model, fused), gpu.current(self._model.device):
                function()
                results.append(outcome().double())
        wanted, found = results
        size = torch.linalg.vector_norm(wanted).clamp(min=torch.finfo(torch.float32).tiny)
        return float(torch.linalg.vector_norm(found - wanted) / size)


def _way(model: Transformer, function: Callable[[], None], *, fused: bool) -> Callable[[], None]:
    def run() -> None:
        with _chosen(model, fused):
            function()

    return run


@contextmanager
def _chosen(model: Transformer, fused: bool) -> Iterator[None]:
    """One way is taken while this lasts; what is recorded keeps to it."""
    layers, head = (None if model.decoder is None else model.decoder.fused), model.head
    parts = [part for part in (layers, head if isinstance(head, Linear) else None) if part is not None]
    before = [part.by_row for part in parts]
    for part in parts:
        part.by_row = fused
    try:
        yield
    finally:
        for part, was in zip(parts, before, strict=True):
            part.by_row = was
