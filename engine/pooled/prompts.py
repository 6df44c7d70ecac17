"""Prompts that a model's sentence-transformers config puts before texts."""

from __future__ import annotations

from engine.errors import InvalidRequestError
from engine.interface.outputs import EngineInfo
from engine.text.tokenizer import Tokenizer


def find_prompt(info: EngineInfo, name: str | None = None) -> str:
    """The prompt with that name. None: the model's default; "": no prompt. The result is "" if the model has no
    default. Raises InvalidRequestError if the prompt does not exist."""
    name = info.default_prompt if name is None else name
    if not name:
        return ""
    if name not in info.prompts:
        named = f"It has {', '.join(info.prompts)}." if info.prompts else "It has none."
        raise InvalidRequestError(
            f"this model has no prompt named {name!r} (config_sentence_transformers.json). {named}",
            param="prompt_name",
            code="invalid_value",
        )
    return info.prompts[name]


def prompt_tokens(tokenizer: Tokenizer, info: EngineInfo, prompt: str, *, add_special_tokens: bool = True) -> int:
    """The number of tokens at the beginning of an input with this prompt that are left out of its vector
    (`PoolingParams.skip_tokens`). As in sentence-transformers, these are the tokens of the prompt alone and the special
    tokens before it, if inputs have such (`add_special_tokens`)."""
    if info.include_prompt or not prompt:
        return 0
    alone = tokenizer.encode_input(prompt, add_special_tokens=add_special_tokens)
    return len(alone.ids) - (alone.sequence[-1:] == [None])
