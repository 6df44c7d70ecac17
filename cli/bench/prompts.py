"""Prompts of wanted lengths, made at random but the same for the same seed."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cli.bench.client import Client, error_message
from cli.errors import BenchError

Prompt = str | list[int]

_TEXT = (
    "a about after again all also an and any are as at back be because been before but by can come could day do each "
    "even few find first for from get give go good great had have he her here him his how if in into is it its just "
    "know like little long look made make man many may me more most much my never new no not now of old on one only "
    "or other our out over people said same see she should so some such take than that the their them then there "
    "these they thing think this those time to two under up us use very want was water way we well were what when "
    "where which while who will with work world would year you your"
)
WORDS = _TEXT.split()
# Yields many different tokens under any tokenizer.
_SAMPLE = " ".join([*WORDS, *string.printable, string.printable, "Zürich Ελλάδα Москва 東京 ½ 3.14159 {} [] () <=> "])
_TOKENS_PER_WORD = 1.3  # of a usual tokenizer, where the server does not tell


class PromptMaker(Protocol):
    """Makes prompts of one kind."""

    def make(self, rng: random.Random, length: int) -> Prompt:
        """A prompt of so many tokens."""

    def join(self, parts: Sequence[Any]) -> Prompt:
        """One prompt out of several of this maker's."""


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """Prompts of random token ids."""

    vocabulary: Sequence[int]

    def make(self, rng: random.Random, length: int) -> list[int]:
        """A prompt of exactly that many tokens."""
        return rng.choices(self.vocabulary, k=length)

    def join(self, parts: Sequence[Any]) -> list[int]:
        """One prompt out of several."""
        return [token for part in parts for token in part]


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Prompts of random words."""

    tokens_per_word: float

    def make(self, rng: random.Random, length: int) -> str:
        """A prompt of about that many tokens."""
        return " ".join(rng.choices(WORDS, k=max(1, round(length / self.tokens_per_word))))

    def join(self, parts: Sequence[Any]) -> str:
        """One prompt out of several."""
        return " ".join(parts)


async def find_token_prompts(client: Client, model: str, vocab_size: int | None) -> TokenPrompts:
    """Random ids from 0 to vocab_size - 1; without it, those that the server's tokenizer makes of a varied
    text.

    Raises:
        BenchError: the server does not tokenize.
    """
    if vocab_size is not None:
        return TokenPrompts(range(vocab_size))
    return TokenPrompts(sorted(set(await _tokenize(client, model, _SAMPLE))))


async def find_text_prompts(client: Client, model: str) -> tuple[TextPrompts, str | None]:
    """Random words, and a note if the server could not say how many tokens they are."""
    try:
        tokens = await _tokenize(client, model, " ".join(WORDS))
    except BenchError:
        note = f"The server does not tokenize: input lengths assume {_TOKENS_PER_WORD} tokens per word."
        return TextPrompts(_TOKENS_PER_WORD), note
    return TextPrompts(len(tokens) / len(WORDS)), None


async def _tokenize(client: Client, model: str, text: str) -> list[int]:
    asked = {"model": model, "prompt": text, "add_special_tokens": False}
    status, answer = await client.json("POST", "/tokenize", asked)
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if status != 200 or not isinstance(tokens, list) or not tokens or not all(type(item) is int for item in tokens):
        raise BenchError(
            f"/tokenize did not return token ids (status {status}: {error_message(answer)[:120]}). "
            "Set --vocab-size, or --prompts text."
        )
    return tokens
