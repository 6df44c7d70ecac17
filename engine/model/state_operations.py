"""The operations of a layer program that carry a state from token to token.

They read the state of each row before its first token and write the state after its last one
(`engine.model.inputs.States`). A token's result depends only on its row's tokens, not on how they are divided into
steps.
"""

from __future__ import annotations

from typing import Literal

from engine.backends.rows import Rows
from engine.model.operations import Operation, operation
from engine.model.recurrences import Recurrence
from engine.model.state_layers import CausalConvolution, DeltaRuleAttention, SelectiveStateSpace

Form = Literal["silu", "gated", "plain"]
"""The result of a convolution: silu(convolution(x)), b * convolution(a * x) of [a | b | x], or itself."""


@operation(reads="x", writes="out")
class Convolve(Operation):
    """out = what `form` says. `layer`: the layer's number among those with a state."""

    module: CausalConvolution
    x: Rows
    out: Rows
    form: Form
    layer: int


@operation(reads="x rates opening", writes="out")
class ApplyDelta(Operation):
    """out = silu(opening) * norm of what each head's matrix gives for its query. The token has changed the matrix."""

    module: DeltaRuleAttention
    x: Rows  # queries, keys and values
    rates: Rows  # as of `DeltaRuleAttention`
    opening: Rows
    out: Rows
    layer: int  # the layer's number among those with a state. Its matrices follow the convolution's part of the state.


@operation(reads="x rates opening", writes="out")
class ApplyScan(Operation):
    """out = norm(silu(opening) * result of each head's matrix), or silu(opening) * norm(result). The token has changed
    the matrix."""

    module: SelectiveStateSpace
    x: Rows  # x of all heads, B and C of all groups
    rates: Rows  # of each head the number that its step follows from
    opening: Rows
    out: Rows
    layer: int  # as of `ApplyDelta`


@operation(reads="given", writes="out")
class Advance(Operation):
    """out = what a module's recurrence makes of the given rows, which are those of its `advance`."""

    module: Recurrence
    given: tuple[Rows, ...]
    out: Rows
    layer: int  # as of `ApplyDelta`
