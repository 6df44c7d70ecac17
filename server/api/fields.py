"""Fields of bodies that need no class: those of `SamplingParams`, and unknown ones."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from engine import (
    BIAS_RANGE,
    MAX_BREAKER_LENGTH,
    MAX_BREAKERS,
    MAX_LISTED_IDS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRINGS,
    NUMBER_RANGES,
    SamplingParams,
)
from server.config.wording import field_docs
from server.errors import ApiError

# Fields without effect on the answer: silently ignored.
HARMLESS = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "client_metadata",
        "include_obfuscation",
    }
)  # fmt: skip
# Unsupported fields that would change the answer or who may see it, with their neutral values. Any other unknown field
# is a hint: it is ignored with a notice.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "decoder_prompt": (),
    "forced_bos_token": (),
    "src_lang": (),
    "tgt_lang": (),
    "continue_final_message": (False,),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "bbox": (),
    "truncation_side": (),
    "max_chunks_per_doc": (),
    "rank_fields": (),
    "function_to_apply": (),
    "ignore_labels": (["O"],),
    "stride": (0,),
    "targets": ([],),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "padding": ("do_not_pad",),
    "logits_processors": ([],),
    # Sampling methods of llama.cpp, text-generation-webui and others.
    "repeat_penalty": (1.0,),
    "repeat_last_n": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "mirostat_tau": (5.0,),
    "mirostat_eta": (0.1,),
    "samplers": (),
    "sampler_seq": (),
    "sampler_order": (),
    "sampler_priority": (),
    "temperature_last": (False,),
    "dynamic_temperature": (False,),
    "dynatemp_low": (1.0,),
    "dynatemp_high": (1.0,),
    "dynatemp_range": (0.0,),
    "dynatemp_exponent": (1.0,),
    "smoothing_factor": (0.0,),
    "smoothing_curve": (1.0,),
    "tfs": (1.0,),
    "tfs_z": (1.0,),
    "top_a": (0.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    # Of transformers.
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "input_type": (),
    "logprob_token_ids": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": ("",),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
}
# Fields without effect if the field that they belong to was sent and is off.
_PART_OF: dict[str, tuple[str, ...]] = {
    "repeat_last_n": ("repeat_penalty",),
    "mirostat_tau": ("mirostat", "mirostat_mode"),
    "mirostat_eta": ("mirostat", "mirostat_mode"),
    "dynatemp_low": ("dynamic_temperature",),
    "dynatemp_high": ("dynamic_temperature",),
    "dynatemp_exponent": ("dynatemp_range", "dynamic_temperature"),
    "smoothing_curve": ("smoothing_factor",),
}
# The supported alternative.
_INSTEAD = {
    "repeat_penalty": "repeat_penalty is not supported; send repetition_penalty, which counts the whole prompt and "
    "answer.",
    "input_type": "input_type is not supported; send prompt_name, or put the model's prompt for queries or "
    "documents before the text.",
}
_SENDABLE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_NAMES_SHOWN = 32
IGNORED_HEADER = "X-Octavo-Ignored-Fields"
_MOST_LOGGED = 64  # maximum names; clients choose them
_logged: set[str] = set()

logger = logging.getLogger("octavo.server")


def refuse_unsupported(unknown: Mapping[str, Any]) -> None:
    """Refuse fields that would change the answer and are not supported. Raises ApiError: names the first such field."""
    for name, value in unknown.items():
        nothing = UNSUPPORTED.get(name)
        if nothing is None or _asks_for_nothing(name, value):
            continue
        if any(
            unknown.get(whole) is not None and _asks_for_nothing(whole, unknown[whole])
            for whole in _PART_OF.get(name, ())
        ):
            continue
        otherwise = f" or send {json.dumps(nothing[0])}" if nothing else ""
        message = _INSTEAD.get(name, f"{name} is not supported. Remove it{otherwise}.")
        raise ApiError(400, message, param=name, code="unsupported_parameter")


def _asks_for_nothing(name: str, value: Any) -> bool:
    return value is None or any(_same(value, other) for other in UNSUPPORTED[name])


def _same(value: Any, other: Any) -> bool:
    if type(other) is float and type(value) is int:  # JSON writes 1.0 as 1, too
        return value == other
    return type(value) is type(other) and bool(value == other)  # 0 is not false


def unknown_fields(names: Iterable[str]) -> list[str]:
    """The unknown fields that the client may have expected to change the answer."""
    return [name for name in names if name not in HARMLESS and name not in UNSUPPORTED]


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that lists these fields, if a header can contain any of them. The log names each field once."""
    listed = [name for name in sorted(names) if _SENDABLE_NAME.fullmatch(name)][:_NAMES_SHOWN]
    if new := [name for name in listed if name not in _logged][: _MOST_LOGGED - len(_logged)]:
        _logged.update(new)
        logger.warning(
            "A request had fields that this server ignored or lowered: %s. The log names each field once; the "
            "answer's header %s lists them every time.",
            ", ".join(new),
            IGNORED_HEADER,
        )
    return {IGNORED_HEADER: ", ".join(listed)} if listed else {}


