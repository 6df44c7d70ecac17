"""Attention whose heads are experts that each token chooses (mixture of attention heads, arXiv:2306.04640)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.backends.attention.base import AttentionBackend
from engine.model import spec
from engine.model.experts import ExpertMatrices, best, group
from engine.model.inputs import RunningPass
from engine.model.layers import Linear
from engine.model.place import Place


class RoutedAttention(nn.Module):
    """The weights of attention with chosen heads. Each expert has a matrix that makes one query for each KV head, and
    one that maps the results of these.

    A token's result does not depend on the others: every product has at least `min_rows` rows, and each token adds its
    experts' results in the order of their numbers.
    """

    def __init__(
        self, part: spec.Attention, routed: spec.RoutedHeads, hidden_size: int, backend: AttentionBackend, place: Place
    ):
        super().__init__()
        width = part.kv_heads * part.head_dim
        self.part, self.routed, self.backend = part, routed, backend
        self.router = Linear(hidden_size, routed.count, False, place)
        self.queries = ExpertMatrices(routed.count, hidden_size, width, False, place)
        self.kv = Linear(hidden_size, 2 * width, False, place)
        self.results = ExpertMatrices(routed.count, width, hidden_size, False, place)
        self.bias = place.parameter(hidden_size)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (float32) and experts of each token of x [T, hidden], [T, active] both, in the order of experts."""
        logits, chosen = best(self.router(x).float(), self.routed.active)
        chosen, places = chosen.sort(dim=-1)
        return logits.softmax(dim=-1).gather(-1, places), chosen

    def make_heads(self, state: RunningPass, x: Tensor, kv: Tensor) -> Tensor:
        """[Tp, (heads + 2 * kv_heads) * head_dim]: the queries that the tokens' experts make of x, then kv."""
        tokens, active = state.inputs.tokens, self.routed.active
        queries = x.new_zeros(len(x), self.part.kv_heads, active, self.part.head_dim)
        if tokens:
            own = x[:tokens]
            made = self._by_expert(self.queries, own.repeat_interleave(active, dim=0), self.route(x)[1][:tokens], state)
            # The queries of one KV head are neighbours.
            queries[:tokens] = made.view(tokens, active, self.part.kv_heads, -1).transpose(1, 2)
        return torch.cat((queries.flatten(1), kv), dim=1)

    def reduce(self, state: RunningPass, x: Tensor, attended: Tensor) -> Tensor:
        """[Tp, hidden]: the sum of what the experts of x make of their heads' results [Tp, heads * head_dim]."""
        tokens, active = state.inputs.tokens, self.routed.active
        out = torch.zeros_like(x)
        if tokens:
            weights, chosen = (found[:tokens] for found in self.route(x))
            heads = attended[:tokens].reshape(tokens, self.part.kv_heads, active, -1).transpose(1, 2)
            made = self._by_expert(self.results, heads.reshape(tokens * active, -1), chosen, state)
            for own, weight in zip(made.unbind(1), weights.unsqueeze(2).unbind(1), strict=True):
                out[:tokens] += (own * weight).to(x.dtype)
        return out + self.bias

    def _by_expert(self, matrices: ExpertMatrices, x: Tensor, chosen: Tensor, state: RunningPass) -> Tensor:
        """[T, active, out] of rows x [T * active, in], one for each of the experts [T, active] of each token."""
        rows, sizes, slots = group(chosen, matrices.count, state.inputs.min_rows)
        made = x.new_empty(len(rows), matrices.outputs)
        parts = zip(torch.split(rows, sizes), torch.split(made, sizes), strict=True)
        for expert, (own, answer) in enumerate(parts):
            if sizes[expert]:
                answer.copy_(matrices(x.index_select(0, own), expert))
        return made.index_select(0, slots.flatten()).view(*chosen.shape, -1)
