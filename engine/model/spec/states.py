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


StateLayer = ShortConvolution
