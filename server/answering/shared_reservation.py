"""The slots of a request that has more prompts than slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from server.gates import Reservation


class SharedReservation:
    """Several prompts share each slot. A slot is free once the last of its prompts has ended."""

    def __init__(self, reservation: Reservation, slots: int, prompts: int) -> None:
        self._reservation = reservation
        self._slots = slots  # how many there are
        self._tokens = [0] * prompts  # waiting tokens of each prompt, once known
        self._waiting = set(range(prompts))
        self._held = set(range(prompts))
        self._waiting_in = Counter(map(self._slot, range(prompts)))
        self._held_in = Counter(self._waiting_in)
        self.num_unfinished = prompts  # how many share them

    def _slot(self, index: int) -> int:
        return index % self._slots

    def __enter__(self) -> Self:
        self._reservation.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reservation.__exit__(kind, problem, trace)

    async def measured(self, tokens: Sequence[int]) -> None:
        """Replace the estimate by each prompt's number of tokens. Raises ApiError: 503 if there are too many tokens."""
        self._tokens = list(tokens)
        await self._reservation.measured([sum(tokens[slot :: self._slots]) for slot in range(self._slots)])

    def progressed(self, index: int, tokens: int) -> None:
        """Count this many of a prompt's tokens as no longer waiting."""
        tokens = min(tokens, self._tokens[index])
        self._tokens[index] -= tokens
        self._reservation.progressed(self._slot(index), tokens)

    def started(self, index: int) -> None:
        """A prompt's first token has come."""
        if index not in self._waiting:
            return
        self._waiting.remove(index)
        slot = self._slot(index)
        self._waiting_in[slot] -= 1
        if self._waiting_in[slot]:
            self.progressed(index, self._tokens[index])
        else:
            self._reservation.started(slot)

    def finished(self, index: int) -> None:
        """A prompt's answers are complete."""
        if index not in self._held:
            return
        self._held.remove(index)
        self.num_unfinished -= 1
        slot = self._slot(index)
        self._held_in[slot] -= 1
        if self._held_in[slot]:
            self.started(index)
        else:
            self._reservation.finished(slot)
