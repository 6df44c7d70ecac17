"""Samples from one row as a whole, for filters that need more than its few largest logits.

The filters in order: temperature; top-n-sigma (arXiv:2411.07641); top-k, top-p and min-p; locally typical sampling
(arXiv:2202.00666); XTC, as in llama.cpp and text-generation-webui. The filters of `transformers` come in its order.
Tokens equal to the last one that a filter keeps are kept too.

Rows are sampled one at a time, in tensors of one shape, so that sums have one order whatever else is sampled.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.interface.sampling_table import Table
from engine.scheduling.philox import uniforms

_INFINITE = float("inf")
XTC_PURPOSE = 1  # key of the random numbers that decide where XTC applies


def draw(logits: Tensor, table: Table, numbers: NDArray[np.float64]) -> Tensor:
    """Tokens sampled by inverse CDF in vocabulary order.

    Args:
        logits: float32 [vocabulary], after all edits.
        table: [1] parameters; the temperature is above 0.
        numbers: a uniform number in [0, 1) for each draw, and perhaps more.

    Returns: Tokens [num_draws] int64; arbitrary ones if no token is possible.
    """
    # On a GPU, the order of running sums over a single row may vary; over two rows it does not.
    weights = _filtered(logits.expand(1 if logits.is_cpu else 2, -1), table)
    count = int(table["num_draws"][0])
    excluding = _excluding(table, count)
    drawn = torch.zeros(count, dtype=torch.int64, device=logits.device)
    for without in (False, True):
        places = np.flatnonzero(excluding == without)
        if not len(places):
            continue
        running = _running(_without_top_choices(weights, float(table["xtc_threshold"][0])) if without else weights)
        whole = running[:, -1:].contiguous()
        found = torch.searchsorted(running, torch.from_numpy(numbers[places]).to(logits.device) * whole, right=True)
        # Rounding may put a number at the very end; then the last possible token is drawn.
        found = torch.minimum(found, torch.searchsorted(running, whole, right=False))
        drawn[torch.from_numpy(places).to(logits.device)] = found[0].clamp(max=logits.shape[0] - 1)
    return drawn


def _excluding(table: Table, count: int) -> NDArray[np.bool_]:
    """The draws at which XTC applies: for the answers from the table's on, at the table's position."""
    probability = float(table["xtc_probability"][0])
    if probability <= 0:
        return np.zeros(count, dtype=np.bool_)
    seed, choice, position = (int(table[name][0]) for name in ("seed", "choice", "position"))
    made = uniforms([seed] * count, range(choice, choice + count), [position] * count, XTC_PURPOSE)
    return made < probability


def _filtered(logits: Tensor, table: Table) -> Tensor:
    """Weights [N, vocabulary] float64 of the tokens that filters keep, relative to the likeliest; 0 for others."""
    # Divide by a tensor: if the divisor is a number, a GPU multiplies by its reciprocal, which rounds differently.
    scaled = logits / torch.full((1, 1), float(table["temperature"][0]), device=logits.device)
    vocabulary = scaled.shape[1]
    sigma, k, p = float(table["top_n_sigma"][0]), int(table["top_k"][0]), float(table["top_p"][0])
    if sigma > 0:
        scaled = _near_the_largest(scaled, sigma)
    if 0 < k < vocabulary:
        scaled = scaled.masked_fill(scaled < scaled.topk(k, dim=-1).values[:, -1:], -_INFINITE)
    relative = scaled - scaled.amax(dim=-1, keepdim=True)
    weights = relative.exp()
    if p < 1.0:
        # Tokens equal to the k-th count only until there are k in total.
        falling = relative.sort(dim=-1, descending=True).values[:, : k if 0 < k < vocabulary else vocabulary]
        sizes = falling.exp().double()
        running = sizes.cumsum(dim=-1)
        kept = (running - sizes < p * running[:, -1:]).sum(dim=-1, keepdim=True).clamp(min=1)
        weights = weights.masked_fill(relative < falling.gather(1, kept - 1), 0.0)
    weights = keep_likely(weights, table)
    mass = float(table["typical_p"][0])
    found = weights.double()
    return found if mass >= 1.0 else _typical(found, mass)


def keep_likely(weights: Tensor, table: Table) -> Tensor:
    """Weights, with 0 for tokens that a filter on a token's weight alone removes.

    Args:
        weights: float32 [N, vocabulary], relative to the likeliest.
        table: [N], or [1] for all.
    """
    min_p = np.ascontiguousarray(table["min_p"])
    if not (min_p > 0).any():
        return weights
    return weights.masked_fill(weights < torch.from_numpy(min_p).to(weights.device)[:, None], 0.0)


def _near_the_largest(scaled: Tensor, sigma: float) -> Tensor:
    """Logits at most `sigma` standard deviations below the largest; -inf for others. Impossible tokens do not count."""
    possible = scaled > -_INFINITE
    values = scaled.double().masked_fill(~possible, 0.0)
    count = possible.sum(dim=-1, keepdim=True)
    mean = _running(values)[:, -1:] / count
    squares = (values - mean).square().masked_fill(~possible, 0.0)
    bound = scaled.amax(dim=-1, keepdim=True) - sigma * (_running(squares)[:, -1:] / count).sqrt()
    return scaled.masked_fill(scaled < bound, -_INFINITE)


def _typical(weights: Tensor, mass: float) -> Tensor:
    """Weights of the tokens whose information is nearest to the entropy, until they have that probability."""
    probability = weights / _running(weights)[:, -1:]
    information = -probability.log()
    entropy = _running((information * probability).masked_fill(weights == 0, 0.0))[:, -1:]
    distance = (information - entropy).abs()
    nearest = distance.sort(dim=-1, stable=True)
    running = probability.gather(1, nearest.indices).cumsum(dim=-1)
    last = (running < mass).sum(dim=-1, keepdim=True).clamp(max=weights.shape[1] - 1)
    return weights.masked_fill(distance > nearest.values.gather(1, last), 0.0)


def _without_top_choices(weights: Tensor, threshold: float) -> Tensor:
    """Weights without the tokens that are more probable than the least probable one that reaches the threshold."""
    top_choices = (weights > 0) & (weights >= threshold * _running(weights)[:, -1:])
    least = weights.masked_fill(~top_choices, _INFINITE).amin(dim=-1, keepdim=True)
    return weights.masked_fill(weights > least, 0.0)


def _running(values: Tensor) -> Tensor:
    """Running sums of rows; the last one is the total. `sum` would be divided among threads."""
    return values.cumsum(dim=-1)
