"""Settings of speculative decoding. The form is vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from engine.errors import ConfigError
from engine.interface.json_settings import decoded

NAME = "speculative_config"
METHODS = ("ngram", "suffix", "off")
MOST_DRAFTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted.

    Attributes:
        method: ngram or suffix: the tokens that followed the longest earlier occurrence of the last tokens, in the
            prompt or the answer. off: none.
        num_speculative_tokens: maximum drafts of a sequence in a step.
    """

    method: Literal["ngram", "suffix", "off"] = "ngram"
    num_speculative_tokens: int = 8

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"{NAME}: method must be one of {', '.join(METHODS)}, got {self.method!r}.")
        number = self.num_speculative_tokens
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_DRAFTS:
            raise ConfigError(
                f"{NAME}: num_speculative_tokens must be an integer from 1 to {MOST_DRAFTS}, got {number!r}."
            )


_WITHOUT_EFFECT = ("prompt_lookup_min", "prompt_lookup_max")
"""vLLM's fields that do not change answers: Octavo always uses the longest match."""


def parse_speculative(given: Any) -> SpeculativeConfig:
    """The settings in a mapping, in a JSON object as text, or the method alone.

    Raises:
        ConfigError: it is none of these, or a setting in it is unknown or out of range.
    """
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        if given not in METHODS:
            raise ConfigError(f"{NAME} must be {', '.join(METHODS)} or a JSON object, got {given!r}.")
        given = {"method": given}
    values = {name: value for name, value in decoded(NAME, given).items() if name not in _WITHOUT_EFFECT}
    known = [field.name for field in fields(SpeculativeConfig)]
    for name in values:
        if name not in known:
            raise ConfigError(f"{NAME} has no field {name!r}; its fields are {', '.join(known)}.")
    return SpeculativeConfig(**values)
