"""Runs a stack's program operation by operation, by kernels for single operations where there are some.

It runs what no executor of a device runs in larger pieces: programs with matrices or pages of other formats, and single
passes that need something between two operations.
"""

from __future__ import annotations

from engine.model.executors.reference import TorchExecutor
from engine.model.program import Program
from engine.model.row_kernels import RowKernels
from engine.model.tables import Tables


class SingleExecutor(TorchExecutor):
    """Runs a program by these kernels, which its modules use too."""

    def __init__(self, program: Program, tables: Tables, kernels: RowKernels):
        super().__init__(program, tables)
        self.kernels = kernels
