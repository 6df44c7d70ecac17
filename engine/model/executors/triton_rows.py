"""Single operations on rows with a GPU's kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.backends import triton as gpu
from engine.backends.triton import activations, norms, rotary
from engine.model import spec
from engine.model.norms import LayerNorm, RmsNorm
from engine.model.row_kernels import NewHeads


class TritonRows:
    """`RowKernels` of a GPU."""

    def activate(self, name: spec.Activation, x: Tensor) -> Tensor | None:
        return activations.activate(x, name) if gpu.takes(x) else None

    def gate(self, name: spec.Activation, x: Tensor) -> Tensor | None:
        return activations.gate(x, name) if gpu.takes(x) else None

    def norm(self, module: nn.Module, x: Tensor) -> Tensor | None:
        how = None if getattr(module, "rows", 1) > 1 else norm_of(module, x.dtype)
        return norms.norm(x, how) if how is not None and gpu.takes(x) and norms.serves(x) else None

    def rotate_and_store(self, heads: NewHeads) -> bool:
        turning, values, part, angles, cache, slots = heads
        if not gpu.takes(turning) or turning.shape[2] > rotary.LONGEST_HEAD:
            return False
        how = None
        if part is not None and angles is not None:
            how = rotary.Angles(*angles, part.interleaved, part.in_float32)
        if cache is not None and slots is not None:
            rotary.rotate_and_store(turning, values, cache, angles=how, slots=slots)
        elif how is not None:
            rotary.rotate_(turning, how)
        return True


def norm_of(module: nn.Module | None, dtype: torch.dtype) -> norms.Norm | None:
    """A norm in the kernels' form, for rows of a format; None if torch computes it."""
    match module:
        case RmsNorm():
            norm = norms.Norm(module.weight, module.eps, unit_offset=module.unit_offset, in_float32=module.in_float32)
        case LayerNorm():
            norm = norms.Norm(module.weight, module.eps, centred=True, bias=module.bias)
        case _:
            return None
    return norm if all(part is None or part.dtype == dtype for part in (norm.weight, norm.bias)) else None
