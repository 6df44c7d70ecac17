"""Matrix products with weights that were laid out once: on a CPU by our own kernels or by oneDNN, or quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.backends import native
from engine.backends import triton as gpu
from engine.backends.native import gemm
from engine.model import quantisation
from engine.model.quantisation import Held, Parts, Quantization
from engine.model.row_form import RowForm

_NARROW = (torch.bfloat16, torch.float16)
LookUp = Callable[[Tensor, torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """x [..., in] to x @ weight.T + bias [..., out], in x's format."""

    compute: Callable[[Tensor], Tensor]
    invariant: bool  # whether its rows never depend on each other, for any number of rows
    native: gemm.Packed | None = None  # the weight, if our own kernels compute the product on a CPU
    few_bits: gemm.Quantised | None = None  # the weight, if it is quantised and on a GPU
    # returns rows [N] of the weight in a format, [N, in]; None if they cannot be read from its packed form
    look_up: LookUp | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.compute(x)


def pack_product(
    weight: Tensor | gemm.Weight | gemm.Packed,
    bias: Tensor | None = None,
    quantization: Held | None = None,
    amx: bool = False,
    device: torch.device | None = None,
    table: bool = False,
) -> PackedProduct | None:
    """The product with a weight [out, in], which is no longer needed afterwards unless it is packed already; None if
    plain products are best.

    One form is used for all numbers of rows, because two would take twice the memory. Our form reaches oneDNN's speed
    for many rows and is up to three times as fast for few; see docs/performance.md.

    Args:
        quantization: the packed form of the weight, already made or still to be made.
        amx: multiply plain weights by Intel's matrix tiles if the CPU has them, see `gemm.pack`.
        device: device of the product; None for the weight's.
        table: whether its rows are also looked up, which oneDNN's packed form does not allow.
    """
    if isinstance(weight, gemm.Packed):
        return native_product(gemm.with_bias(weight, bias))
    if device is not None and on_gpu(device):
        if quantization is None:
            return None
        made = quantisation.on_device(weight, quantization, device)
        return PackedProduct(quantisation.device_product(made, bias), invariant=False, few_bits=made)
    if quantization is not None and (not isinstance(weight, Tensor) or weight.device.type == "cpu"):
        held = quantisation.made_of(weight, quantization)
        compute, packed = quantisation.product(held, bias, quantization)
        look_up = partial(_rows, packed) if packed is not None else partial(quantisation.rows, held)
        return PackedProduct(compute, invariant=True, native=packed, look_up=look_up)
    assert isinstance(weight, Tensor)
    weight = weight.detach()
    if on_gpu(weight.device):
        return None
    if _native_is_best(weight.dtype, amx) or (table and _has_vectors(weight.dtype)):
        return native_product(gemm.pack(weight, bias, amx or table))
    if not _has_onednn(weight.dtype):
        return None
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def by_onednn(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
        return out

    return PackedProduct(by_onednn, invariant=False)


def wide_product(x: Tensor, weight: Tensor | gemm.Quantised, bias: Tensor | None, form: RowForm) -> Tensor | None:
    """x @ weight.T + bias of rows [N, features] in float32, not rounded to x's format first; None if torch has no such
    product."""
    if form.fused and gpu.takes(x) and x.shape[0] == 1:
        from engine.backends.triton import matvec

        if matvec.serves(weight):
            return matvec.product(x, weight, bias, dtype=torch.float32, overlap=form.overlapping)
    if isinstance(weight, gemm.Quantised):
        if not gpu.takes(x):
            return None
        from engine.backends.triton import few_bits

        return few_bits.product(x, weight, bias, dtype=torch.float32)
    if not x.is_cuda or torch.version.hip is not None or x.dtype not in _NARROW or weight.dtype != x.dtype:
        return None
    product = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return product if bias is None else product.add_(bias)


Pieces = tuple[tuple[gemm.Kind, int], ...]
"""The pieces of a packed weight: the kind and the outputs of each part, or of the whole."""


def pieces_of(
    outputs: int, inputs: int, dtype: torch.dtype, quantization: Held | None, rotated: bool, amx: bool, table: bool
) -> Pieces:
    """The form that `pack_product` gives a weight on a CPU; empty if our own kernels do not compute the product.

    Args:
        dtype: format of a plain weight.
        rotated: whether quantised groups are rotated, see `gemm.Quantised`.
        quantization, amx, table: see `pack_product`.
    """
    if not native.available():
        return ()
    if isinstance(quantization, Parts):
        kinds = zip(quantization.kinds, quantization.lengths, strict=True)
        return tuple((_kind_of(kind, rotated), length) for kind, length in kinds)
    if quantization is not None:
        return ((_kind_of(quantization, rotated), outputs),)
    if _native_is_best(dtype, amx) or (table and _has_vectors(dtype)):
        return ((gemm.plain_kind(dtype, inputs, amx or table), outputs),)
    return ()


def _kind_of(kind: Quantization | gemm.BlockKind, rotated: bool) -> gemm.Kind:
    match kind:
        case "int8" | "int8-fast" | "int4":
            return gemm.quantised_kind(kind, rotated)
        case _:
            return kind


def keeps_once(device: torch.device, dtype: torch.dtype, quantization: Held | None) -> bool:
    """Whether a head's packed matrix also serves as the token table: see `PackedProduct.look_up`."""
    return not on_gpu(device) and (quantization is not None or _has_vectors(dtype) or not _has_onednn(dtype))


def takes_parts(dtype: torch.dtype, quantization: Held | None, table: bool) -> bool:
    """Whether `pack_parts` supports a weight on a CPU. `quantization`, `table`: see `pack_product`."""
    if quantization is not None:
        return native.available()
    return _has_vectors(dtype) and (table or _native_is_best(dtype, amx=False))


def pack_parts(
    parts: Iterator[Tensor | gemm.Weight], outputs: int, bias: Tensor | None, quantization: Held | None, amx: bool
) -> PackedProduct:
    """The same product, if `takes_parts`, with a weight that arrives some rows at a time.

    Args:
        parts: see `gemm.pack_parts`.
        amx: see `pack_product`.
    """
    if quantization is None:
        return native_product(gemm.pack_parts(parts, outputs, bias, partial(_pack_part, amx)))
    return native_product(quantisation.pack_parts(parts, outputs, bias, quantization))


def _rows(packed: gemm.Packed, ids: Tensor, dtype: torch.dtype) -> Tensor:
    return gemm.look_up(packed, ids, dtype if dtype == torch.bfloat16 else torch.float32).to(dtype)


def _pack_part(amx: bool, part: Tensor, into: Tensor | None) -> gemm.Packed:
    return gemm.pack(part, None, amx, into)


def on_gpu(device: torch.device) -> bool:
    """Whether products are a GPU's; Triton's interpreter on a CPU counts as a GPU."""
    return device.type not in ("cpu", "meta") or gpu.serves(device)


def native_product(packed: gemm.Packed) -> PackedProduct:
    """The product with a weight that `engine.backends.native.gemm` has laid out."""
    compute, look_up = quantisation.native_product(packed), partial(_rows, packed)
    return PackedProduct(compute, invariant=True, native=packed, look_up=look_up)


def _native_is_best(dtype: torch.dtype, amx: bool) -> bool:
    """Whether our kernels are at least as fast as oneDNN's on this CPU.

    They are not if oneDNN has instructions that they do not use: matrix tiles for bfloat16, or 512-bit vectors for
    float32 if the CPU lacks what our own code of that width needs. Nor are they without vector instructions that they
    support.
    """
    library = native.current()
    if library is None or not _has_vectors(dtype):
        return False
    if dtype == torch.bfloat16:
        has_tiles: bool = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        return (amx and gemm.has_amx()) or not has_tiles
    return library.isa.startswith("avx512") or torch.backends.cpu.get_cpu_capability() != "AVX512"


def _has_vectors(dtype: torch.dtype) -> bool:
    """Whether we have kernels with vector instructions for weights of this format."""
    library = native.current()
    return library is not None and library.isa != "portable" and dtype in (torch.float32, torch.bfloat16)


def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN has a packed product for this format on this machine."""
    kernels = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not all(hasattr(torch.ops.mkldnn, kernel) for kernel in kernels):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
