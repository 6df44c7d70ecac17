"""The operations of a layer program that carry a state from token to token.

They read the state of each row before its first token and write the state after its last one
(`engine.model.inputs.States`). A token's result depends only on its row's tokens, not on how they are divided into
steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.backends.native.program import Rows
from engine.model.operations import HasRows
from engine.model.state_layers import CausalConvolution, DeltaRuleAttention, SelectiveStateSpace


@dataclass(frozen=True, slots=True, eq=False)
class Convolve(HasRows):
    """out = b * convolution(a * x) of [a | b | x], or silu(convolution(x)). `layer`: the layer's number among those
    with a state."""

    READS = ("x",)
    WRITES = ("out",)
    module: CausalConvolution
    x: Rows
    out: Rows
    gated: bool
    layer: int


@dataclass(frozen=True, slots=True, eq=False)
class ApplyDelta(HasRows):
    """out = silu(opening) * norm of what each head's matrix gives for its query. The token has changed the matrix."""

    READS = ("x", "rates", "opening")
    WRITES = ("out",)
    module: DeltaRuleAttention
    x: Rows  # queries, keys and values
    rates: Rows  # as of `DeltaRuleAttention`
    opening: Rows
    out: Rows
    layer: int  # the layer's number among those with a state. Its matrices follow the convolution's part of the state.


@dataclass(frozen=True, slots=True, eq=False)
class ApplyScan(HasRows):
    """out = norm(silu(opening) * result of each head's matrix), or silu(opening) * norm(result). The token has changed
    the matrix."""

    READS = ("x", "rates", "opening")
    WRITES = ("out",)
    module: SelectiveStateSpace
    x: Rows  # x of all heads, B and C of all groups
    rates: Rows  # of each head the number that its step follows from
    opening: Rows
    out: Rows
    layer: int  # as of `ApplyDelta`
