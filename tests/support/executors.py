"""Which executor runs a model's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

from engine.model.native_executor import NativeExecutor
from engine.model.stack import TransformerStack
from engine.model.torch_executor import TorchExecutor
from engine.model.transformer import Transformer


def stacks_of(model: nn.Module) -> list[TransformerStack]:
    """The encoder, the decoder, or both."""
    return [module for module in model.modules() if isinstance(module, TransformerStack)]


def use_torch(model: Transformer) -> None:
    """Let torch run all layers from now on."""
    for stack in stacks_of(model):
        stack.executor = TorchExecutor(stack.program, stack.tables)


@contextmanager
def by_torch(model: Transformer) -> Iterator[None]:
    """torch runs all layers while this lasts."""
    kept = [(stack, stack.executor) for stack in stacks_of(model)]
    use_torch(model)
    try:
        yield
    finally:
        for stack, executor in kept:
            stack.executor = executor


@contextmanager
def counted(executor: type[Any] = NativeExecutor) -> Iterator[mock.MagicMock]:
    """Counts the passes that executors of a kind run."""
    with mock.patch.object(executor, "run", autospec=True, side_effect=executor.run) as run:
        yield run
