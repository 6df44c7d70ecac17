"""Runs a stack's program operation by operation, by kernels for single operations where there are some.

It runs what no executor of a device runs in larger pieces: programs with matrices or pages of other formats, and single
passes that need something between two operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from engine.model.attention_operations import PrepareHeads
from engine.model.executors.reference import (
    HANDLERS,
    Handler,
    TorchExecutor,
    activate_rows,
    convolve_rows,
    prepare_heads,
)
from engine.model.operations import Activate
from engine.model.program import Program
from engine.model.row_kernels import RowKernels
from engine.model.state_operations import Convolve
from engine.model.tables import Tables


class SingleExecutor(TorchExecutor):
    """Runs a program whose modules compute by these kernels."""

    def __init__(self, program: Program, tables: Tables, kernels: RowKernels):
        super().__init__(program, tables, handlers_of(kernels))


def handlers_of(kernels: RowKernels) -> Mapping[type, Handler]:
    """The functions of all operations."""
    by_kernels: dict[type, Callable[..., None]] = {
        Activate: activate_rows,
        PrepareHeads: prepare_heads,
        Convolve: convolve_rows,
    }
    return HANDLERS | {kind: partial(handler, kernels=kernels) for kind, handler in by_kernels.items()}
