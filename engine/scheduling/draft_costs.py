"""The time that a step takes for each further token. It decides how many drafts are worth their work."""

from __future__ import annotations

import math

# Weight of past steps after each new one: about the last hundred count.
_MEMORY = 0.98
# Share of a one-token step that a further token takes, until steps of several sizes were seen.
_FIRST_SHARE = 0.2
# Minimum spread of sizes (variance, tokens squared) from which a token's time can be determined.
_LEAST_SPREAD = 0.05
# A share above the initial one falls by this factor with each step that gives no information on it: an estimate that is
# too high ends all drafts, and without drafts no step could show that it is too high.
_FORGETTING = 0.997
# While sizes have too little spread, one step in this many has no drafts, so that sizes vary.
_PLAIN_EVERY = 8
# Draft only if the gain exceeds the cost by this factor: estimates are noisy.
_MARGIN = 1.25
# And by this much more for each further sequence of the step: a draft helps one request and delays the others.
_FOR_OTHERS = 0.25
# And by this factor if a wrong draft makes the next step larger.
_AGAIN = 1.5


class DraftCosts:
    """A line fitted to the last decoding steps: seconds = fixed + each * tokens, by least squares."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0
        self._share = _FIRST_SHARE
        self._alike = 0  # steps since sizes had enough spread

    def observe(self, tokens: int, seconds: float) -> None:
        """Count the time of a decoding step with this many tokens."""
        if tokens <= 0 or not 0.0 < seconds < math.inf:
            return
        self._weight = _MEMORY * self._weight + 1.0
        self._tokens = _MEMORY * self._tokens + tokens
        self._squares = _MEMORY * self._squares + tokens * tokens
        self._seconds = _MEMORY * self._seconds + seconds
        self._products = _MEMORY * self._products + tokens * seconds
        mean, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean * mean
        if self._weight < 4.0 or spread < _LEAST_SPREAD:
            self._share = min(self._share, max(_FORGETTING * self._share, _FIRST_SHARE))
            self._alike += 1
            return
        self._alike = 0
        each = (self._products / self._weight - mean * mean_seconds) / spread
        one = mean_seconds + each * (1.0 - mean)
        if one > 0.0:
            self._share = min(max(each / one, 0.01), 1.0)

    def seconds(self, tokens: int) -> float:
        """The time of a step with this many tokens. A step of one token takes 1."""
        return 1.0 + self._share * (tokens - 1)

    @property
    def wants_plain(self) -> bool:
        """Whether the next step should have no drafts: the last ones had too similar sizes to determine their cost."""
        return self._alike % _PLAIN_EVERY == _PLAIN_EVERY - 1

    @property
    def share(self) -> float:
        """The time of a further token."""
        return self._share


class DraftGain:
    """The expected tokens of a step and its expected time, as drafts are added to it. `again`: after a wrong draft, the
    next step computes the row's known tokens a second time."""

    def __init__(self, costs: DraftCosts | None, rows: int, *, again: bool = False):
        self._costs = costs  # costs of a step; None if every draft is worth its time
        self._tokens = rows  # decoding sequences of the step. Each row yields a token without drafts.
        self._margin = _MARGIN * (1.0 + _FOR_OTHERS * max(rows - 1, 0)) * (_AGAIN if again else 1.0)
        self._expected = float(rows)

    def is_worth(self, probability: float) -> bool:
        """Whether one more draft, which is right with this probability, increases the tokens of answers per second."""
        if self._costs is None:
            return True
        if self._costs.wants_plain:
            return False
        rate = self._expected / self._costs.seconds(self._tokens)
        return probability > self._margin * rate * self._costs.share

    def count(self, probability: float) -> None:
        """Count this draft as part of the step."""
        self._tokens += 1
        self._expected += probability


class DraftPlaces:
    """Counts of drafted tokens by their position in the drafts of a sequence."""

    def __init__(self) -> None:
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def count(self, drafted: int, accepted: int) -> None:
        """Record the number of drafts that a sequence had, and how many of the first ones were right."""
        missing = drafted - len(self._drafted)
        if missing > 0:
            self._drafted += [0] * missing
            self._accepted += [0] * missing
        for place in range(drafted):
            self._drafted[place] += 1
            self._accepted[place] += place < accepted

    @property
    def drafted(self) -> tuple[int, ...]:
        """Tokens that were drafted at each position."""
        return tuple(self._drafted)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Drafted tokens that were right, at each position."""
        return tuple(self._accepted)
