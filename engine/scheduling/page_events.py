"""The pages that the prefix cache has gained and lost, in order: a router may rely on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.interface.token_sides import hashed
from engine.scheduling.block_pool import PageHash, PageHasher
from engine.scheduling.plan import Int32
from engine.scheduling.sequence import IntBuffer, SequenceGroup


@dataclass(slots=True)
class PagesStored:
    """Pages that follow each other can now be found."""

    hashes: list[PageHash]
    parent: PageHash | None  # hash of the page before the first of them; None if they begin a sequence
    token_ids: Int32
    # for each page whose K and V depend on more than tokens, a value that stands for the rest, by page number here
    beside: dict[int, PageHash]


@dataclass(slots=True)
class PagesRemoved:
    """Pages can no longer be found."""

    hashes: list[PageHash]


@dataclass(slots=True)
class PagesCleared:
    """No page can be found any more."""


PageEvent = PagesStored | PagesRemoved | PagesCleared


class PageEvents:
    """Collects events until they are taken. A scheduler has one only if events are to be reported. `events`: events
    since they were last taken, oldest first."""

    def __init__(self, hasher: PageHasher, block_size: int):
        self._ordinary = hasher.root(None)
        self._size = block_size
        self.events: list[PageEvent] = [PagesCleared()]  # whatever a predecessor held

    def stored(self, group: SequenceGroup, tokens: IntBuffer, hashes: Sequence[PageHash], pages: Sequence[int]) -> None:
        """A sequence's pages at these positions, in ascending order, can be found."""
        start = 0
        for place in range(1, len(pages) + 1):
            if place == len(pages) or pages[place] != pages[place - 1] + 1:
                self._stored(group, tokens, hashes, pages[start], pages[place - 1] + 1)
                start = place

    def removed(self, page_hash: PageHash) -> None:
        """A page was evicted."""
        last = self.events[-1] if self.events else None
        if isinstance(last, PagesRemoved):
            last.hashes.append(page_hash)
        else:
            self.events.append(PagesRemoved([page_hash]))

    def cleared(self) -> None:
        """All pages were forgotten."""
        self.events = [PagesCleared()]  # earlier events do not matter

    def take(self) -> list[PageEvent]:
        """Return the events so far, and forget them here."""
        events, self.events = self.events, []
        return events

    def _stored(
        self, group: SequenceGroup, tokens: IntBuffer, hashes: Sequence[PageHash], first: int, end: int
    ) -> None:
        size, beside = self._size, dict[int, PageHash]()
        if first == 0 and group.root != self._ordinary:
            beside[0] = group.root
        if group.sides:  # a page's own hash stands for the sides of its tokens
            others = (page for page in range(first, end) if hashed(group.sides, page * size, size))
            beside |= {page - first: hashes[page] for page in others}
        self.events.append(
            PagesStored(
                hashes=list(hashes[first:end]),
                parent=hashes[first - 1] if first else None,
                token_ids=tokens.view(first * size, end * size).copy(),
                beside=beside,
            )
        )
