"""The model's own decoding defaults, and the completion of a request's parameters with them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import InvalidRequestError, ModelLoadError
from engine.interface.constraints import AllowedTokens, Constraint
from engine.interface.dry import DEFAULT_ALLOWED_LENGTH, DEFAULT_BASE, Breakers, Dry
from engine.interface.outputs import EngineInfo, SpeechInfo
from engine.interface.request import Decoding, SamplingParams
from engine.interface.sampling_table import FILTERS, REQUESTED
from engine.interface.speech import Vocabulary, read_speech
from engine.interface.values import brief

logger = logging.getLogger("octavo.generation")

DEFAULT_MAX_TOKENS = 16
CHAT_ROOM = 256
"""Tokens that `truncate_prompt_tokens=-1` keeps free for an answer in a conversation without max_tokens."""

# Supported fields, besides EOS.
_HONOURED = (
    *(name for name, column in REQUESTED.items() if column.allowed is not None and column.allowed.optional),
    "num_beams",
    "length_penalty",
    "early_stopping",
    "no_repeat_ngram_size",
    "min_length",
    "min_new_tokens",
    "max_length",
    "max_new_tokens",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "renormalize_logits",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "do_sample",
)
_ID_FIELDS = ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")
# Unsupported fields that would change the answer, with their neutral values.
_NOT_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1, 1.0),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "constraints": ([],),
    "force_words_ids": ([],),
    "remove_invalid_values": (False,),
    "watermarking_config": ({},),
    "stop_strings": ([], ""),
    "max_time": (),
    "dola_layers": (),
    "token_healing": (False,),
    "num_return_sequences": (1,),
    # Only in GGUF files (`engine.model.gguf.sampling`).
    "mirostat": (0,),
    "penalty_last_n": (-1,),
    "sampling_sequence": (),
}
FALLBACK = "sampling_fallback"
"""The field of a GGUF file's `generation_config.json` with llama.cpp's defaults."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """A checkpoint's defaults for decoding."""

    # the supported fields of `generation_config.json` that are set
    values: Mapping[str, Any] = field(default_factory=dict)
    # values of further fields, for requests without a temperature
    fallback: Mapping[str, Any] = field(default_factory=dict)
    eos_ids: frozenset[int] = frozenset()  # token ids that end a sequence
    ignored: tuple[str, ...] = ()  # unsupported fields that would change the answer
    decoder_start_token_id: int | None = None  # the first token of an encoder-decoder model's decoder
    speech: SpeechInfo | None = None  # the special tokens of a speech model

    def as_params(self) -> SamplingParams:
        """The parameters of a request that asks for these defaults."""
        names = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}
        known = {item.name for item in fields(SamplingParams)}
        given = {names.get(name, name): value for name, value in {**self.fallback, **self.values}.items()}
        if given.get("do_sample") is False:
            given["temperature"] = 0.0
        ends = given.get("forced_eos_token_id")
        if isinstance(ends, list):  # a request names one
            given["forced_eos_token_id"] = ends[0] if len(ends) == 1 else None
        return SamplingParams(**{name: value for name, value in given.items() if name in known})


