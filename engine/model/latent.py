"""Attention over latents (multi-head latent attention, arXiv:2405.04434, 2.1): its weights, and the computations per
head.

A head's keys would be K c and its values V c, for the latents c in pages. Since q . (K c) = (K' q) . c, and a sum of V
c is V times the sum, K' is multiplied with queries and V with results: heads attend to the latents themselves, as one
KV head that all of them share, and nothing is expanded again for earlier tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.backends.attention.base import AttentionBackend
from engine.model import spec
from engine.model.experts import ExpertMatrices
from engine.model.layers import Linear
from engine.model.norms import build_norm
from engine.model.place import Place
from engine.model.positions import Rotary
from engine.model.rotary import rotate


class LatentAttention(nn.Module):
    """The weights of attention over latents.

    `keys` [heads, width, content] maps a head's query to latents, `values` [heads, values, width] maps latents to its
    result; both come from the single matrix that would make keys and values.
    """

    def __init__(
        self, part: spec.Attention, latent: spec.Latent, hidden_size: int, backend: AttentionBackend, place: Place
    ):
        super().__init__()
        self.part, self.shape, self.backend = part, latent, backend
        self.query_latent, self.query_norm = None, None
        if latent.query_width is not None:
            self.query_latent = Linear(hidden_size, latent.query_width, part.qkv_bias, place)
            self.query_norm = build_norm(latent.norm, latent.query_width, place)
        queries = part.heads * (latent.content + latent.rotary)
        self.queries = Linear(latent.query_width or hidden_size, queries, False, place)
        self.latent = Linear(hidden_size, latent.width + latent.rotary, part.qkv_bias, place)
        self.latent_norm = build_norm(latent.norm, latent.width, place)
        self.keys = ExpertMatrices(part.heads, latent.content, latent.width, False, place)
        self.values = ExpertMatrices(part.heads, latent.width, latent.values, False, place)
        self.out = Linear(part.heads * latent.values, hidden_size, part.out_bias, place)

    def prepare(self, queries: Tensor, latents: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, head_dim] and keys [T, 1, head_dim] for attention: latents first, then the rotated part.

        Args:
            queries: [T, heads * (content + rotary)].
            latents: [T, width + rotary] latents before their norm, and shared keys.
            angles: cosines and sines of the tokens; None for no rotation.
        """
        shape, heads = self.shape, self.part.heads
        content, turning = queries.view(len(queries), heads, -1).tensor_split((shape.content,), dim=-1)
        latent, shared = latents.tensor_split((shape.width,), dim=-1)
        turning = torch.cat((turning, shared.unsqueeze(1)), dim=1)
        if angles is not None and isinstance(self.part.position, Rotary):
            turning = rotate(turning, self.part.position, *angles)
        normed = self.latent_norm(latent.contiguous())
        absorbed = torch.cat((by_head(self.keys, content), normed.unsqueeze(1)), dim=1)
        return torch.cat((absorbed, turning), dim=-1).tensor_split((heads,), dim=1)  # type: ignore[return-value]

    def expand(self, attended: Tensor) -> Tensor:
        """[T, heads * values] from the heads' attention results over latents, [T, heads * head_dim]."""
        vectors = attended.view(len(attended), self.part.heads, self.part.head_dim)
        return by_head(self.values, vectors[..., : self.shape.width]).flatten(1)


def by_head(matrices: ExpertMatrices, x: Tensor) -> Tensor:
    """[T, heads, out] of x [T, heads, in], each head multiplied with its own matrix."""
    rows = x.transpose(0, 1).contiguous()
    if matrices.packed is None and x.device.type != "cpu":
        product = torch.bmm(rows, matrices.weight.transpose(1, 2))
        return (product if matrices.bias is None else product + matrices.bias.unsqueeze(1)).transpose(0, 1)
    return torch.stack([matrices(own, head) for head, own in enumerate(rows)], dim=1)
