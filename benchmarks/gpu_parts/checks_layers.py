"""Norms, activations and gates, what becomes of queries and keys, and copies of pages, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.backends.attention.base import Paged
from engine.backends.attention.formats import LARGEST, PageShape, format_named, movable
from engine.backends.triton import activations, norms
from engine.backends.triton.rotary import Angles, HeadNorms, rotate_and_store
from engine.execution.kv_cache import KVCache
from gpu_parts.check import Check, Outcome, Setting

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "tanh": torch.tanh,
}


def _rows(setting: Setting) -> list[tuple[int, int]]:
    """Rows and features: of a single token, a step and a prompt, of widths that are no powers of two."""
    return [(1, 4096), (256, 1024), (2049, 4096), (33, 5120)] if setting.full else [(1, 64), (5, 40)]


def _normalised(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if centred else x
    scaled = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return scaled if bias is None else scaled + bias.double()


def _norm(centred: bool) -> Callable[[Setting], Iterator[Outcome]]:
    def checks(setting: Setting) -> Iterator[Outcome]:
        for rows, size in _rows(setting):
            x = setting.normal(rows, size, deviation=3.0) + 1
            weight, bias = setting.normal(size, seed=1), setting.normal(size, seed=2) if centred else None
            how = norms.Norm(weight, 1e-6, centred=centred, bias=bias)
            yield norms.norm(x, how), _normalised(x.double(), weight, bias, 1e-6, centred)

    return checks


def _add_norm(centred: bool) -> Callable[[Setting], Iterator[Outcome]]:
    def checks(setting: Setting) -> Iterator[Outcome]:
        for rows, size in _rows(setting):
            stream, y = setting.normal(rows, size), setting.normal(rows, size, deviation=0.5, seed=1)
            weight, bias = setting.normal(size, seed=2), setting.normal(size, seed=3) if centred else None
            total = stream.double() + y.double()
            got = norms.add_norm(stream, y, norms.Norm(weight, 1e-5, centred=centred, bias=bias))
            yield stream, total
            yield got, _normalised(stream.double(), weight, bias, 1e-5, centred)

    return checks


def _activation(gated: bool) -> Callable[[Setting], Iterator[Outcome]]:
    def checks(setting: Setting) -> Iterator[Outcome]:
        for rows, size in _rows(setting):
            x = setting.normal(rows, 2 * size if gated else size, deviation=3.0)
            for name, function in _ACTIVATIONS.items():
                if not gated:
                    yield activations.activate(x, name), function(x.double())
                    continue
                first, second = x.double().chunk(2, -1)
                yield activations.gate(x, name), function(first) * second

    return checks


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [T, n, head_dim] whose first and second halves are turned by angles [T, head_dim / 2]."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _rotary(pages: str | None, normed: bool) -> Callable[[Setting], Iterator[Outcome]]:
    """Queries where they lie, and keys and values in pages."""

    def checks(setting: Setting) -> Iterator[Outcome]:
        tokens, heads, kv_heads, size, page = (300, 32, 8, 128, 16) if setting.full else (7, 4, 2, 16, 4)
        dtype = setting.dtype if pages is None else format_named(pages)
        device, blocks = setting.device, tokens + 1
        angles = torch.arange(2 * tokens, device=device).double()[:, None] * 1e4 ** (
            -torch.arange(0, size, 2, device=device).double() / size
        )
        table = Angles(torch.cat((angles, angles), -1).cos().float(), angles.sin().float(), False, True)
        positions = torch.arange(tokens, device=device) * 2 % (2 * tokens)
        turning = setting.normal(tokens, heads + kv_heads, size)
        values = setting.normal(tokens, kv_heads, size, seed=1)
        weights = [setting.normal(size, seed=seed) for seed in (2, 3)]
        how = HeadNorms(*(norms.Norm(weight, 1e-6) for weight in weights)) if normed else None
        cache = Paged(
            *(torch.zeros(blocks, page, kv_heads, size, device=device).to(dtype) for _ in range(2)),
            torch.zeros(tokens, 1, dtype=torch.int32, device=device),
            *(
                torch.zeros(blocks, page, kv_heads, dtype=torch.bfloat16, device=device) if dtype in LARGEST else None
                for _ in range(2)
            ),
        )
        slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).to(device) * page + page + 1
        before = turning.double()
        rotate_and_store(turning, values, cache, angles=table, positions=positions, slots=slots, norms=how)
        queries, keys = before.split((heads, kv_heads), 1)
        if normed:
            queries, keys = (
                _normalised(x, weight, None, 1e-6, False) for x, weight in zip((queries, keys), weights, strict=True)
            )
        cos, sin = angles.cos()[positions], angles.sin()[positions]
        if pages is None:
            yield turning[:, :heads], _turned(queries, cos, sin)
        # A key is rounded before it is turned: where two terms cancel, what is left is off by their roundings.
        terms = keys.abs().unflatten(-1, (2, -1)).amax(-2).repeat(1, 1, 2)
        for stored, scales, want, size_of in (
            (cache.keys, cache.key_scales, _turned(keys, cos, sin), terms),
            (cache.values, cache.value_scales, values.double(), values.double().abs()),
        ):
            read = movable(stored).view(-1, kv_heads, size)[slots].view(dtype).double()
            if scales is None:
                yield read, want
                continue
            scale = scales.view(-1, kv_heads)[slots].double()[..., None]
            # Half a step; of fp8, 3 bits after the leading one. What was rounded before may be on a step's edge.
            step = scale / 2 if dtype == torch.int8 else torch.maximum(want.abs() / 16, scale / 1024)
            allowed = step + 2 * torch.finfo(setting.dtype).eps * torch.maximum(want.abs(), size_of)
            yield float(((read * scale - want).abs() / allowed).max())

    return checks


def _copies(setting: Setting) -> Iterator[Outcome]:
    heads, size, layers, count = (8, 128, 4, 64) if setting.full else (2, 16, 2, 3)
    cache = KVCache([PageShape(heads, size)] * layers, 2 * count, 16, setting.dtype, setting.device)
    tensors = [tensor for layer in cache.layers for tensor in layer]
    for number, tensor in enumerate(tensors):
        tensor.copy_(setting.normal(*tensor.shape, seed=number))
    before = [tensor.double() for tensor in tensors]
    pairs = np.random.default_rng(0).permutation(2 * count).astype(np.int32).reshape(-1, 2) + 1
    cache.copy_pages(pairs)
    for found, wanted in zip(tensors, before, strict=True):
        wanted[pairs[:, 1]] = wanted[pairs[:, 0]]
        yield found, wanted


CHECKS = (
    Check("norms: RMSNorm", _norm(False)),
    Check("norms: LayerNorm", _norm(True)),
    Check("norms: addition and RMSNorm", _add_norm(False)),
    Check("norms: addition and LayerNorm", _add_norm(True)),
    Check("rotary: turned and stored", _rotary(None, False)),
    Check("rotary: with norms of heads", _rotary(None, True)),
    Check("rotary: stored in int8", _rotary("int8", True), bound=1.05),
    Check("rotary: stored in fp8", _rotary("fp8", True), bound=1.05),
    Check("pages: copied in all layers", _copies),
    Check("activations", _activation(False)),
    Check("activations: gates", _activation(True)),
)
