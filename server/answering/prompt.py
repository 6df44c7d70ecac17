"""Prompts in the engine's form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from engine import EngineInfo, PixelInput, PlacedImage, Seq2SeqInput, TokenInput
from engine.text.processor import Tokenizer
from server.admission import CHARACTERS_PER_TOKEN
from server.errors import ApiError, shown

LIKELY_CHARACTERS = 16  # characters per token: a longer text hardly ever has so few tokens
MAX_TOKENIZED = 65536  # tokens of a text whose length limit is not the model's, if the model allows less
_TOKENISED = 262144  # characters that are always tokenised, however few tokens are allowed
_SLICE = 65536  # characters tokenised at once if only the number of tokens is needed


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the engine's form."""

    token_ids: list[int]  # the prompt; for an encoder-decoder model the encoder's input
    text: str | None = None  # the text; None if the prompt came as token ids
    # for an encoder-decoder model the given beginning of the answer; None for a decoder-only model
    decoder_ids: list[int] | None = None
    images: tuple[PlacedImage, ...] = ()
    # an image that an encoder reads, and its number of positions; the prompt is then the decoder's first tokens
    pixels: PixelInput | None = None
    positions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + len(self.decoder_ids or ()) + self.positions

    @property
    def continued(self) -> list[int]:
        """The tokens that the answer continues."""
        return self.token_ids if self.decoder_ids is None else self.decoder_ids

    @property
    def source(self) -> TokenInput | Seq2SeqInput | PixelInput:
        if self.pixels is not None:
            return self.pixels
        if self.decoder_ids:
            return Seq2SeqInput(self.token_ids, self.decoder_ids)
        return TokenInput(self.token_ids, self.text, images=self.images)


