"""The interface of admission, wherever the counts are kept: in this process, or in one that several share."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self


class Place(Protocol):
    """The slots of one request, given back when its context is left; see `server.admission.Ticket`.

    Attributes:
        num_unfinished: prompts that have not ended in order.
    """

    num_unfinished: int

    def __enter__(self) -> Self:
        """It is released at the end."""

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release everything that is still held; idempotent."""

    async def measured(self, tokens: Sequence[int]) -> None:
        """Replace the estimate by each prompt's number of tokens.

        Raises:
            ApiError: 503, if these are too many.
        """

    def started(self, index: int) -> None:
        """A prompt's first token has come."""

    def progressed(self, index: int, tokens: int) -> None:
        """Note that so many of a prompt's tokens wait no longer."""

    def finished(self, index: int) -> None:
        """A prompt's answers are complete."""


class Gate(Protocol):
    """Admits requests while there is room; see `server.admission.Admission`."""

    async def look(self, tenant: str | None = None) -> None:
        """Refuse a request of this tenant if every request of the tenant would be refused. Nothing else is known of it
        yet.

        Raises:
            ApiError: 503, there is no room.
        """

    async def admit(
        self,
        prompts: int,
        tokens: int,
        tenant: str | None = None,
        deadline: float | None = None,
        *,
        patient: bool = False,
    ) -> Place:
        """Slots for so many prompts with about so many tokens.

        Args:
            patient: the request waits and asks again, so that a refusal does not count as one.

        Raises:
            ApiError: 503 while there is no room, or none in time; 400 if there never will be.
        """
