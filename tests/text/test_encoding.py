"""Texts and pairs of texts as models read them, against transformers' own call of the same tokenizers."""

from __future__ import annotations

import copy
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.encoder_text import CORPUS, KINDS, roberta, wordpiece
from support.turns import lets_others_run
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from engine.errors import InvalidRequestError
from engine.text.encoding import Encoding
from engine.text.processor import Tokenizer, load_tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers"
PUBLISHED = ("roberta-base", "t5-small")

# Words that the tokenizers know, and what is hard about text: case, accents in both forms, astral characters and
# sequences of them, right to left, spaces of all kinds, special tokens spelled out, what normalisers take apart.
PIECES = [
    "London", "harbour", " ", "  ", "\n", "\t", "unlikely", "É", "e\u0301te\u0301", "İ", "ẞ", "😀", "👩\u200d🚀",
    "🇩🇪", "日本", "שלום", "\u00a0", "\u3000", "\u200b", "ﬁn", "½", "[MASK]", "<mask>", "[SEP]", "</s>", "a", ".",
    "'s", "\x00", "\ufffd", "##ing",
]  # fmt: skip
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=10).map(" ".join),
)


@cache
def pair_of(kind: str) -> tuple[Tokenizer, Any]:
    """Ours, and transformers' with a state of its own."""
    if kind in KINDS:
        hf = KINDS[kind]()  # training it again might give other ids
        return Tokenizer(copy.deepcopy(hf)), hf
    loaded = load_tokenizer(SHARED / kind)
    assert loaded is not None
    return loaded, transformers.AutoTokenizer.from_pretrained(SHARED / kind)


def reference(hf: Any, text: str, pair: str | None, **settings: Any) -> Encoding:
    """What transformers makes of it. (A batch of one: alone, it takes an empty second text for none.)"""
    found = hf([text], None if pair is None else [pair], return_offsets_mapping=hf.is_fast, **settings)
    ids = found["input_ids"][0]
    types = found["token_type_ids"][0] if "token_type_ids" in found else [0] * len(ids)
    if not hf.is_fast:
        return Encoding(ids, types, None, [None] * len(ids))
    return Encoding(ids, types, found["offset_mapping"][0], found.encodings[0].sequence_ids)


def check(kind: str, text: str, pair: str | None, max_length: int | None, side: str, special: bool) -> bool:
    """Ours is transformers'; returns whether something was left out."""
    tokenizer, hf = pair_of(kind)
    tokenizer.truncation_side = hf.truncation_side = side  # type: ignore[assignment]
    whole = reference(hf, text, pair, add_special_tokens=special)
    added = sum(owner is None for owner in whole.sequence)
    if max_length is not None:
        max_length = max(max_length, added)
    mine = tokenizer.encode_input(text, pair, add_special_tokens=special, max_length=max_length)
    cut = max_length is not None
    theirs = reference(hf, text, pair, add_special_tokens=special, truncation=cut, max_length=max_length)
    assert (mine.ids, mine.type_ids, mine.sequence) == (theirs.ids, theirs.type_ids, theirs.sequence)
    if kind == "roberta-prefix-space" and side == "left" and mine.truncated:
        # transformers takes the first token that is left for the first of the text, whose leading space is not of the
        # text, and counts the space among the token's characters. Ours has the place that it has in the whole text.
        assert set(mine.offsets or ()) <= set(whole.offsets or ())
        for number in range(1 if pair is None else 2):
            at = [at for at, owner in enumerate(mine.sequence) if owner == number][1:]
            assert [mine.offsets[i] for i in at] == [theirs.offsets[i] for i in at]  # type: ignore[index]
    else:
        assert mine.offsets == theirs.offsets
    assert mine.truncated == (len(mine.ids) < len(whole.ids))
    assert max_length is None or len(mine.ids) <= max_length
    return mine.truncated


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(
    text=TEXTS,
    pair=st.none() | TEXTS,
    max_length=st.none() | st.integers(0, 24),
    side=st.sampled_from(["right", "left"]),
    special=st.booleans(),
)
def test_any_text_is_read_as_transformers_reads_it(
    kind: str, text: str, pair: str | None, max_length: int | None, side: str, special: bool
) -> None:
    check(kind, text, pair, max_length, side, special)


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_share_the_room_between_two_texts(kind: str) -> None:
    """Longer first, shorter first, equal ones, and room for all, for one, for none, odd and even."""
    lengths, truncated = (0, 1, 4, 9), 0
    for first in lengths:
        for second in lengths:
            text, pair = (" ".join(["a"] * length) for length in (first, second))
            for side in ("right", "left"):
                truncated += sum(check(kind, text, pair, size, side, True) for size in range(16))
    assert truncated > 150


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_tokenizers(kind: str) -> None:
    if not (SHARED / kind).is_dir():
        pytest.skip("no tokenizers among the shared data")
    for text in [*CORPUS, "".join(PIECES), " ".join(PIECES), ""]:
        for pair in (None, CORPUS[1], ""):
            for size in (None, 4, 7, 20):
                for side in ("right", "left"):
                    check(kind, text, pair, size, side, True)


