"""A tokenizer that is read in little memory is the one that the tokenizers library reads, to the letter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from engine.text import large_vocabulary
from engine.text.large_vocabulary import read_tokenizer
from server.config.settings import DEMO_MODEL


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_vocabulary, "LARGE", 0)


def content() -> dict[str, Any]:
    """Byte fallback, tokens that look like JSON, added tokens within the vocabulary and behind it."""
    odd = ['"merges": [', '"], ["', "]]", "\\", "\n", "\U0001f600", "a b"]
    letters = [*"abcdeft \"'[],:\\\n", "\U0001f600", "\u2581"]
    merges = [("a", "b"), ("ab", "c"), ("d", "e"), ("[", '"'), ("abc", "de"), ("\n", "\n"), ("\U0001f600", "a")]
    texts = dict.fromkeys(["<unk>", *letters, *(a + b for a, b in merges), *odd, "<0x41>"])
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(texts)}, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.ByteFallback()
    made.add_special_tokens(["<unk>", "<s>"])
    made.add_tokens([AddedToken("abc", normalized=True), AddedToken("new", lstrip=True, single_word=True)])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    found: dict[str, Any] = json.loads(made.to_str())
    return found


def check(file: Path) -> Tokenizer:
    found, expected = read_tokenizer(file), Tokenizer.from_file(str(file))
    assert found.to_str() == expected.to_str()
    texts = ["abcde  new\n\n", 'x "merges": [ <s> \U0001f600a', '"], ["']
    for text in texts:
        assert found.encode(text).ids == expected.encode(text).ids
    return found


@pytest.mark.parametrize("indent", [None, 2])
def test_byte_pairs(indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their own way: the library reads no file but for comparison."""
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content(), indent=indent, ensure_ascii=indent is None), encoding="utf-8")
    check(file)
    monkeypatch.setattr(Tokenizer, "from_file", None, raising=False)
    assert large_vocabulary._built(file) is not None


def test_merges_as_lines(tmp_path: Path) -> None:
    """The older form, a blank between two tokens."""
    held = content()
    held["model"]["merges"] = [f"{a} {b}" for a, b in held["model"]["merges"]]
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(held))
    check(file)
    assert large_vocabulary._built(file) is not None


@pytest.mark.parametrize("lines", [False, True])
def test_pieces_of_merges_may_end_anywhere(lines: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within a token that looks like the end of a merge."""
    held = content()
    tokens = held["model"]["vocab"]
    for pair in (["]", ","], ['"', ","], ['",', "a"], ["],", '"'], ["],", "["]):
        tokens.setdefault("".join(pair), len(tokens))
        held["model"]["merges"].insert(3, pair)
    ordered = sorted(held["model"]["merges"], key=lambda pair: len("".join(pair)))
    held["model"]["merges"] = [" ".join(pair) for pair in ordered] if lines else ordered
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(held))
    whole = check(file).to_str()
    for piece in range(1, 90, 8):
        monkeypatch.setattr(large_vocabulary, "_PIECE", piece)
        found = large_vocabulary._built(file)
        assert found is not None
        assert found.to_str() == whole


def test_the_chat_models_own() -> None:
    check(DEMO_MODEL / "tokenizer.json")


def test_merges_that_are_comments(tmp_path: Path) -> None:
    """The library skips them in the older form alone."""
    held = content()
    tokens, pairs = held["model"]["vocab"], held["model"]["merges"]
    tokens |= {text: len(tokens) + i for i, text in enumerate(["#version", "s", "#versions", "#version:", "0.2"])}
    file = tmp_path / "tokenizer.json"
    for merges in (["#version: 0.2", "#version s", *(f"{a} {b}" for a, b in pairs)], [["#version", "s"], *pairs]):
        held["model"]["merges"] = merges
        file.write_text(json.dumps(held))
        check(file)
        assert large_vocabulary._built(file) is not None


@pytest.mark.parametrize("damage", ["cut", "words", "merges", "unknown", "mixed", "mapping", "numbers", "id", "added"])
def test_what_is_no_byte_pairs_is_the_librarys(damage: str, tmp_path: Path) -> None:
    """Another model is read as it reads it; a damaged file is refused as it refuses it."""
    file, held = tmp_path / "tokenizer.json", content()
    match damage:
        case "words":
            held["model"] = {"type": "WordLevel", "vocab": {"merges": 0, "<unk>": 1}, "unk_token": "<unk>"}
        case "merges":
            held["model"]["merges"][2] = ["d"]
        case "mixed":
            held["model"]["merges"][2] = "d e"
        case "mapping":
            held["model"]["merges"] = [{"d": 1, "e": 2}]
        case "numbers":
            held["model"]["merges"][2] = [1, 2]
        case "id":
            del held["added_tokens"][0]["id"]
        case "added":
            held["added_tokens"] = None
        case "unknown":
            held["model"]["merges"][2] = ["d", "zz"]
    text = json.dumps(held)
    file.write_text(text[: len(text) // 2] if damage == "cut" else text)
    if damage == "words":
        assert read_tokenizer(file).to_str() == Tokenizer.from_file(str(file)).to_str()
        return
    with pytest.raises(Exception) as expected:
        Tokenizer.from_file(str(file))
    with pytest.raises(type(expected.value), match=f"^{re.escape(str(expected.value))}$"):
        read_tokenizer(file)
