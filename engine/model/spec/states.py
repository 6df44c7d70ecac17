"""Layers that carry a state from token to token, in the place of attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """A gated causal convolution: out(c * convolution(b * x)), where b, c and x are projections of the token
    (LFM2, arXiv:2511.23404).

    Attributes:
        width: features, each of which has its own kernel.
        kernel: tokens that it sees, the token itself included.
        bias: of the projections and of the convolution.
    """

    width: int
    kernel: int
    bias: bool = False

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state."""
        return (self.kernel - 1) * self.width


StateLayer = ShortConvolution
