"""Products with one row, and what they take along, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from engine.backends.triton import few_bits, matvec
from engine.backends.triton.norms import Norm
from engine.model.packing import wide_product
from engine.model.quantisation import ON_GPUS, Quantization
from engine.model.row_form import LIBRARY
from gpu_parts.check import Check, Outcome, Setting


def _matrices(setting: Setting, *, inputs: bool) -> list[tuple[int, int]]:
    """Results and features of the products that read the stream, or of those that add to it: of served models, and odd
    ones."""
    if not setting.full:
        return [(96, 64), (33, 40)]
    if inputs:
        return [(4096, 1024), (6144, 4096), (14336, 4096), (1001, 8192), (771, 1001)]
    return [(1024, 2048), (1024, 3072), (4096, 4096), (4096, 14336), (999, 1001), (4544, 18177)]


def _normalised(x: Tensor, norm: Norm) -> Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if norm.centred else x
    assert norm.weight is not None
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    return x if norm.bias is None else x + norm.bias.double()


def _normed(centred: bool, gated: bool) -> Callable[[Setting], Iterator[Outcome]]:
    def checks(setting: Setting) -> Iterator[Outcome]:
        for width, size in _matrices(setting, inputs=True):
            x = setting.normal(1, size, deviation=3.0) + 1
            weight = setting.normal(width * (1 + gated), size, deviation=size**-0.5, seed=1)
            bias = setting.normal(len(weight), seed=2) if centred else None
            shift = setting.normal(size, seed=4) if centred else None
            norm = Norm(setting.normal(size, seed=3), 1e-5, centred=centred, bias=shift)
            function = "silu" if gated else None
            got = matvec.product(x, weight, bias, norm=norm, function=function, gated=gated)
            want = _normalised(x, norm) @ weight.double().T + (0.0 if bias is None else bias.double())
            if gated:
                first, second = want.chunk(2, -1)
                want = functional.silu(first) * second
            yield got, want

    return checks


def _added(setting: Setting) -> Iterator[Outcome]:
    for width, size in _matrices(setting, inputs=False):
        x, weight = setting.normal(1, size), setting.normal(width, size, deviation=size**-0.5, seed=1)
        stream, also = setting.normal(1, width, seed=2), setting.normal(1, width, seed=3)
        made = x.double() @ weight.double().T
        once, twice = stream.clone(), stream.clone()
        yield matvec.product(x, weight, stream=once), stream.double() + made
        yield matvec.product(x, weight, stream=twice, also=also), stream.double() + also.double() + made


def _few_bits(bits: Quantization) -> Callable[[Setting], Iterator[Outcome]]:
    """Products with weights of 8 or 4 bits: of one row with its norm and without, of several, and of many."""

    def checks(setting: Setting) -> Iterator[Outcome]:
        for width, size in _matrices(setting, inputs=True):
            weight = setting.quantised(width, size, bits)
            rounded, norm = weight.dense().to(setting.dtype), Norm(setting.normal(size, seed=3), 1e-5)
            one = setting.normal(1, size, deviation=3.0)
            yield matvec.product(one, weight, norm=norm), _normalised(one, norm) @ weight.dense().double().T
            yield matvec.product(one, weight), one.double() @ weight.dense().double().T
            for rows in few_bits.TRIAL:
                x = setting.normal(rows, size, seed=rows)
                yield few_bits.product(x, weight), x.double() @ rounded.double().T

    return checks


def _logits(setting: Setting) -> Iterator[Outcome]:
    for width, size in ((151936, 1024), (128256, 4096)) if setting.full else ((300, 64),):
        x, weight = setting.normal(1, size), setting.normal(width, size, deviation=size**-0.5, seed=1)
        want = (x.float() @ weight.float().T).double()
        yield matvec.product(x, weight, dtype=torch.float32), want
        if setting.device.type == "cuda":
            several = wide_product(x.expand(3, -1).contiguous(), weight, None, LIBRARY)
            assert several is not None
            yield several, want.expand(3, -1)


CHECKS = (
    Check("one row: RMSNorm and product", _normed(False, False)),
    Check("one row: LayerNorm, product, bias", _normed(True, False)),
    Check("one row: RMSNorm, product, gate", _normed(False, True), spread=1.0),
    Check("one row: product and addition", _added),
    Check("logits of one row, and of several", _logits),
    *(Check(f"products with weights of few bits: {bits}", _few_bits(bits)) for bits in ON_GPUS),
)
