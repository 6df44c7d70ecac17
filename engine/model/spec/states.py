"""Layers that carry a state from token to token, instead of attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """A gated causal convolution: out(c * convolution(b * x)), where b, c and x are projections of the token
    (LFM2, arXiv:2511.23404).

    Attributes:
        width: number of features, each with a separate kernel.
        kernel: number of tokens that it sees, including the token itself.
        bias: whether the projections and the convolution have biases.
    """

    width: int
    kernel: int
    bias: bool = False

    @property
    def state_size(self) -> int:
        """The number of values in a sequence's state."""
        return (self.kernel - 1) * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """Heads that each keep a matrix, which every token decays and corrects: S = d * S + k (b * (v - k (d * S))), and
    which its query reads (gated delta rule, arXiv:2412.06464). Queries, keys and values pass a short convolution and
    SiLU; queries and keys have length 1. Results are normed per head, times SiLU of a gate.

    Attributes:
        key_heads, value_heads: their numbers; neighbouring value heads share a key head.
        key_dim, value_dim: features of a head.
        kernel: tokens that the convolution sees, the token itself included.
        eps: of the norm.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float

    @property
    def convolved(self) -> int:
        """Features that are convolved: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state."""
        return (self.kernel - 1) * self.convolved + self.value_heads * self.key_dim * self.value_dim


StateLayer = ShortConvolution | DeltaRule
