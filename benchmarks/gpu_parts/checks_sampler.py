"""Sampled tokens against distributions in float64: a number in [0, 1) must fall where its token lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from engine.execution.sampler_device import DeviceSampler
from gpu_parts.check import Check, Outcome, Setting
from gpu_parts.sampling import MIXTURES, SHAPES, batch_of


def _kept(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution [vocabulary] that a row is drawn from: temperature, top-k, top-p, min-p in this order."""
    probabilities = (logits.double() / temperature).softmax(-1)
    order = probabilities.sort(descending=True)
    falling = order.values.clone()
    if top_k:
        falling[top_k:] = 0
    before = (falling / falling.sum()).cumsum(-1) - falling / falling.sum()
    falling[before >= top_p] = 0
    falling[falling < min_p * falling[0]] = 0
    kept = torch.zeros_like(probabilities).scatter(-1, order.indices, falling)
    return kept / kept.sum()


def _sampled(mixture: str, shape: str) -> Callable[[Setting], Iterator[Outcome]]:
    def checks(setting: Setting) -> Iterator[Outcome]:
        rows, vocabulary = (64, 131072) if setting.full else (4, 700)
        logits = SHAPES[shape](rows, vocabulary, setting.device)
        batch = batch_of(MIXTURES[mixture], rows)
        sampler = DeviceSampler(setting.device)
        result = sampler.sample(logits, batch).result()
        for row, token in enumerate(result.tokens[:, 0].tolist()):
            probabilities = logits[row].double().log_softmax(-1)
            yield abs(float(probabilities[token]) - float(result.logprobs[row, 0])) / 1e-5
            if batch.table["temperature"][row] == 0:
                yield 0.0 if token == int(logits[row].argmax()) else float("inf")
                continue
            given = [float(batch.table[name][row]) for name in ("temperature", "top_k", "top_p", "min_p")]
            kept = _kept(logits[row], given[0], int(given[1]), given[2], given[3])
            end = kept.cumsum(-1)[token].item()
            # How far the number lies outside of the token's part of [0, 1).
            uniform = float(np.float64(batch.uniforms[row, 0]))
            yield max(uniform - end, end - kept[token].item() - uniform, 0.0) / 1e-6

    return checks


CHECKS = tuple(
    Check(f"sampler: {mixture}, {shape}", _sampled(mixture, shape), bound=10.0)
    for mixture in MIXTURES
    for shape in SHAPES
)
