"""Which executor runs a model's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

from engine.model.executors.native import NativeExecutor
from engine.model.executors.reference import TorchExecutor
from engine.model.heads import NO_TABLES, Head
from engine.model.stack import TransformerStack
from engine.model.transformer import Transformer


def stacks_of(model: nn.Module) -> list[TransformerStack]:
    """The encoder, the decoder, or both."""
    return [module for module in model.modules() if isinstance(module, TransformerStack)]


def parts_of(model: nn.Module) -> list[TransformerStack | Head]:
    """All that has a program."""
    return [module for module in model.modules() if isinstance(module, TransformerStack | Head)]


def use_torch(model: Transformer) -> None:
    """Let torch run all layers, and the head, from now on."""
    for part in parts_of(model):
        part.executor = TorchExecutor(part.program, part.tables if isinstance(part, TransformerStack) else NO_TABLES)


@contextmanager
def by_torch(model: Transformer) -> Iterator[None]:
    """torch runs all layers while this lasts."""
    kept = [(part, part.executor) for part in parts_of(model)]
    use_torch(model)
    try:
        yield
    finally:
        for part, executor in kept:
            part.executor = executor


@contextmanager
def counted(executor: type[Any] = NativeExecutor) -> Iterator[mock.MagicMock]:
    """Counts the passes that executors of a kind run."""
    with mock.patch.object(executor, "run", autospec=True, side_effect=executor.run) as run:
        yield run
