"""The positions in an encoder's input at which a decoder's tokens are spoken: a path through tokens and positions that
follows the attention weights of some of the decoder's heads.

The method is that of OpenAI's program for Whisper (arXiv:2212.04356) and of `transformers`: weights are normalised over
the tokens and smoothed along the input, and dynamic time warping (Sakoe and Chiba, 1978) finds the path that advances
through both and has the largest weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.backends import triton as gpu
from engine.backends.attention.base import Paged
from engine.backends.attention.formats import dequantise, movable
from engine.execution.kv_cache import KVCache
from engine.interface.outputs import Alignment
from engine.model.transformer import Transformer
from engine.scheduling.plan import Int32, PooledRow, PoolingRow, StepPlan

_AT_ONCE = 2**18  # numbers per block of medians, which fit a CPU's cache
_EXCHANGED = 15  # maximum width of a median that is sorted by exchanging neighbours
_BOTH, _TOKEN, _POSITION = range(3)  # what a step of a path advances


class KeptQueries:
    """Keeps the queries of aligned rows, for the heads that alignment uses, during one pass."""

    def __init__(self, plan: StepPlan):
        starts = plan.query_start
        self._found: list[dict[int, Tensor]] = [{} for _ in plan.pooling]
        self._wanted: dict[int, list[tuple[int, int, int, slice]]] = {}
        for number, wanted in enumerate(plan.pooling):
            span = slice(int(starts[wanted.row]), int(starts[wanted.row + 1]))
            for place, (layer, head) in enumerate(_alignment(wanted).heads):
                self._wanted.setdefault(layer, []).append((number, place, head, span))

    def __call__(self, layer: int, queries: Tensor) -> None:
        """Keep the wanted part of a layer's queries [Tp, heads, head_dim]."""
        for number, place, head, span in self._wanted.get(layer, ()):
            self._found[number][place] = queries[span, head].to(torch.float32, copy=True)

    def of(self, number: int) -> Tensor:
        """The queries [tokens, heads, head_dim] in float32 of the row with this number among the pooled rows."""
        found = self._found[number]
        return torch.stack([found[place] for place in range(len(found))], dim=1)


