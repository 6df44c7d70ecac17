"""The interface of admission, wherever the counts are kept: in this process, or in one shared by several."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self


class Reservation(Protocol):
    """The slots of one request, released when its context is left; see `server.admission.LocalReservation`.
    `num_unfinished`: prompts that have not ended normally."""

    num_unfinished: int

    def __enter__(self) -> Self:
        """The slots are released at the end."""

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release everything that is still held; idempotent."""

    async def measured(self, tokens: Sequence[int]) -> None:
        """Replace the estimate by each prompt's number of tokens. Raises ApiError: 503 if there are too many tokens."""

    def started(self, index: int) -> None:
        """A prompt's first token has come."""

    def progressed(self, index: int, tokens: int) -> None:
        """Record that this many of a prompt's tokens no longer wait."""

    def finished(self, index: int) -> None:
        """A prompt's answers are complete."""


class Gate(Protocol):
    """A gate that admits requests while there is room; see `server.admission.Admission`."""

    async def look(self, tenant: str | None = None) -> None:
        """Refuse a request of this tenant if every request of the tenant would be refused. Only the tenant is known
        yet. Raises ApiError: 503 if there is no room."""

    async def admit(
        self,
        prompts: int,
        tokens: int,
        tenant: str | None = None,
        deadline: float | None = None,
        *,
        patient: bool = False,
    ) -> Reservation:
        """Slots for prompts with an estimated number of tokens. `patient`: the request waits and asks again, so a
        refusal does not count. Raises ApiError: 503 while there is no room, or none before the deadline; 400 if there
        will never be room."""
