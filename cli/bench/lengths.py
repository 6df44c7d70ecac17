"""Lengths in tokens: fixed, from a range, or from a distribution."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from cli.errors import OptionError

FORMS = "N, LOW:HIGH, normal:MEAN:STD or lognormal:MEDIAN:SIGMA"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Draws lengths of at least 1. `highest`: the longest possible length; None if there is no limit."""

    text: str
    draw: Callable[[random.Random], int]
    highest: int | None


def parse_lengths(text: str, option: str) -> Lengths:
    """Parse a length: "128", "64:256" (uniform, both ends included), "normal:200:50" or "lognormal:200:0.8" (median,
    and standard deviation of the logarithm). Raises OptionError: names the option and the problem."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "normal":
            mean, std = map(float, rest.split(":"))
            if not (mean > 0 and std >= 0 and math.isfinite(mean + std)):
                raise ValueError
            return Lengths(text, lambda rng: max(1, round(rng.gauss(mean, std))), None)
        if kind == "lognormal":
            median, sigma = map(float, rest.split(":"))
            if not (median > 0 and 0 <= sigma <= 10 and math.isfinite(median)):
                raise ValueError
            return Lengths(text, lambda rng: max(1, round(rng.lognormvariate(math.log(median), sigma))), None)
        low, high = (int(kind), int(rest)) if rest else (int(text), int(text))
    except ValueError:
        raise OptionError(f"{option} must be {FORMS}, got {text!r}.") from None
    if not 1 <= low <= high:
        raise OptionError(f"{option}: lengths must be at least 1 and LOW at most HIGH, got {text!r}.")
    if low == high:
        return Lengths(text, lambda rng: low, high)
    return Lengths(text, lambda rng: rng.randint(low, high), high)
