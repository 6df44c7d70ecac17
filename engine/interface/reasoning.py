"""A limit on the reasoning of an answer: after this many tokens, a short sentence and the closing mark must follow.

It is a constraint: every fork of a sequence counts its own tokens, and the count survives a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.interface.constraints import Constraint, Failing, Forcing, allow
from engine.interface.sampling_table import MaskRow
from engine.interface.values import NumberRange, check_ids, check_number, fail

_TOKENS = NumberRange(low=0, integer=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningBudget:
    """A limit on the reasoning of an answer.

    Attributes:
        tokens: maximum reasoning tokens, without the marks around them and the last words.
        open: the tokens of the opening mark.
        close: the token of the closing mark.
        last_words: tokens before the closing mark if the limit ends the reasoning.
        begun: whether the prompt has opened reasoning.
    """

    tokens: int
    open: tuple[int, ...]
    close: int
    last_words: tuple[int, ...] = ()
    begun: bool = False

    def __post_init__(self) -> None:
        check_number("reasoning_budget", self.tokens, _TOKENS)
        check_ids("reasoning_budget", self.ids)
        if not self.open:
            fail("reasoning_budget", "reasoning_budget must name the tokens that open reasoning.")

    @property
    def ids(self) -> list[int]:
        """All tokens that it contains."""
        return [*self.open, self.close, *self.last_words]


def check_no_beams(num_beams: int | None) -> None:
    """Refuse a limit for beams, whose scores would include words that were forced. Raises InvalidRequestError if there
    are several beams."""
    if num_beams is not None and num_beams > 1:
        message = f"reasoning_budget cannot be used with beam search (num_beams is {num_beams}); leave one of them out."
        fail("reasoning_budget", message)


class LimitedReasoning:
    """The constraint. Other constraints of the answer apply beside it. `vocab_size`: the number of tokens."""

    __slots__ = ("_budget", "_forced", "_inside", "_left", "_tail", "inner", "vocab_size")

    def __init__(self, budget: ReasoningBudget, vocab_size: int, inner: Constraint | None = None):
        self._budget, self.vocab_size, self.inner = budget, vocab_size, inner
        self._left = budget.tokens
        self._inside = budget.begun
        self._forced: tuple[int, ...] = ()  # tokens that must come now
        self._tail: tuple[int, ...] = ()  # the last tokens, while the opening mark is searched
        self._limit()

    @property
    def is_free(self) -> bool:
        """Whether any token may come, so that no mask is needed."""
        return not self._forced and self.inner is None

    @property
    def is_complete(self) -> bool:
        """Whether only the end of the answer may follow."""
        return not self._forced and self.inner is not None and self.inner.is_complete

    @property
    def problem(self) -> str | None:
        """The reason why the inner constraint cannot continue; None if it can."""
        return self.inner.problem if isinstance(self.inner, Failing) else None

    def accept(self, token: int) -> None:
        """Continue the answer with this token."""
        if self.inner is not None:
            self.inner.accept(token)
        self.pass_by(token)

    def pass_by(self, token: int) -> None:
        """Continue the answer with a token that is not passed to `inner`."""
        if token == self._budget.close:
            self._inside, self._forced, self._tail = False, (), ()
        elif self._forced:
            self._forced = self._forced[1:]
        elif self._inside:
            self._left -= 1
            self._limit()
        else:
            self._tail = (*self._tail, token)[-len(self._budget.open) :]
            if self._tail == self._budget.open:
                self._inside, self._tail = True, ()
                self._limit()

    def fill(self, mask_row: MaskRow) -> None:
        """Write which tokens may come next."""
        if self._forced:
            allow(mask_row, self._forced[:1])
        elif self.inner is not None:
            self.inner.fill(mask_row)
        else:
            mask_row[:] = ~mask_row

    def forced(self) -> Sequence[int]:
        """The tokens that must come, in order."""
        if self._forced:
            return self._forced
        return self.inner.forced() if isinstance(self.inner, Forcing) and not self._inside else ()

    def fork(self) -> LimitedReasoning:
        """A copy of the state that develops independently."""
        fork = LimitedReasoning(self._budget, self.vocab_size, None if self.inner is None else self.inner.fork())
        fork._left, fork._inside, fork._forced, fork._tail = self._left, self._inside, self._forced, self._tail
        return fork

    def _limit(self) -> None:
        if self._inside and self._left <= 0:
            # Reasoning that begins again, or may not begin at all, ends without the last words.
            words = self._budget.last_words if self._left == 0 and self._budget.tokens else ()
            self._left = -1
            self._forced = (*words, self._budget.close)