def test_places_are_characters_of_the_text_as_it_was_given() -> None:
    for kind, text in (("roberta", "😀 Été e\u0301té London"), ("modernbert", "😀 Été"), ("xlmr", "London 😀 Été")):
        found = pair_of(kind)[0].encode_input(text)
        assert found.offsets is not None
        covered = {at for start, end in found.offsets for at in range(start, end)}
        assert {at for at, char in enumerate(text) if char != " "} <= covered
        assert max(covered) == len(text) - 1
    accents = pair_of("wordpiece")[0].encode_input("ÉTÉ London")
    assert accents.offsets is not None
    words = ["ÉTÉ London"[start:end] for start, end in accents.offsets]
    assert "".join(words) == "ÉTÉLondon"
    assert accents.ids == pair_of("wordpiece")[0].encode_input("ete london").ids


def test_segments_and_the_texts_of_a_pair() -> None:
    found = pair_of("wordpiece")[0].encode_input("the engine", "London")
    first = found.type_ids.index(1)
    assert found.type_ids == [0] * first + [1] * (len(found.ids) - first)
    assert found.sequence[0] is None
    assert found.sequence[first - 1] is None
    assert set(found.sequence[1 : first - 1]) == {0}
    assert set(found.sequence[first:-1]) == {1}
    # Its template has segments, but its model none.
    other = pair_of("modernbert")[0].encode_input("the engine", "London")
    assert 1 in other.sequence
    assert set(other.type_ids) == {0}


@pytest.mark.parametrize(("kind", "pair", "needed"), [("wordpiece", None, 2), ("roberta", "b", 4), ("t5", "b", 2)])
def test_special_tokens_must_have_room(kind: str, pair: str | None, needed: int) -> None:
    tokenizer, _ = pair_of(kind)
    left = tokenizer.encode_input("a", pair, max_length=needed)
    assert len(left.ids) == needed
    assert set(left.sequence) == {None}
    with pytest.raises(InvalidRequestError, match=f"adds {needed} special tokens.* to at least {needed}") as caught:
        tokenizer.encode_input("a", pair, max_length=needed - 1)
    assert caught.value.param == "truncate_prompt_tokens"


def test_unpaired_surrogates_are_refused_in_both_texts() -> None:
    for texts in (("a\ud800", None), ("a", "\udfffb")):
        with pytest.raises(InvalidRequestError, match="unpaired surrogate"):
            pair_of("wordpiece")[0].encode_input(*texts)


