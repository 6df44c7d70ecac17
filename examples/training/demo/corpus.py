"""The chat model's corpus: documents that follow from a seed and a number alone, so that any part can be made anew."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
import re
from collections.abc import Iterator

from demo import calls, facts, questions
from demo.chat import Talk, ask_story, converse, look_back
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


def document(number: int, *, held_out: bool = False, seed: int = SEED, wider: bool = False) -> list[Piece]:
    """Document `number`: 3 of 4 are conversations, the others stories and sentences as a prompt without chat begins.

    Args:
        number: of the document.
        held_out: whether it has held-out names and pairs alone, or none.
        seed: of the corpus.
        wider: whether it may have all that the third part of the training adds.
    """
    rng = random.Random(f"{'wider ' if wider else ''}{seed} {number} {held_out}")
    kind = rng.random()
    if kind < 0.2:
        return plain(tell(rng, held_out=held_out, wider=wider).text)
    if kind < 0.25:
        return plain(_definition(rng, held_out))
    return conversation(*converse(rng, held_out=held_out, wider=wider))


def closer(number: int, *, held_out: bool = False, seed: int = SEED, wider: bool = False) -> list[Piece]:
    """Document `number` of the second part of the training, in which what has to be looked up stands close together.

    2 of 5 are as in the first part. 2 of 5 are the beginning of a story whose hero was asked for, to learn who it is
    about and where. 1 of 5 is a conversation of which only the last answer, which takes up an earlier turn, is learnt.

    `wider`: of the third part, which has more heroes, topics and names, and what people type in a hurry; 7 of 10 are
    whole documents, 2 beginnings of stories, 1 looks back.
    """
    rng = random.Random(f"{'closer and wider' if wider else 'closer'} {seed} {number} {held_out}")
    whole, begun = (0.7, 0.9) if wider else (0.4, 0.8)
    kind = rng.random()
    if kind < whole:
        return document(number, held_out=held_out, seed=seed, wider=wider)
    state = Talk(rng, held_out, wider=wider)
    if kind < begun:
        asked, story = ask_story(state)
        while state.story is None or state.story.hero not in asked:
            asked, story = ask_story(state)
        begin = re.match(r".*?[.] .*?[.] ", story)
        assert begin is not None
        return [Piece(f"{BOS}{USER}{state.typed(asked)}{EOS}{ASSISTANT}", False), Piece(begin[0].rstrip(), True)]
    *before, last = look_back(state)
    read = [dataclasses.replace(piece, learnt=False) for piece in conversation("", before)]
    return read + conversation("", [last])[1:]


def calling(number: int, *, held_out: bool = False, seed: int = SEED) -> list[Piece]:
    """Document `number` of the fourth part: half of them are conversations with tools, the others of the third part."""
    rng = random.Random(f"calling {seed} {number} {held_out}")
    if rng.random() < 0.5:
        return closer(number, held_out=held_out, seed=seed, wider=True)
    system, turns = calls.converse(rng, held_out=held_out)
    pieces = [Piece(BOS + (f"{SYSTEM}{system}{EOS}" if system else ""), False)]
    for turn in turns:
        pieces.append(Piece(f"{USER}{turn.asked}{EOS}{ASSISTANT}", False))
        if turn.call:
            result = f"{USER}<tool_response>{turn.result}</tool_response>{EOS}{ASSISTANT}"
            pieces += [Piece(turn.call + EOS, True), Piece(result, False)]
        pieces.append(Piece(turn.answer + EOS, True))
    return pieces


def documents(
    first: int, count: int, *, held_out: bool = False, seed: int = SEED, part: int = 1
) -> Iterator[list[Piece]]:
    """`count` documents from number `first` on, of part 1, 2, 3 or 4 of the training."""
    for number in range(first, first + count):
        if part == 1:
            yield document(number, held_out=held_out, seed=seed)
        elif part == 4:
            yield calling(number, held_out=held_out, seed=seed)
        else:
            yield closer(number, held_out=held_out, seed=seed, wider=part == 3)


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
    """The definition of a topic, after its question."""
    while True:
        key, topic = rng.choice(list(facts.TOPICS.items()))
        phrasing = rng.choice(questions.ASK_WHAT)
        if is_held_out_pair(key, phrasing) == held_out:
            return capital(f"{phrasing.format(x=rng.choice(topic.names))} {rng.choice(topic.answers)}")


def digest(count: int) -> str:
    """SHA-256 of the first `count` documents of each part of the training, one a line."""
    parts = itertools.chain.from_iterable(documents(0, count, part=part) for part in (1, 2, 3, 4))
    lines = ("".join(piece.text for piece in pieces) + "\n" for pieces in parts)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
