"""Operations that carry a state, in torch: the reference. Every token takes one step of the recurrence, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.backends.states import States

Step = Callable[[Tensor, slice], Tensor]
"""Given a row's state and some of its tokens, computes the tokens and returns the state after them."""


def each_row(counts: Sequence[int], states: States | None, layer: int, size: int, step: Step) -> None:
    """Compute all rows of a pass from their states, and store the new states.

    Args:
        counts: number of tokens of each row.
        states: None: they begin as zeros and are not kept.
        layer: the layer's number among those with a state.
        size: number of values in a state.
    """
    start = 0
    for row, count in enumerate(counts):
        if states is None:
            step(torch.zeros(size), slice(start, start + count))
        else:
            memory, snapshot, after = states.layers[layer], int(states.snapshots[row]), int(states.afters[row])
            state = memory[int(states.sources[row])].clone()
            if snapshot:
                state = memory[snapshot] = step(state, slice(start, start + after))
            else:
                after = 0
            memory[int(states.targets[row])] = step(state, slice(start + after, start + count))
        start += count


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
