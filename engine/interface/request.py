"""Requests from callers: inputs and parameters, frozen and validated on entry.

Fields of `SamplingParams` that are None use the model's own default (`generation_config.json`), and without one the
value in the field's description. Names are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequestError
from engine.interface.adapters import AdapterInfo
from engine.interface.constraints import Constraint
from engine.interface.dry import MAX_BREAKER_LENGTH, MAX_BREAKERS, Dry
from engine.interface.pooling import Pooling, PoolingParams
from engine.interface.reasoning import ReasoningBudget, check_no_beams
from engine.interface.sampling_table import FILTERS, REQUESTED
from engine.interface.structured import StructuredOutputsParams
from engine.interface.token_sides import SIDES, Sides, asked_sides
from engine.interface.values import (
    IDS,
    MAX_INT,
    MAX_LISTED_IDS,
    NumberRange,
    brief,
    check_ids,
    check_number,
    check_words,
    fail,
)
from engine.interface.vision import PlacedImage, SeenImage

__all__ = [
    "BIAS_RANGE", "NUMBER_RANGES", "AudioInput", "Decoding", "EarlyStopping", "EngineInput", "PixelInput",
    "PoolingParams", "Request", "SamplingParams", "Seq2SeqInput", "TokenInput",
]  # fmt: skip

EarlyStopping = bool | Literal["never"]

MAX_SEED = 2**64 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PREDICTED = 1 << 20
MAX_PRIORITY = 2**31 - 1  # that of background requests

# The numeric fields of `SamplingParams`; those of the sampling table are declared there.
NUMBER_RANGES: Mapping[str, NumberRange] = {
    "max_tokens": NumberRange(low=1, integer=True),
    "min_tokens": NumberRange(low=0, integer=True),
    **{column.name: column.allowed for column in FILTERS if column.allowed is not None},
    "seed": NumberRange(low=-(2**63), high=MAX_SEED, integer=True),
    "n": NumberRange(low=1, integer=True, optional=False),
    **{name: column.allowed for name, column in REQUESTED.items() if column.use != "filter" and column.allowed},
    "dry_multiplier": NumberRange(low=0.0),
    "dry_base": NumberRange(low=1.0),
    "dry_allowed_length": NumberRange(low=0, integer=True),
    "dry_penalty_last_n": NumberRange(low=-1, integer=True),
    "truncate_prompt_tokens": NumberRange(low=-1, integer=True),
    "logprobs": NumberRange(low=0, high=MAX_LOGPROBS, integer=True),
    "prompt_logprobs": NumberRange(low=0, high=MAX_LOGPROBS, integer=True),
    "num_beams": NumberRange(low=1, integer=True),
    "length_penalty": NumberRange(),
    "no_repeat_ngram_size": NumberRange(low=0, integer=True),
    "encoder_repetition_penalty": NumberRange(low=0.0, open_low=True),
    "encoder_no_repeat_ngram_size": NumberRange(low=0, integer=True),
    "min_length": NumberRange(low=0, integer=True),
    "decoder_start_token_id": NumberRange(low=0, integer=True),
    "forced_bos_token_id": NumberRange(low=0, integer=True),
    "forced_eos_token_id": NumberRange(low=0, integer=True),
}
_SWITCHES = (
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "stream_beams", "renormalize_logits", "timestamps", "detokenize",
)  # fmt: skip
BIAS_RANGE = NumberRange(low=-100.0, high=100.0, optional=False)


@dataclass(frozen=True, slots=True)
class TokenInput:
    """A prompt as token ids.

    Attributes:
        token_ids: the ids, each in [0, vocabulary size).
        text: the original text, for information only.
        token_type_ids: the segment of each token, for encoders with segments; None: all are in the first.
        bbox: the box of each token on its page, for encoders that read boxes: [left, upper, right, lower] on a page of
            (for most models) 1000 by 1000; None: all are zeros.
        sides: other sides of the tokens by name (`engine.interface.token_sides`), one entry per token.
        images: the images whose vectors take the places of some tokens, in the order of these tokens.
    """

    token_ids: Sequence[int]
    text: str | None = None
    token_type_ids: Sequence[int] | None = None
    bbox: Sequence[Sequence[int]] | None = None
    sides: Mapping[str, Sequence[Any]] | None = None
    images: tuple[PlacedImage, ...] = ()

    @property
    def given(self) -> dict[str, Sequence[Any]]:
        """The sides that are set, by name.

        Raises:
            InvalidRequestError: a key of `sides` is not a name.
        """
        if self.sides is not None and not isinstance(self.sides, Mapping):
            message = f"sides must be a mapping of names to lists, got {brief(self.sides)}."
            raise InvalidRequestError(message, param="sides", code="invalid_value")
        fields = {side.name: getattr(self, side.param) for side in asked_sides() if side.param is not None}
        return {**(self.sides or {}), **{name: values for name, values in fields.items() if values is not None}}

    @classmethod
    def of(cls, token_ids: Sequence[int], text: str | None, sides: Mapping[str, Sequence[Any]]) -> TokenInput:
        """An input with these sides, each in its own field."""
        fields = {side.name: side.param for side in asked_sides() if side.param is not None}
        named: dict[str, Any] = {fields[name]: values for name, values in sides.items() if name in fields}
        return cls(token_ids, text, sides={k: v for k, v in sides.items() if k not in fields} or None, **named)

    def keeping(self, token_ids: Sequence[int], entries: Callable[[Sequence[Any]], Sequence[Any]]) -> TokenInput:
        """The input with other tokens; `entries` selects a side's entries for them."""
        return self.of(token_ids, self.text, {name: entries(values) for name, values in self.given.items()})

    def filled(self, token_ids: Sequence[int]) -> TokenInput:
        """The input with more tokens at its end, which have default sides."""
        more = {name: [SIDES[name].entry] * len(token_ids) for name in self.given}
        sides = {name: [*values, *more[name]] for name, values in self.given.items()}
        return self.of([*self.token_ids, *token_ids], self.text, sides)


