"""Segments of a text, encoded one by one, have the token ids of the whole: for every kind of tokenizer and any added
tokens. And prompts whose segments are remembered have the ids that they would have anyway."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from engine import InvalidRequestError
from engine.text.processor import Tokenizer, load_tokenizer
from engine.text.segments import Segmenter, cutting_tokens
from server.answering.prompt import Room, encode_fitting
from server.answering.remembered import RememberedTokens
from server.errors import ApiError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SMALL_WORDS = (
    "ab",
    "a b",
    " Ab\n\n",
    "\u00c5ngstro\u0308m",
    "\ufb01ne\u2581",
    "\u4f60\u597d",
    "x|>",
    "<|a",
    "a|><",
    "12 3",
)
CHAT = ("<|im_start|>", "<|im_end|>", "\n", "user", "assistant", "<s>", "[INST]", " ", "<|im_", "end|>", "\u00e9")
MARKS = ["<|im_start|>", "<|im_end|>"]
ROOM = Room(100_000, "messages")


def _made(model: Any, trainer: Any, **parts: Any) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.train_from_iterator(SMALL_WORDS, trainer)
    return made


def _byte_level(*, spaced: bool) -> tokenizers.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    split = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    return _made(models.BPE(), trainer, pre_tokenizer=split, normalizer=normalizers.NFC())


def _metaspace(scheme: str) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>"], show_progress=False)
    split = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme != "never")
    return _made(models.BPE(unk_token="<unk>"), trainer, pre_tokenizer=split)


def _llama() -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>"], show_progress=False)
    before = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return _made(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, normalizer=before)


def _unigram() -> tokenizers.Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=40, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    before = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    return _made(models.Unigram(), trainer, normalizer=before, pre_tokenizer=split)


def _word_piece() -> tokenizers.Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"], show_progress=False)
    split = pre_tokenizers.BertPreTokenizer()
    before = normalizers.BertNormalizer(lowercase=True)
    return _made(models.WordPiece(unk_token="[UNK]"), trainer, normalizer=before, pre_tokenizer=split)


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": lambda: _byte_level(spaced=False),
    "byte-level, spaced": lambda: _byte_level(spaced=True),
    "metaspace, first": lambda: _metaspace("first"),
    "metaspace, always": lambda: _metaspace("always"),
    "metaspace, never": lambda: _metaspace("never"),
    "llama": _llama,
    "unigram": _unigram,
    "word-piece": _word_piece,
}


@cache
def saved(kind: str) -> str:
    """A tokenizer of a kind without added tokens of its own, as a tokenizer.json."""
    return KINDS[kind]().to_str()


def with_added(kind: str, added: Sequence[AddedToken]) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(saved(kind))
    for token in added:  # one by one: each keeps its own settings
        (made.add_special_tokens if token.special else made.add_tokens)([token])
    return made


def ids_of(by: tokenizers.Tokenizer, text: str) -> list[int]:
    return by.encode_batch_fast([text], add_special_tokens=False)[0].ids


# Tokens that begin, hold or end each other, and stand beside spaces, letters and letters of two forms.
_CONTENTS = st.one_of(
    st.sampled_from(
        ["<|a|>", "<|a|>b", "b<|a|>", "|><|", "<|", "|>", "a|>", "\n<|a|>", "<|a|>\n", "<<", "ab", "\ufb01"]
    ),
    st.text("<|a>b \n\u00c5", min_size=1, max_size=4),
)
_ADDED = st.builds(
    AddedToken,
    _CONTENTS,
    single_word=st.sampled_from([False, False, True]),
    lstrip=st.sampled_from([False, False, True]),
    rstrip=st.booleans(),
    normalized=st.sampled_from([False, False, True]),
    special=st.booleans(),
)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_segments_of_any_text_with_any_added_tokens(kind: str, data: st.DataObject) -> None:
    added = data.draw(st.lists(_ADDED, min_size=1, max_size=5, unique_by=lambda token: token.content))
    contents = [token.content for token in added]
    # The library fails on a token that begins with a space which the one before takes.
    assume(not (any(token.rstrip for token in added) and any(content[0].isspace() for content in contents)))
    made = with_added(kind, added)
    pieces = st.one_of(
        st.sampled_from([*contents, *SMALL_WORDS, " ", "\n"]), st.text("<|a>b \n\u00c5\u0308", max_size=3)
    )
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    marks = cutting_tokens(made.get_added_tokens_decoder().values(), "\n".join(contents))
    segments = Segmenter(marks, least=1).split(text)
    assert "".join(segments) == text
    assert [token for segment in segments for token in ids_of(made, segment)] == ids_of(made, text)


@pytest.mark.parametrize("kind", KINDS)
def test_chat_tokens_cut_in_every_kind(kind: str) -> None:
    made = with_added(kind, [AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    assert cutting_tokens(made.get_added_tokens_decoder().values(), "".join(MARKS)) == MARKS


@pytest.mark.parametrize(
    ("other", "left"),
    [("\n<|im_start|>", ["<|im_end|>"]), ("x<|im", []), ("(<|im_start|>)", ["<|im_end|>"])],
    ids=["ends with it", "ends with its beginning", "holds it"],
)
def test_no_cut_before_a_token_that_another_one_reaches_into(other: str, left: list[str]) -> None:
    added = [AddedToken(token, normalized=False) for token in (*MARKS, other)]
    assert cutting_tokens(added, "".join(MARKS)) == left


@pytest.mark.parametrize("flag", ["lstrip", "single_word", "normalized"])
def test_no_cut_before_a_token_that_depends_on_what_is_around(flag: str) -> None:
    flags = {"normalized": False, flag: True}
    assert cutting_tokens([AddedToken("<|im_end|>", **flags)], "<|im_end|>") == []


@pytest.mark.parametrize("flag", ["lstrip", "single_word"])
def test_no_cut_before_a_token_that_a_longer_one_begins_with_that_depends_on_what_is_around(flag: str) -> None:
    added = [AddedToken("<|a|>", normalized=False), AddedToken("<|a|>b", normalized=False, **{flag: True})]
    assert cutting_tokens(added, "<|a|>") == []


def test_only_tokens_that_a_template_writes_are_looked_for() -> None:
    added = [AddedToken(f"<unused{number}>", normalized=False) for number in range(99)]
    assert cutting_tokens(added, "{{ '<unused7>' }}") == ["<unused7>"]


def test_a_beginning_has_the_same_segments_whatever_follows() -> None:
    segmenter = Segmenter(MARKS, least=20)
    before = "".join(f"<|im_start|>user\n{'word ' * count}<|im_end|>\n" for count in range(9))
    short, long = segmenter.split(before + "<|im_st"), segmenter.split(before + "<|im_start|>assistant")
    assert len(short) > 5
    assert short[:-1] == long[: len(short) - 1]
    assert all(len(segment) >= 20 for segment in long[:-1])


# ---------------------------------------------------------------- remembered


def chat_tokenizer(kind: str) -> Tokenizer:
    made = with_added(kind, [AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=made, chat_template="".join(MARKS)))


class Counting:
    """Counts the characters that a tokenizer encodes."""

    def __init__(self, tokenizer: Tokenizer):
        self.characters, self._encode = 0, tokenizer.encode
        tokenizer.encode = self.encode  # type: ignore[method-assign]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.characters += len(text)
        return self._encode(text, add_special_tokens)


def turn(number: int) -> str:
    return f"<|im_start|>user\n{f'ab {number} ' * 250}<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(given=st.lists(st.sampled_from([*map(turn, range(3)), *CHAT]), min_size=1, max_size=5))
def test_remembered_prompts_have_the_same_ids(kind: str, given: list[str]) -> None:
    tokenizer = chat_tokenizer(kind)
    remembered = RememberedTokens(tokenizer, most_bytes=6000)  # a few segments
    text = ""
    for part in [*given, *given]:
        text += part
        assert remembered.encode(text, ROOM, None) == tokenizer.encode(text, add_special_tokens=False)
        assert remembered.num_bytes <= 6000


def test_a_turn_costs_what_it_adds() -> None:
    tokenizer = chat_tokenizer("byte-level")
    counting, remembered = Counting(tokenizer), RememberedTokens(tokenizer)
    text = "".join(map(turn, range(20)))
    remembered.encode(text, ROOM, None)
    assert counting.characters == len(text)
    remembered.encode(text + turn(20), ROOM, None)
    assert counting.characters < len(text) + 2 * len(turn(20))


def test_salts_share_nothing() -> None:
    tokenizer = chat_tokenizer("byte-level")
    counting, remembered = Counting(tokenizer), RememberedTokens(tokenizer)
    for salt in (None, "a", "b"):
        before = counting.characters
        remembered.encode(turn(0) + turn(1), ROOM, salt)
        assert counting.characters - before == len(turn(0) + turn(1)), salt


def test_segments_used_least_recently_are_forgotten() -> None:
    tokenizer = chat_tokenizer("byte-level")
    remembered = RememberedTokens(tokenizer, most_bytes=50_000)
    system, others = turn(0), [turn(number) for number in range(1, 40)]
    for other in others:
        remembered.encode(system + other + turn(0), ROOM, None)
    assert 30_000 < remembered.num_bytes <= 50_000
    counting = Counting(tokenizer)
    remembered = RememberedTokens(tokenizer, most_bytes=50_000)
    for other in others:
        remembered.encode(system + other + turn(0), ROOM, None)
    assert counting.characters < len(system) + sum(len(other) + len(turn(0)) for other in others)


@pytest.mark.parametrize(
    "text", ["<|im_start|>" * 9000, f"{turn(0)}<|im_start|>{'ab ' * 400_000}"], ids=["tokens", "characters"]
)
def test_too_long_prompts_are_refused_in_the_same_words(text: str) -> None:
    tokenizer, room = chat_tokenizer("byte-level"), Room(500, "messages")
    remembered = RememberedTokens(tokenizer)
    for encode in (lambda: remembered.encode(text, room, None), lambda: encode_fitting(tokenizer.encode, text, room)):
        with pytest.raises(ApiError) as refusal:
            encode()
        assert refusal.value.code == "context_length_exceeded"
    assert remembered.num_bytes == 0


def test_unpaired_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        RememberedTokens(chat_tokenizer("byte-level")).encode(f"{turn(0)}\ud800", ROOM, None)


def test_a_tokenizer_in_python_encodes_the_whole_text() -> None:
    tokenizer = Tokenizer(ByT5Tokenizer())
    text = "</s>ab" * 1000
    assert tokenizer.segmenter().split(text) == [text]
    assert RememberedTokens(tokenizer).encode(text, ROOM, None) == tokenizer.encode(text, add_special_tokens=False)


REAL = ("tokenizers/nmt", "tokenizers/t5-small", "tokenizers/roberta-base", "stories260k/hf")


@pytest.mark.skipif(not (DATA / "tokenizers").is_dir(), reason="the shared data are not there")
@pytest.mark.parametrize("folder", REAL)
@given(
    pieces=st.lists(
        st.sampled_from([*CHAT, "</s>", "<pad>", "<mask>", "Once upon a time", "  ", "\u2581", "\n\n"]), max_size=20
    )
)
@example(pieces=["</s>", " ", "</s>", "Once upon a time", "</s>"])
def test_segments_by_published_tokenizers(folder: str, pieces: list[str]) -> None:
    tokenizer, marks = _published(folder)
    text = "".join(pieces)
    segments = Segmenter(marks, least=1).split(text)
    found = [token for segment in segments for token in tokenizer.encode(segment, add_special_tokens=False)]
    assert found == tokenizer.encode(text, add_special_tokens=False)


@cache
def _published(folder: str) -> tuple[Tokenizer, list[str]]:
    tokenizer = load_tokenizer(DATA / folder)
    assert tokenizer is not None
    added = json.loads((DATA / folder / "tokenizer.json").read_text())["added_tokens"]
    marks = cutting_tokens([AddedToken(**_settings(token)) for token in added], "\n".join(t["content"] for t in added))
    assert ("</s>" in marks) == (folder != "tokenizers/roberta-base")  # which looks for it in the normalised text
    return tokenizer, marks


def _settings(token: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in token.items() if name != "id"}
