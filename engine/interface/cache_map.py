"""A snapshot of the engine at work: the contents of each page of the KV cache, and the requests that use it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """An unfinished request, without its text.

    Attributes:
        request_id: the request.
        num_prompt: tokens of its prompt; with an encoder, of the encoder's input and the decoder's beginning.
        num_output: tokens of its longest answer so far.
        num_computed: the number of these tokens whose K and V are computed.
        num_sequences: number of live answers or beams.
        beams: whether it is a beam search.
        num_pages: number of distinct pages that it holds.
        num_found: number of these that it found in the cache.
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
    """The distinct cells of a map, one list entry per kind."""

    # held, cached: the number of the cell's pages in this state; the others are free
    held: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    # the maximum number of tables that hold one of its pages; above 1, the page is shared
    tables: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)  # the number of its pages that a running request found in the cache
    # the first few running requests that hold them, as indices in the map's list
    holders: list[list[int]] = field(default_factory=list)
    others: list[int] = field(default_factory=list)  # the number of further requests


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMap:
    """All pages in order, as cells, and the running and waiting requests.

    Attributes:
        pages_per_cell: pages in each cell; the last cell may have fewer. 1 unless there are very many pages.
        runs: alternately, the number of equal cells in a row and the index of their kind.
        kinds: the kinds of cells.
        running: the first running requests, in the order of service.
        waiting: the first waiting requests, in the order of admission.
    """

    pages_per_cell: int
    runs: list[int]
    kinds: CellKinds
    running: list[LiveRequest]
    waiting: list[LiveRequest]
