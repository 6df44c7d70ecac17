"""The choice of the executor that runs a program on a device."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from engine.backends import triton as gpu
from engine.model.executors.native import NativeExecutor, refusal
from engine.model.executors.reference import TorchExecutor
from engine.model.inputs import Inputs
from engine.model.program import Program
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


def fastest(program: Program, tables: Tables, dtype: torch.dtype, device: torch.device) -> Executor:
    """The device's fastest executor for a program. The weights must be loaded and laid out, and must not change any
    more."""
    executor: Executor = TorchExecutor(program, tables)
    if gpu.serves(device):
        from engine.model.executors.triton import TritonExecutor

        executor = TritonExecutor(program, tables, dtype)
    elif device.type == "cpu":
        reason = refusal(program, dtype)
        if reason is None:
            executor = NativeExecutor(program, tables, dtype)
        else:
            logger.debug("torch runs a program: %s", reason)
    if executor.missing:
        logger.info("torch computes these parts, for which there are no kernels: %s", ", ".join(executor.missing))
    return executor
