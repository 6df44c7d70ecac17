"""Activations of rows that give each row the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model import spec
from engine.model.row_kernels import RowKernels


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[spec.Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": _relu2,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


# For any elementwise function, torch uses one thread up to _UNDIVIDED elements, and all threads from _SHARED elements
# per thread on.
_UNDIVIDED, _SHARED = 2**14, 2**15
_VECTORS = 64  # a multiple of the elements that any CPU's vector loop processes at once


def activate(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of rows [T, width] that gives each row the same bits in any batch.

    torch divides a tensor's elements among threads at arbitrary places, and code other than full vectors computes the
    remainder of each piece, which rounds differently. So this function makes pieces of whole rows, and rows of full
    vectors.
    """
    rows, width = x.shape
    if x.device.type != "cpu" or not rows:
        return function(x)
    if odd := width % _VECTORS:
        return activate(function, F.pad(x, (0, _VECTORS - odd)))[:, :width].contiguous()
    x = x.contiguous()  # some functions have other code for tensors that are not contiguous
    threads = torch.get_num_threads()
    # Rows of which each thread gets equally many.
    shared = rows - rows % threads
    if width > _UNDIVIDED or shared * width < threads * _SHARED:
        shared = 0
    block = max(_UNDIVIDED // width, 1)
    sizes = [shared] if shared else []
    sizes += [min(block, rows - start) for start in range(shared, rows, block)]
    if threads == 1 or len(sizes) == 1:
        return function(x)
    return torch.cat([function(part) for part in torch.split(x, sizes)])


def activate_by_name(name: spec.Activation, x: Tensor, kernels: RowKernels | None = None) -> Tensor:
    """An activation of rows [T, width] that gives each row the same bits in any batch."""
    activated = None if kernels is None else kernels.activate(name, x)
    return activate(ACTIVATIONS[name], x) if activated is None else activated


def gate_by_name(name: spec.Activation, x: Tensor, kernels: RowKernels | None = None) -> Tensor:
    """activation(a) * b of rows [a | b], [T, 2 * width] to [T, width], with the same property."""
    gated = None if kernels is None else kernels.gate(name, x)
    if gated is not None:
        return gated
    gate, up = x.chunk(2, dim=-1)
    return activate(ACTIVATIONS[name], gate).mul_(up)
