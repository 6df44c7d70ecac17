"""Modules with a recurrence, and its computation in torch: one token after the other, in float32, so a token's bits do
not depend on how its prompt is divided. On a CPU, the library has kernels for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.torch.states import apply_delta, apply_scan, each_row
from engine.model import spec
from engine.model.activations import activate
from engine.model.experts import ExpertMatrices
from engine.model.inputs import RunningPass
from engine.model.layers import Linear, split_heads
from engine.model.norms import build_norm
from engine.model.place import Place
from engine.model.state_layers import (
    CausalConvolution,
    DeltaRuleAttention,
    GatedConvolution,
    SelectiveStateSpace,
    StateModule,
)


class ChannelScanLayer(StateModule):
    """The weights of Mamba's scan, whose features each have a state of a few numbers.

    Attributes:
        enter: makes x, then the gates.
        made: makes the vector of t, B and C from the convolved x.
        steps: makes t from that vector, before softplus.
        decay: [width, size] the logarithms of the decays' factors.
        skip: [width] the factor of x in the result.
    """

    def __init__(self, part: spec.ChannelScan, hidden_size: int, place: Place):
        super().__init__()
        self.part = part
        self.enter = Linear(hidden_size, 2 * part.width, part.bias, place)
        self.convolution = CausalConvolution(part.width, part.kernel, part.kernel_bias, place)
        self.made = Linear(part.width, part.rank + 2 * part.size, False, place)
        self.step_norm = build_norm(part.norm, part.rank, place)
        self.before_norm, self.after_norm = (build_norm(part.norm, part.size, place) for _ in range(2))
        self.steps = Linear(part.rank, part.width, True, place)
        self.decay, self.skip = place.parameter(part.width, part.size), place.parameter(part.width)
        self.out = Linear(part.width, hidden_size, part.bias, place)

    def advance(
        self, layer: int, state: RunningPass, x: Tensor, before: Tensor, after: Tensor, steps: Tensor, opening: Tensor
    ) -> Tensor:
        """The gated results [Tp, width] of rows of convolved x, B, C, t before softplus, and gates."""
        part, speeds = self.part, -self.decay.float().exp().t()
        before, after = before.float(), after.float()
        steps, values = activate(F.softplus, steps.float()), x.float()
        added, out = values * steps, torch.zeros_like(values)

        def step(known: Tensor, tokens: slice) -> Tensor:
            kept = known.view(part.size, part.width)
            for token in range(tokens.start, tokens.stop):
                kept = kept * (speeds * steps[token]).exp() + added[token] * before[token, :, None]
                out[token] = (kept * after[token, :, None]).sum(dim=0)
            return kept.flatten()

        _advance(layer, state, step, part.width * part.size, (part.kernel - 1) * part.width, x.device)
        gates = activate(F.silu, opening.float())
        return ((out + values * self.skip.float()) * gates).to(x.dtype)


class GatedRecurrenceLayer(StateModule):
    """The weights of RG-LRU, whose features each have a state of one number.

    Attributes:
        enter: makes the gates, then x.
        inputs, decays: make the input gates and the recurrence gates, block by block.
        speed: [width] multiplied by the recurrence gates, after softplus, in the logarithm of a.
    """

    def __init__(self, part: spec.GatedRecurrence, hidden_size: int, place: Place):
        super().__init__()
        self.part = part
        block = part.width // part.blocks
        self.enter = Linear(hidden_size, 2 * part.width, True, place)
        self.convolution = CausalConvolution(part.width, part.kernel, True, place)
        self.inputs, self.decays = (ExpertMatrices(part.blocks, block, block, True, place) for _ in range(2))
        self.speed = place.parameter(part.width)
        self.out = Linear(part.width, hidden_size, True, place)

    def advance(self, layer: int, state: RunningPass, x: Tensor, inputs: Tensor, decays: Tensor) -> Tensor:
        """The results [Tp, width], before they are multiplied by gates. `x`: convolved."""
        width, out = self.part.width, torch.zeros_like(x, dtype=torch.float32)
        inputs, decays = (activate(torch.sigmoid, each.float()) for each in (inputs, decays))
        logarithms = decays * (F.softplus(self.speed.float()) * -8.0)
        kept, first = activate(torch.exp, logarithms), state.inputs.positions[:, None] == 0
        roots = activate(lambda rows: (1 - torch.exp(2 * rows)).sqrt(), logarithms)
        added = x.float() * inputs * torch.where(first, 1.0, roots)
        kept = torch.where(first, 0.0, kept)

        def step(known: Tensor, tokens: slice) -> Tensor:
            for token in range(tokens.start, tokens.stop):
                known = out[token] = known * kept[token] + added[token]
            return known

        _advance(layer, state, step, width, (self.part.kernel - 1) * width, x.device)
        return out.to(x.dtype)


class FadingAttentionLayer(StateModule):
    """The weights of lightning attention, whose heads have states that decay at a fixed rate. `enter`: makes values,
    keys and queries."""

    def __init__(self, part: spec.FadingAttention, hidden_size: int, place: Place):
        super().__init__()
        self.part = part
        width = part.heads * part.head_dim
        self.enter = Linear(hidden_size, 3 * width, False, place)
        self.opening = Linear(hidden_size, width, False, place)
        self.norm = build_norm(part.norm, width, place)
        self.out = Linear(width, hidden_size, False, place)

    def advance(self, layer: int, state: RunningPass, x: Tensor) -> Tensor:
        """The results [Tp, heads * head_dim] of rows of values, keys and queries, after their activation."""
        part = self.part
        values, keys, queries = (split_heads(each, part.head_dim) for each in x.float().chunk(3, dim=1))
        decays = torch.tensor(part.slopes, device=x.device).neg().exp()
        out = torch.zeros_like(values)

        def step(known: Tensor, tokens: slice) -> Tensor:
            matrices = known.view(part.heads, part.head_dim, part.head_dim)
            given = (values[tokens], keys[tokens], queries[tokens])
            out[tokens], left = apply_scan(given, decays.expand(len(given[0]), -1), matrices)
            return left.flatten()

        _advance(layer, state, step, part.state_size, 0, x.device)
        return out.flatten(1).to(x.dtype)


class FeatureDeltaLayer(StateModule):
    """The weights of the gated delta rule with a decay for each feature of a key.

    Attributes:
        enter: makes queries, keys and values.
        rates: makes the share of a correction, before the sigmoid.
        low: makes two short vectors; `fading` makes decays from one, `opening` gates from the other.
        decay: [heads] the logarithms of the decays' factors.
        offset: [heads * head_dim] added to the result of `fading`, before softplus.
    """

    def __init__(self, part: spec.FeatureDelta, hidden_size: int, place: Place):
        super().__init__()
        self.part = part
        self.enter = Linear(hidden_size, 3 * part.width, False, place)
        self.convolution = CausalConvolution(3 * part.width, part.kernel, False, place)
        self.rates = Linear(hidden_size, part.heads, False, place)
        self.low = Linear(hidden_size, 2 * part.head_dim, False, place)
        self.fading, self.opening = (Linear(part.head_dim, part.width, False, place) for _ in range(2))
        self.decay, self.offset = place.parameter(part.heads), place.parameter(part.width)
        self.norm = place.parameter(part.head_dim)
        self.out = Linear(part.width, hidden_size, False, place)

    def advance(
        self, layer: int, state: RunningPass, x: Tensor, rates: Tensor, fading: Tensor, opening: Tensor
    ) -> Tensor:
        """The gated results [Tp, heads * head_dim]. `x`: convolved queries, keys and values."""
        part = self.part
        queries, keys, values = (split_heads(each, part.head_dim) for each in x.float().chunk(3, dim=1))
        queries, keys = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (queries, keys))
        queries = queries * part.head_dim**-0.5
        steps = split_heads(activate(F.softplus, fading.float() + self.offset.float()), part.head_dim)
        decays = activate(torch.exp, (steps * -self.decay.float().exp()[:, None]).flatten(1)).view(steps.shape)
        shares, out = activate(torch.sigmoid, rates.float()), torch.zeros_like(values)

        def step(known: Tensor, tokens: slice) -> Tensor:
            matrices = known.view(part.heads, part.head_dim, part.head_dim)
            given = (queries[tokens], keys[tokens], values[tokens])
            out[tokens], left = apply_delta(given, decays[tokens], shares[tokens], matrices)
            return left.flatten()

        begin = (part.kernel - 1) * 3 * part.width
        _advance(layer, state, step, part.state_size - begin, begin, x.device)
        found = out.to(x.dtype).float()
        normed = found * (found.square().mean(-1, keepdim=True) + part.eps).rsqrt() * self.norm.float()
        return (normed.flatten(1) * activate(torch.sigmoid, opening.float())).to(x.dtype)


def _advance(
    layer: int, state: RunningPass, step: Callable[[Tensor, slice], Tensor], size: int, begin: int, device: torch.device
) -> None:
    """Compute all rows of a pass from their states (`each_row`)."""
    each_row(state.inputs.metadata.query_lens, state.inputs.states, layer, step, size, begin, device=device)


Recurrence = ChannelScanLayer | GatedRecurrenceLayer | FadingAttentionLayer | FeatureDeltaLayer


def build_state_layer(part: spec.StateLayer, hidden_size: int, place: Place) -> StateModule:
    match part:
        case spec.ShortConvolution():
            return GatedConvolution(part, hidden_size, place)
        case spec.DeltaRule():
            return DeltaRuleAttention(part, hidden_size, place)
        case spec.SelectiveScan():
            return SelectiveStateSpace(part, hidden_size, place)
        case spec.ChannelScan():
            return ChannelScanLayer(part, hidden_size, place)
        case spec.GatedRecurrence():
            return GatedRecurrenceLayer(part, hidden_size, place)
        case spec.FadingAttention():
            return FadingAttentionLayer(part, hidden_size, place)
        case spec.FeatureDelta():
            return FeatureDeltaLayer(part, hidden_size, place)
