"""Ids to text while they arrive, for every kind of tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.structured import tokenizer_of
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from engine.text.detokenizer import Detokenizer, WordDetokenizer
from engine.text.processor import Tokenizer

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # one emoji of five code points
TEXTS = (
    "Once upon a time, there was a little girl. She didn't like it -- at all!",
    "  two  spaces,\n\nnew lines\tand tabs  ",
    f"emoji \U0001f600\U0001f680 {FAMILY} end",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u6f22\u5b57 \u3053\u3093\u306b\u3061\u306f",
    "cafe\u0301 nai\u0308ve \u1ea1\u0301 \u0915\u094d\u0937\u093f",
    "def f(x):\n    return x ** 2  # \u00b2\n",
)


def byte_level(texts: Sequence[str] = TEXTS) -> Tokenizer:
    """Byte-level BPE that is trained on these texts."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>"))


def _word_piece() -> Tokenizer:
    model = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    model.train_from_iterator(TEXTS, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]", sep_token="[SEP]"))


def _unigram() -> Tokenizer:
    model = tokenizers.Tokenizer(models.Unigram())
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    model.train_from_iterator(TEXTS, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="</s>"))


def _byte_fallback() -> Tokenizer:
    """LLaMA's kind: a SentencePiece BPE that spells what it does not know in bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,!?'O\u4f60", "\u2581t", "he", "\u2581the", "\u2581a", "on"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("\u2581", "a"), ("o", "n")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    model.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    model.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>"))


def _slow() -> Tokenizer:
    return Tokenizer(ByT5Tokenizer())


def _data(folder: str) -> Path:
    path = DATA / folder
    if not path.is_dir():
        pytest.skip(f"no {folder} among the shared data")
    return path


def _folder(target: Path, files: dict[str, Path], config: dict[str, str]) -> Path:
    target.mkdir()
    for name, source in files.items():
        shutil.copy(source, target / name)
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def _gpt2(tmp: Path) -> Tokenizer:
    source = _data("tokenizers/gpt2_graykode")
    files = {"vocab.json": source / "encoder.json", "merges.txt": source / "vocab.bpe"}
    return tokenizer_of(_folder(tmp / "gpt2", files, {"tokenizer_class": "GPT2Tokenizer"}))


def _bert(tmp: Path) -> Tokenizer:
    source = _data("tokenizers/bert-base-cased")
    files = {"vocab.txt": source / "bert_basic_cased_vocab.txt"}
    return tokenizer_of(_folder(tmp / "bert", files, {"tokenizer_class": "BertTokenizer"}))


def _nmt(tmp: Path) -> Tokenizer:
    files = {"tokenizer.json": _data("tokenizers/nmt") / "tokenizer.json"}
    return tokenizer_of(
        _folder(tmp / "nmt", files, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )


def _mistral(tmp: Path) -> Tokenizer:
    source = _data("tokenizers/mistral")
    pytest.importorskip("sentencepiece")
    files = {"tokenizer.model": source / "tokenizer.model.v1"}
    return tokenizer_of(_folder(tmp / "mistral", files, {"tokenizer_class": "LlamaTokenizer"}))


TRAINED: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "word-piece": _word_piece,
    "unigram": _unigram,
    "byte-fallback": _byte_fallback,
    "slow": _slow,
}
REAL: dict[str, Callable[[Path], Tokenizer]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "nmt": _nmt,
    "mistral": _mistral,
    "t5": lambda tmp: tokenizer_of(_data("tokenizers/t5-small")),
    "roberta": lambda tmp: tokenizer_of(_data("tokenizers/roberta-base")),
    "stories": lambda tmp: tokenizer_of(_data("stories260k/hf")),
}
# Tokenizers whose tokens are plain bytes: their decoding is exact for any ids at all.
BYTES = ("byte-level", "gpt2", "roberta")


@cache
def trained(name: str) -> Tokenizer:
    return TRAINED[name]()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    @cache
    def load(name: str) -> Tokenizer:
        return trained(name) if name in TRAINED else REAL[name](tmp_path_factory.mktemp(name))

    return load


def in_context(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """What `transformers` itself says the ids add to the prompt's text."""
    hf = tokenizer.hf
    before = hf.decode(list(prompt), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    both = hf.decode([*prompt, *ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert both.startswith(before)
    return both[len(before) :]


def deltas(ids: Sequence[int], cuts: Sequence[int]) -> Iterator[Sequence[int]]:
    places = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    for start, end in pairwise(places):
        yield ids[start:end]


def stream(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], cuts: Sequence[int], skip: bool = True
) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    pieces = [detokenizer.append(tokenizer.visible(part, skip)) for part in deltas(ids, cuts)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("name", [*TRAINED, *REAL])
def test_encode_and_decode_equal_transformers(name: str, real: Callable[[str], Tokenizer]) -> None:
    tokenizer = real(name)
    hf = tokenizer.hf
    for text in (*TEXTS, ""):
        for special in (True, False):
            ids = hf.encode(text, add_special_tokens=special)
            assert tokenizer.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                assert tokenizer.decode(ids, skip_special_tokens=skip) == hf.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (hf.eos_token_id, len(hf))


@pytest.mark.parametrize("name", [*TRAINED, *REAL])
def test_text_in_pieces_is_the_text_in_context(name: str, real: Callable[[str], Tokenizer]) -> None:
    tokenizer = real(name)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for start in (0, 1, len(ids) // 3, len(ids) // 2):
            prompt, rest = ids[:start], ids[start:]
            if "\ufffd" in tokenizer.decode(prompt):
                continue
            expected = in_context(tokenizer, prompt, rest)
            for step in (1, 2, 3, 7, len(ids)):
                pieces = stream(tokenizer, prompt, rest, range(0, len(rest), step))
                assert "".join(pieces) == expected
                if "\ufffd" not in expected:
                    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", [*TRAINED, *REAL])
def test_random_ids_give_one_text_however_they_arrive(name: str, real: Callable[[str], Tokenizer]) -> None:
    tokenizer = real(name)
    ordinary = len(tokenizer.visible(range(tokenizer.vocab_size), True))
    assert ordinary > 50
    # Half of the ids come from the first few hundred, where byte tokens live, and a few from outside.
    token = st.integers(0, min(300, tokenizer.vocab_size - 1)) | st.integers(0, tokenizer.vocab_size + 3)
    ids = st.lists(token, max_size=80)
    seen_whole = seen_broken = 0

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(prompt=st.lists(token, max_size=12), ids=ids, cuts=st.lists(st.integers(1, 80)), skip=st.booleans())
    def check(prompt: list[int], ids: list[int], cuts: list[int], skip: bool) -> None:
        nonlocal seen_whole, seen_broken
        one_by_one = "".join(stream(tokenizer, prompt, ids, range(len(ids)), skip))
        assert "".join(stream(tokenizer, prompt, ids, cuts, skip)) == one_by_one
        assert "".join(stream(tokenizer, prompt, ids, [], skip)) == one_by_one
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        broken = "\ufffd" in whole
        if name in BYTES or not broken:
            assert "".join(stream(tokenizer, [], ids, cuts, skip)) == whole
        seen_whole += not broken
        seen_broken += broken

    check()
    assert seen_whole
    assert seen_broken or name not in ("byte-level", "byte-fallback", "gpt2")


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 100)))
def test_any_text_survives_byte_tokens(name: str, text: str, cuts: list[int]) -> None:
    tokenizer = trained(name)
    prompt = tokenizer.encode("a")
    both = tokenizer.encode("a" + text)
    if both[: len(prompt)] != prompt:  # the text's beginning merged with the prompt's end
        return
    ids = both[len(prompt) :]
    for pieces in (stream(tokenizer, prompt, ids, cuts), stream(tokenizer, prompt, ids, range(len(ids)))):
        # What SentencePiece normalises on the way in is not the detokenizer's doing.
        assert "".join(pieces) == in_context(tokenizer, prompt, ids)
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """The id of the token that is this byte."""
    name = f"<0x{byte:02X}>"
    alphabet = tokenizer._fast
    found = alphabet.token_to_id(name)
    if found is None:
        # GPT-2's table from bytes to printable characters.
        kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
        moved = [other for other in range(256) if other not in kept]
        found = alphabet.token_to_id(chr(byte if byte in kept else 256 + moved.index(byte)))
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_a_character_arrives_with_its_last_byte_and_never_in_halves(name: str) -> None:
    tokenizer = trained(name)
    text = f"\U0001f600\u4e16\u00e9x{FAMILY}"
    ids = [byte_id(tokenizer, byte) for byte in text.encode()]
    detokenizer = tokenizer.detokenizer([])
    sizes = [len(char.encode()) for char in text]
    arrived = 0
    for char, size in zip(text, sizes, strict=True):
        pieces = [detokenizer.append([token]) for token in ids[arrived : arrived + size]]
        assert pieces == [""] * (size - 1) + [char]
        arrived += size
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_an_unfinished_character_is_flushed_at_the_end(name: str) -> None:
    tokenizer = trained(name)
    ids = [*tokenizer.encode("a"), *(byte_id(tokenizer, byte) for byte in "\u4f60".encode()[:2])]
    pieces = stream(tokenizer, [], ids, range(len(ids)))
    assert pieces[-1]
    assert set(pieces[-1]) == {"\ufffd"}
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_a_prompt_that_ends_within_a_character(name: str) -> None:
    tokenizer = trained(name)
    smile = [byte_id(tokenizer, byte) for byte in "\U0001f600".encode()]
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    prompt = [*tokenizer.encode("on"), *smile[:2]]
    for step in (1, 9):
        finished = stream(tokenizer, prompt, [*smile[2:], letter], range(0, 9, step))
        assert "".join(finished) == "\U0001f600" + tokenizer.token_text(letter)
        # Not finished: the prompt's broken half is the prompt's, and is not repeated.
        unfinished = stream(tokenizer, prompt, [letter], range(0, 9, step))
        assert "".join(unfinished) == tokenizer.token_text(letter)
    assert stream(tokenizer, prompt, [], []) == [""]


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_rubbish_is_released_in_time_and_at_bounded_cost(name: str) -> None:
    tokenizer = trained(name)
    decoded = 0

    def decode(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return tokenizer._decode(ids)

    for byte in (0x80, 0xE4, 0xF0):
        ids = [byte_id(tokenizer, byte)] * 1000
        detokenizer, decoded, shown = Detokenizer(decode), 0, 0
        for count, token in enumerate(ids, 1):
            shown += len(detokenizer.append([token]))
            assert count - shown <= 8
        assert shown + len(detokenizer.finish()) == 1000
        assert decoded < 60 * len(ids)


@pytest.mark.parametrize("name", [*TRAINED])
def test_the_cost_of_a_token_does_not_grow(name: str) -> None:
    tokenizer = trained(name)
    calls = decoded = 0

    def decode(ids: list[int]) -> str:
        nonlocal calls, decoded
        calls, decoded = calls + 1, decoded + len(ids)
        return tokenizer._decode(ids)

    ids = tokenizer.visible(tokenizer.encode(" ".join(TEXTS) * 5), True)
    text = "".join(map(Detokenizer(decode).append, ([token] for token in ids)))
    assert decoded < 40 * len(ids)
    calls = 0
    assert Detokenizer(decode).append(ids) == text
    assert calls < len(ids) / 2


def test_leading_space_depends_on_what_stands_before() -> None:
    tokenizer = trained("byte-fallback")
    the = tokenizer.encode("the", add_special_tokens=False)
    assert the == [tokenizer._fast.token_to_id("\u2581the")]
    assert tokenizer.bos_token_id is not None
    assert "".join(stream(tokenizer, [], the, [])) == "the"
    assert "".join(stream(tokenizer, [tokenizer.bos_token_id], the, [])) == "the"
    assert "".join(stream(tokenizer, tokenizer.encode("on"), the, [])) == " the"
    # Special tokens in between, shown or not, do not swallow the space.
    between = [*the, tokenizer.bos_token_id, *the]
    assert "".join(stream(tokenizer, [], between, range(3))) == "the the"
    assert "".join(stream(tokenizer, [], between, range(3), skip=False)) == "the<s> the"
    blank = tokenizer._fast.token_to_id("\u2581")
    spaced = [*the, *[blank] * 12, *the]
    assert "".join(stream(tokenizer, [], spaced, range(20))) == "the" + " " * 13 + "the"


def test_stories_begin_without_a_space_and_go_on_with_one(real: Callable[[str], Tokenizer]) -> None:
    tokenizer = real("stories")
    ids = tokenizer.encode("Once upon a time there")
    assert "".join(stream(tokenizer, ids[:1], ids[1:], [])) == "Once upon a time there"
    prompt = tokenizer.encode("Once upon a time")
    assert ids[: len(prompt)] == prompt
    assert "".join(stream(tokenizer, prompt, ids[len(prompt) :], [])) == " there"


def test_token_text() -> None:
    llama = trained("byte-fallback")
    assert llama.token_text(llama._fast.token_to_id("\u2581the")) == " the"
    assert llama.token_text(llama._fast.token_to_id("he")) == "he"
    assert llama.token_text(byte_id(llama, 0xE4)) == "\ufffd"
    assert llama.token_text(1) == "<s>"
    assert llama.token_text(10**6) == ""
    word_piece = trained("word-piece")
    assert word_piece.token_text(word_piece._fast.token_to_id("girl")) == " girl"
    assert word_piece.token_text(word_piece._fast.token_to_id("##le")) == "le"
    byte_level = trained("byte-level")
    ids = byte_level.encode(TEXTS[0])
    assert "".join(map(byte_level.token_text, ids)) == TEXTS[0]


def quoting(ids: list[int]) -> str:
    """Words, of which 0 is a quotation mark that opens and closes by turns, and 1 a full stop."""
    text, opened = "", False
    for token in ids:
        if token == 0:
            text, opened = (f'{text}"' if opened else f'{text} "'), not opened
        elif token == 1:
            text += "."
        else:
            text += ("" if opened and text.endswith('"') else " ") + "abcdefgh"[token]
    return text.strip()


@given(ids=st.lists(st.integers(0, 7), max_size=20), begin=st.lists(st.integers(2, 7), max_size=3), data=st.data())
def test_texts_that_are_written_from_words(ids: list[int], begin: list[int], data: st.DataObject) -> None:
    """Whatever the deltas, the text is that of all words."""
    detokenizer = WordDetokenizer(quoting, begin)
    pieces, rest = [], ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(detokenizer.append(rest[:size]))
        rest = rest[size:]
    assert quoting(begin) + "".join(pieces) + detokenizer.finish() == quoting(begin + ids)
    assert detokenizer.append([]) == detokenizer.finish() == ""
