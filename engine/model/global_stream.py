"""Vectors that pass through the layers beside the tokens (PEGASUS-X, arXiv:2208.04347, 3)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.attention.base import AttentionBackend
from engine.backends.torch import attention_stream
from engine.model import spec
from engine.model.activations import activate_by_name
from engine.model.inputs import RunningPass
from engine.model.layers import DenseFeedForward, SelfAttention, heads_of
from engine.model.norms import build_norm
from engine.model.place import Place


class StreamAttention(SelfAttention):
    """The weights of self-attention, which the vectors share, and a norm of the vectors."""

    def __init__(self, part: spec.Attention, hidden_size: int, backend: AttentionBackend, place: Place):
        super().__init__(part, hidden_size, backend, place)
        assert isinstance(part.sees, spec.GlobalStream)
        self.size, self.shift = part.sees.size, part.sees.shift
        self.global_norm = build_norm(part.sees.norm, hidden_size, place)

    def attend(self, state: RunningPass, *heads: Tensor) -> Tensor:
        """Attention of the queries, the first of three `heads`, to the keys and values beside them in their block, and
        to those of the vectors beside the tokens; these vectors add the results of their own attention to all tokens
        and to each other."""
        part, inputs, vectors = self.part, state.inputs, state.beside
        assert vectors is not None
        count = len(vectors)
        made = self.qkv(self.global_norm(_filled(vectors, inputs.min_rows)))[:count]
        of_vectors = made.view(count, 3, part.heads, part.head_dim).unbind(1)
        attended, seen = attention_stream.attend(
            heads_of(heads, part.head_dim), of_vectors, inputs.metadata, part.scale, size=self.size, shift=self.shift
        )
        state.beside = vectors + self.out(_filled(seen.flatten(1), inputs.min_rows))[:count]
        return attended.flatten(1)


def begin(vectors: Tensor, state: RunningPass) -> None:
    """Each input of the pass gets these vectors, [count, features], which pass through the layers beside its tokens."""
    state.beside = vectors.repeat(len(state.inputs.metadata.query_lens), 1)


def feed(before: nn.Module | None, network: DenseFeedForward, state: RunningPass) -> None:
    """Add a feed-forward network of their norms to the vectors beside the tokens."""
    assert state.beside is not None
    x = _filled(state.beside, state.inputs.min_rows)
    up = network.up(x if before is None else before(x))
    fed = network.down(activate_by_name(network.activation, up, network.kernels))
    state.beside = state.beside + fed[: len(state.beside)]


def _filled(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, max(rows - len(x), 0)))
