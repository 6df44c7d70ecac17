"""DRY ("don't repeat yourself"), as a request sets it: a penalty on tokens that would continue a repetition.

It works as in llama.cpp and text-generation-webui. If the last `allowed_length` or more tokens occurred earlier, the
token that followed them there loses `multiplier * base ** (length - allowed_length)` of its logit. Repetitions end at
sequence breakers, such as the end of a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
MAX_BREAKERS = 32
MAX_BREAKER_LENGTH = 64  # characters
DEFAULT_BASE = 1.75
DEFAULT_ALLOWED_LENGTH = 2


@dataclass(frozen=True, slots=True)
class Breakers:
    """The token sequences at which repetitions end."""

    # for each token in which a breaker begins, the tokens that must follow; () for a token that contains a whole
    # breaker
    tails: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    longest: int = 0  # maximum tokens of a tail


@dataclass(frozen=True, slots=True, kw_only=True)
class Dry:
    """`SamplingParams.dry_*` with all defaults filled in. `last_n`: number of latest tokens that are examined; -1: all
    of prompt and output."""

    multiplier: float
    base: float = DEFAULT_BASE
    allowed_length: int = DEFAULT_ALLOWED_LENGTH
    last_n: int = -1
    breakers: Breakers = field(default_factory=Breakers)
