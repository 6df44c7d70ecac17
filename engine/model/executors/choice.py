"""The choice of the executor that runs a program on a device."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.backends import native
from engine.backends import triton as gpu
from engine.model.executors.native import NativeExecutor, refusal
from engine.model.executors.native_rows import NativeRows
from engine.model.executors.reference import TorchExecutor
from engine.model.executors.single import SingleExecutor
from engine.model.inputs import Inputs
from engine.model.program import Program
from engine.model.row_kernels import RowKernels, RowModule
from engine.model.tables import Tables

logger = logging.getLogger("octavo.model")


class Executor(Protocol):
    """An object that runs a program."""

    @property
    def missing(self) -> Collection[str]:
        """The operations that this executor leaves to torch, with the reasons."""
        ...

    def run(self, inputs: Inputs) -> Tensor:
        """Run the program. Returns hidden states [Tp, features]."""
        ...


def choose_kernels(module: nn.Module, device: torch.device) -> None:
    """Let all modules in a model compute their rows by the device's kernels from now on."""
    kernels = _kernels_of(device)
    for part in module.modules():
        if isinstance(part, RowModule):
            part.kernels = kernels


def by_operation(program: Program, tables: Tables, device: torch.device) -> Executor:
    """The executor that runs a program operation by operation on a device."""
    kernels = _kernels_of(device)
    return TorchExecutor(program, tables) if kernels is None else SingleExecutor(program, tables, kernels)


def _kernels_of(device: torch.device) -> RowKernels | None:
    if gpu.serves(device):
        from engine.model.executors.triton_rows import TritonRows

        return TritonRows()
    return NativeRows() if device.type == "cpu" and native.available() else None


def fastest(program: Program, tables: Tables, dtype: torch.dtype, device: torch.device) -> Executor:
    """The device's fastest executor for a program. The weights must be loaded and laid out, and must not change any
    more."""
    executor = by_operation(program, tables, device)
    if gpu.serves(device):
        from engine.model.executors.triton import TritonExecutor

        executor = TritonExecutor(program, tables, dtype)
    elif device.type == "cpu":
        reason = refusal(program, dtype)
        if reason is None:
            executor = NativeExecutor(program, tables, dtype)
        else:
            logger.debug("single kernels and torch run a program: %s", reason)
    if executor.missing:
        logger.info("torch computes these parts, for which there are no kernels: %s", ", ".join(executor.missing))
    return executor
