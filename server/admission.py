"""Admission to the service: a slot is reserved before any work is done for a request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from server.errors import ApiError
from server.pace import Mean, Pace

OVERLOADED = "overloaded"  # the error code for lack of room
LONGEST_WAIT = 60  # maximum seconds in Retry-After
RESERVE = 8  # tenants with little in the service may exceed a bound by this fraction (its reciprocal)
_LEAST_REMEMBERED = 64  # events that determine a pace
CHARACTERS_PER_TOKEN = 4  # a rough value for English; only an estimate until the text is tokenised


def estimate_tokens(text: str) -> int:
    return len(text) // CHARACTERS_PER_TOKEN + 1


@dataclass(slots=True)
class _Account:
    """One tenant's work in the service: its prompts, its prompts that wait for their first token, and the tokens of
    these."""

    prompts: int = 0
    waiting: int = 0
    tokens: int = 0


class Admission:
    """Counts the prompts in the service and the waiting prompt tokens. Refuses requests beyond the bounds.

    A prompt is in the service from its reservation until its answers are complete or the prompt is refused or aborted.
    It and its tokens count as waiting from the reservation until its first token. A request is admitted at any size if
    no tokens are waiting, so no valid prompt is refused for ever.

    Tenants share the bounds. If several tenants have requests in the service, a tenant below its equal share of a bound
    may exceed the bound by an eighth. Other tenants are refused at the bound. So capacity that one tenant has filled
    goes to the others as its requests end.

    The waiting time of a new prompt is estimated from the prompts that are served before it (round-robin over tenants)
    and from the recent pace of first tokens.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_queued: int,
        max_queued_tokens: int,
        rejected: Callable[[str], None],
        max_queue_time: float | None = 0.0,
        lacks_room: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_running = max_running  # maximum prompts that run at the same time
        self._max_queued = max_queued  # maximum prompts in addition to these
        self._max_queued_tokens = max_queued_tokens  # maximum prompt tokens that may wait
        # maximum seconds that a prompt may wait while the engine lacks room; 0 for no limit. None: half of the recent
        # time to first token while there was room; until that is known, one prompt of each tenant may wait.
        self._max_queue_time = max_queue_time
        # called with the reason for each refused request: queue_full, queue_time, queued_tokens or deadline
        self._rejected = rejected
        self._lacks_room = lacks_room  # whether the engine has no room for the next prompt until another one ends
        self._clock = clock  # monotonic seconds, the clock of deadlines
        self._accounts: dict[str | None, _Account] = {}  # only tenants with something in the service
        # Prompts that began together may end together, so a pace is measured over more prompts than run at a time.
        memory = max(_LEAST_REMEMBERED, 2 * max_running)
        self._endings = Pace(clock, memory)
        self._starts = {lacking: Pace(clock, memory) for lacking in (False, True)}
        self._lacked_room = False  # as of the latest change
        self._runs = Mean(_LEAST_REMEMBERED)  # seconds from a prompt's first token to its end
        self._prefills = Mean(_LEAST_REMEMBERED)  # seconds to the first token, for prompts that found room
        self._num_waiting = 0
        self.num_prompts = 0
        self.num_queued_tokens = 0

    @property
    def max_prompts(self) -> int:
        """Maximum prompts in the service at once."""
        return self._max_running + self._max_queued

    def check(self, tenant: str | None = None) -> None:
        """Refuse a request if every request of its tenant would be refused now. Only the tenant is known at this time.
        Raises ApiError: 503 if there is no room."""
        with self._counting():
            self._check_prompts(1, tenant)
            self._check_time(tenant, None)
            self._check_tokens(1, 0, tenant, "at least ")

    def reserve(
        self,
        prompts: int,
        tokens: int,
        tenant: str | None = None,
        deadline: float | None = None,
        *,
        patient: bool = False,
    ) -> LocalReservation:
        """Reserve slots for prompts with an estimated number of tokens; leaving the context releases them. Raises
        ApiError: 503 if there is no room now or before the deadline; 400 if there will never be room.

        Args:
            deadline: time on the clock by which the first token must arrive.
            patient: the request waits and asks again, so a refusal is not counted.
        """
        if prompts > self.max_prompts:
            raise ApiError(
                400,
                f"The request has {prompts} prompts, but the service accepts at most {self.max_prompts} at a time "
                f"({self._sum()}). Send fewer per request, or raise --max-num-queued-reqs.",
                param="prompt",
                code="too_many_prompts",
            )
        with self._counting(not patient):
            self._check_prompts(prompts, tenant)
            crowded = self._check_time(tenant, deadline)
            self._check_tokens(tokens, 0, tenant, "about ")
        self.change(tenant, prompts=prompts, waiting=prompts, tokens=tokens)
        return LocalReservation(self, tenant, prompts, tokens, crowded=crowded)

    async def look(self, tenant: str | None = None) -> None:
        """Same as `check`; the common interface of all gates."""
        self.check(tenant)

    async def admit(
        self,
        prompts: int,
        tokens: int,
        tenant: str | None = None,
        deadline: float | None = None,
        *,
        patient: bool = False,
    ) -> LocalReservation:
        """Same as `reserve`; the common interface of all gates."""
        return self.reserve(prompts, tokens, tenant, deadline, patient=patient)

    def measure(self, tenant: str | None, estimate: int, exact: int) -> None:
        """Replace the estimate by the exact number of tokens. Raises ApiError: 503 if there are too many tokens; the
        estimate then stays."""
        with self._counting():
            self._check_tokens(exact, estimate, tenant, "")
        self.change(tenant, tokens=exact - estimate)

    def change(self, tenant: str | None, *, prompts: int = 0, waiting: int = 0, tokens: int = 0) -> None:
        """Change a tenant's counts in the service by these numbers."""
        account = self._accounts.setdefault(tenant, _Account())
        account.prompts += prompts
        account.waiting += waiting
        account.tokens += tokens
        if not (account.prompts or account.tokens):
            del self._accounts[tenant]
        self.num_prompts += prompts
        self.num_queued_tokens += tokens
        self._num_waiting += waiting
        if prompts < 0:
            self._endings.count(-prompts)
        self._watch()

    def started(self, tenant: str | None, tokens: int, prefill: float | None) -> None:
        """Record that a prompt's first token has arrived, so these tokens no longer wait; `prefill` is the seconds
        since the reservation, for a prompt that found room."""
        if prefill is not None:
            self._prefills.add(prefill)
        self._starts[self._lacked_room].count()
        self.change(tenant, waiting=-1, tokens=-tokens)

    def ran(self, seconds: float) -> None:
        """Record that a prompt has ended normally, this many seconds after its first token."""
        self._runs.add(seconds)

    def now(self) -> float:
        """Seconds on the clock."""
        return self._clock()

    def _watch(self) -> None:
        lacking = self._lacked_room = self._lacks_room()
        self._endings.switch(self.num_prompts > 0)
        self._starts[lacking].switch(self._num_waiting > 0)
        self._starts[not lacking].switch(False)

    def _account(self, tenant: str | None) -> _Account:
        return self._accounts.get(tenant) or _Account()

    def _is_owed(self, tenant: str | None, held: int, more: int, bound: int, excess: int) -> bool:
        """Whether the tenant may exceed a bound by this much: other tenants have requests in the service, and it has
        few."""
        sharers = len(self._accounts) + (tenant not in self._accounts)
        return sharers > 1 and held + more <= max(bound // sharers, 1) and excess <= max(bound // RESERVE, 1)

    def _check_prompts(self, prompts: int, tenant: str | None) -> None:
        missing = self.num_prompts + prompts - self.max_prompts
        held = self._account(tenant).prompts
        if missing > 0 and not self._is_owed(tenant, held, prompts, self.max_prompts, missing):
            raise self._refusal(
                "queue_full",
                f"The service is full: it has {self.num_prompts} prompts, and {prompts} more would exceed the limit "
                f"of {self.max_prompts} ({self._sum()}).",
                "--max-num-queued-reqs",
                self._endings.seconds * missing,
            )

    def _check_time(self, tenant: str | None, deadline: float | None) -> bool:
        """Check that the prompt can begin before its deadline, if another one must end first."""
        own = self._account(tenant).waiting
        # Tenants are served round-robin, so no more prompts of another tenant come first than of this one.
        ahead = sum(min(account.waiting, own + (name != tenant)) for name, account in self._accounts.items())
        seconds, missing = self._expect(ahead)
        if own and missing > 1:
            self._check_queue_time(seconds)
        left = math.inf if deadline is None else deadline - self._clock()
        if ahead and seconds > left:
            raise self._refusal(
                "deadline",
                f"The service is busy: the request would wait about {seconds:.1f} s for its first token, but its "
                f"time limit ends in {max(left, 0.0):.1f} s.",
                "the request's time limit",
                seconds - left,
            )
        return missing > 0

    def _check_queue_time(self, seconds: float) -> None:
        """Check the seconds that a prompt would wait, if another one already waits for a slot."""
        limit = self._max_queue_time
        if limit is None:
            limit, known = self._prefills.value / 2, self._prefills.count > 0 and self._runs.count > 0
            what = f"{limit:.2g} s, half the time to first token of an idle server (max_queue_time is not set)"
        else:
            known, what = True, f"{limit:g} s (max_queue_time)"
            if not limit:
                return
        if not known:
            message = "The service is full, and the waiting time is not known yet."
            raise self._refusal("queue_time", message, "--max-queue-time", 0.0)
        if seconds > limit:
            raise self._refusal(
                "queue_time",
                f"The service is full: the request would wait about {seconds:.1f} s for its first token, more than "
                f"{what}.",
                "--max-queue-time",
                seconds - limit,
            )

    def _expect(self, ahead: int) -> tuple[float, int]:
        """Expected seconds until the first token of a prompt that has this many prompts before it, and how many running
        ones must end first."""
        running = self.num_prompts - self._num_waiting
        lacking = self._lacks_room()
        missing = ahead + 1 if lacking else ahead + 1 - max(self._max_running - running, 0)
        if missing <= 0:
            return self._starts[False].seconds * (ahead + 1), 0
        # These prompts must end, and as many as run end in parallel. This is known even if room has only just become
        # short.
        ending = self._runs.value / max(running if lacking else self._max_running, 1)
        return max(self._starts[True].seconds, ending) * missing, missing

    def _check_tokens(self, tokens: int, own: int, tenant: str | None, about: str) -> None:
        """Check the limit on waiting tokens; `own` of them are the request's and will be replaced by these."""
        others = self.num_queued_tokens - own
        missing = others + tokens - self._max_queued_tokens
        if not others or missing <= 0:
            return
        held = self._account(tenant).tokens - own
        # A tenant's first prompt may have any size here too.
        more, excess = (tokens, missing) if held else (0, missing - tokens)
        if not self._is_owed(tenant, held, more, self._max_queued_tokens, excess):
            raise self._refusal(
                "queued_tokens",
                f"The service is full: {others} prompt tokens are waiting, and {about}{tokens} more would exceed "
                f"{self._max_queued_tokens} (max_num_queued_tokens).",
                "--max-num-queued-tokens",
                self._endings.seconds,
            )

    def _sum(self) -> str:
        return f"max_num_seqs ({self._max_running}) + max_num_queued_reqs ({self._max_queued})"

    @contextmanager
    def _counting(self, counts: bool = True) -> Iterator[None]:
        """Report why a request is refused, if the refusal counts."""
        try:
            yield
        except _Refusal as refusal:
            if counts:
                self._rejected(refusal.reason)
            raise

    def _refusal(self, reason: str, message: str, limit: str, seconds: float) -> _Refusal:
        wait = max(1, min(math.ceil(seconds), LONGEST_WAIT))
        message += f" Try again in {wait} s, or raise {limit}."
        return _Refusal(reason, message, wait)


class _Refusal(ApiError):
    """No room for a request. There may be room after this many seconds."""

    def __init__(self, reason: str, message: str, seconds: int):
        super().__init__(503, message, code=OVERLOADED, headers={"Retry-After": str(seconds)})
        self.reason = reason


class LocalReservation:
    """The slots of one request. Leaving its context releases all slots still held, however the request ended.
    `num_unfinished`: prompts that have not ended normally, also after the release."""

    def __init__(self, admission: Admission, tenant: str | None, prompts: int, tokens: int, *, crowded: bool = False):
        self._admission = admission
        self._tenant = tenant
        self._estimate = tokens
        self._tokens = [0] * prompts  # waiting tokens of each prompt, once known
        self._waits = [True] * prompts
        self._reserved = None if crowded else admission.now()
        self._began = [0.0] * prompts
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
            tokens = self._estimate + sum(self._tokens)
            self._admission.change(self._tenant, prompts=-sum(self._held), waiting=-sum(self._waits), tokens=-tokens)

    def measure(self, tokens: Sequence[int]) -> None:
        """Replace the estimate by each prompt's number of tokens. Raises ApiError: 503 if there are too many tokens."""
        self._admission.measure(self._tenant, self._estimate, sum(tokens))
        self._estimate, self._tokens = 0, list(tokens)

    async def measured(self, tokens: Sequence[int]) -> None:
        """The `measure` method that all kinds of slots have."""
        self.measure(tokens)

    def started(self, index: int) -> None:
        """A prompt's first token has come."""
        if self._waits[index] and not self._released:
            self._waits[index] = False
            self._began[index] = now = self._admission.now()
            prefill = None if self._reserved is None else now - self._reserved
            self._admission.started(self._tenant, self._tokens[index], prefill)
            self._tokens[index] = 0

    def progressed(self, index: int, tokens: int) -> None:
        """Record that this many of a prompt's tokens no longer wait; a larger number than are waiting means all of
        them."""
        if not self._released:
            tokens = min(tokens, self._tokens[index])
            self._admission.change(self._tenant, tokens=-tokens)
            self._tokens[index] -= tokens

    def finished(self, index: int) -> None:
        """A prompt's answers are complete; its slot is released."""
        if self._held[index] and not self._released:
            waited, tokens = self._waits[index], self._tokens[index]
            if not waited:
                self._admission.ran(self._admission.now() - self._began[index])
            self._held[index] = self._waits[index] = False
            self._tokens[index] = 0
            self.num_unfinished -= 1
            self._admission.change(self._tenant, prompts=-1, waiting=-waited, tokens=-tokens)
