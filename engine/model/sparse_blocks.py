"""Attention to some blocks of tokens (BigBird, arXiv:2007.14062)."""

from __future__ import annotations

from torch import Tensor

from engine.backends.torch import attention_sparse
from engine.model import spec
from engine.model.inputs import RunningPass
from engine.model.layers import heads_of


def attend(part: spec.Attention, state: RunningPass, *heads: Tensor) -> Tensor:
    """Attention of the queries, the first of three `heads`, to the keys and values beside them in the blocks that they
    see."""
    blocks = part.sees
    assert isinstance(blocks, spec.SparseBlocks)
    return attention_sparse.attend(
        heads_of(heads, part.head_dim), state.inputs.metadata, part.scale, size=blocks.size, whole=blocks.whole,
        first_counts=1 + blocks.drawn,
    ).flatten(1)  # fmt: skip
