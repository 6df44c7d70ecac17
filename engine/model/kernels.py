"""Where kernels of our own (`engine.native`) take over from torch: on a CPU, for what they were measured to be faster at.

Which code computes a row is decided by its format alone, never by how many rows there are: a row's bits would depend on
the batch. Without a library, and for what is not listed here, torch computes the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine import native
from engine.model import spec

_FORMATS = (torch.float32, torch.bfloat16)

# By format, the activations that are faster here alone, and times the second half of a row.
PLAIN: dict[torch.dtype, frozenset[spec.Activation]] = {
    torch.float32: frozenset({"gelu_tanh", "quick_gelu", "relu2"}),
    torch.bfloat16: frozenset({"gelu_tanh", "quick_gelu", "relu2"}),
}
GATED: dict[torch.dtype, frozenset[spec.Activation]] = {
    torch.float32: frozenset({"silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh"}),
    torch.bfloat16: frozenset({"silu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh"}),
}


def take(x: Tensor) -> bool:
    """Whether there are kernels for tensors like x."""
    return x.is_cpu and x.dtype in _FORMATS and native.available()
