"""Mixtures of experts against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from engine.backends.triton.experts import mix
from gpu_parts.check import Check, Outcome, Setting


def _mixed(gated: bool, normalize: bool) -> Callable[[Setting], Iterator[Outcome]]:
    def checks(setting: Setting) -> Iterator[Outcome]:
        generator = torch.Generator().manual_seed(0)
        # A step that decodes, which is bound by reading the experts, and a prompt.
        for tokens in (1, 37, 600) if setting.full else (3,):
            count, active, hidden, width = (64, 6, 2048, 1408) if setting.full else (4, 2, 32, 24)
            x = setting.normal(tokens + 1, hidden)
            up = setting.normal(count, 2 * width if gated else width, hidden, deviation=hidden**-0.5, seed=1)
            down = setting.normal(count, hidden, width, deviation=width**-0.5, seed=2)
            # No two of a row are equal: of such, any may be chosen.
            order = torch.stack([torch.randperm(count, generator=generator) for _ in range(tokens + 1)])
            logits = (order * (8.0 / count) - 4.0).to(setting.device, setting.dtype)
            got = mix(
                x, logits, up, down, tokens=tokens, active=active, activation="silu", gated=gated, normalize=normalize
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
    Check("experts: gated", _mixed(True, True), bound=4.0),
    Check("experts: plain, shares as they are", _mixed(False, False), bound=4.0),
)
