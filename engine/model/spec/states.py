"""Layers that carry a state from token to token, instead of attention."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.normalisation import Norm
from engine.model.spec.networks import Activation


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelScan:
    """Mamba's scan (arXiv:2312.00752). Each feature has a state of a few numbers. A token decays them and adds to them:
    s = exp(-t * a) * s + B (t * x). The result is C s + d * x, times SiLU of a gate. Each feature has its own t; all
    share B and C. x first passes a short convolution and SiLU; t, B and C are made from the result.

    Attributes:
        width: number of features.
        size: numbers in the state of a feature.
        rank: features of the vector from which every t is made.
        kernel: tokens that the convolution sees, the token itself included.
        norm: the norm of that vector, of B and of C; None for no norm.
        bias, kernel_bias: whether the projections and the convolution have biases.
    """

    width: int
    size: int
    rank: int
    kernel: int
    norm: Norm | None = None
    bias: bool = False
    kernel_bias: bool = False

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state."""
        return (self.kernel - 1 + self.size) * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedRecurrence:
    """RG-LRU (arXiv:2402.19427, 2.4). Each feature has a state of one number: h = a * h + sqrt(1 - a^2) * i * x. The
    token makes a and i. The result is h times a gate. x first passes a short convolution. For the first token of a
    sequence, a is 0 and the root is left out.

    Attributes:
        width: number of features.
        blocks: number of blocks. a and i of a feature are made from the features of x in its block.
        kernel: tokens that the convolution sees, the token itself included.
        activation: of the gate.
    """

    width: int
    blocks: int
    kernel: int
    activation: Activation

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state."""
        return self.kernel * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class FadingAttention:
    """Lightning attention (arXiv:2405.17381). The state of each head is a matrix that decays at a fixed rate: S =
    exp(-slope) * S + k v. The result is q S. Queries, keys and values first pass an activation. The results of all
    heads are normed together and multiplied by the sigmoid of a gate.

    Attributes:
        heads, head_dim: their number, and features of each.
        slopes: of each head.
        norm: the norm of the results.
    """

    heads: int
    head_dim: int
    slopes: tuple[float, ...]
    activation: Activation
    norm: Norm

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state."""
        return self.heads * self.head_dim**2


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureDelta:
    """The gated delta rule with a decay for each feature of a key (arXiv:2510.26692). The decays are made from a vector
    of head_dim features, the gates from another. Gates pass a sigmoid.

    Attributes:
        heads, head_dim: their number, and features of a query, a key and a value.
        kernel: tokens that the convolution sees, the token itself included.
        eps: of the norm.
    """

    heads: int
    head_dim: int
    kernel: int
    eps: float

    @property
    def width(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state."""
        return (self.kernel - 1) * 3 * self.width + self.width * self.head_dim


StateLayer = (
    ShortConvolution | DeltaRule | SelectiveScan | ChannelScan | GatedRecurrence | FadingAttention | FeatureDelta
)
