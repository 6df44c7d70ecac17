"""Tokens that are expected to follow a sequence, so that a step may check several of them at once.

Drafts change no answer (`engine.scheduling.row`), only the number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from engine.interface.constraints import Constraint, Forcing
from engine.interface.request import Request
from engine.interface.sampling_table import mask_words
from engine.scheduling.draft_costs import DraftGain
from engine.scheduling.earlier_answers import EarlierAnswers
from engine.scheduling.ngram import Drafting, NgramIndex, Prediction
from engine.scheduling.sequence import Sequence, SequenceGroup

# Drafts that are right less often than this are left out, even if costs do not limit drafts.
_HOPELESS = 0.1


Wanted = tuple[SequenceGroup, Sequence, int]
"""A sequence that may have so many drafts."""


class Drafter(Protocol):
    """The source of expected tokens: a small model, or known texts."""

    def prepare(self, wanted: Seq[Wanted], gain: DraftGain) -> bool:
        """Find the drafts of all sequences for which a step may draft. Returns whether this took time that is the same
        for any number of drafts. `gain`: the gain of drafts in this step, a copy of the caller's own."""

    def serves(self, request: Request) -> bool:
        """Whether there may be drafts for the answers to this request."""

    def propose(self, request: Request, sequence: Sequence, most: int) -> tuple[Seq[int], float]:
        """Tokens that are likely to follow an answer and its prompt, both of which are known. Also, for each token, the
        probability that it is right if all tokens before it are. `most`: the maximum number of tokens that are used."""

    def ended(self, request: Request, sequence: Sequence) -> None:
        """An answer to the request has ended."""


class TextDrafter:
    """Drafts from known texts (`engine.scheduling.ngram`)."""

    def __init__(self, most: int, *, own: bool = True, earlier: EarlierAnswers | None = None):
        self._most = most  # maximum drafts of a sequence in a step
        # each sequence's own tokens are among the texts. Otherwise only requests with a prediction have drafts.
        self._own = own
        # answers that ended are kept here, and are among the texts of later requests of the same scope
        self._earlier = earlier

    def serves(self, request: Request) -> bool:
        """Each request has its own tokens."""
        return self._own or bool(request.decoding.prediction)

    def prepare(self, wanted: Seq[Wanted], gain: DraftGain) -> bool:
        """Known texts need no preparation."""
        return False

    def propose(self, request: Request, sequence: Sequence, most: int) -> tuple[Seq[int], float]:
        """The tokens that followed the longest earlier occurrence of the last tokens."""
        if not isinstance(sequence.drafting, Drafting):
            sequence.drafting = self._begin(request, sequence)
        if self._earlier is not None:
            sequence.drafting.earlier = self._earlier.of(request)
        guess, rate = sequence.drafting.guess(sequence.tokens.view(), min(most, self._most))
        return (guess, rate) if rate > _HOPELESS else ((), rate)

    def _begin(self, request: Request, sequence: Sequence) -> Drafting:
        predicted = request.decoding.prediction
        return Drafting(
            index=NgramIndex() if self._own else None,
            prediction=Prediction(np.array(predicted, dtype=np.int32)) if predicted else None,
            answer_at=sequence.num_prompt,
            votes=self._earlier is not None,
        )

    def ended(self, request: Request, sequence: Sequence) -> None:
        """Keep the answer for later requests, if that is set."""
        if self._earlier is not None:
            self._earlier.add(request, sequence.tokens.view(sequence.num_prompt))


def drafts_of(
    drafter: Drafter, group: SequenceGroup, sequence: Sequence, most: int, gain: DraftGain
) -> tuple[int, ...]:
    """The tokens that the drafter expects for a sequence whose tokens are all known, as far as they are possible and
    worth their time. Drafts stop before a token that ends an answer, and before one that a constraint excludes: after
    an excluded token, a mask does not say what may follow."""
    decoding = group.request.decoding
    most = min(most, decoding.max_tokens - 1 - sequence.num_output)  # there is nothing to check the last token for
    if most <= 0:
        return ()
    proposed, rate = drafter.propose(group.request, sequence, most)
    drafts: list[int] = []
    right = 1.0
    for token in proposed[:most]:
        if token in decoding.stop_ids:
            break
        right *= rate
        if not gain.is_worth(right):
            break
        if sequence.constraint is not None:
            mask = sequence.mask
            forced = decoding.forced_after(sequence.num_tokens, sequence.num_output)
            if mask is not None and not forced and not _allows(mask, token):
                break
            sequence = sequence.gone_on(decoding, token)
        gain.count(right)
        drafts.append(token)
    return tuple(drafts)


def forced_drafts(group: SequenceGroup, sequence: Sequence, most: int) -> tuple[int, ...]:
    """The tokens that a sequence's constraint forces next, if all its tokens are known. They are certain. As drafts
    they are computed in one step, and each gets its log-probability."""
    decoding, constraint = group.request.decoding, sequence.constraint
    most = min(most, decoding.max_tokens - 1 - sequence.num_output)
    if most <= 0 or constraint is None or not isinstance(constraint, Forcing):
        return ()
    drafts: list[int] = []
    for place, token in enumerate(constraint.forced()[:most]):
        other = decoding.forced_after(sequence.num_tokens + place, sequence.num_output + place)
        if token in decoding.stop_ids or other:
            break
        drafts.append(token)
    return tuple(drafts)


def _allows(constraint: Constraint, token: int) -> bool:
    if constraint.is_complete:
        return False
    row = np.zeros(mask_words(constraint.vocab_size), dtype=np.uint32)
    constraint.fill(row)
    return bool(row[token // 32] >> (token % 32) & 1)
