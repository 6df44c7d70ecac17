"""The outcome of each request as the clients saw it, and the server's counters that must agree with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from soaking.answers import Answer
from soaking.cases import Case

# refused: 503 at once; dead: 503 since there is no engine (any more); cut: an error ended the stream; left: closed by
# the client; stalled: reset by the server; wrong: an answer that may not be.
Fate = Literal["complete", "refused", "dead", "cut", "left", "stalled", "wrong"]
FATES: tuple[Fate, ...] = ("complete", "refused", "dead", "cut", "left", "stalled", "wrong")


@dataclass(slots=True)
class Ledger:
    """Sums over all requests for text and vectors.

    Attributes:
        fates: how many requests ended so.
        by_id: the fate of each request, and whether its answer had begun, by the id that the client gave it.
        ended: choices (and inputs) that have ended, by finish_reason.
        begun: choices of accepted requests that have not ended as far as the client knows; each must be counted.
        open: choices of requests that may have been accepted; each may be counted or not.
        prompts_left: prompts of requests that clients left or that may count as left.
        unheard: requests that were left before their answer began: refused, perhaps.
        bad: answers to malformed requests by name and status.
        bad_away: those that were answered 503 before what is wrong with them was seen, by code.
        violations: what may not be, in words.
    """

    fates: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    by_id: dict[str, tuple[Fate, bool]] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    begun: int = 0
    open: int = 0
    prompts_left: int = 0
    unheard: int = 0
    compared: int = 0
    tokens: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    bad_away: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def enter(self, request_id: str, case: Case, answer: Answer, fate: Fate) -> None:
        """A request is over."""
        self.fates[fate] += 1
        self.by_kind[case.name.partition("-")[0]] += 1
        if not (case.num_choices or case.num_inputs):
            return  # counted nowhere
        accepted = answer.streamed and answer.status == 200
        self.by_id[request_id] = (fate, accepted)
        if fate == "complete" and not case.num_choices:
            self.ended["stop"] += case.num_inputs
        elif fate != "refused":
            reasons = [choice.finish_reason for choice in answer.choices.values() if choice.finish_reason]
            self.ended.update(reasons)
            unended = max(0, (case.num_choices or case.num_inputs) - len(reasons))
            self.begun += unended if accepted else 0
            self.open += unended if fate != "complete" and not accepted else 0
        self.tokens += sum(len(choice.token_ids) for choice in answer.choices.values())
        if fate in ("left", "wrong"):
            self.prompts_left += case.num_prompts
            self.unheard += answer.status == 0

    def violate(self, line: str) -> None:
        """Something was seen that may not be."""
        self.violations.append(line)
