"""Sampling on a GPU without sorting the vocabulary: launches of the kernels in `sampling_*.py`.

Data read for B rows of V float32 logits: everything once by the walk (256 x 131072: 134 MB, 31 us at 4.3 TB/s), then
about 1 KB for each of the few chunks with large logits. Rows whose filters keep many tokens are read six to eight times
more (`sampling_wide.py`), by programs that all run at once. No launch depends on data on the device: grids follow from
shapes, and every kernel can be captured in a CUDA graph. Compile-time parameters do not depend on numbers that change
between steps, and memory always has the same alignment: `DeviceSampler.warm` compiles everything that serving needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from engine.backends.triton import sampling_best, sampling_draw, sampling_walk, sampling_wide

_CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes by which kernels divide their work. The batch never determines them, because sums would then have
    another order."""

    split: int = 2048  # tokens that one program of the walk reads, a multiple of 64; all sizes are powers of two
    few: int = 256  # the number of largest logits among which a threshold is searched first
    room: int = 1024  # maximum number of collected logits, at least twice `few`
    depth: int = 4  # splits that a pass over a row reads at a time


SIZES = Sizes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The sampling parameters of S rows, on the device."""

    # [S, WORDS] int32, contiguous rows of the sampling table (`engine.interface.sampling_table`); 0 draws: the row
    # wants only the likeliest token; less: it is unused
    table: Tensor
    uniforms: Tensor | None = None  # [S, D] float64, one for each draw; None if the device computes them from the table


class Workspace:
    """Device memory for the results of a walk over up to `rows` rows: about 26 KB per row for 131072 tokens.
    `vocabulary`: tokens per row."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device, sizes: Sizes = SIZES):
        self.rows, self.vocabulary, self.sizes = rows, vocabulary, sizes
        self.splits, self.tops = triton.cdiv(vocabulary, sizes.split), triton.cdiv(vocabulary, _CHUNK)

        def room(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((rows, width), dtype=dtype, device=device)

        self.split_peak = room(self.splits, torch.float32)
        self.split_floor = room(self.splits, torch.float32)
        self.split_sum = room(self.splits, torch.float32)
        self.split_place = room(self.splits, torch.int32)
        self.split_weight = room(self.splits, torch.float64)
        self.top = room(self.tops, torch.float32)
        self.chunks = room(self.tops, torch.int32)
        self.values = room(sizes.room, torch.float32)
        self.candidates = room(sizes.room, torch.int32)
        self.peak, self.log_sum = room(1, torch.float32)[:, 0], room(1, torch.float32)[:, 0]
        self.is_wide = room(1, torch.int32)[:, 0]
        self.every = torch.arange(rows, dtype=torch.int32, device=device)


class LogitRows:
    """Rows of logits with statistics from one walk over them. Raises ValueError if the logits do not fit.

    Args:
        logits: [S, vocabulary] of any float format; the tokens of a row are contiguous.
        room: memory for S rows or more; it belongs to this object until another one is made with it.
    """

    def __init__(self, logits: Tensor, parameters: Parameters, room: Workspace):
        if logits.dim() != 2 or logits.shape[1] != room.vocabulary or len(logits) > room.rows or logits.stride(1) != 1:
            raise ValueError(
                f"expected up to {room.rows} rows of {room.vocabulary} contiguous logits, got {list(logits.shape)} "
                f"with strides {logits.stride()}"
            )
        self.logits, self.parameters, self.room = logits, parameters, room
        self.peak, self.log_sum = room.peak[: len(logits)], room.log_sum[: len(logits)]
        sampling_walk.summarize[(len(logits), room.splits)](
            logits,
            logits.stride(0),
            room.vocabulary,
            parameters.table,
            room.split_peak,
            room.split_floor,
            room.split_place,
            room.split_sum,
            room.split_weight,
            room.top,
            room.splits,
            room.tops,
            CHUNKS=room.sizes.split // _CHUNK,
            num_warps=4,
        )

    def choose(self, tokens: Tensor, chosen: Tensor, place: Tensor | None = None) -> None:
        """Sample, or take the likeliest token; this also sums up the walk, and must come first.

        Args:
            tokens, chosen: [.., C] int32 and float32, outputs: the tokens and their logits, in the first num_draws
                columns of rows that draw, and in all columns of others.
            place: [S] int32 rows of the outputs; None for the first S.
        """
        room, given = self.room, self.parameters
        counted = given.uniforms is None
        every = room.every if place is None else place
        numbers = (
            given.table if given.uniforms is None else given.uniforms,  # or data that is not read
            0 if given.uniforms is None else given.uniforms.shape[1],
        )
        row = (self.logits, self.logits.stride(0), room.vocabulary, every)
        columns = tokens.shape[1]
        splits, sizes = triton.next_power_of_2(room.splits), room.sizes
        sampling_draw.choose[(len(self.logits),)](
            *row,
            given.table,
            *numbers,
            room.split_peak,
            room.split_place,
            room.split_sum,
            room.split_weight,
            room.top,
            room.splits,
            room.tops,
            room.peak,
            room.log_sum,
            room.chunks,
            room.values,
            room.candidates,
            room.is_wide,
            tokens,
            chosen,
            columns,
            COUNTED=counted,
            SPLITS=splits,
            TOPS=triton.next_power_of_2(room.tops),
            ROOM=sizes.room,
            SPLIT=sizes.split,
            COLUMNS=_block(columns),
            FEW=sizes.few,
            num_warps=8,
        )
        sampling_wide.wide[(len(self.logits),)](
            *row,
            given.table,
            *numbers,
            room.split_floor,
            room.split_weight,
            room.splits,
            room.split_peak,
            room.peak,
            room.values,
            room.is_wide,
            tokens,
            chosen,
            columns,
            COUNTED=counted,
            SPLITS=splits,
            ROOM=sizes.room,
            SPLIT=sizes.split,
            DEPTH=sizes.depth,
            num_warps=16,
        )

    def best(
        self,
        rows: Tensor,
        counts: Tensor,
        tokens: Tensor,
        scores: Tensor,
        *,
        before: Tensor,
        after: Tensor,
        chosen: Tensor | None = None,
        place: Tensor | None = None,
    ) -> None:
        """Write the largest logits of some rows, best first; equal ones in ascending order of tokens.

        Args:
            rows, counts: [M] int32.
            tokens, scores, chosen: [.., C] int32, float32, float32, outputs: tokens, scores, logits; in the columns
                beyond a row's count 0 and -inf.
            before, after: [S] float32, subtracted from logits to give scores.
            place: [M] int32 rows of `tokens` to write; None for `rows`.
        """
        room = self.room
        width = tokens.shape[1]
        if not len(rows) or not width:
            return
        sampling_best.best[(len(rows),)](
            self.logits,
            self.logits.stride(0),
            room.vocabulary,
            rows,
            counts,
            before,
            after,
            room.top,
            room.tops,
            room.chunks,
            room.values,
            room.candidates,
            tokens,
            scores,
            rows if place is None else place,
            width,
            torch.empty_like(scores) if chosen is None else chosen,
            TOPS=triton.next_power_of_2(room.tops),
            ROOM=room.sizes.room,
            BLOCK=room.sizes.split,
            COLUMNS=_block(width),
            num_warps=8,
        )

    def ranks(self, rows: Tensor, tokens: Tensor, ranks: Tensor, place: Tensor | None = None) -> None:
        """Write the ranks of tokens: the number of larger logits, plus one.

        Args:
            rows: [M] int32, in any order.
            tokens, ranks: [.., C] int32; their rows `place` [M] are read and written; None for `rows`.
        """
        room, columns = self.room, tokens.shape[1]
        if not len(rows):
            return
        where = rows if place is None else place
        partial = torch.empty((len(rows), room.splits, columns), dtype=torch.int32, device=tokens.device)
        sampling_best.count_larger[(len(rows), room.splits)](
            self.logits,
            self.logits.stride(0),
            room.vocabulary,
            rows,
            tokens,
            where,
            columns,
            partial,
            room.splits,
            BLOCK=room.sizes.split,
            num_warps=4,
        )
        ranks.index_copy_(0, where.long(), partial.sum(dim=1, dtype=torch.int32) + 1)

    def report(self, tokens: Tensor, chosen: Tensor, logprobs: Tensor, first: Tensor, *, counted: bool = False) -> None:
        """Write log-probabilities of tokens under the model's own distribution: NaN if `chosen` is -inf.

        Args:
            tokens, chosen, logprobs: [S, C].
            first: [S] int32, output: the first column of the tokens.
            counted: whether positions in the table advance by one in rows that draw.
        """
        columns = tokens.shape[1]
        sampling_best.report[(len(self.logits),)](
            self.logits,
            self.logits.stride(0),
            self.peak,
            self.log_sum,
            tokens,
            chosen,
            columns,
            logprobs,
            first,
            self.parameters.table,
            COLUMNS=_block(columns),
            COUNTED=counted,
            num_warps=1,
        )


def _block(columns: int) -> int:
    """Columns that a program holds: the same number for nearly all launches, so that little is compiled while
    serving."""
    return max(64, int(triton.next_power_of_2(columns)))
