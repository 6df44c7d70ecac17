"""The vectors that layers read for each token beside the stream (Gemma 3n), and what layers compute from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model import spec
from engine.model.inputs import RunningPass
from engine.model.layers import Linear
from engine.model.norms import build_norm
from engine.model.place import Place


class LayerEmbedding(nn.Module):
    """Token ids and their embedding to a vector for each layer."""

    def __init__(self, part: spec.LayerVectors, layers: int, hidden_size: int, place: Place):
        super().__init__()
        self.width, self.layers = part.width, layers
        self.table = place.parameter(part.vocab_size, layers * part.width)
        self.projection = Linear(hidden_size, layers * part.width, False, place)
        self.norm = build_norm(part.norm, part.width, place)
        # Rounded to the weights' format, as the checkpoint was trained.
        self.scale = torch.tensor(part.scale, dtype=place.dtype, device="cpu").item()
        self.of_projection = hidden_size**-0.5

    def embed(self, state: RunningPass, x: Tensor) -> Sequence[Tensor]:
        """Each layer's vectors [Tp, width] of the tokens, whose embedding is x [Tp, hidden]."""
        token_ids = state.inputs.token_ids
        made = (self.projection(x) * self.of_projection).view(len(x), self.layers, self.width)
        known = torch.where(token_ids < len(self.table), token_ids, 0)
        looked_up = F.embedding(known, self.table) * self.scale
        summed: Tensor = (self.norm(made) + looked_up.view_as(made)) * 2.0**-0.5
        return summed.unbind(1)


class LayerInputs(nn.Module):
    """The weights of x + norm(projection(activation(gate(x)) * own))."""

    def __init__(self, part: spec.LayerInput, hidden_size: int, place: Place):
        super().__init__()
        self.activation = part.activation
        self.gate = Linear(hidden_size, part.width, False, place)
        self.projection = Linear(part.width, hidden_size, False, place)
        self.norm = build_norm(part.norm, hidden_size, place)


class LowRankPath(nn.Module):
    """The weights of y + norm(right(left(y)))."""

    def __init__(self, part: spec.LowRank, hidden_size: int, place: Place):
        super().__init__()
        self.left = Linear(hidden_size, part.rank, False, place)
        self.right = Linear(part.rank, hidden_size, False, place)
        self.norm = build_norm(part.norm, hidden_size, place)
