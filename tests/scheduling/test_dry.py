"""DRY: what is taken from tokens that would go on with a repetition, and where repetitions end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference
from support.checkpoints import Checkpoint
from support.reference import MIN_MARGIN
from support.structured import tokenizer_of
from torch import Tensor

from engine import InvalidRequestError, SamplingParams
from engine.interface.dry import DEFAULT_BREAKERS, Breakers, Dry
from engine.scheduling.repetition import dry_penalties
from engine.scheduling.sequence import Sequence as Line
from engine.text.breakers import BreakerTokens

DEMO = Path(__file__).resolve().parents[2] / "server" / "demo"
Words = Sequence[tuple[int, ...]]


def naive(tokens: Sequence[int], dry: Dry, breakers: Words) -> dict[int, float]:
    """By the definition, place by place: `breakers` are sequences of tokens."""
    window = list(tokens) if dry.last_n < 0 else list(tokens)[max(0, len(tokens) - dry.last_n) :]
    if len(window) <= dry.allowed_length:
        return {}
    limit = len(window)
    for at in reversed(range(len(window))):
        ends = [at + len(word) for word in breakers if tuple(window[at : at + len(word)]) == word]
        if ends:
            limit = len(window) - max(ends)
            break
    longest: dict[int, int] = {}
    for end in range(len(window) - 1):
        length = 0
        while length <= end and window[end - length] == window[-1 - length]:
            length += 1
        length = min(length, limit)
        if limit >= dry.allowed_length and length >= dry.allowed_length:
            longest[window[end + 1]] = max(length, longest.get(window[end + 1], 0))
    return {token: dry.multiplier * dry.base ** (length - dry.allowed_length) for token, length in longest.items()}


def in_tokens(words: Words) -> Breakers:
    tails: dict[int, tuple[tuple[int, ...], ...]] = {}
    for first, *rest in words:
        tails[first] = (*tails.get(first, ()), tuple(rest))
    return Breakers(tails, max((len(word) - 1 for word in words), default=0))


def found(dry: Dry, line: Line) -> dict[int, float]:
    tokens, taken = dry_penalties(dry, line)
    assert len(set(tokens.tolist())) == len(tokens)
    return dict(zip(tokens.tolist(), taken.tolist(), strict=True))


def line_of(tokens: Sequence[int]) -> Line:
    return Line(0, tokens, with_logprobs=False)


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    grown=st.lists(st.integers(0, 3), max_size=40),
    words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=2, unique=True),
    base=st.sampled_from([1.0, 1.5, 2.0]),
    allowed_length=st.integers(0, 4),
    last_n=st.sampled_from([-1, 0, 1, 5, 30, 1000]),
)
def test_penalties_are_those_of_the_definition(
    tokens: list[int], grown: list[int], words: Words, base: float, allowed_length: int, last_n: int
) -> None:
    """From nothing, and token after token; for a line that goes its own way after a while, too."""
    dry = Dry(multiplier=0.5, base=base, allowed_length=allowed_length, last_n=last_n, breakers=in_tokens(words))
    line = line_of(tokens)
    assert found(dry, line) == pytest.approx(naive(tokens, dry, words))
    for place, token in enumerate(grown):
        line.tokens.append(token)
        if place % 3:  # now and then several at once
            assert found(dry, line) == pytest.approx(naive(line.tokens.view().tolist(), dry, words))
    other = line_of(tokens)
    other.follow(line)
    line.tokens.append(0)
    other.tokens.append(1)
    for one in (line, other):
        assert found(dry, one) == pytest.approx(naive(one.tokens.view().tolist(), dry, words))


def test_an_example() -> None:
    """After 1 2 3 came 4 once, and 5 after 3 alone; a 3 has just followed on 1 2 again."""
    dry = Dry(multiplier=2.0, base=3.0, allowed_length=1)
    assert found(dry, line_of([1, 2, 3, 4, 9, 3, 5, 1, 2, 3])) == {4: 2.0 * 3.0**2, 5: 2.0}
    broken = Dry(multiplier=2.0, base=3.0, allowed_length=1, breakers=in_tokens([(2,)]))
    assert found(broken, line_of([1, 2, 3, 4, 9, 3, 5, 1, 2, 3])) == {4: 2.0, 5: 2.0}


def test_a_long_repetition_takes_what_float32_holds() -> None:
    line = line_of([7] * 5000)
    (taken,) = found(Dry(multiplier=3.0, base=4.0), line).values()
    assert 1e38 < taken < np.inf
    assert list(found(Dry(multiplier=3.0, base=1.0), line).values()) == [3.0]


# ------------------------------------------------------------------ breakers


@pytest.mark.parametrize("name", ["chat", "seq2seq"])
def test_breakers_are_found_within_tokens_and_over_their_ends(name: str) -> None:
    tokenizer = tokenizer_of(DEMO / name)
    size = tokenizer.vocab_size
    texts = [tokenizer.token_text(token) for token in range(size)]
    for token, text in tokenizer.special_texts().items():
        texts[token] = text
    one = BreakerTokens(lambda: tokenizer, size)
    found = one.get(None)
    holding = {token for token, text in enumerate(texts) if any(breaker in text for breaker in DEFAULT_BREAKERS)}
    assert set(found.tails) == holding != set()
    assert (set(found.tails.values()), found.longest) == ({((),)}, 0)
    assert one.get([*DEFAULT_BREAKERS[::-1], ":"]) is found
    assert one.get([]) == Breakers()

    breaker = "the end"
    made = one.get([breaker])
    assert made.longest > 0
    ids = tokenizer.encode("so, the end of it, then the others, the end", add_special_tokens=False)
    spans = [
        (place, place + 1 + len(tail))
        for place in range(len(ids))
        for tail in made.tails.get(ids[place], ())
        if tuple(ids[place + 1 : place + 1 + len(tail)]) == tail
    ]
    assert len({end for _, end in spans}) == 2, "as often as it is there"
    for first, end in spans:
        assert breaker in "".join(texts[token] for token in ids[first:end])
    for _, end in spans:  # and nothing is taken for what follows on it
        assert not found_after(made, ids[:end])


def found_after(made: Breakers, ids: list[int]) -> dict[int, float]:
    return found(Dry(multiplier=1.0, allowed_length=1, breakers=made), line_of([*ids, *ids]))


def test_special_tokens_are_what_texts_write() -> None:
    tokenizer = tokenizer_of(DEMO / "chat")
    token, text = next(iter(tokenizer.special_texts().items()))
    assert token in BreakerTokens(lambda: tokenizer, tokenizer.vocab_size).get([text]).tails


def test_without_a_tokenizer_there_are_no_breakers_but_none() -> None:
    one = BreakerTokens(lambda: None, 10)
    assert one.get([]) == Breakers()
    with pytest.raises(InvalidRequestError, match=r"Send dry_sequence_breakers: \[\]") as caught:
        one.get(None)
    assert caught.value.param == "dry_sequence_breakers"


def test_breakers_are_looked_up_in_a_thread() -> None:
    tokenizer = tokenizer_of(DEMO / "chat")
    one = BreakerTokens(lambda: tokenizer, tokenizer.vocab_size)
    begun = one.begin(["\n"])
    assert begun is not None
    assert begun.result(timeout=60) is one.get(["\n"])
    assert one.begin(["\n"]) is None


# ------------------------------------------------------------------ answers


class Penalties(transformers.LogitsProcessor):
    """The definition as a processor of transformers."""

    def __init__(self, dry: Dry, words: Words):
        self._dry, self._words = dry, words

    def __call__(self, input_ids: torch.LongTensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, tokens in enumerate(input_ids.tolist()):
            for token, taken in naive(tokens, self._dry, self._words).items():
                scores[row, token] -= taken
        return scores


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    ("ours", "dry"),
    [
        ({}, Dry(multiplier=2.0)),
        ({"dry_base": 1.2, "dry_allowed_length": 1}, Dry(multiplier=2.0, base=1.2, allowed_length=1)),
        ({"dry_allowed_length": 1, "dry_penalty_last_n": 6}, Dry(multiplier=2.0, allowed_length=1, last_n=6)),
    ],
    ids=["default", "one", "window"],
)
def test_answers(
    num_beams: int, ours: dict[str, Any], dry: Dry, checkpoint: Callable[[str], Checkpoint], shared_llm: Any
) -> None:
    """Greedy and by beams, with the other penalties before it."""
    model = checkpoint("llama-grouped")
    length = 24 if num_beams == 1 else 12
    params = SamplingParams(
        **({"temperature": 0.0} if num_beams == 1 else {"num_beams": 4, "n": 4}),
        **ours, max_tokens=length, repetition_penalty=0.8, dry_multiplier=2.0, dry_sequence_breakers=[],
    )  # fmt: skip
    changed = 0
    for prompt, output in zip(
        model.prompts(), shared_llm("llama-grouped").generate(model.prompts(), params), strict=True
    ):
        search = reference.greedy if num_beams == 1 else reference.beams
        more: dict[str, Any] = {} if num_beams == 1 else {"num_beams": 4, "n": 4}
        arguments = (model.model, prompt, model.eos, length)
        repetition = transformers.RepetitionPenaltyLogitsProcessor(0.8)
        expected = search(*arguments, **more, processors=[repetition, Penalties(dry, ())])
        assert expected.margin > MIN_MARGIN
        assert [answer.token_ids for answer in output.outputs] == [answer.tokens for answer in expected.answers]
        changed += expected.answers != search(*arguments, **more, processors=[repetition]).answers
    assert changed > 0