class Aligner:
    """Finds where the tokens of a plan's rows are spoken, from the encoder's output for their inputs. `model`: an
    encoder-decoder model."""

    def __init__(self, model: Transformer):
        decoder = model.spec.decoder
        self._parts = [] if decoder is None else [block.cross for block in decoder.blocks]

    def align(self, plan: StepPlan, kept: KeptQueries, cache: KVCache) -> tuple[PooledRow, ...]:
        """For each row that ends its tokens, their positions [tokens, 1], without those that began the answer; for
        other rows, the queries so far, [tokens, heads * head_dim]. If weights are NaN, so are positions. `cache`: holds
        the encoder's keys."""
        return tuple(self._row(plan, wanted, kept.of(number), cache) for number, wanted in enumerate(plan.pooling))

    def _row(self, plan: StepPlan, wanted: PoolingRow, queries: Tensor, cache: KVCache) -> PooledRow:
        if wanted.before is not None:
            before = torch.from_numpy(wanted.before).to(queries)
            queries = torch.cat([before.view(-1, *queries.shape[1:]), queries])
        if not wanted.complete:
            return PooledRow(values=queries.flatten(1).cpu().numpy())
        assert plan.cross is not None
        pages, count = plan.cross.tables[wanted.row], int(plan.cross.lens[wanted.row])
        pooling, alignment = wanted.pooling, _alignment(wanted)
        length = min(pooling.encoder_length or count, count)
        queries = queries[pooling.skip_tokens :]
        total = torch.zeros(len(queries), length, device=queries.device)
        views = cache.views(gpu.upload(pages[None], queries.device))
        for place, (layer, head) in enumerate(alignment.heads):
            part = self._parts[layer]
            assert part is not None
            keys = _keys(views[layer], head // (part.heads // part.kv_heads), count)
            weights = torch.softmax(queries[:, place] @ keys.T * part.scale, dim=-1)[:, :length]
            total += smoothed(weights, alignment.filter_width)
        costs = -(total / len(alignment.heads)).cpu().numpy().astype(np.float64)
        if not np.isfinite(costs).all():
            return PooledRow(values=np.full((len(costs), 1), np.nan, dtype=np.float32))
        return PooledRow(values=first_positions(costs)[:, None].astype(np.float32))


def _alignment(wanted: PoolingRow) -> Alignment:
    assert wanted.pooling.alignment is not None
    return wanted.pooling.alignment


def _keys(paged: Paged, head: int, count: int) -> Tensor:
    """float32 [count, head_dim] keys of a head, for the one row whose table the pages have. They include the centre, as
    in self-attention."""
    pages = paged.block_tables[0].long()
    keys = movable(paged.keys)[:, :, head][pages].flatten(0, 1)[:count].view(paged.keys.dtype)
    if paged.key_scales is None:
        return keys.float()
    return dequantise(keys, paged.key_scales[:, :, head][pages].flatten()[:count])


def smoothed(weights: Tensor, width: int) -> Tensor:
    """Weights [tokens, positions], normalised to mean 0 and deviation 1 over the tokens (all 0 if they are equal), then
    replaced by the medians over `width` positions around each; mirrored at both ends. If there are only half as many
    positions or fewer, no medians are taken."""
    deviation, mean = torch.std_mean(weights, dim=0, keepdim=True, unbiased=False)
    normal, side = (weights - mean) / deviation.masked_fill(deviation == 0, 1.0), width // 2
    positions = normal.shape[1]
    if side == 0 or positions <= side:
        return normal
    padded = F.pad(normal, (side, side), mode="reflect")
    parts: tuple[Tensor, ...] = torch.split(padded, max(_AT_ONCE // (positions * width), 1))
    return torch.cat([_medians(part, width) for part in parts])


def _medians(rows: Tensor, width: int) -> Tensor:
    """The medians of each `width` neighbours in a row."""
    side, count = width // 2, rows.shape[1] - width + 1
    if width > _EXCHANGED:
        return rows.unfold(1, width, 1).sort(dim=-1)[0][..., side]
    # This exchanges whole rows, which is faster than sorting numbers: in each round the largest one moves to the end.
    columns = [rows[:, i : i + count] for i in range(width)]
    for end in range(width - 1, side - 1, -1):
        for i in range(end):
            one, other = columns[i], columns[i + 1]
            columns[i], columns[i + 1] = torch.minimum(one, other), torch.maximum(one, other)
    return columns[side]


def first_positions(costs: NDArray[np.float64]) -> Int32:
    """[tokens] the position at which the cheapest path through costs [tokens, positions] reaches each token.

    A path goes from the first token and position to the last, by one token, one position, or both at a time.
    """
    tokens, positions = costs.shape
    steps = _cheapest_steps(costs)
    found = np.zeros(tokens, dtype=np.int32)
    token, position = tokens, positions
    while token > 0 and position > 0:
        found[token - 1] = position - 1
        step = steps[token + position][token]
        token, position = token - (step != _POSITION), position - (step != _TOKEN)
    return found


def _cheapest_steps(costs: NDArray[np.float64]) -> Sequence[NDArray[np.int8]]:
    """The last step of the cheapest path to each cell. Cells are counted from 1; those whose indices add up to d are in
    [d][token]. Each diagonal follows from the two before it and is computed at once; sums are kept in float32."""
    tokens, positions = costs.shape
    flat, offsets = costs.ravel(), np.arange(tokens + 1) * (positions - 1)
    steps = np.full((tokens + positions + 1, tokens + 1), _POSITION, dtype=np.int8)
    # The sums on the diagonal before the last and on the last one, by token; cells that no path reaches have infinite
    # sums.
    before, last = np.full((2, tokens + 1), np.inf, dtype=np.float32)
    before[0] = 0.0
    for diagonal in range(2, tokens + positions + 1):
        low, high = max(1, diagonal - positions), min(tokens, diagonal - 1) + 1
        both, token, position = before[low - 1 : high - 1], last[low - 1 : high - 1], last[low:high]
        by_both, by_token = (both < token) & (both < position), (token < both) & (token < position)
        step = steps[diagonal, low:high]
        step[by_both], step[by_token] = _BOTH, _TOKEN
        cheapest = np.where(by_both, both, np.where(by_token, token, position))
        here = np.full(tokens + 1, np.inf, dtype=np.float32)
        # Cell (i, j) is at (i - 1) * positions + j - 1, where i + j is the diagonal.
        here[low:high] = flat[offsets[low:high] + (diagonal - positions - 1)] + cheapest
        before, last = last, here
    return list(steps)
