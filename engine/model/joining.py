"""Another model's hidden states, joined with the vectors of tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model import spec
from engine.model.layers import Linear
from engine.model.norms import build_norm
from engine.model.place import Place


class Joining(nn.Module):
    """projection([norm(x), norm(hidden)]), or the hidden states alone. `width`: features of both."""

    def __init__(self, part: spec.Joined, width: int, place: Place):
        super().__init__()
        self.token_norm = build_norm(part.norm, width, place)
        self.hidden_norm = self.projection = self.entrance = None
        if part.entrance:
            self.entrance = Linear(part.entrance, width, False, place)
        else:
            self.hidden_norm = build_norm(part.norm, width, place)
            self.projection = Linear(2 * width, width, False, place)

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        """[Tp, width] of vectors x [Tp, width] and hidden states of the same shape; None: these are zeros."""
        known = torch.zeros_like(x) if hidden is None else hidden
        if self.projection is None or self.hidden_norm is None:
            return known
        joined: Tensor = self.projection(torch.cat((self.normed(x), self.hidden_norm(known)), dim=1))
        return joined

    def normed(self, x: Tensor) -> Tensor:
        """The norm of tokens' vectors."""
        normed: Tensor = self.token_norm(x)
        return normed

    def enter(self, hidden: Tensor, min_rows: int) -> Tensor:
        """The hidden states of another model, mapped to the form that this model reads. `min_rows`: minimum rows of a
        matrix product."""
        if self.entrance is None:
            return hidden
        padding = max(min_rows - len(hidden), 0)
        entered: Tensor = self.entrance(nn.functional.pad(hidden, (0, 0, 0, padding)))
        return entered[: len(hidden)]
