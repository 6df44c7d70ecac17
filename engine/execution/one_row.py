"""How one row decodes on a GPU: with the library's products, as many rows do, or with kernels that take along what lies
around a product (`engine.backends.triton.one_row`), each of which may begin while the one before it ends.

Which is faster depends on the GPU and on the model's shapes, so nothing is guessed: all are recorded at start and
timed, and one is kept. A form whose results are others than those of the library's products is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.backends import triton as gpu
from engine.execution.recording import Recorder
from engine.model.kernels import FUSED, LIBRARY, OVERLAPPING, RowForm
from engine.model.transformer import Transformer

logger = logging.getLogger("octavo.execution")

# Of numbers in 16 bits, which each layer rounds anew; kernels that are wrong are further away than this.
_ALIKE = 0.1


class FormRecorder(Protocol):
    """Makes of a function that is told the form of one row one that does the same again."""

    def __call__(self, function: Callable[[RowForm], None]) -> Callable[[], None]: ...


class OneRow:
    """Records what is done for one row in all forms, and keeps the fastest.

    Args:
        record: makes a graph of a function.
        seconds: what a graph takes. None: nothing is timed, and the library's products are taken.

    Attributes:
        timed: the seconds of each form by its name, by the name of what was recorded; kept: which form was.
    """

    def __init__(self, model: Transformer, record: Recorder, seconds: Callable[[Callable[[], None]], float] | None):
        self._model, self._record, self._seconds = model, record, seconds
        self.timed: dict[str, dict[str, float]] = {}
        self.kept: dict[str, str] = {}

    def recorder(self, name: str, outcome: Callable[[RowForm], Sequence[Tensor]]) -> FormRecorder:
        """The object that records a function for one row.

        Args:
            name: of the function, for the log.
            outcome: its results, once it has run, each of which is to be the same in all forms.
        """
        return lambda function: self._fastest(name, function, outcome)

    def _fastest(
        self, name: str, function: Callable[[RowForm], None], outcome: Callable[[RowForm], Sequence[Tensor]]
    ) -> Callable[[], None]:
        kept = self._record(lambda: function(LIBRARY))
        if self._seconds is None or not _has_forms(self._model):
            return kept
        with gpu.current(self._model.device):
            wanted = _results(LIBRARY, kept, outcome)
            times = {LIBRARY.name: self._seconds(kept)}
            best = LIBRARY.name
            for form in self._ours():
                try:
                    replay = self._record(partial(function, form))
                    taken = self._seconds(replay)
                    difference = max(map(_difference, _results(form, replay, outcome), wanted))
                except Exception as error:  # of torch and Triton all kinds: there is another form
                    logger.warning("%s of one row: %s cannot be used (%s)", name, form.name, error, exc_info=True)
                    break
                if not difference <= _ALIKE:
                    logger.warning("%s of one row: %s are off by %.2g, and not used", name, form.name, difference)
                    break
                times[form.name] = taken
                if taken < times[best]:
                    kept, best = replay, form.name
        self.timed[name], self.kept[name] = times, best
        told = ", ".join(f"{1e3 * seconds:.3f} ms with {form}" for form, seconds in times.items())
        logger.debug("%s of one row: %s; kept: %s", name, told, best)
        return kept

    def _ours(self) -> list[RowForm]:
        from engine.backends.triton import overlap

        return [FUSED, OVERLAPPING] if overlap.can_overlap(self._model.device) else [FUSED]


def _results(form: RowForm, replay: Callable[[], None], outcome: Callable[[RowForm], Sequence[Tensor]]) -> list[Tensor]:
    replay()
    return [result.double() for result in outcome(form)]  # copies


def _difference(found: Tensor, wanted: Tensor) -> float:
    """The distance of results from others, relative to their size."""
    size = torch.linalg.vector_norm(wanted).clamp(min=torch.finfo(torch.float32).tiny)
    return float(torch.linalg.vector_norm(found - wanted) / size)


def _has_forms(model: Transformer) -> bool:
    """The decoder computes one row otherwise than many."""
    if not gpu.serves(model.device) or model.decoder is None:
        return False
    from engine.backends.triton.executor import TritonExecutor

    return isinstance(model.decoder.executor, TritonExecutor)
