"""Memory that holds NaN until something is written there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@contextmanager
def poisoned(*modules: ModuleType) -> Iterator[None]:
    """What these modules allocate by `torch.empty` or `torch.empty_like` holds NaN, of integers -1."""

    def filled(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

    def empty(*args: Any, **how: Any) -> Tensor:
        return filled(torch.empty(*args, **how))

    def empty_like(*args: Any, **how: Any) -> Tensor:
        return filled(torch.empty_like(*args, **how))

    fake = SimpleNamespace(**vars(torch) | {"empty": empty, "empty_like": empty_like})
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "torch", fake))
        yield