class TooLongError(ApiError):
    """A prompt has more tokens than fit. `tokens`: the prompt's tokens; an estimate if the text was too long to be
    tokenised whole."""

    def __init__(self, message: str, param: str, tokens: int):
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class Room:
    """The limit on a prompt's length, and the error for a longer prompt, in the engine's words."""

    tokens: int  # maximum tokens, including the answer if it continues the prompt
    param: str = "prompt"  # the request's field with the prompt
    encoder: bool = False  # whether the prompt is an encoder's input

    @classmethod
    def of_prompt(cls, info: EngineInfo, param: str = "prompt") -> Room:
        """The limit for prompts of this model."""
        if info.max_encoder_len is not None:
            return cls(info.max_encoder_len, param, encoder=True)
        return cls(info.max_model_len, param)

    def refusal_of_characters(self, count: int) -> ApiError:
        """The error for a text that has too many characters to be tokenised."""
        length = f"{count} characters, more than the {most_characters(self.tokens)} that can make {self.tokens}"
        return self.refusal(length, count // CHARACTERS_PER_TOKEN)

    def refusal(self, length: str, tokens: int = 0) -> ApiError:
        """The error for a prompt of that length, and an estimate of its tokens, if known."""
        name = "decoder_prompt" if self.param == "decoder_prompt" else "prompt"
        limit = f"this model's maximum context length is {self.tokens} tokens, answer included"
        if self.encoder:
            limit = f"the maximum context length of this model's encoder is {self.tokens} tokens"
        message = (
            f"the {name} is too long: {length} tokens, and {limit} (max_model_len). Shorten the {name} or raise "
            "--max-model-len."
        )
        return TooLongError(message, self.param, max(tokens, self.tokens + 1))


def most_characters(tokens: int) -> int:
    """Maximum characters of a text that is tokenised for this many tokens. A tokenizer takes up to 200 bytes of memory
    per character, even for characters without tokens."""
    return max(LIKELY_CHARACTERS * tokens, _TOKENISED)


@dataclass(frozen=True, slots=True)
class Truncation:
    """The rule for cutting longer prompts (`truncate_prompt_tokens`)."""

    tokens: int  # the number of tokens that stay
    # where tokens are removed: the beginning of a prompt that an answer continues; for an encoder's input, the
    # tokenizer's side
    side: Literal["left", "right"] = "left"

    @classmethod
    def of(cls, asked: int | None, info: EngineInfo, tokenizer: Tokenizer | None, free: int) -> Self | None:
        """Read a request's field. Raises ApiError if the value is more than the model allows, or none.

        Args:
            asked: the field; -1 keeps as many tokens as leave `free` tokens for the answer.
            free: free tokens of the context.
        """
        if asked is None:
            return None
        room = Room.of_prompt(info)
        if asked == 0 or asked > room.tokens:
            message = (
                f"truncate_prompt_tokens is {asked}; it must be at least 1 and at most {room.tokens} "
                "(max_model_len), or -1 to keep as many tokens as leave room for the answer."
            )
            raise ApiError(400, message, param="truncate_prompt_tokens", code="invalid_value")
        if room.encoder:
            return cls(
                room.tokens if asked == -1 else asked, "left" if tokenizer is None else tokenizer.truncation_side
            )
        return cls(max(room.tokens - free, 1) if asked == -1 else asked)

    def ids(self, ids: Sequence[int]) -> list[int]:
        """The token ids after cutting."""
        return list(ids[-self.tokens :] if self.side == "left" else ids[: self.tokens])

    def encode(self, tokenizer: Tokenizer, text: str, room: Room, *, add_special_tokens: bool) -> list[int]:
        """A text's token ids after cutting, including special tokens. Raises ApiError if the text has far too many
        characters for so few tokens; InvalidRequestError if the special tokens alone exceed the limit."""
        plain = functools.partial(tokenizer.encode, add_special_tokens=False)
        beyond = count_beyond(plain, text, self.tokens, left=self.side == "left")
        if beyond is not None:  # the rest does not matter and may take minutes
            size, count = beyond
            if count <= 2 * self.tokens:
                raise room.refusal_of_characters(len(text))
            text = text[-size:] if self.side == "left" else text[:size]
        return tokenizer.encode_input(
            text, add_special_tokens=add_special_tokens, max_length=self.tokens, side=self.side
        ).ids


def check_length(count: int, room: Room) -> None:
    """Refuse far too many token ids before they are sent to the engine, which would refuse them too. Raises ApiError if
    there are more than twice as many as fit. The engine refuses smaller excesses."""
    if count > 2 * room.tokens:
        raise room.refusal(f"it has {count}", count)


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside the vocabulary. Raises ApiError: names the range and a wrong id."""
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        message = f"{param}: token ids must be from 0 to {vocab_size - 1}, got {shown(wrong)}."
        raise ApiError(400, message, param=param, code="invalid_value")


def count_beyond(
    encode: Callable[[str], Sequence[int]], text: str, tokens: int, *, left: bool = False
) -> tuple[int, int] | None:
    """The number of characters that have more than twice the given tokens, and the number of their tokens.

    The text is tokenised in slices and no further than needed, because the whole text may take minutes and gigabytes. A
    cut between slices changes only a few tokens, because token boundaries depend only on nearby text. At twice the
    limit, the text cannot fit whatever follows. `encode`: text to ids, without special tokens.

    Returns: None if the text may fit; for a text longer than `most_characters`, that number and its tokens.
    """
    size, limit = max(min(LIKELY_CHARACTERS * tokens, _SLICE), 2 * tokens), most_characters(tokens)
    if len(text) <= size:
        return None
    count = 0
    for start in range(0, min(len(text), limit), size):
        end = min(start + size, limit)
        count += len(encode(text[max(len(text) - end, 0) : len(text) - start] if left else text[start:end]))
        if count > 2 * tokens:
            return end, count
    return None if len(text) <= limit else (limit, count)


def encode_fitting(encode: Callable[[str], Sequence[int]], text: str, room: Room) -> list[int]:
    """A text's token ids. Raises ApiError if the text is far too long. The engine, which counts exactly, refuses
    smaller excesses."""
    beyond = count_beyond(encode, text, room.tokens)
    if beyond is not None:
        size, count = beyond
        if count <= 2 * room.tokens:
            raise room.refusal_of_characters(len(text))
        raise room.refusal(f"the first {size} of its {len(text)} characters have {count}", count * len(text) // size)
    return list(encode(text))
