"""The chat model's corpus: documents that follow from a seed and a number alone, so that any part can be made anew."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Iterator

from demo import facts, questions
from demo.chat import converse
from demo.names import is_held_out_pair
from demo.stories import capital, tell

SEED = 8
BOS, EOS, SYSTEM, USER, ASSISTANT = "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (BOS, EOS, SYSTEM, USER, ASSISTANT)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of a document.

    Attributes:
        text: with the special tokens in it.
        learnt: whether the model is to learn to say it; what a user says is only read.
    """

    text: str
    learnt: bool


def document(number: int, *, held_out: bool = False, seed: int = SEED) -> list[Piece]:
    """Document `number`: 3 of 4 are conversations, the others stories and sentences as a prompt without chat begins."""
    rng = random.Random(f"{seed} {number} {held_out}")
    kind = rng.random()
    if kind < 0.2:
        return plain(tell(rng, held_out=held_out).text)
    if kind < 0.25:
        return plain(_definition(rng, held_out))
    return conversation(*converse(rng, held_out=held_out))


def documents(first: int, count: int, *, held_out: bool = False, seed: int = SEED) -> Iterator[list[Piece]]:
    """`count` documents from number `first` on."""
    for number in range(first, first + count):
        yield document(number, held_out=held_out, seed=seed)


def plain(text: str) -> list[Piece]:
    """A document without turns."""
    return [Piece(BOS, False), Piece(text + EOS, True)]


def conversation(system: str, exchanges: list[tuple[str, str]]) -> list[Piece]:
    """A document in the form that the chat template gives."""
    pieces = [Piece(BOS + (f"{SYSTEM}{system}{EOS}" if system else ""), False)]
    for asked, answer in exchanges:
        pieces += [Piece(f"{USER}{asked}{EOS}{ASSISTANT}", False), Piece(answer + EOS, True)]
    return pieces


def _definition(rng: random.Random, held_out: bool) -> str:
    """What a topic is, after its question."""
    while True:
        key, topic = rng.choice(list(facts.TOPICS.items()))
        phrasing = rng.choice(questions.ASK_WHAT)
        if is_held_out_pair(key, phrasing) == held_out:
            return capital(f"{phrasing.format(x=rng.choice(topic.names))} {rng.choice(topic.answers)}")


def digest(count: int) -> str:
    """SHA-256 of the first `count` documents of training, one a line."""
    lines = ("".join(piece.text for piece in pieces) + "\n" for pieces in documents(0, count))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
