"""Edits of logits: penalties of tokens that occurred, each token once; tokens that a mask makes impossible."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.triton.sampling_walk import WORDS
from engine.interface.sampling_table import word

_BLOCK = 256
_MASK_BLOCK = 1024
REPETITION = tl.constexpr(word("repetition_penalty"))
FREQUENCY = tl.constexpr(word("frequency_penalty"))
PRESENCE = tl.constexpr(word("presence_penalty"))


@triton.jit(do_not_specialize=["count"])
def _penalize(logits, stride, vocabulary, keys, first, last, count, table, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < count
    token = tl.load(keys + at, mask=known, other=-1) // 2
    before = tl.load(keys + at - 1, mask=known & (at > 0), other=-1) // 2
    new = known & ((at == 0) | (token != before))  # if a token occurs several times, only the first counts
    times = (tl.load(last + at, mask=new, other=0) - tl.load(first + at, mask=new, other=0)).to(tl.float32)
    row = token // vocabulary
    where = logits + row * stride + token % vocabulary
    score = tl.load(where, mask=new, other=0.0)
    own = table + row * WORDS
    factor = tl.load(own + REPETITION, mask=new, other=0x3F800000).to(tl.float32, bitcast=True)  # or 1
    score = tl.where(score < 0, score * factor, tl.math.div_rn(score, factor))
    taken = tl.load(own + FREQUENCY, mask=new, other=0).to(tl.float32, bitcast=True) * times
    taken += tl.load(own + PRESENCE, mask=new, other=0).to(tl.float32, bitcast=True) * (times > 0).to(tl.float32)
    tl.store(where, score - taken, mask=new)


def penalize(logits: Tensor, rows: Tensor, tokens: Tensor, is_output: Tensor, table: Tensor) -> None:
    """Subtract penalties from logits [N, vocabulary] float32, in place, without knowing on the host which tokens occur.

    Args:
        rows, tokens, is_output: [M] occurrences: tokens within the vocabulary, repeated as they occur.
        table: [N, WORDS] int32 (`engine.interface.sampling_table`).
    """
    vocabulary = logits.shape[1]
    keys = ((rows.long() * vocabulary + tokens) * 2 + is_output).sort().values
    output = keys | 1
    first = torch.searchsorted(keys, output)
    last = torch.searchsorted(keys, output, right=True)
    _penalize[(triton.cdiv(len(keys), _BLOCK),)](
        logits, logits.stride(0), vocabulary, keys, first, last, len(keys), table, BLOCK=_BLOCK
    )


@triton.jit(do_not_specialize=["vocabulary", "words"])
def _mask(logits, stride, vocabulary, rows, masks, words, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = token < vocabulary
    bits = tl.load(masks + item * words + token // 32, mask=known, other=-1)
    row = tl.load(rows + item).to(tl.int64)
    banned = ((bits >> (token % 32)) & 1) == 0
    tl.store(logits + row * stride + token, float("-inf"), mask=known & banned)


def mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Make tokens impossible in rows of logits [N, vocabulary] float32, in place.

    Args:
        rows: [M] int32.
        masks: [M, words] int32, contiguous: tokens with bit 0 become impossible.
    """
    vocabulary = logits.shape[1]
    _mask[(len(rows), triton.cdiv(vocabulary, _MASK_BLOCK))](
        logits, logits.stride(0), vocabulary, rows, masks, masks.shape[1], BLOCK=_MASK_BLOCK
    )
