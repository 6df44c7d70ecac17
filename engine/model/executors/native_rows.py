"""Single operations on rows with the CPU's library, where it is faster than torch."""

from __future__ import annotations

from torch import Tensor

from engine.backends.native import activations, norms, rotary
from engine.backends.native.arguments import FORMATS
from engine.model import spec
from engine.model.row_kernels import NewHeads

# The activations that are faster here, alone and times the second half of a row.
PLAIN: frozenset[spec.Activation] = frozenset({"gelu_tanh", "quick_gelu", "relu2"})
GATED: frozenset[spec.Activation] = frozenset({"silu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh"})


class NativeRows:
    """`RowKernels` of a CPU."""

    def activate(self, name: spec.Activation, x: Tensor) -> Tensor | None:
        return activations.activate(x, name) if _takes(x) and name in PLAIN else None

    def gate(self, name: spec.Activation, x: Tensor) -> Tensor | None:
        return activations.gate(x, name) if _takes(x) and name in GATED else None

    def rms_norm(
        self, x: Tensor, weight: Tensor | None, eps: float, *, unit_offset: bool, in_float32: bool
    ) -> Tensor | None:
        if not _takes(x, weight):
            return None
        return norms.rms_norm(x, weight, eps, unit_offset=unit_offset, in_float32=in_float32)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rows: int) -> Tensor | None:
        return norms.layer_norm(x, weight, bias, eps, rows) if _takes(x, weight, bias) else None

    def rotate_and_store(self, heads: NewHeads) -> bool:
        turning, values, part, angles, cache, slots = heads
        if not _takes(turning) or turning.shape[2] > rotary.LONGEST_HEAD:
            return False
        if cache is not None and cache.keys.dtype not in rotary.PAGES:
            return False
        rotation = None
        if part is not None and angles is not None:
            rotation = rotary.Rotation(*angles, part.interleaved)
        if cache is not None and slots is not None:
            rotary.rotate_and_store(turning, values, rotation, cache, slots)
        elif rotation is not None:
            rotary.rotate_(turning, rotation)
        return True


def _takes(x: Tensor, *parameters: Tensor | None) -> bool:
    return x.is_cpu and x.dtype in FORMATS and all(one is None or one.dtype == x.dtype for one in parameters)
