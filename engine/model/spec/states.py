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
        alternate: the value heads of the first key head are not neighbours; each is followed by one of every other key
            head, as in GGUF files.
        key_dim, value_dim: features of a head.
        kernel: tokens that the convolution sees, the token itself included.
        eps: of the norm.
        most: the factor of the sigmoid that gives a token's share b of a correction.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    alternate: bool = False
    most: float = 1.0

    @property
    def convolved(self) -> int:
        """Features that are convolved: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state."""
        return (self.kernel - 1) * self.convolved + self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScan:
    """Heads that each keep a matrix, which every token decays and adds to: S = exp(-t * a) * S + B (t * x), and whose
    result is C S + d * x. The token makes t, B and C (Mamba-2, arXiv:2405.21060). x, B and C pass a short convolution
    and SiLU. Results are multiplied by SiLU of a gate, and normed in groups.

    Attributes:
        heads, head_dim: their number, and features of a head.
        groups: neighbouring heads share B and C; the norm has as many groups.
        size: features of B and C.
        kernel: tokens that the convolution sees, the token itself included.
        eps: of the norm; None for no norm.
        norm_first: whether results are normed before they are multiplied.
        bias, kernel_bias, out_bias: whether the projections, the convolution and the last matrix have biases.
    """

    heads: int
    head_dim: int
    groups: int
    size: int
    kernel: int
    eps: float | None
    norm_first: bool = False
    bias: bool = False
    kernel_bias: bool = False
    out_bias: bool = False

    @property
    def width(self) -> int:
        """Features of the results."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Features that are convolved: x, B and C."""
        return self.width + 2 * self.groups * self.size

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state."""
        return (self.kernel - 1) * self.convolved + self.width * self.size


StateLayer = ShortConvolution | DeltaRule | SelectiveScan