def load_defaults(
    path: Path,
    hf_config: Any,
    vocab_size: int,
    *,
    honour: bool = True,
    load_vocabulary: Callable[[], Vocabulary | None] = lambda: None,
) -> GenerationDefaults:
    """Defaults from a checkpoint folder: `generation_config.json`, or without that file the same fields of
    `config.json`, as in `transformers`. Raises ModelLoadError if the file is not a JSON object, or contains an invalid
    value.

    Args:
        vocab_size: ids outside the vocabulary are dropped with a warning.
        honour: False keeps only the EOS ids and a speech model's special tokens.
        load_vocabulary: see `read_speech`.
    """
    source = path / "generation_config.json"
    if not source.exists():
        source = path / "config.json"
    try:
        stored = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{source} cannot be read: {error}") from error
    if not isinstance(stored, dict):
        raise ModelLoadError(f"{source} must hold a JSON object, found {type(stored).__name__}.")
    eos = stored.get("eos_token_id")
    if eos is None:
        eos = getattr(hf_config, "eos_token_id", None)
    eos_ids = frozenset(_known_ids("eos_token_id", _ids(eos), vocab_size))
    starts = [
        stored.get("decoder_start_token_id"),
        getattr(hf_config, "decoder_start_token_id", None),
        stored.get("bos_token_id"),
        getattr(hf_config, "bos_token_id", None),
    ]
    # A list has the start of each input of a batch; a single id applies to all.
    starts = [i[0] if isinstance(i, list) and len(i) == 1 else i for i in starts]
    start = next((i for i in starts if type(i) is int and 0 <= i < vocab_size), None)
    speech = read_speech(stored, vocab_size, hf_config, load_vocabulary, honour=honour)
    if not honour:
        return GenerationDefaults(eos_ids=eos_ids, decoder_start_token_id=start, speech=speech)
    ignored = [
        name
        for name, neutral in _NOT_IMPLEMENTED.items()
        if stored.get(name) is not None and stored[name] not in neutral and name not in _HONOURED
    ]
    if stored.get("do_sample") and (stored.get("num_beams") or 1) > 1:
        ignored.append("do_sample with num_beams")
    if ignored:
        logger.warning(
            "%s sets %s, which Octavo does not implement: answers may differ from those of transformers",
            source.name,
            ", ".join(f"{name}={stored.get(name)!r}" if name in stored else name for name in ignored),
        )
    values = {name: stored[name] for name in _HONOURED if stored.get(name) is not None}
    _check_values(values, source)
    for name in _ID_FIELDS:
        if name in values:
            known = _known_ids(name, _ids(values.pop(name)), vocab_size)
            if known:
                values[name] = known[0] if name == "forced_bos_token_id" else known
    if "bad_words_ids" in values:
        known_ids = set(_known_ids("bad_words_ids", {i for word in values["bad_words_ids"] for i in word}, vocab_size))
        values["bad_words_ids"] = [word for word in values["bad_words_ids"] if known_ids.issuperset(word)]
    return GenerationDefaults(
        values=values,
        fallback=stored.get(FALLBACK) or {},
        eos_ids=eos_ids,
        ignored=tuple(ignored),
        decoder_start_token_id=start,
        speech=speech,
    )


def log_fallback(defaults: GenerationDefaults) -> None:
    """Log in one line which sampling defaults are not the model's own."""
    if defaults.fallback:
        logger.info(
            "The GGUF file has no default for %s. Requests that set no temperature use llama.cpp's: %s. "
            "--generation-config none turns these off.",
            " and ".join(", ".join(defaults.fallback).rsplit(", ", 1)),
            ", ".join(f"{name} {value:g}" for name, value in defaults.fallback.items()),
        )


def _check_values(values: Mapping[str, Any], source: Path) -> None:
    names = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens", "max_length": "min_length"}
    for name, value in values.items():
        given: dict[str, Any] = {names.get(name, name): value}
        if name == "do_sample":
            given = {"ignore_eos": value}  # any boolean is allowed
        elif name in _ID_FIELDS:
            listed = value if isinstance(value, list) else [value]
            given = {"stop_token_ids": [i for i in listed if i != -1]}  # -1 means none
        elif name == "bad_words_ids" and isinstance(value, list):
            for word in value:  # a model's own list may be longer than a request's
                _check_values({"bad_words_ids": (word,)}, source)
            continue
        try:
            SamplingParams(**given)
        except InvalidRequestError as error:
            raise ModelLoadError(
                f"{source} sets {name} to {value!r}, which is invalid: {error} Correct the file, or ignore it with "
                f"--generation-config none."
            ) from error


