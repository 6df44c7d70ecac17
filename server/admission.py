"""How much may be in the service at once: a slot is reserved before any work is done for a request."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from server.errors import ApiError

LONGEST_WAIT = 60  # seconds that Retry-After asks for at most
_CHARACTERS_PER_TOKEN = 4  # roughly, of English; an estimate until the text has been tokenised
_ENDINGS_REMEMBERED = 64


def estimate_tokens(text: str) -> int:
    """About how many tokens a text will have."""
    return len(text) // _CHARACTERS_PER_TOKEN + 1


class Admission:
    """Counts the prompts in the service and the prompt tokens that wait; refuses what is beyond the bounds.

    A prompt is in the service from its reservation until its answers are complete, or it was refused or
    aborted. Its tokens wait from the reservation until its first token has come. A request that finds no
    waiting tokens is admitted whatever its size: no valid prompt is refused for ever.

    Args:
        max_running: prompts that can be worked on at the same time.
        max_queued: prompts allowed beyond those.
        max_queued_tokens: prompt tokens that may wait.
        rejected: told why, for each refused request: queue_full or queued_tokens.
        clock: seconds that only grow.

    Attributes:
        num_prompts: prompts in the service.
        num_queued_tokens: prompt tokens that wait.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_queued: int,
        max_queued_tokens: int,
        rejected: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_running = max_running
        self._max_queued = max_queued
        self._max_queued_tokens = max_queued_tokens
        self._rejected = rejected
        self._clock = clock
        self._endings: deque[float] = deque(maxlen=_ENDINGS_REMEMBERED)
        self.num_prompts = 0
        self.num_queued_tokens = 0

    @property
    def max_prompts(self) -> int:
        """Prompts that may be in the service at once."""
        return self._max_running + self._max_queued

    def reserve(self, prompts: int, tokens: int) -> Ticket:
        """Slots for so many prompts with about so many tokens, to be released by leaving the ticket's context.

        Raises:
            ApiError: 503 while there is no room; 400 if there never will be.
        """
        if prompts > self.max_prompts:
            raise ApiError(
                400,
                f"{prompts} prompts cannot be in the service at once: at most {self.max_prompts} can, {self._sum()}. "
                "Send fewer in one request, or raise --max-num-queued-reqs.",
                param="prompt",
                code="too_many_prompts",
            )
        missing = self.num_prompts + prompts - self.max_prompts
        if missing > 0:
            raise self._refusal(
                "queue_full",
                f"The service is full: {self.num_prompts} prompts are in it, and {prompts} more would exceed "
                f"{self.max_prompts}, {self._sum()}.",
                "--max-num-queued-reqs",
                missing,
            )
        self._check_tokens(tokens, self.num_queued_tokens, "about ")
        self.num_prompts += prompts
        self.num_queued_tokens += tokens
        return Ticket(self, prompts, tokens)

    def measure(self, estimate: int, exact: int) -> None:
        """Put the exact number of tokens in the estimate's place.

        Raises:
            ApiError: 503, if that is too many; the estimate then stays.
        """
        others = self.num_queued_tokens - estimate
        self._check_tokens(exact, others, "")
        self.num_queued_tokens = others + exact

    def ended(self, prompts: int, tokens: int) -> None:
        """So many prompts, with so many tokens still waiting, have left the service."""
        self.num_prompts -= prompts
        self.num_queued_tokens -= tokens
        self._endings.extend([self._clock()] * min(prompts, _ENDINGS_REMEMBERED))

    def started(self, tokens: int) -> None:
        """So many tokens wait no longer."""
        self.num_queued_tokens -= tokens

    def _check_tokens(self, tokens: int, others: int, about: str) -> None:
        if others and others + tokens > self._max_queued_tokens:
            raise self._refusal(
                "queued_tokens",
                f"The service is full: {others} prompt tokens wait, and {about}{tokens} more would exceed "
                f"{self._max_queued_tokens} (max_num_queued_tokens).",
                "--max-num-queued-tokens",
                1,
            )

    def _sum(self) -> str:
        return f"max_num_seqs ({self._max_running}) + max_num_queued_reqs ({self._max_queued})"

    def _refusal(self, reason: str, message: str, flag: str, missing: int) -> ApiError:
        self._rejected(reason)
        seconds = self._seconds_until_free(missing)
        message += f" Try again in {seconds} s, or raise {flag}."
        return ApiError(503, message, code="overloaded", headers={"Retry-After": str(seconds)})

    def _seconds_until_free(self, slots: int) -> int:
        """How long so many endings take at the recent rate."""
        if not self._endings:
            return 1
        seconds = (self._clock() - self._endings[0]) / len(self._endings) * slots
        return max(1, min(math.ceil(seconds), LONGEST_WAIT))


class Ticket:
    """The slots of one request. Leaving its context releases what is still held, however the request ended.

    Attributes:
        num_unfinished: prompts that have not ended in order, also after the release.
    """

    def __init__(self, admission: Admission, prompts: int, tokens: int):
        self._admission = admission
        self._estimate = tokens
        self._waiting = [0] * prompts  # tokens of each prompt, once they are known
        self._held = [True] * prompts
        self._released = False
        self.num_unfinished = prompts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._released:
            self._released = True
            self._admission.ended(sum(self._held), self._estimate + sum(self._waiting))

    def measure(self, tokens: Sequence[int]) -> None:
        """Replace the estimate by each prompt's number of tokens.

        Raises:
            ApiError: 503, if these are too many.
        """
        self._admission.measure(self._estimate, sum(tokens))
        self._estimate, self._waiting = 0, list(tokens)

    def started(self, index: int) -> None:
        """A prompt's first token has come."""
        if not self._released:
            self._admission.started(self._waiting[index])
            self._waiting[index] = 0

    def progressed(self, index: int, tokens: int) -> None:
        """So many of a prompt's tokens wait no longer; more than still wait count as all of them."""
        if not self._released:
            tokens = min(tokens, self._waiting[index])
            self._admission.started(tokens)
            self._waiting[index] -= tokens

    def finished(self, index: int) -> None:
        """A prompt's answers are complete: its slot is free."""
        if self._held[index] and not self._released:
            self._held[index] = False
            self.num_unfinished -= 1
            self._admission.ended(1, self._waiting[index])
            self._waiting[index] = 0
