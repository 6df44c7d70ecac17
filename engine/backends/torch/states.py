"""Operations that carry a state, in torch: the reference. Every token takes one step of the recurrence, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.backends.states import States

Step = Callable[[Tensor, slice], Tensor]
"""Given a row's state and some of its tokens, computes the tokens and returns the state after them."""


def each_row(
    counts: Sequence[int],
    states: States | None,
    layer: int,
    step: Step,
    size: int,
    begin: int = 0,
    *,
    device: torch.device,
) -> None:
    """Compute all rows of a pass from their states, and store the new states.

    Args:
        counts: number of tokens of each row.
        states: None: they begin as zeros and are not kept.
        layer: the layer's number among those with a state.
        size, begin: the operation's values are `size` values of a state from `begin` on.
    """
    start = 0
    for row, count in enumerate(counts):
        if states is None:
            step(torch.zeros(size, device=device), slice(start, start + count))
        else:
            memory = states.layers[layer][:, begin : begin + size]
            snapshot, after = int(states.snapshots[row]), int(states.afters[row])
            state = memory[int(states.sources[row])].clone()
            if snapshot:
                state = memory[snapshot] = step(state, slice(start, start + after))
            else:
                after = 0
            memory[int(states.targets[row])] = step(state, slice(start + after, start + count))
        start += count


def apply_delta(
    x: tuple[Tensor, Tensor, Tensor], decays: Tensor, shares: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule of some tokens, one after the other.

    Args:
        x: queries and keys [N, heads, key_dim], values [N, heads, value_dim]; float32.
        decays: [N, heads, 1 or key_dim] the factors of the matrices, or of their rows.
        shares: [N, heads] the factors of corrections.
        state: [heads, key_dim, value_dim].

    Returns:
        [N, heads, value_dim], and the state after the last token.
    """
    out = torch.empty_like(x[2])
    for token, (query, key, value) in enumerate(zip(*x, strict=True)):
        state = state * decays[token, :, :, None]
        known = (state * key[:, :, None]).sum(dim=1)
        change = (value - known) * shares[token, :, None]
        state = state + key[:, :, None] * change[:, None, :]
        out[token] = (state * query[:, :, None]).sum(dim=1)
    return out, state


def apply_scan(x: tuple[Tensor, Tensor, Tensor], decays: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The selective scan of some tokens, one after the other.

    Args:
        x: the added vectors [N, heads, head_dim], B and C [N, heads, size]; float32.
        decays: [N, heads] the factors of the matrices.
        state: [heads, size, head_dim].

    Returns:
        [N, heads, head_dim], and the state after the last token.
    """
    out = torch.empty_like(x[0])
    for token, (added, before, after) in enumerate(zip(*x, strict=True)):
        state = state * decays[token, :, None, None] + before[:, :, None] * added[:, None, :]
        out[token] = (state * after[:, :, None]).sum(dim=1)
    return out, state


def convolve(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """A causal convolution of each feature in float32, tap by tap, from the oldest token on.

    Args:
        x: [N, features] float32.
        state: [taps - 1, features] the inputs before it.
        weight: [features, taps] float32.

    Returns:
        [N, features], and the state after the last token.
    """
    taps = weight.shape[1]
    known = torch.cat((state, x))
    total = known[: len(x)] * weight[:, 0]
    for tap in range(1, taps):
        total = total + known[tap : tap + len(x)] * weight[:, tap]
    if bias is not None:
        total = total + bias
    return total, known[len(x) :]
