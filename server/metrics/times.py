"""The times of one prompt's events."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine import RequestDelta


@dataclass(slots=True)
class PromptTimes:
    """The times of one prompt in the service. All times are seconds of `time.monotonic()`, which the engine's process
    shares.

    A preempted request waits again; that wait belongs to the phase that it interrupts.
    """

    arrival: float  # when the HTTP request arrived
    num_prompt: int
    num_answers: int
    num_cached: int = 0  # prompt tokens found in the prefix cache
    # num_drafted, num_accepted: tokens that were drafted for its answers, and those of them that came
    num_drafted: int = 0
    num_accepted: int = 0
    scheduled: float | None = None  # when a step first had room for it, which ends its queueing
    sampled: float | None = None  # when the engine knew its first token, which ends its prefill
    # first_token, last_token: when tokens arrived here; for beams, when they became certain
    first_token: float | None = None
    last_token: float | None = None
    generated: list[int] = field(init=False)
    reasons: list[str | None] = field(init=False)  # why each answer ended; None while it runs
    latest: list[float] = field(init=False)  # each answer's last token; negative if there is none yet

    def __post_init__(self) -> None:
        self.generated = [0] * self.num_answers
        self.reasons = [None] * self.num_answers
        self.latest = [-1.0] * self.num_answers

    def note(self, delta: RequestDelta) -> None:
        """Copy the times that the engine measured."""
        self.num_cached = max(self.num_cached, delta.num_cached_tokens)
        self.num_drafted += delta.num_draft_tokens
        self.num_accepted += delta.num_accepted_draft_tokens
        if self.scheduled is None:
            self.scheduled = delta.scheduled_time
        if self.sampled is None:
            self.sampled = delta.first_token_time

    @property
    def queue_seconds(self) -> float | None:
        """Seconds from arrival to the first step; None if there was no step."""
        return None if self.scheduled is None else max(0.0, self.scheduled - self.arrival)

    @property
    def prefill_seconds(self) -> float | None:
        """Seconds from the first step to the first token."""
        if self.scheduled is None or self.sampled is None:
            return None
        return max(0.0, self.sampled - self.scheduled)

    @property
    def decode_seconds(self) -> float | None:
        """Seconds from the first token to the last."""
        start = self.first_token if self.sampled is None else self.sampled
        if start is None or self.last_token is None:
            return None
        return max(0.0, self.last_token - start)
