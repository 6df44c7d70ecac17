"""A sequence's part in a step: the tokens that are computed, and the last of them, whose logits are sampled.

A row may end with drafted tokens, which are expected to follow and may be wrong. Then all positions from the last known
token on are sampled, each as if the drafts before it were right, with the random number, bans, penalties and masks of
its position. As long as the sampled token equals the drafted one, the next position counts. So the answer does not
depend on the drafts, and a step yields 1 to k + 1 of its tokens (speculative decoding, arXiv:2211.17192, with sampled
tokens compared instead of distributions).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.scheduling.sequence import Sequence, SequenceGroup


@dataclass(frozen=True, slots=True)
class RowState:
    """State slots of a row (`engine.scheduling.state_slots`)."""

    # source, target: the slot of the state before its first token, which it reads, and of the one after its last token,
    # which it writes
    source: int
    target: int
    snapshot: int = 0  # the slot of the state after its first `after` tokens, which it also writes; 0 for none
    after: int = 0


@dataclass(slots=True)
class Row:
    """`count` tokens of a sequence from `start` on. Immutable, except for `belong`, and for `state` while it is
    planned."""

    group: SequenceGroup
    sequence: Sequence
    start: int
    count: int
    # how many of the last positions are sampled: none if known tokens are left, else one, plus one per draft
    sampled: int
    num_releases: int = 0  # the sequence's `num_releases` when this was planned
    drafts: tuple[int, ...] = ()  # the row's last tokens, which are not known but expected
    state: RowState | None = None  # where its sequence's states are, if the model's layers have any

    @property
    def is_void(self) -> bool:
        """Whether the sequence has ended or was preempted since, so that the result of this row is dropped."""
        return self.num_releases != self.sequence.num_releases

    def belong(self, sequence: Sequence) -> None:
        """Set the search beam that this row belongs to, which is now known."""
        self.sequence, self.num_releases = sequence, sequence.num_releases

    @property
    def num_output(self) -> int:
        """Tokens of the answer before the last one that is sampled here; not all of them need be known."""
        return self.start + self.count - self.sequence.num_prompt

    @property
    def scored(self) -> range:
        """Positions whose next token is known but still needs its log-probability: those of a prompt."""
        group = self.group
        if group.request.decoding.prompt_logprobs is None or group.started:
            return range(0)
        # The token after position p has entry p + 1; entries known before a preemption are not computed again.
        first = max(self.start, len(group.prompt_logprobs) - 1)
        return range(first, max(first, min(self.start + self.count, self.sequence.num_prompt - 1)))

    def drafting(self, drafts: tuple[int, ...]) -> Row:
        return replace(self, count=self.count + len(drafts), sampled=1 + len(drafts), drafts=drafts)

    def keeping(self, count: int) -> Row:
        """The part of this row that has become its sequence's: the first `count` of its drafts, and all tokens
        before."""
        less = len(self.drafts) - count
        return replace(self, count=self.count - less, sampled=self.sampled - less, drafts=self.drafts[:count])

    def positions(self) -> list[Row]:
        """A row for each sampled position. Such a row has no drafts; its sequence has continued with the drafts before
        that position."""
        rows = [self.keeping(0)]
        for number, token in enumerate(self.drafts, start=1):
            sequence = rows[-1].sequence.gone_on(self.group.request.decoding, token)
            rows.append(replace(rows[0], sequence=sequence, count=rows[0].count + number))
        return rows
