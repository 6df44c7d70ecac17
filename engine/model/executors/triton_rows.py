"""Single operations on rows with a GPU's kernels."""

from __future__ import annotations

from torch import Tensor

from engine.backends import triton as gpu
from engine.backends.triton import activations, norms, rotary
from engine.model import spec
from engine.model.row_kernels import NewHeads


class TritonRows:
    """`RowKernels` of a GPU."""

    def activate(self, name: spec.Activation, x: Tensor) -> Tensor | None:
        return activations.activate(x, name) if gpu.takes(x) else None

    def gate(self, name: spec.Activation, x: Tensor) -> Tensor | None:
        return activations.gate(x, name) if gpu.takes(x) else None

    def rms_norm(
        self, x: Tensor, weight: Tensor | None, eps: float, *, unit_offset: bool, in_float32: bool
    ) -> Tensor | None:
        if not _normalises(x, weight):
            return None
        return norms.norm(x, norms.Norm(weight, eps, unit_offset=unit_offset, in_float32=in_float32))

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rows: int) -> Tensor | None:
        if rows > 1 or not _normalises(x, weight, bias):
            return None
        return norms.norm(x, norms.Norm(weight, eps, centred=True, bias=bias))

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


def _normalises(x: Tensor, *parameters: Tensor | None) -> bool:
    return gpu.takes(x) and all(one is None or one.dtype == x.dtype for one in parameters) and norms.serves(x)
