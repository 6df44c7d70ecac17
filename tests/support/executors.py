"""Which executor runs a model's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

from engine.model.executors.native import NativeExecutor
from engine.model.executors.native_rows import NativeRows
from engine.model.executors.reference import TorchExecutor
from engine.model.executors.single import SingleExecutor
from engine.model.heads import NO_TABLES, Head
from engine.model.row_kernels import RowModule
from engine.model.stack import TransformerStack
from engine.model.tables import Tables
from engine.model.transformer import Transformer


def stacks_of(model: nn.Module) -> list[TransformerStack]:
    """The encoder, the decoder, or both."""
    return [module for module in model.modules() if isinstance(module, TransformerStack)]


def parts_of(model: nn.Module) -> list[TransformerStack | Head]:
    """All that has a program."""
    return [module for module in model.modules() if isinstance(module, TransformerStack | Head)]


def tables_of(part: TransformerStack | Head) -> Tables:
    """The position tables of a program."""
    return part.tables if isinstance(part, TransformerStack) else NO_TABLES


def use_torch(model: Transformer) -> None:
    """Let torch alone run all layers, and the head, from now on. Only attention and the products of packed matrices
    stay with the kernels that these were made for."""
    for part in parts_of(model):
        part.executor = TorchExecutor(part.program, tables_of(part))
    for module in model.modules():
        if isinstance(module, RowModule):
            module.kernels = None


@contextmanager
def by_torch(model: Transformer) -> Iterator[None]:
    """torch runs all layers while this lasts."""
    kept = [(part, "executor", part.executor) for part in parts_of(model)]
    kept += [(module, "kernels", module.kernels) for module in model.modules() if isinstance(module, RowModule)]
    use_torch(model)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


@contextmanager
def by_single_kernels(model: Transformer) -> Iterator[None]:
    """Each operation is a call of its own kernel while this lasts."""
    kept = [(part, part.executor) for part in parts_of(model)]
    for part in parts_of(model):
        part.executor = SingleExecutor(part.program, tables_of(part), NativeRows())
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
