"""Mixtures of experts against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from engine.backends.native.gemm import Quantised
from engine.backends.triton.experts import mix
from engine.model.experts import stacked
from engine.model.quantisation import ON_GPUS, Quantization
from gpu_parts.check import Check, Outcome, Setting


def _quantised(shape: torch.Size, bits: Quantization, setting: Setting, seed: int) -> tuple[Quantised, Tensor]:
    """Experts' matrices [experts, outputs, inputs] as kernels read them, and what these stand for once they are rounded
    to the rows' format."""
    made = [setting.quantised(*shape[1:], bits, seed=seed + number) for number in range(shape[0])]
    return stacked(made, len(made)), torch.stack([one.dense().to(setting.dtype) for one in made])


def _mixed(gated: bool, normalize: bool, bits: Quantization | None = None) -> Callable[[Setting], Iterator[Outcome]]:
    def checks(setting: Setting) -> Iterator[Outcome]:
        generator = torch.Generator().manual_seed(0)
        # A step that decodes, which is bound by reading the experts, and a prompt.
        for tokens in (1, 37, 600) if setting.full else (3,):
            count, active, hidden, width = (
                (64 if bits is None else 16, 6, 2048, 1408) if setting.full else (4, 2, 32, 24)
            )
            x = setting.normal(tokens + 1, hidden)
            up = setting.normal(count, 2 * width if gated else width, hidden, deviation=hidden**-0.5, seed=1)
            down = setting.normal(count, hidden, width, deviation=width**-0.5, seed=2)
            matrices: list[Tensor | Quantised] = [up, down]
            if bits is not None:
                matrices[0], up = _quantised(up.shape, bits, setting, 100)
                matrices[1], down = _quantised(down.shape, bits, setting, 200)
            # No two of a row are equal: of such, any may be chosen.
            order = torch.stack([torch.randperm(count, generator=generator) for _ in range(tokens + 1)])
            logits = (order * (8.0 / count) - 4.0).to(setting.device, setting.dtype)
            got = mix(
                x, logits, *matrices, tokens=tokens, active=active, activation="silu", gated=gated, normalize=normalize
            )
            shares, chosen = logits[:tokens].double().softmax(-1).topk(active)
            if normalize:
                shares = shares / shares.sum(-1, keepdim=True)
            want = torch.zeros(tokens + 1, hidden, dtype=torch.float64, device=setting.device)
            for expert in range(count):
                row, place = (chosen == expert).nonzero(as_tuple=True)
                inner = x[row].double() @ up[expert].double().T
                if gated:
                    gate, opened = inner.chunk(2, -1)
                    inner = functional.silu(gate) * opened
                else:
                    inner = functional.silu(inner)
                want.index_add_(0, row, inner @ down[expert].double().T * shares[row, place][:, None])
            yield got, want

    return checks


CHECKS = (
    Check("experts: gated", _mixed(True, True)),
    Check("experts: plain, shares as they are", _mixed(False, False)),
    *(Check(f"experts with weights of few bits: {bits}", _mixed(True, True, bits)) for bits in ON_GPUS),
)
