"""Prompts that a model's sentence-transformers config wants in front of texts."""

from __future__ import annotations

from engine.errors import InvalidRequestError
from engine.interface.outputs import EngineInfo
from engine.text.tokenizer import Tokenizer


def find_prompt(info: EngineInfo, name: str | None = None) -> str:
    """The prompt of that name. None: the model's default; "": no prompt. The result is "" if the model has no default.

    Raises:
        InvalidRequestError: there is no such prompt.
    """
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
    """How many tokens at the beginning of an input that starts with this prompt are left out of its vector
    (`PoolingParams.skip_tokens`): as sentence-transformers counts them, those of the prompt alone and the special
    tokens before it, where inputs have such (`add_special_tokens`)."""
    if info.include_prompt or not prompt:
        return 0
    alone = tokenizer.encode_input(prompt, add_special_tokens=add_special_tokens)
    return len(alone.ids) - (alone.sequence[-1:] == [None])
