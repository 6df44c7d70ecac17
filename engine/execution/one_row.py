"""Decoding one row on a GPU: with the library's products, as for many rows, or with kernels that include the work
around a product (`engine.model.executors.triton_row`), each of which may start before the previous one ends.

Which is faster depends on the GPU and on the model's shapes, so all are recorded at start and timed, and one is kept. A
form whose results differ from those of the library's products is not kept.
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
from engine.model.row_form import FUSED, LIBRARY, OVERLAPPING, RowForm
from engine.model.transformer import Transformer

logger = logging.getLogger("octavo.execution")

# For 16-bit numbers, which each layer rounds; wrong kernels differ by more than this.
_ALIKE = 0.1


class FormRecorder(Protocol):
    """Turns a function that is given the form of one row into one that repeats the work."""

    def __call__(self, function: Callable[[RowForm], None]) -> Callable[[], None]: ...


class OneRow:
    """Records the work for one row in all forms, and keeps the fastest.

    Args:
        record: makes a graph of a function.
        seconds: measures a graph. None: nothing is timed, and the library's products are used.
    """

    def __init__(self, model: Transformer, record: Recorder, seconds: Callable[[Callable[[], None]], float] | None):
        self._model, self._record, self._seconds = model, record, seconds
        # the seconds of each form by name, by the name of the recorded function; kept: which form was kept
        self.timed: dict[str, dict[str, float]] = {}
        self.kept: dict[str, str] = {}

    def recorder(self, name: str, outcome: Callable[[RowForm], Sequence[Tensor]]) -> FormRecorder:
        """The object that records a function for one row.

        Args:
            name: the function's name for the log.
            outcome: its results after a run, which must be the same in all forms.
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
                except Exception as error:  # torch and Triton raise errors of all kinds: there is another form
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
    """The relative difference of results from others."""
    size = torch.linalg.vector_norm(wanted).clamp(min=torch.finfo(torch.float32).tiny)
    return float(torch.linalg.vector_norm(found - wanted) / size)


def _has_forms(model: Transformer) -> bool:
    """Whether the decoder computes one row differently from many."""
    if not gpu.serves(model.device) or model.decoder is None:
        return False
    from engine.model.executors.triton import TritonExecutor

    return isinstance(model.decoder.executor, TritonExecutor)
