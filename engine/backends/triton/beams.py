"""Finds the next step's beams, with their tokens and pages, on a GPU before the host knows them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# The numbers of a search: the plan's row of its first beam; the sampled row of that beam; beams; candidates per beam;
# the column of the tables that is written; whether it is a new page; its first row among those of all searches; and, as
# offsets into all numbers, the beams' scores, the rows' pages, the stop tokens, and their end.
_ROW, _PLACE, _WIDTH, _CANDIDATES, _COLUMN, _FRESH, _FIRST, _SCORES, _PAGES, _STOPS, _END = map(tl.constexpr, range(11))
FIELDS = 11
_FIELDS = tl.constexpr(FIELDS)
# Numbers of beams; a launch uses the first that is large enough, and considers its square of candidates.
WIDTHS = (8, 16, 32, 64)


@triton.jit(do_not_specialize=["columns", "table_row", "rows"])
def go_on_kernel(
    tokens, scores, columns, numbers, tables, table_row, sampled, places, pairs, pages, rows, BEAMS: tl.constexpr
):
    """Program g: search g. `go_on` describes its output."""
    own = numbers + tl.program_id(0) * _FIELDS
    row, place = tl.load(own + _ROW), tl.load(own + _PLACE)
    width, count = tl.load(own + _WIDTH), tl.load(own + _CANDIDATES)
    column, fresh, first = tl.load(own + _COLUMN), tl.load(own + _FRESH), tl.load(own + _FIRST)
    before, aside = numbers + tl.load(own + _SCORES), numbers + tl.load(own + _PAGES)
    at = tl.arange(0, BEAMS * BEAMS)
    known, beam = at < width * count, at // count
    source = (place + beam) * columns + at % count
    token = tl.load(tokens + source, mask=known, other=0)
    score = tl.load(scores + source, mask=known, other=float("-inf"))
    score += tl.load(before + beam, mask=known, other=0).to(tl.float32, bitcast=True)
    for stop in range(tl.load(own + _STOPS), tl.load(own + _END)):
        score = tl.where(token == tl.load(numbers + stop), float("-inf"), score)
    score = tl.where(score == score, score, float("-inf"))
    beams = tl.arange(0, BEAMS)
    continued = beams < 0
    for number in range(width):
        best = tl.max(score, axis=0)
        chosen = tl.min(tl.where(score == best, at, BEAMS * BEAMS), axis=0)  # the first of equal ones
        parent = chosen // count
        again = tl.max((continued & (beams == parent)).to(tl.int32), axis=0)
        page = tl.load(tables + (row + parent).to(tl.int64) * table_row + column)
        mine = tl.load(aside + number)
        copied = (again > 0) & (fresh == 0)
        out = first + number
        tl.store(sampled + place + number, tl.sum(tl.where(at == chosen, token, 0), axis=0))
        tl.store(places + out, (row + parent).to(tl.int64))
        tl.store(places + rows + out, (row + number).to(tl.int64))
        tl.store(places + 2 * rows + out, (row + number).to(tl.int64) * table_row + column)
        tl.store(pairs + 2 * out, tl.where(copied, page, 0))
        tl.store(pairs + 2 * out + 1, tl.where(copied, mine, 0))
        tl.store(pages + out, tl.where(copied | (fresh != 0), mine, page))
        continued = continued | (beams == parent)
        score = tl.where(at == chosen, float("-inf"), score)


def width_for(beams: int, candidates: int) -> int:
    """The entry of `WIDTHS` for this many beams with this many candidates in total."""
    return next(width for width in WIDTHS if beams <= width and candidates <= width * width)


def go_on(
    tokens: Tensor,
    scores: Tensor,
    numbers: Tensor,
    tables: Tensor,
    sampled: Tensor,
    found: tuple[Tensor, Tensor, Tensor],
    searches: int,
    width: int,
) -> None:
    """Choose how some beam searches continue, as `engine.scheduling.plan.Searches` says.

    Args:
        tokens, scores: [S, C] the candidates of all sampled rows, contiguous.
        numbers: int32, beginning with `FIELDS` for each search, then the data that these refer to; scores as their
            bits.
        tables: [rows, blocks] int32, contiguous; only read.
        sampled: [S] int32, where the rows of the searches find their tokens; written.
        found: output for N rows of all searches: places [3, N] int64 (the table row that each continues, its own table
            row, and the index of its last page in the flattened tables), pairs [N, 2] int32 (source and target pages of
            copies; (0, 0) for none), and the last pages [N] int32.
        width: one of `WIDTHS`.
    """
    places, pairs, pages = found
    go_on_kernel[(searches,)](
        tokens,
        scores,
        tokens.shape[1],
        numbers,
        tables,
        tables.shape[1],
        sampled,
        places,
        pairs,
        pages,
        places.shape[1],
        BEAMS=width,
        num_warps=4 if width < WIDTHS[-1] else 8,
    )