def test_threads_do_not_see_each_others_lengths() -> None:
    tokenizer, text = Tokenizer(wordpiece()), " ".join(CORPUS)
    expected = {length: tokenizer.encode_input(text, text, max_length=length) for length in range(3, 60)}
    wrong: list[int] = []

    def work(lengths: list[int]) -> None:
        for length in lengths * 5:
            if tokenizer.encode_input(text, text, max_length=length) != expected[length]:
                wrong.append(length)

    lengths = list(expected)
    threads = [threading.Thread(target=work, args=(lengths[start:] + lengths[:start],)) for start in (0, 15, 30, 45)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len({len(found.ids) for found in expected.values()}) == len(expected)
    assert tokenizer._fast.truncation is None


def test_encoding_lets_other_threads_run() -> None:
    tokenizer = Tokenizer(roberta())
    assert lets_others_run(lambda: tokenizer.encode_input("word " * 200_000, max_length=16))


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """BERT's tokenizer in Python."""
    vocab = sorted(wordpiece().get_vocab().items(), key=lambda item: item[1])
    file = tmp_path_factory.mktemp("legacy") / "vocab.txt"
    file.write_text("\n".join(token for token, _ in vocab) + "\n", encoding="utf-8")
    return BertTokenizerLegacy(str(file))


@pytest.mark.parametrize("kind", ["byt5", "legacy"])
def test_tokenizers_in_python(kind: str, legacy: Any) -> None:
    hf = legacy if kind == "legacy" else transformers.ByT5Tokenizer()
    tokenizer = Tokenizer(copy.copy(hf))
    assert not hf.is_fast
    truncated = 0
    for first in ("", "a b", "the engine 😀 in London"):
        for second in (None, "a", "red boats é"):
            for side in ("right", "left"):
                tokenizer.truncation_side = hf.truncation_side = side  # type: ignore[assignment]
                added = hf.num_special_tokens_to_add(pair=second is not None)
                for size in [None, *range(added, added + 12)]:
                    mine = tokenizer.encode_input(first, second, max_length=size)
                    theirs = reference(hf, first, second, truncation=size is not None, max_length=size)
                    assert mine.offsets is None
                    assert (mine.ids, mine.type_ids) == (theirs.ids, theirs.type_ids)
                    assert sum(owner is None for owner in mine.sequence) == added
                    if size is None:
                        lengths = [len(hf.encode(text, add_special_tokens=False)) for text in (first, second or "")]
                        assert [mine.sequence.count(0), mine.sequence.count(1)] == lengths
                    truncated += mine.truncated
                with pytest.raises(InvalidRequestError, match="special tokens"):
                    tokenizer.encode_input(first, second, max_length=added - 1)
    assert truncated > 30
    plain = tokenizer.encode_input("a b", "a", add_special_tokens=False)
    assert plain.ids == hf.encode("a b", add_special_tokens=False) + hf.encode("a", add_special_tokens=False)
    assert None not in plain.sequence


def test_lower_case_keeps_the_places() -> None:
    text = "London 😀 HARBOUR [MASK] İstanbul"
    hf = wordpiece(lower=False)
    plain, lower = Tokenizer(hf), Tokenizer(copy.deepcopy(hf), lower_case=True)
    found, meant = lower.encode_input(text), plain.encode_input(text.lower().replace("[mask]", "[MASK]"))
    assert found.ids == meant.ids != plain.encode_input(text).ids
    assert lower.mask_token_id in found.ids
    assert found.offsets is not None
    assert found.offsets[1][0] == text.index("London")
    assert max(end for _, end in found.offsets) == len(text)
    assert lower.encode("LONDON") == plain.encode("london") != plain.encode("LONDON")
    in_python = Tokenizer(transformers.ByT5Tokenizer(), lower_case=True)
    assert in_python.encode_input("ABC").ids == in_python.encode_input("abc").ids == in_python.encode("ABC")


def test_a_mask_that_the_vocabulary_lacks_is_none() -> None:
    hf = wordpiece()
    assert (Tokenizer(copy.deepcopy(hf)).mask_token, Tokenizer(hf).mask_token_id) == ("[MASK]", 4)
    named = transformers.PreTrainedTokenizerFast(tokenizer_object=hf._tokenizer, unk_token="[UNK]")
    named._special_tokens_map["mask_token"] = "<blank>"
    assert named.mask_token_id == named.unk_token_id
    found = Tokenizer(named)
    assert (found.mask_token_id, found.mask_token) == (None, None)
    assert pair_of("gpt2")[0].mask_token_id is None


def test_ids_are_cut_on_the_same_side() -> None:
    whole = Encoding.of_ids([5, 6, 7, 8], type_ids=[0, 0, 1, 1], added=(5, 8))
    assert whole == Encoding([5, 6, 7, 8], [0, 0, 1, 1], None, [None, 0, 0, None])
    assert Encoding.of_ids([5, 6, 7, 8], 3, type_ids=[0, 0, 1, 1]) == Encoding(
        [5, 6, 7], [0, 0, 1], None, [0, 0, 0], truncated=True
    )
    left = Encoding.of_ids([5, 6, 7, 8], 3, "left", type_ids=[0, 0, 1, 1])
    assert (left.ids, left.type_ids, left.truncated) == ([6, 7, 8], [0, 1, 1], True)
    assert not Encoding.of_ids([5, 6], 2).truncated


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_marker_is_one_of_the_special_tokens(is_fast: bool, side: str, legacy: Any) -> None:
    hf = wordpiece() if is_fast else legacy
    tokenizer = Tokenizer(copy.deepcopy(hf))
    tokenizer.truncation_side = side  # type: ignore[assignment]
    text, mark = "the engine in London", hf.convert_tokens_to_ids("a")
    for size in (None, *range(3, 9)):
        plain = tokenizer.encode_input(text, max_length=None if size is None else size - 1)
        found = tokenizer.encode_input(text, max_length=size, marker=mark)
        assert found.ids == [plain.ids[0], mark, *plain.ids[1:]]
        assert found.sequence == [None, None, *plain.sequence[1:]]
        assert (found.truncated, len(found.type_ids)) == (plain.truncated, len(found.ids))
        assert found.offsets == (None if plain.offsets is None else [(0, 0), *plain.offsets])
    with pytest.raises(InvalidRequestError, match="adds 3 special tokens"):
        tokenizer.encode_input(text, max_length=2, marker=mark)
    bare = hf.encode(text, add_special_tokens=False)
    assert tokenizer.encode_input(text, add_special_tokens=False, marker=mark).ids == [mark, *bare]
