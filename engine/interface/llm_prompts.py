"""The prompts that `LLM.generate` takes: texts, token ids, and vLLM's dictionaries of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NoReturn

from engine.errors import InvalidRequestError
from engine.interface.outputs import EngineInfo
from engine.interface.request import AudioInput, Seq2SeqInput, TokenInput
from engine.interface.values import brief
from engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | TokenInput | Seq2SeqInput | AudioInput | Mapping[str, Any]

_PLAIN = ("prompt", "prompt_token_ids")
_SIDES = ("encoder_prompt", "decoder_prompt")


def list_prompts(prompts: Any) -> list[Any]:
    """One prompt or several, as a list.

    Raises:
        InvalidRequestError: `prompts` is neither.
    """
    if isinstance(prompts, (str, TokenInput, Seq2SeqInput, AudioInput, Mapping)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        _refuse(prompts)
    items = list(prompts)
    return [items] if items and _is_id(items[0]) else items


def read_prompt(prompt: Any, tokenizer: Tokenizer | None, info: EngineInfo) -> TokenInput | Seq2SeqInput | AudioInput:
    """One prompt as the engine takes it.

    Raises:
        InvalidRequestError: it is no prompt, or a text for a model without a tokenizer.
    """
    if isinstance(prompt, (TokenInput, Seq2SeqInput, AudioInput)):
        return prompt
    if isinstance(prompt, Mapping):
        return _read_dict(prompt, tokenizer, info)
    if isinstance(prompt, str):
        return TokenInput(_need(tokenizer, info).encode(prompt), prompt)
    return TokenInput(_ids(prompt))


def _read_dict(
    prompt: Mapping[str, Any], tokenizer: Tokenizer | None, info: EngineInfo
) -> TokenInput | Seq2SeqInput | AudioInput:
    given = {name: value for name, value in prompt.items() if value is not None}
    if given and set(given) <= set(_PLAIN):
        text, ids = (given.get(name) for name in _PLAIN)
        if text is not None and not isinstance(text, str):
            _fail(f"prompt must be a text, got {brief(text)}. Token ids go into prompt_token_ids.")
        return read_prompt(text, tokenizer, info) if ids is None else TokenInput(_ids(ids), text)
    if "encoder_prompt" in given and set(given) <= set(_SIDES):
        whole, begin = read_prompt(given["encoder_prompt"], tokenizer, info), given.get("decoder_prompt")
        if not isinstance(whole, TokenInput):
            _fail(f"encoder_prompt must be a text or token ids, got {brief(given['encoder_prompt'])}.")
        if isinstance(begin, str):
            return Seq2SeqInput(whole.token_ids, _need(tokenizer, info).encode_answer(begin))
        begun = None if begin is None else read_prompt(begin, tokenizer, info)
        return Seq2SeqInput(whole.token_ids, begun.token_ids if isinstance(begun, TokenInput) else None)
    unknown = sorted(str(name) for name in given if name not in (*_PLAIN, *_SIDES))
    found = f"unknown keys: {', '.join(unknown)}" if unknown else f"its keys are: {', '.join(given) or 'none'}"
    _fail(
        "a prompt given as a dictionary must hold prompt or prompt_token_ids, or encoder_prompt and optionally "
        f"decoder_prompt for an encoder-decoder model; {found}."
    )


def _ids(ids: Any) -> list[int]:
    """Token ids, those of numpy's and torch's arrays included."""
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(listed, (str, bytes)) or not isinstance(listed, Sequence) or not all(map(_is_id, listed)):
        _refuse(ids)
    return [int(token) for token in listed]


def _is_id(item: Any) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)


def _need(tokenizer: Tokenizer | None, info: EngineInfo) -> Tokenizer:
    if tokenizer is None:
        _fail(f"{info.model} has no tokenizer, so prompts must be token ids. Set tokenizer to a folder that has one.")
    return tokenizer


def _refuse(prompt: Any) -> NoReturn:
    _fail(
        "a prompt must be a text, a list of token ids, or a dictionary with prompt or prompt_token_ids, got "
        f"{type(prompt).__name__}: {brief(prompt)}."
    )


def _fail(message: str) -> NoReturn:
    raise InvalidRequestError(message, param="prompt", code="invalid_value")
