"""What a stack begins with: token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model import spec
from engine.model.layers import Linear
from engine.model.norms import build_norm
from engine.model.place import Place
from engine.model.positions import Sinusoidal


class TokenEmbedding(nn.Module):
    """Token ids [T], positions [T] and segments [T] (None: all of the first) to vectors [T, hidden].

    Args:
        shared: a token table that another module owns.
    """

    def __init__(self, part: spec.Tokens, place: Place, shared: nn.Parameter | None = None):
        super().__init__()
        hidden = part.projection or part.width
        added = part.width if part.projects_sum else hidden
        self.tokens = place.parameter(part.vocab_size, part.width) if shared is None else shared
        self.projection = None if part.projection is None else Linear(part.width, hidden, False, place)
        self.projects_sum = part.projects_sum
        self.types = None if not part.token_types else place.parameter(part.token_types, added)
        self.positions = None
        self.offset = 0
        self.unplaced = None if isinstance(part.positions, Sinusoidal | None) else part.positions.unplaced
        if part.positions is not None:
            self.positions = place.parameter(part.positions.size, added)
            self.offset = part.positions.offset
        self.token_norm = build_norm(part.token_norm, hidden, place)
        self.norm = build_norm(part.norm, hidden, place)
        self.expansion = None if part.expansion is None else Linear(hidden, part.expansion, True, place)
        # Rounded to the weights' format, as the checkpoint was trained.
        self.scale = torch.tensor(part.scale, dtype=place.dtype, device="cpu").item()

    def forward(self, token_ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        x = F.embedding(token_ids, self.tokens)
        if self.scale != 1.0:
            x = x * self.scale
        if self.projection is not None and not self.projects_sum:
            x = self.projection(x)
        if self.token_norm is not None:
            x = self.token_norm(x)
        if self.unplaced is not None:
            positions = positions.masked_fill(token_ids == self.unplaced, -1)
        if self.positions is not None:
            x = x + F.embedding(positions + self.offset if self.offset else positions, self.positions)
        if self.types is not None:
            x = x + (self.types[0] if types is None else F.embedding(types, self.types))
        if self.projection is not None and self.projects_sum:
            x = self.projection(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.expansion is not None:
            x = self.expansion(x)
        return x


def count_placed(token_ids: Tensor, positions: Tensor, unplaced: int) -> Tensor:
    """Positions [T] in whole inputs that count only the tokens which have one; -1 for those that have none."""
    skipped = token_ids == unplaced
    total = skipped.cumsum(0)
    first = torch.arange(len(positions), device=positions.device) - positions
    before = total[first] - skipped[first].long()
    return (positions - (total - before)).masked_fill(skipped, -1).to(positions.dtype)
