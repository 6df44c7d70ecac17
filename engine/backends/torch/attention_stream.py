"""Attention of tokens in blocks, and of vectors beside them, in torch; memory grows linearly with the length of a row.

Each row is divided into blocks by its own length, so its result does not depend on what else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata
from engine.backends.torch.attention_row import Heads, by_head
from engine.backends.torch.attention_row import attend as attend_row


def attend(
    tokens: Heads, vectors: Heads, metadata: AttentionMetadata, scale: float, *, size: int, shift: int
) -> tuple[Tensor, Tensor]:
    """The attention of the tokens of each row, [Tp, heads, head_dim], and of its vectors, [rows * count, heads,
    head_dim].

    A token sees its block and the vectors of its row; a vector sees all tokens and vectors of its row. Scores, softmax
    and sums are in float32. Positions past the rows get zeros.

    Args:
        tokens: queries, keys and values, [Tp, heads, head_dim] each.
        vectors: the same for `count` vectors per row, row after row.
        size: tokens per block.
        shift: the number of tokens missing from the first block.
    """
    found = tokens[0].new_zeros(tokens[0].shape)
    of_vectors = torch.empty_like(vectors[0])
    lengths = metadata.query_lens
    count, start = len(vectors[0]) // max(len(lengths), 1), 0
    for number, length in enumerate(lengths):
        row, own = slice(start, start + length), slice(number * count, (number + 1) * count)
        start += length
        queries, keys, values = (by_head(x[row]) for x in tokens)
        beside, others, given = (by_head(x[own]) for x in vectors)
        seen = attend_row(beside, torch.cat((others, keys), 1), torch.cat((given, values), 1), scale)
        of_vectors[own] = seen.transpose(0, 1).to(of_vectors.dtype)
        for begin in range(-shift, length, size):
            part = slice(max(begin, 0), min(begin + size, length))
            near, of_near = torch.cat((others, keys[:, part]), 1), torch.cat((given, values[:, part]), 1)
            attended = attend_row(queries[:, part], near, of_near, scale)
            found[row][part] = attended.transpose(0, 1).to(found.dtype)
    return found, of_vectors