def at_most(limit: int, what: str) -> BeforeValidator:
    """Refuses a list or an object that is too long before its items are checked, because each item might make an
    error."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise PydanticCustomError("limit", f"may have at most {limit} {what}, got {len(value)}")
        return value

    return BeforeValidator(check)


def _few_ids(value: Any) -> Any:
    if isinstance(value, list):
        total = sum(len(item) if isinstance(item, list) else 1 for item in value)
        if total > MAX_LISTED_IDS:
            raise PydanticCustomError("limit", f"may have at most {MAX_LISTED_IDS} token ids in total, got {total}")
    return value


def _integer_keys(value: Any) -> Any:
    """logit_bias with integer token ids, because JSON keys are strings. As in llama.cpp, it may be a list of pairs, in
    which false bans a token."""
    if isinstance(value, list):
        value = _paired(value)
    if not isinstance(value, dict):
        return value
    digits = re.compile(r"[0-9]{1,10}", re.ASCII)
    return {int(key) if isinstance(key, str) and digits.fullmatch(key) else key: bias for key, bias in value.items()}


def _paired(pairs: list[Any]) -> dict[Any, Any]:
    biases: dict[Any, Any] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int:
            raise PydanticCustomError("limit", "must contain pairs of a token id and a number, such as [[15, -1.5]]")
        token, bias = pair
        biases[token] = BIAS_RANGE.low if bias is False else bias
    return biases


def _listed(value: Any) -> Any:
    """A list that may be sent as text, with or without brackets, as in text-generation-webui."""
    if isinstance(value, str):
        text = value.strip()
        try:
            value = json.loads(text if text.startswith("[") else f"[{text}]")
        except (ValueError, RecursionError):
            raise PydanticCustomError("limit", 'must be a list of strings, such as ["\\n", ":"]') from None
    return value


MAX_NAME = 256  # maximum characters of a field that contains a name
Name = Annotated[str, Field(max_length=MAX_NAME)]
_FIRST = Field(fail_fast=True)  # one error is enough
_ID = {"type": "integer", "minimum": 0}
_FEW = at_most(MAX_LISTED_IDS, "token ids")
_IDS: Any = Annotated[
    list[int], _FIRST, _FEW, WithJsonSchema({"type": "array", "maxItems": MAX_LISTED_IDS, "items": _ID})
]
_STOP = {"type": "string", "minLength": 1, "maxLength": 1024}
_BIASED = {"type": "number", "minimum": BIAS_RANGE.low, "maximum": BIAS_RANGE.high}
_BIAS = {
    "anyOf": [
        {
            "type": "object",
            "maxProperties": MAX_LISTED_IDS,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": _BIASED,
        },
        {
            "type": "array",
            "maxItems": MAX_LISTED_IDS,
            "items": {
                "type": "array",
                "prefixItems": [_ID, {"anyOf": [_BIASED, {"const": False}]}],
                "minItems": 2,
                "maxItems": 2,
            },
        },
    ]
}
# JSON's types, if Python's own types are wider than JSON's or less precise.
_JSON_TYPES: dict[str, Any] = {
    "logit_bias": Annotated[dict[int, float], BeforeValidator(_integer_keys), _FEW, WithJsonSchema(_BIAS)],
    "stop": Annotated[
        str | Annotated[list[str], _FIRST],
        at_most(MAX_STOP_STRINGS, "strings"),
        WithJsonSchema({"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP}]}),
    ],
    "dry_sequence_breakers": Annotated[
        list[str],
        _FIRST,
        at_most(MAX_BREAKERS, "strings"),
        BeforeValidator(_listed),
        WithJsonSchema(
            {
                "type": "array",
                "maxItems": MAX_BREAKERS,
                "items": {"type": "string", "minLength": 1, "maxLength": MAX_BREAKER_LENGTH},
            }
        ),
    ],
    "bad_words": Annotated[
        list[str],
        _FIRST,
        at_most(MAX_LISTED_IDS, "strings"),
        WithJsonSchema({"type": "array", "maxItems": MAX_LISTED_IDS, "items": _STOP}),
    ],
    "logprob_token_ids": Annotated[
        list[int],
        _FIRST,
        at_most(MAX_LOGPROB_TOKEN_IDS, "token ids"),
        WithJsonSchema({"type": "array", "maxItems": MAX_LOGPROB_TOKEN_IDS, "items": _ID}),
    ],
    "stop_token_ids": _IDS,
    "suppress_tokens": _IDS,
    "begin_suppress_tokens": _IDS,
    "allowed_token_ids": Annotated[
        list[int],
        _FIRST,
        _FEW,
        WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_LISTED_IDS, "items": _ID}),
    ],
    "constraint": Annotated[
        dict[str, Name],
        at_most(1, "fields"),
        WithJsonSchema(
            {
                "type": "object",
                "properties": {"catalogue": {"type": "string", "minLength": 1, "maxLength": MAX_NAME}},
                "required": ["catalogue"],
                "additionalProperties": False,
            }
        ),
    ],
    "bad_words_ids": Annotated[
        Annotated[list[Annotated[list[int], _FIRST]], _FIRST],
        BeforeValidator(_few_ids),
        WithJsonSchema(
            {"type": "array", "maxItems": MAX_LISTED_IDS, "items": {"type": "array", "minItems": 1, "items": _ID}}
        ),
    ],
}


# Fields that bodies have in another form or lack.
ELSEWHERE = (
    "reasoning_budget", "structured_outputs", "timestamps", "truncate_prompt_tokens", "detokenize",
    "predicted_token_ids",
)  # fmt: skip
# For these fields -1 means the maximum, as in vLLM.
COUNTS_OF_LOGPROBS = ("logprobs", "prompt_logprobs")


def _number(name: str) -> Any:
    allowed = NUMBER_RANGES[name]
    schema: dict[str, Any] = {"type": "integer" if allowed.integer else "number"}
    if name in COUNTS_OF_LOGPROBS:
        schema["minimum"] = -1
    elif allowed.low is not None:
        schema["exclusiveMinimum" if allowed.open_low else "minimum"] = allowed.low
    if allowed.high is not None:
        schema["maximum"] = allowed.high
    return Annotated[int if allowed.integer else float, WithJsonSchema(schema)]


def sampling_fields() -> dict[str, Any]:
    """The fields of `SamplingParams` for a body, all optional: pydantic's type and `Field` for each name."""
    docs, hints = field_docs(SamplingParams), get_type_hints(SamplingParams)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingParams):
        if field.name in ELSEWHERE:
            continue
        if field.name in NUMBER_RANGES:
            kind = _number(field.name)
        else:
            kind = _JSON_TYPES.get(field.name, hints[field.name])
        fields[field.name] = (kind | None, Field(default=None, description=docs.get(field.name)))
    return fields
