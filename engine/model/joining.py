"""Another model's hidden states, joined with the vectors of tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model import spec
from engine.model.layers import Linear
from engine.model.norms import build_norm
from engine.model.place import Place


class Joining(nn.Module):
    """projection([norm(x), norm(hidden)]).

    Args:
        width: features of vectors and of hidden states.
    """

    def __init__(self, part: spec.Joined, width: int, place: Place):
        super().__init__()
        self.token_norm = build_norm(part.norm, width, place)
        self.hidden_norm = build_norm(part.norm, width, place)
        self.projection = Linear(2 * width, width, False, place)

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        """[Tp, width] of vectors x [Tp, width] and hidden states of the same shape; None: these are zeros."""
        assert self.token_norm is not None
        assert self.hidden_norm is not None
        known = torch.zeros_like(x) if hidden is None else hidden
        joined: Tensor = self.projection(torch.cat((self.token_norm(x), self.hidden_norm(known)), dim=1))
        return joined
