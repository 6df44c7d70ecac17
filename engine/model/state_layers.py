"""The modules of layers that carry a state from token to token."""

from __future__ import annotations

from torch import nn

from engine.model import spec
from engine.model.layers import Linear
from engine.model.place import Place
from engine.model.row_kernels import RowModule


class CausalConvolution(nn.Module):
    """The weights of a convolution in which each feature sees its own values at the last tokens, including the current
    one.

    The state is the inputs of the last `kernel - 1` tokens, oldest first.
    """

    def __init__(self, width: int, kernel: int, bias: bool, place: Place):
        super().__init__()
        self.width, self.taps = width, kernel
        self.weight = place.parameter(width, kernel)
        self.bias = place.parameter(width) if bias else None


class StateModule(RowModule):
    """A layer's module that carries a state, and has no keys and values in pages."""


class GatedConvolution(StateModule):
    """The weights of out(c * convolution(b * x)), where `enter` makes b, c and x."""

    def __init__(self, part: spec.ShortConvolution, hidden_size: int, place: Place):
        super().__init__()
        self.enter = Linear(hidden_size, 3 * part.width, part.bias, place)
        self.convolution = CausalConvolution(part.width, part.kernel, part.bias, place)
        self.out = Linear(part.width, hidden_size, part.bias, place)


class DeltaRuleAttention(StateModule):
    """The weights of a layer of the gated delta rule.

    Attributes:
        enter: makes queries, keys and values.
        rates: makes of each value head the share of a correction, before the sigmoid; then the numbers that its decay
            follows from.
        decay: [value heads] the logarithm of the decay's factor.
        offset: [value heads] added to what the decay follows from.
    """

    def __init__(self, part: spec.DeltaRule, hidden_size: int, place: Place):
        super().__init__()
        self.part = part
        values = part.value_heads * part.value_dim
        self.enter = Linear(hidden_size, part.convolved, False, place)
        self.opening = Linear(hidden_size, values, False, place)
        self.rates = Linear(hidden_size, 2 * part.value_heads, False, place)
        self.convolution = CausalConvolution(part.convolved, part.kernel, False, place)
        self.decay, self.offset = place.parameter(part.value_heads), place.parameter(part.value_heads)
        self.norm = place.parameter(part.value_dim)
        self.out = Linear(values, hidden_size, False, place)


class SelectiveStateSpace(StateModule):
    """The weights of a layer of Mamba-2.

    Attributes:
        enter: makes gates, then x, B and C, then of each head the number that its step t follows from.
        decay: [heads] the logarithm of the decay's factor.
        offset: [heads] added to what the step follows from.
        skip: [heads] the factor of x in the result.
    """

    def __init__(self, part: spec.SelectiveScan, hidden_size: int, place: Place):
        super().__init__()
        self.part = part
        self.enter = Linear(hidden_size, part.width + part.convolved + part.heads, part.bias, place)
        self.convolution = CausalConvolution(part.convolved, part.kernel, part.kernel_bias, place)
        self.decay, self.offset, self.skip = (place.parameter(part.heads) for _ in range(3))
        self.norm = None if part.eps is None else place.parameter(part.width)
        self.out = Linear(part.width, hidden_size, part.out_bias, place)


class AttentionBesideState(nn.Module):
    """Attention and a part that carries a state, whose results are added."""

    def __init__(self, attention: nn.Module, state: StateModule):
        super().__init__()
        self.attention, self.state = attention, state