@dataclass(frozen=True, slots=True)
class Seq2SeqInput:
    """An encoder's input, and optionally the start of the decoder's answer (encoder-decoder models)."""

    encoder_token_ids: Sequence[int]
    decoder_token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PixelInput:
    """An image as its preprocessor returns it: numbers [channels, height, width] (vision encoders), and optionally the
    start of the decoder's answer. `encoder_token_ids`: the text after the image, if the encoder reads one."""

    pixel_values: Any
    decoder_token_ids: Sequence[int] | None = None
    encoder_token_ids: Sequence[int] | None = None

    @property
    def signal(self) -> Any:
        """The array that the encoder reads."""
        return self.pixel_values


@dataclass(frozen=True, slots=True, eq=False)
class AudioInput:
    """Sound as its feature extractor returns it: numbers [mel bins, frames] (speech encoders), and optionally the start
    of the decoder's answer."""

    input_features: Any
    decoder_token_ids: Sequence[int] | None = None

    @property
    def signal(self) -> Any:
        """The array that the encoder reads."""
        return self.input_features


EngineInput = TokenInput | Seq2SeqInput | PixelInput | AudioInput | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The decoding parameters of one request.

    Attributes:
        max_tokens: maximum tokens to generate (default: the model's own, else 16).
        min_tokens: ban EOS and stop tokens until this many tokens were generated (0).
        temperature: softmax temperature; 0 means greedy. If it is set, the filters that a GGUF file gets from llama.cpp
            are off (1.0, or 0 if the model's `generation_config.json` has
            `do_sample: false`).
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose total probability reaches top_p (1.0).
        min_p: drop tokens that are less probable than min_p times the most probable one (0.0).
        top_n_sigma: drop tokens whose logits are more than this many standard deviations below the largest one
            (arXiv:2411.07641); 0 or -1: off.
        typical_p: keep the tokens whose information is closest to the expected value, until their total probability
            reaches typical_p (locally typical sampling, arXiv:2202.00666; 1.0).
        xtc_probability: probability of applying XTC ("exclude top choices") to a token: of all choices at or above
            xtc_threshold, keep only the least probable one (0.0).
        xtc_threshold: probability from which a token counts as a top choice for XTC (0.1); XTC does nothing above 0.5.
        seed: makes sampling reproducible, independent of other requests in the batch (default: random).
        n: number of answers.
        repetition_penalty: penalty for tokens that already occur in prompt or output, as in CTRL (arXiv:1909.05858;
            1.0).
        presence_penalty, frequency_penalty: OpenAI's, over the output only, in [-2, 2].
        dry_multiplier: subtracts dry_multiplier * dry_base ** (length - dry_allowed_length) from the logit of a token
            that would extend a repetition of that length in prompt and output (DRY, "don't repeat yourself"; 0.0).
        dry_base: growth of the DRY penalty per repeated token (1.75).
        dry_allowed_length: repetitions shorter than this have no DRY penalty (2).
        dry_penalty_last_n: number of latest tokens that DRY examines; -1 means all (-1).
        dry_sequence_breakers: texts at which repetitions end, at most 32 (["\\n", ":", "\\"", "*"]).
        logit_bias: token id -> value added to its logit, from -100 to 100.
        stop: strings that end the answer, at most 16; not allowed with beams.
        stop_token_ids: token ids that end the answer, in addition to the model's EOS.
        ignore_eos: treat the model's EOS as an ordinary token.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: vLLM's parameter. True: special tokens appear in the text as the tokenizer writes
            them. False is allowed only if they are left out.
        logprobs: report the log-probabilities of the chosen token and of this many most probable tokens.
        prompt_logprobs: the same for each token of the prompt.
        logprob_token_ids: also report the log-probabilities of these token ids, at most 128; implies logprobs.
        num_beams: use beam search with this many beams if above 1; temperature and filters then have no effect. A
            model's default number of beams does not apply to a request with a temperature above 0, with another filter
            that removes tokens, or with stop.
        length_penalty: a finished beam's score is its log-probability / length ** length_penalty (1.0).
        early_stopping: True, False or "never", as in `transformers` (False).
        no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and output (0: off).
        min_length: ban EOS until prompt and output together have this many tokens (0); min_tokens takes precedence, as
            in `transformers`.
        suppress_tokens: token ids that are never generated.
        begin_suppress_tokens: token ids that are not generated as the first token.
        allowed_token_ids: only these token ids are generated; at least one. The answer ends early only with an EOS or
            stop id among them, or with a stop string. Forced tokens are not restricted.
        bad_words_ids: sequences of token ids that never occur in the answer. A sequence of a single EOS id has no
            effect.
        bad_words: texts that never occur in the answer, at its beginning or after a space. Their tokens are banned as
            by bad_words_ids. At most 1024, of at most 1024 characters each.
        encoder_repetition_penalty: above 1 favours the tokens of the encoder's input, or of a decoder-only model's
            prompt; below 1 disfavours them (1.0).
        encoder_no_repeat_ngram_size: no n-gram of this size from the encoder's input, or from a decoder-only model's
            prompt, is generated (0: off).
        renormalize_logits: with beams, normalize scores to log-probabilities again after penalties and bans (False).
        decoder_start_token_id: first token of an encoder-decoder model's decoder.
        forced_bos_token_id: second token of a sequence whose prompt is a single token.
        forced_eos_token_id: last token if max_tokens is reached.
        stream_beams: report after each step which beams continue and which end; only for streamed beam searches.
        structured_outputs: format of the answer: a JSON schema, a choice, a regular expression or a grammar. The answer
            ends as soon as it is complete, even before min_tokens. An answer that max_tokens or a stop string cuts off
            is incomplete.
        reasoning_budget: maximum tokens of the answer's reasoning.
        constraint: {"catalogue": NAME}: the answer is one of the titles of that catalogue. Without max_tokens, the
            limit allows the longest title. An answer that max_tokens cuts off may not be a title.
        truncate_prompt_tokens: cut a longer prompt to its last N tokens. -1: keep as many as leave room for the answer.
        detokenize: convert the answer to text. False: texts are empty, and stop strings are not allowed.
        timestamps: speech models only: add the times of the spoken text to the answer, as tokens, by the rules of
            Whisper (arXiv:2212.04356).
        predicted_token_ids: token ids that the answer is expected to repeat, at most 1048576. They change only its
            speed: they are a source of draft tokens.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    seed: int | None = None
    n: int = 1
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    no_repeat_ngram_size: int | None = None
    min_length: int | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    bad_words: Sequence[str] | None = None
    encoder_repetition_penalty: float | None = None
    encoder_no_repeat_ngram_size: int | None = None
    renormalize_logits: bool | None = None
    decoder_start_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    stream_beams: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    reasoning_budget: ReasoningBudget | None = None
    constraint: Mapping[str, str] | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    timestamps: bool = False
    predicted_token_ids: Sequence[int] | None = None

    @property
    def uses_dry(self) -> bool:
        """Whether tokens that would continue a repetition get a penalty."""
        return bool(self.dry_multiplier) and self.dry_penalty_last_n != 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def __post_init__(self) -> None:
        for name, allowed in NUMBER_RANGES.items():
            check_number(name, getattr(self, name), allowed)
        check_ids("stop_token_ids", self.stop_token_ids)
        check_ids("suppress_tokens", self.suppress_tokens)
        check_ids("begin_suppress_tokens", self.begin_suppress_tokens)
        check_ids("logprob_token_ids", self.logprob_token_ids)
        if (count := len(self.logprob_token_ids or ())) > MAX_LOGPROB_TOKEN_IDS:
            fail("logprob_token_ids", f"logprob_token_ids may have at most {MAX_LOGPROB_TOKEN_IDS} ids, got {count}.")
        check_ids("allowed_token_ids", self.allowed_token_ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            fail("allowed_token_ids", "allowed_token_ids must hold at least one token id; leave it out to allow all.")
        check_words("bad_words_ids", self.bad_words_ids)
        check_ids("predicted_token_ids", self.predicted_token_ids, most=MAX_PREDICTED)
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "renormalize_logits" and value is None):
                fail(name, f"{name} must be true or false, got {brief(value)}.")
        if not (self.spaces_between_special_tokens or self.skip_special_tokens):
            fail(
                "spaces_between_special_tokens",
                "spaces_between_special_tokens must be true if skip_special_tokens is false: Octavo writes special "
                "tokens as the tokenizer does.",
            )
        early: Any = self.early_stopping
        if not (early is None or isinstance(early, bool) or early == "never"):
            fail("early_stopping", f'early_stopping must be true, false or "never", got {brief(early)}.')
        self._check_stop()
        _check_texts("dry_sequence_breakers", self.dry_sequence_breakers, MAX_BREAKERS, MAX_BREAKER_LENGTH)
        _check_texts("bad_words", self.bad_words, MAX_LISTED_IDS, MAX_STOP_LENGTH)
        if self.truncate_prompt_tokens == 0:
            fail("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, got 0.")
        self._check_bias()
        self._check_structured()
        self._check_budget()
        self._check_constraint()
        self._check_timestamps()
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            fail("min_tokens", f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).")
        if self.num_beams is not None and self.num_beams > 1:
            self._check_beams(self.num_beams)

    def _check_stop(self) -> None:
        if self.stop is None:
            return
        stop: Any = self.stop
        if not isinstance(stop, (str, Sequence)):
            fail("stop", f"stop must be a string or a list of strings, got {brief(self.stop)}.")
        strings = self.stop_strings
        if strings and not self.detokenize:
            fail("stop", "stop strings need text, and detokenize is false; use stop_token_ids.")
        if len(strings) > MAX_STOP_STRINGS:
            fail("stop", f"stop may have at most {MAX_STOP_STRINGS} strings, got {len(strings)}.")
        for text in strings:
            if not isinstance(text, str) or not text:
                fail("stop", f"stop must hold non-empty strings, got {brief(text)}.")
            if len(text) > MAX_STOP_LENGTH:
                fail("stop", f"a stop string may have at most {MAX_STOP_LENGTH} characters, got one of {len(text)}.")

    def _check_structured(self) -> None:
        given: Any = self.structured_outputs
        if given is None:
            return
        if not isinstance(given, StructuredOutputsParams):
            fail("structured_outputs", f"structured_outputs must be StructuredOutputsParams, got {brief(given)}.")
        if self.ignore_eos:
            fail("ignore_eos", "ignore_eos cannot be used with structured output, which ends where it is complete.")
        if self.allowed_token_ids is not None:
            fail("allowed_token_ids", "allowed_token_ids cannot be used with structured output, which allows others.")

    def _check_budget(self) -> None:
        budget: Any = self.reasoning_budget
        if budget is None:
            return
        if not isinstance(budget, ReasoningBudget):
            fail("reasoning_budget", f"reasoning_budget must be ReasoningBudget, got {brief(budget)}.")
        check_no_beams(self.num_beams)
        for other in ("allowed_token_ids", "constraint"):
            if getattr(self, other) is not None:
                fail(other, f"{other} cannot be used with reasoning_budget, which changes the allowed tokens itself.")

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        bias: Any = self.logit_bias
        if not isinstance(bias, Mapping):
            fail("logit_bias", f"logit_bias must map token ids to numbers, got {brief(self.logit_bias)}.")
        if len(bias) > MAX_LISTED_IDS:
            fail("logit_bias", f"logit_bias may have at most {MAX_LISTED_IDS} token ids, got {len(bias)}.")
        for token, value in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_INT:
                fail("logit_bias", f"logit_bias keys must be token ids ({IDS}), got {brief(token)}.")
            check_number("logit_bias", value, BIAS_RANGE)

    def _check_constraint(self) -> None:
        given: Any = self.constraint
        if given is None:
            return
        name = given.get("catalogue") if isinstance(given, Mapping) and len(given) == 1 else None
        if not isinstance(name, str) or not name:
            fail("constraint", f'constraint must be {{"catalogue": NAME}}, got {brief(given)}.')
        if self.ignore_eos:
            fail("ignore_eos", "ignore_eos cannot be used with constraint: answers end where a title does.")
        for other in ("allowed_token_ids", "forced_eos_token_id", "structured_outputs"):
            if getattr(self, other) is not None:
                fail(other, f"{other} cannot be used with constraint, which sets the allowed tokens itself.")

    def _check_timestamps(self) -> None:
        if not self.timestamps:
            return
        for other in ("allowed_token_ids", "structured_outputs", "constraint"):
            if getattr(self, other) is not None:
                fail(other, f"{other} cannot be used with timestamps, which set the allowed tokens themselves.")

    def _check_beams(self, num_beams: int) -> None:
        if self.n > num_beams:
            fail("n", f"n ({self.n}) must not exceed num_beams ({num_beams}) in beam search.")
        if self.stop is not None and self.stop_strings:
            fail(
                "stop",
                f"stop strings cannot be used with beam search (num_beams is {num_beams}); use stop_token_ids instead.",
            )


def _check_texts(name: str, given: Any, most: int, longest: int) -> None:
    if given is None:
        return
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        fail(name, f"{name} must be a list of strings, got {brief(given)}.")
    if len(given) > most:
        fail(name, f"{name} may have at most {most} strings, got {len(given)}.")
    for text in given:
        if not isinstance(text, str) or not text:
            fail(name, f"{name} must hold non-empty strings, got {brief(text)}.")
        if len(text) > longest:
            fail(name, f"each of {name} may have at most {longest} characters, got {len(text)}.")
        if any("\ud800" <= character <= "\udfff" for character in text):
            fail(name, f"{name} must hold valid Unicode, got {brief(text)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """`SamplingParams` with all defaults filled in for one prompt (see `engine.interface.generation.resolve`).

    `stop_ids` contains every id that ends a sequence: the model's EOS (unless ignored) and stop_token_ids; `eos_ids`
    contains only the model's EOS, which `min_length` bans. `constraint` is in its initial state, and sequences have
    forks of it. With `distinct_ends`, a beam that may end does so with the most probable of its possible end tokens,
    because others would give the same answer again. `prediction` holds tokens that the answer may repeat.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int = 0
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry: Dry | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    encoder_repetition_penalty: float = 1.0
    encoder_no_repeat_ngram_size: int = 0
    renormalize: bool = False
    forced_bos_token_id: int | None = None
    forced_eos_token_ids: tuple[int, ...] = ()
    stream_beams: bool = False
    constraint: Constraint | None = None
    distinct_ends: bool = False
    prediction: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Maximum rows of this request in one step."""
        return max(self.n, self.num_beams)

    def forced_after(self, num_tokens: int, num_output: int) -> tuple[int, ...]:
        """The only tokens that may come after this many tokens, of which this many belong to the answer; empty if any
        token may come."""
        if self.forced_eos_token_ids and num_output == self.max_tokens - 1:
            return self.forced_eos_token_ids
        if self.forced_bos_token_id is not None and num_tokens == 1:
            return (self.forced_bos_token_id,)
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An accepted request; do not modify it."""

    request_id: str  # the caller's id, unique among unfinished requests
    prompt_token_ids: tuple[int, ...]  # the prompt; for an encoder-decoder model, the beginning of the decoder's tokens
    decoding: Decoding  # the decoding parameters, with all defaults filled in
    # lower runs earlier (as in vLLM); ties by arrival. Between named tenants only MAX_PRIORITY has an effect.
    priority: int = 0
    cache_salt: str | None = None  # requests share cached pages only with requests with the same salt
    deadline: float | None = None  # `time.monotonic()` seconds after which the request is aborted, or None
    tenant: str | None = None  # the request's tenant; waiting tenants are served in turn. None counts as a tenant too.
    encoder_token_ids: tuple[int, ...] = ()  # the encoder's input, for an encoder-decoder model
    # the wanted results of the prompt's hidden states, instead of an answer; None for an answer
    pooling: Pooling | None = None
    # further values of each token of the prompt, besides its id
    sides: Sides = field(default_factory=dict, compare=False)
    # float32 encoder input instead of token ids; the token ids are then zeros, one for each position of the signal
    signal: NDArray[np.float32] | None = field(default=None, compare=False)
    adapter: AdapterInfo | None = None  # the request's adapter; None for the base model alone
    images: tuple[SeenImage, ...] = field(default=(), compare=False)  # those among the tokens of the prompt

    @property
    def is_background(self) -> bool:
        """Whether the request waits while a request of any client has prompt tokens to compute."""
        return self.priority >= MAX_PRIORITY

    @property
    def reach(self) -> int:
        """Maximum computed tokens of one sequence: the prompt's, and those of the longest answer except its last."""
        return len(self.prompt_token_ids) + (0 if self.pooling is not None else self.decoding.max_tokens - 1)
