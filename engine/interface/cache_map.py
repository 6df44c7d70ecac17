"""A view of the engine at work: the contents of each page of the KV cache at a moment, and the requests that use it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """An unfinished request, without its text.

    Attributes:
        request_id: the request.
        num_prompt: tokens of its prompt; with an encoder, of the encoder's input and of the decoder's beginning.
        num_output: tokens of its longest answer so far.
        num_computed: of both together, those whose K and V are there.
        num_sequences: answers or beams that are alive.
        beams: it is a beam search.
        num_pages: distinct pages that it holds.
        num_found: those of them that it found in the cache.
    """

    request_id: str
    num_prompt: int
    num_output: int = 0
    num_computed: int = 0
    num_sequences: int = 1
    beams: bool = False
    num_pages: int = 0
    num_found: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CellKinds:
    """The different cells of a map, a place in each list for each kind.

    Attributes:
        held, cached: how many of the cell's pages are; the others are free.
        tables: most tables that hold one of its pages: above 1, it is shared.
        found: how many of its pages a running request found in the cache.
        holders: which of the running requests hold them, as places in the map's list, the first few.
        others: how many more do.
    """

    held: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    holders: list[list[int]] = field(default_factory=list)
    others: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMap:
    """All pages in their order, as cells, and the requests that run and wait.

    Attributes:
        pages_per_cell: pages that a cell stands for, the last one perhaps fewer: 1 unless there are very many.
        runs: how many cells in a row are alike, and which of the kinds they are, in turns.
        kinds: what the cells may be.
        running: the running requests in the order of service, the first so many.
        waiting: those that wait, in the order in which they will be admitted, the first so many.
    """

    pages_per_cell: int
    runs: list[int]
    kinds: CellKinds
    running: list[LiveRequest]
    waiting: list[LiveRequest]