def _known_ids(name: str, ids: Iterable[int], vocab_size: int) -> list[int]:
    """The ids within the vocabulary; published files contain others, such as -1 for none."""
    listed = sorted(ids)
    unknown = [i for i in listed if not 0 <= i < vocab_size and i != -1]
    if unknown:
        last = vocab_size - 1
        logger.warning("%s contains ids %s, but the vocabulary has ids 0 to %d: they are ignored", name, unknown, last)
    return [i for i in listed if 0 <= i < vocab_size]


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    try:
        return frozenset(int(i) for i in (value if isinstance(value, (list, tuple)) else [value]))
    except (TypeError, ValueError) as error:
        raise ModelLoadError(
            f"The model's generation_config.json or config.json contains {value!r} instead of token ids. Correct the "
            f"file."
        ) from error


def resolve(
    params: SamplingParams,
    defaults: GenerationDefaults,
    *,
    prompt_len: int,
    max_model_len: int,
    vocab_size: int,
    random_seed: int,
    prompt_name: str = "prompt",
    constraint: Constraint | None = None,
    breakers: Breakers | None = None,
) -> Decoding:
    """Complete a request's parameters with the model's defaults and check them against its limits. Raises
    InvalidRequestError: prompt and answer do not fit, an id is outside the vocabulary, or values contradict each other.

    Args:
        constraint: the constraint for `structured_outputs`.
        breakers: `dry_sequence_breakers` as tokens; None for none.
        prompt_len: tokens before the answer; for an encoder-decoder model, the decoder's.
    """
    for name, instead in (("bad_words", "bad_words_ids"), ("truncate_prompt_tokens", "a prompt that is short enough")):
        if getattr(params, name):
            raise InvalidRequestError(
                f"{name} works in LLM and over HTTP only; the engine has no tokenizer and needs {instead}.", param=name
            )
    # A request with a temperature chooses its filters itself.
    values = defaults.values if params.temperature is not None else {**defaults.fallback, **defaults.values}

    def pick(name: str, given: Any, otherwise: Any) -> Any:
        return given if given is not None else values.get(name, otherwise)

    max_tokens = _max_tokens(params, values, prompt_len, max_model_len, prompt_name)
    num_beams = _num_beams(params, values)
    min_tokens = min(int(values.get("min_new_tokens", 0)), max_tokens)
    if params.min_tokens is not None:
        min_tokens = params.min_tokens
    # As in `transformers`, a minimum length of the output replaces one of prompt and output together.
    by_output = params.min_tokens is not None or "min_new_tokens" in values
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens}).", param="min_tokens"
        )
    sampled = values.get("do_sample") is not False
    for name, ids in (
        ("logit_bias", params.logit_bias or ()),
        ("stop_token_ids", params.stop_token_ids or ()),
        ("suppress_tokens", params.suppress_tokens or ()),
        ("begin_suppress_tokens", params.begin_suppress_tokens or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logprob_token_ids", params.logprob_token_ids or ()),
        ("bad_words_ids", [i for word in params.bad_words_ids or () for i in word]),
        ("reasoning_budget", () if params.reasoning_budget is None else params.reasoning_budget.ids),
        ("predicted_token_ids", params.predicted_token_ids or ()),
        ("forced_bos_token_id", (params.forced_bos_token_id,)),
        ("forced_eos_token_id", (params.forced_eos_token_id,)),
    ):
        check_ids(name, [i for i in ids if i is not None], vocab_size)
    numbers: dict[str, Any] = {
        name: (float if column.kind is np.float32 else int)(pick(name, getattr(params, name), column.neutral))
        for name, column in REQUESTED.items()
    }
    numbers["top_k"], numbers["top_n_sigma"] = max(numbers["top_k"], 0), max(numbers["top_n_sigma"], 0.0)
    # As in `transformers`, tokens that are forced at the end are not banned.
    endings = set() if params.ignore_eos else {(i,) for i in defaults.eos_ids}
    words = (tuple(word) for word in pick("bad_words_ids", params.bad_words_ids, ()))
    return Decoding(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        prediction=tuple(params.predicted_token_ids or ()),
        **(numbers | {"temperature": numbers["temperature"] if sampled or params.temperature else 0.0}),
        seed=random_seed if params.seed is None else params.seed,
        n=params.n,
        dry=_dry(params, breakers or Breakers()) if params.uses_dry else None,
        logit_bias=tuple((int(t), float(v)) for t, v in (params.logit_bias or {}).items()),
        stop_ids=frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else defaults.eos_ids),
        eos_ids=defaults.eos_ids,
        logprobs=0 if params.logprobs is None and params.logprob_token_ids else params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logprob_token_ids=tuple(params.logprob_token_ids or ()),
        num_beams=num_beams,
        length_penalty=float(pick("length_penalty", params.length_penalty, 1.0)),
        early_stopping=pick("early_stopping", params.early_stopping, False),
        no_repeat_ngram_size=int(pick("no_repeat_ngram_size", params.no_repeat_ngram_size, 0)),
        min_length=0 if params.ignore_eos or by_output else int(pick("min_length", params.min_length, 0)),
        suppress_tokens=tuple(pick("suppress_tokens", params.suppress_tokens, ())),
        begin_suppress_tokens=tuple(pick("begin_suppress_tokens", params.begin_suppress_tokens, ())),
        bad_words=tuple(word for word in words if word not in endings),
        encoder_repetition_penalty=float(pick("encoder_repetition_penalty", params.encoder_repetition_penalty, 1.0)),
        encoder_no_repeat_ngram_size=int(pick("encoder_no_repeat_ngram_size", params.encoder_no_repeat_ngram_size, 0)),
        renormalize=bool(pick("renormalize_logits", params.renormalize_logits, False)),
        forced_bos_token_id=pick("forced_bos_token_id", params.forced_bos_token_id, None),
        forced_eos_token_ids=tuple(sorted(_ids(pick("forced_eos_token_id", params.forced_eos_token_id, None)))),
        stream_beams=params.stream_beams,
        constraint=AllowedTokens(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else constraint,
    )


def plain_defaults(defaults: GenerationDefaults) -> dict[str, bool | int | float | str]:
    """The defaults of a request without settings, by the names of `SamplingParams`: each number, word and boolean that
    does not depend on the request. The result is empty if the defaults contradict each other; each request then gets
    that error."""
    asked, most = SamplingParams(), 2**31 - 1
    try:
        decoding = resolve(asked, defaults, prompt_len=1, max_model_len=most, vocab_size=most, random_seed=0)
    except InvalidRequestError:
        return {}
    found = {
        item.name: getattr(decoding, item.name, getattr(asked, item.name))
        for item in fields(SamplingParams)
        if item.name
        not in ("seed", "stream_beams", "timestamps", "detokenize", "spaces_between_special_tokens")  # not decoding
    }
    found["renormalize_logits"] = decoding.renormalize
    if "max_new_tokens" not in defaults.values:
        del found["max_tokens"]  # it depends on the prompt or the endpoint
    return {name: value for name, value in found.items() if isinstance(value, int | float | str)}


def chat_max_tokens(params: SamplingParams, info: EngineInfo, prompt_len: int) -> int | None:
    """Maximum tokens of an answer in a conversation whose request sets no limit: the rest of the context, and of the KV
    cache if several sequences could fill it. None if the model's generation config or a catalogue sets the limit.

    If the context is stretched, a prompt of up to half of the original context gets only the rest of the original
    context: for such a chat, the rotary factors for short texts matter more than room for a long answer.
    """
    if params.constraint is not None:
        return None
    if info.default_max_new_tokens is not None or (info.default_max_length or 0) > prompt_len:
        return None
    room = room_for_answer(params, info, prompt_len)
    if info.first_context_len is not None and 2 * prompt_len <= info.first_context_len:
        room = min(room, info.first_context_len - prompt_len + 1)  # the last token is not computed
    return max(room, 1)  # if there is no room the engine raises the error


def tokens_to_keep_free(params: SamplingParams, info: EngineInfo, usual: int = DEFAULT_MAX_TOKENS) -> int:
    """Tokens of the context that `truncate_prompt_tokens=-1` keeps free for the answer.

    The number is max_tokens. Without max_tokens, it is the model's default or `usual`, up to a quarter of the context.
    """
    if params.max_tokens is not None:
        return params.max_tokens
    wanted = min(info.default_max_new_tokens or usual, info.max_model_len // 4)
    return max(wanted, params.min_tokens or 1)


def room_for_answer(params: SamplingParams, info: EngineInfo, prompt_len: int) -> int:
    """The tokens left in the context, and in the KV cache if several sequences could fill it."""
    width = max(params.n, params.num_beams or 1)
    pages = info.num_blocks // width
    length = info.max_model_len if width <= info.full_requests else pages * info.block_size
    return min(info.max_model_len, length) - prompt_len


def _dry(params: SamplingParams, breakers: Breakers) -> Dry:
    length, last_n = params.dry_allowed_length, params.dry_penalty_last_n
    return Dry(
        multiplier=float(params.dry_multiplier or 0.0),
        base=DEFAULT_BASE if params.dry_base is None else float(params.dry_base),
        allowed_length=DEFAULT_ALLOWED_LENGTH if length is None else length,
        last_n=-1 if last_n is None else last_n,
        breakers=breakers,
    )


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside [0, vocab_size). Raises InvalidRequestError: names the first one."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{name} holds token id {brief(token)}, but the vocabulary has ids 0 to {vocab_size - 1}.",
                param=name,
                code="invalid_value",
            )


def _max_tokens(
    params: SamplingParams, values: Mapping[str, Any], prompt_len: int, max_model_len: int, prompt_name: str
) -> int:
    room = max_model_len - prompt_len
    if room < 1:
        raise InvalidRequestError(
            # Clients recognise the error by these words if they do not get the code.
            f"the {prompt_name} is too long: it has {prompt_len} tokens, and this model's maximum context length is "
            f"{max_model_len} tokens, answer included (max_model_len). Shorten the {prompt_name} or raise "
            "--max-model-len.",
            param=prompt_name,
            code="context_length_exceeded",
        )
    if params.max_tokens is not None:
        if params.max_tokens > room:
            parts = f"the prompt has {prompt_len} tokens and max_tokens is {params.max_tokens}"
            if prompt_name != "prompt":
                parts = f"max_tokens is {params.max_tokens}, and the decoder's beginning takes {prompt_len}"
            raise InvalidRequestError(
                f"{parts}, in total {prompt_len + params.max_tokens}, but this model's maximum context length is "
                f"{max_model_len} tokens (max_model_len). Lower max_tokens, shorten the {prompt_name} or raise "
                "--max-model-len.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return params.max_tokens
    if "max_new_tokens" in values:
        return min(int(values["max_new_tokens"]), room)
    if int(values.get("max_length", 0)) > prompt_len:
        return min(int(values["max_length"]) - prompt_len, room)
    return min(max(DEFAULT_MAX_TOKENS, params.min_tokens or 0), room)


def _num_beams(params: SamplingParams, values: Mapping[str, Any]) -> int:
    if params.num_beams is not None:
        return params.num_beams
    # A setting that only makes sense without beams, if sent explicitly, overrides the model's default number of beams.
    given = [(getattr(params, column.name), column.nothing) for column in FILTERS]
    if params.stop_strings or any(value is not None and value not in nothing for value, nothing in given):
        return 1
    beams = int(values.get("num_beams", 1))
    return max(beams, params.n) if beams > 1 else 1
