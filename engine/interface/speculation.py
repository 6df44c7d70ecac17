"""Settings of speculative decoding. The form is vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from engine.errors import ConfigError
from engine.interface.json_settings import decoded

NAME = "speculative_config"
METHODS = ("ngram", "suffix", "draft_model", "mtp", "eagle3", "off")
_WITH_MODEL = ("draft_model", "eagle3")
MOST_DRAFTS = 32
_DEFAULT_COUNTS = {"mtp": 1, "eagle3": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The settings for drafting tokens."""

    # ngram: the tokens that followed the longest earlier occurrence of the last tokens, in the prompt or the answer.
    # suffix: also in earlier answers to requests of the same API key, cache salt and adapter; equally long occurrences
    # vote on each token. draft_model: the tokens of a small model. mtp: those of the model's own layer for multi-token
    # prediction. eagle3: those of a head that was trained for the model. off: none.
    method: Literal["ngram", "suffix", "draft_model", "mtp", "eagle3", "off"] = "ngram"
    model: str | None = None  # the folder, file or hub id of the small model or the head
    num_speculative_tokens: int = 8  # maximum drafts of a sequence in a step
    # 0: earlier answers are not kept. Otherwise as many are kept as there is room for.
    suffix_decoding_max_cached_requests: int = -1

    @property
    def keeps_answers(self) -> bool:
        """Earlier answers are a source of drafts."""
        return self.method == "suffix" and self.suffix_decoding_max_cached_requests != 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"{NAME}: method must be one of {', '.join(METHODS)}, got {self.method!r}.")
        if (self.method in _WITH_MODEL) != (self.model is not None):
            raise ConfigError(
                f"{NAME}: model names the draft model of the methods draft_model and eagle3, got method "
                f"{self.method!r} and model {self.model!r}."
            )
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ConfigError(f"{NAME}: model must be a folder, a file or a hub id, got {self.model!r}.")
        number = self.num_speculative_tokens
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_DRAFTS:
            raise ConfigError(
                f"{NAME}: num_speculative_tokens must be an integer from 1 to {MOST_DRAFTS}, got {number!r}."
            )
        kept = self.suffix_decoding_max_cached_requests
        if isinstance(kept, bool) or not isinstance(kept, int):
            raise ConfigError(f"{NAME}: suffix_decoding_max_cached_requests must be an integer, got {kept!r}.")


_WITHOUT_EFFECT = (
    "prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)  # fmt: skip
"""vLLM's fields that do not change answers: Octavo always uses the longest match, and learns how sure it is."""


def parse_speculative(given: Any) -> SpeculativeConfig:
    """The settings in a mapping, in a JSON object as text, or the method alone. Raises ConfigError if it is none of
    these, or a setting in it is unknown or out of range."""
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        alone = [method for method in METHODS if method not in _WITH_MODEL]
        if given not in alone:
            raise ConfigError(f"{NAME} must be {', '.join(alone)} or a JSON object, got {given!r}.")
        given = {"method": given}
    values = {name: value for name, value in decoded(NAME, given).items() if name not in _WITHOUT_EFFECT}
    if "model" in values:
        values.setdefault("method", "draft_model")
    if count := _DEFAULT_COUNTS.get(str(values.get("method"))):
        values.setdefault("num_speculative_tokens", count)
    known = [field.name for field in fields(SpeculativeConfig)]
    for name in values:
        if name not in known:
            raise ConfigError(f"{NAME} has no field {name!r}; its fields are {', '.join(known)}.")
    return SpeculativeConfig(**values)
