"""Norms, activations and gates, and what becomes of queries and keys, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from engine.gpu import activations, norms
from gpu_parts.kernels import Check, Outcome, Setting

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


CHECKS = (
    Check("norms: RMSNorm", _norm(False)),
    Check("norms: LayerNorm", _norm(True)),
    Check("norms: addition and RMSNorm", _add_norm(False)),
    Check("norms: addition and LayerNorm", _add_norm(True)),
    Check("activations", _activation(False)),
    Check("activations: gates", _activation(True)),
)
