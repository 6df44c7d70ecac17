"""The choice of the executor that runs a program on a device."""

from __future__ import annotations

import logging
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

    def run(self, inputs: Inputs) -> Tensor:
        """Hidden states [Tp, features]."""
        ...


def fastest(program: Program, tables: Tables, dtype: torch.dtype, device: torch.device) -> Executor:
    """The fastest executor of a device for a program; the weights are loaded, laid out, and do not change."""
    if gpu.serves(device):
        from engine.model.executors.triton import TritonExecutor

        return TritonExecutor(program, tables, dtype)
    if device.type == "cpu":
        reason = refusal(program, dtype)
        if reason is None:
            return NativeExecutor(program, tables, dtype)
        logger.debug("torch runs a program: %s", reason)
    return TorchExecutor(program, tables)
