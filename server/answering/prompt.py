"""A prompt ready for the engine."""

from __future__ import annotations

from dataclasses import dataclass

from engine.text import Tokenizer
from server.errors import ApiError

_LIKELY_CHARACTERS = 16  # per token: hardly a text of so many for each token of the context has room there


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine; `text` is None where it came as token ids."""

    token_ids: list[int]
    text: str | None = None


def check_length(count: int, longest: int, param: str) -> None:
    """Refuse token ids that are far too many before they are sent to the engine, which would only say the same.

    Raises:
        ApiError: there are more than twice as many as `longest`. What is only a little too long is left to the engine.
    """
    if count > 2 * longest:
        message = (
            f"the prompt is too long: it has {count} tokens, and this model's maximum context length is {longest} "
            "tokens, answer included (max_model_len). Shorten the prompt or raise --max-model-len."
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")


def encode_fitting(
    tokenizer: Tokenizer, text: str, longest: int, param: str, *, add_special_tokens: bool = True
) -> list[int]:
    """A text's token ids. Of a text that is far too long only a beginning is tokenised, since the whole may take
    minutes.

    Args:
        longest: tokens that prompt and answer may have together.
        param: the field that the text came in.

    Raises:
        ApiError: the text is far too long. What is only a little too long is left to the engine, which counts.
    """
    size = _LIKELY_CHARACTERS * longest
    while size < len(text):
        count = len(tokenizer.encode(text[:size], add_special_tokens=False))
        if count > 2 * longest:  # no way of going on makes that fit
            message = (
                f"the prompt is too long: the first {size} of its {len(text)} characters have {count} tokens, and this "
                f"model's maximum context length is {longest} tokens, answer included (max_model_len). Shorten the "
                "prompt or raise --max-model-len."
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        size *= 4
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
