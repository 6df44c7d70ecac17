"""Activations of rows, such that no row's bits depend on the others in the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model import kernels, spec


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


# Up to _UNDIVIDED elements torch gives an elementwise function to one thread, whichever function it is, and from
# _SHARED elements per thread on to all of them.
_UNDIVIDED, _SHARED = 2**14, 2**15
_VECTORS = 64  # a multiple of how many elements any CPU's vector loop takes at once


def activate(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of rows [T, width], such that no row's bits depend on the others.

    torch divides a tensor's elements among threads wherever it comes out even, and what is left over at the end of a
    piece is computed by other code than full vectors are, which rounds differently. So a piece is made of whole rows
    here, and a row of full vectors.
    """
    rows, width = x.shape
    if x.device.type != "cpu" or not rows:
        return function(x)
    if odd := width % _VECTORS:
        return activate(function, F.pad(x, (0, _VECTORS - odd)))[:, :width].contiguous()
    x = x.contiguous()  # some functions have other code for tensors that are not
    threads = torch.get_num_threads()
    # Rows of which each thread gets as many whole ones.
    shared = rows - rows % threads
    if width > _UNDIVIDED or shared * width < threads * _SHARED:
        shared = 0
    block = max(_UNDIVIDED // width, 1)
    sizes = [shared] if shared else []
    sizes += [min(block, rows - start) for start in range(shared, rows, block)]
    if threads == 1 or len(sizes) == 1:
        return function(x)
    return torch.cat([function(part) for part in torch.split(x, sizes)])


def activate_by_name(name: spec.Activation, x: Tensor) -> Tensor:
    """An activation of rows [T, width], such that no row's bits depend on the others."""
    activated = kernels.activate(name, x)
    return activate(ACTIVATIONS[name], x) if activated is None else activated


def gate_by_name(name: spec.Activation, x: Tensor) -> Tensor:
    """activation(a) * b of rows [a | b], [T, 2 * width] to [T, width], likewise."""
    gated = kernels.gate(name, x)
    if gated is not None:
        return gated
    gate, up = x.chunk(2, dim=-1)
    return activate(ACTIVATIONS[name], gate).mul_(up)
