"""Attention in a window, and to sums of blocks of tokens (LongT5, arXiv:2112.07916, 3.1.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.attention.base import AttentionBackend, AttentionMetadata, Window
from engine.backends.torch import attention_blocks
from engine.model import spec
from engine.model.inputs import RunningPass
from engine.model.layers import SelfAttention, heads_of
from engine.model.norms import build_norm
from engine.model.place import Place


class BlockSumAttention(SelfAttention):
    """The weights of self-attention, which also make keys and values from sums of blocks, and the norm of the sums."""

    def __init__(self, part: spec.Attention, hidden_size: int, backend: AttentionBackend, place: Place):
        super().__init__(part, hidden_size, backend, place)
        assert isinstance(part.sees, spec.BlockSums)
        self.size = part.sees.size
        self.block_norm = build_norm(part.sees.norm, hidden_size, place)

    def attend(self, state: RunningPass, x: Tensor, *heads: Tensor) -> Tensor:
        """Attention of the queries, the first of three `heads`, to nearby keys and values, and to those that are made
        from sums of blocks of their rows' x."""
        part, inputs = self.part, state.inputs
        assert isinstance(part.window, Window)
        blocks = self.of_blocks(x, inputs.metadata, inputs.min_rows)
        return attention_blocks.attend(
            heads_of(heads, part.head_dim), blocks, inputs.metadata, self.size, part.window, part.scale,
            *state.block_biases(self),
        ).flatten(1)  # fmt: skip

    def of_blocks(self, x: Tensor, metadata: AttentionMetadata, min_rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values [blocks, heads, head_dim] of the sums of rows x [Tp, features], input by input. `min_rows`:
        minimum rows of a matrix product."""
        inputs = torch.split(x[: sum(metadata.query_lens)], metadata.query_lens)
        sums = torch.cat([sum_blocks(one, self.size) for one in inputs])
        filled = F.pad(sums, (0, 0, 0, max(min_rows - len(sums), 0)))
        heads = self.qkv(self.block_norm(filled))[: len(sums)].view(len(sums), 3, self.part.heads, self.part.head_dim)
        return heads[:, 1], heads[:, 2]


def sum_blocks(x: Tensor, size: int) -> Tensor:
    """[blocks, features] of one input x [T, features], summed in float32."""
    count = len(x) // size
    whole = x[: count * size].float().view(count, size, x.shape[1]).sum(1)
    if count:
        whole[-1] += x[count * size :].float().sum(0)
    return whole.to(x.dtype)
