"""Tokenizers of GGUF files: token ids are those of llama.cpp, which `support/llama_ids.json` holds."""

from __future__ import annotations

import itertools
import json
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gguf_files import KINDS as ARCHITECTURES
from support.gguf_files import library, write_file
from support.llama_ids import KINDS, SAME, Kind, LlamaIds, write_vocabulary
from support.service import Service
from tokenizers import Tokenizer as Fast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.interface.generation import load_defaults, log_fallback, resolve
from engine.interface.request import SamplingParams
from engine.model import checkpoint
from engine.model.gguf import folder as folders
from engine.model.gguf.container import Gguf
from engine.model.gguf.vocabulary import tokenizer_files
from engine.text.processor import Tokenizer, load_tokenizer

ORACLE = Path(sys.prefix) / "clients" / "quantised"  # tools/setup.py puts it there
STORED = LlamaIds()
CASED = "b1-.ßßXHelloX,ß"
TEXTS = (
    "Hello world, it's 2026: we'll see 1234567 things!", "  two blanks,   three\n\n\tand a tab \r\n", "", " ", "a",
    "Ünïcödé Straße 東京 🙂 and HTTPServer isn't DON'T", "<|im_start|>user\nhi<|im_end|>\n<think>x</think>",
    "x=1;\n\n  y", CASED,
)  # fmt: skip
ENDS = ("<|im_end|>", "<|end|>", "<|endoftext|>")


@pytest.fixture(scope="module")
def gguf() -> Iterator[Any]:
    with library(ORACLE) as module:
        yield module


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "cache_folder", lambda name: tmp_path / "cache" / name)


def byte_level(**more: Any) -> dict[str, Any]:
    """A small vocabulary of merged bytes."""
    return STORED.metadata(Kind("bytes", {f"tokenizer.{name.replace('__', '.')}": more[name] for name in more}))


def by_scores(**more: Any) -> dict[str, Any]:
    """A small vocabulary with scores."""
    return STORED.metadata(Kind("scores", {f"tokenizer.{name.replace('__', '.')}": more[name] for name in more}))


def both(path: Path) -> tuple[Tokenizer, Any]:
    """Ours, and that of transformers."""
    ours = load_tokenizer(checkpoint.locate(str(path)))
    assert ours is not None
    architecture, described, _ = get_gguf_tokenizer(str(path))
    return ours, convert_gguf_tokenizer(architecture, described)[0]


def check_same(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True), text


@pytest.mark.parametrize("name", [*KINDS, *SAME])
def test_ids_are_llama_cpps(name: str) -> None:
    """Of 300 texts, and of each token that is never cut, alone and between others."""
    stored = SAME.get(name, name)
    kind = KINDS[stored]
    metadata = STORED.metadata(kind) | ({} if name == stored else {"tokenizer.ggml.pre": name})
    ours = Fast.from_str(json.dumps(tokenizer_files(Gguf(Path("x.gguf"), 3, metadata, {}))["tokenizer.json"]))
    for text, expected in zip(STORED.texts(kind), STORED.ids(stored), strict=True):
        if name in ("qwen2", "qwen35") and text != (composed := unicodedata.normalize("NFC", text)):
            # Qwen's own tokenizer composes characters first, which llama.cpp leaves out.
            assert ours.encode(text).ids == ours.encode(composed).ids != expected
        elif stored in ("tekken", "gpt-4o") and text == CASED:
            # llama.cpp takes all but a to z for capitals here, too. `test_merged_bytes` has this text.
            assert ours.encode(text).ids != expected
        else:
            assert ours.encode(text, add_special_tokens=False).ids == expected, text
    assert ours.encode("a").ids == STORED.frame(stored)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_merged_bytes(pre: str, gguf: Any, tmp_path: Path) -> None:
    described = byte_level(ggml__pre=pre)
    # transformers takes no blanks for tokens, and ends for whole ones only where the file says that they are.
    tokens, types = described["tokenizer.ggml.tokens"], described["tokenizer.ggml.token_type"]
    described["tokenizer.ggml.tokens"] = [text if text.strip() else f"<{i}>" for i, text in enumerate(tokens)]
    described["tokenizer.ggml.token_type"] = [
        3 if text in ENDS else kind for text, kind in zip(tokens, types, strict=True)
    ]
    ours, theirs = both(write_vocabulary(tmp_path / "tiny.gguf", described, "qwen2"))
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True), text


@pytest.mark.parametrize("name", ["llama", "unspaced"])
def test_texts_come_back(name: str, gguf: Any, tmp_path: Path) -> None:
    """Without what a tokenizer with scores puts in front of them."""
    ours = load_tokenizer(
        checkpoint.locate(str(write_vocabulary(tmp_path / "tiny.gguf", STORED.metadata(KINDS[name]), "gemma3")))
    )
    assert ours is not None
    whole = STORED.whole(KINDS[name]) if name == "llama" else STORED.whole(KINDS[name], 2, 3)
    texts = [text for text in STORED.published if not any(part in text for part in (*whole, "\u2581"))]
    assert len(texts) > 100
    assert [ours.decode(ours.encode(text)) for text in texts] == texts


def test_what_a_file_says_of_texts(gguf: Any, tmp_path: Path) -> None:
    """Ends, frames and the chat template."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    described = by_scores(ggml__add_bos_token=False, ggml__add_eos_token=True, chat_template=template)
    folder = checkpoint.locate(str(write_vocabulary(tmp_path / "tiny.gguf", described)))
    ours = load_tokenizer(folder)
    assert ours is not None
    assert ours.encode("a")[-1] == 2
    assert ours.encode("a")[0] != 1
    assert ours.chat_template == template
    assert (ours.eos_token_id, ours.bos_token_id, ours.unk_token_id) == (2, 1, 0)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, *map(described["tokenizer.ggml.tokens"].index, ENDS)], (
        "its own, and those known by name"
    )
    assert generation["sampling_fallback"] == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def test_what_a_file_says_of_sampling(gguf: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its own values come first, then a request's temperature, then llama.cpp's defaults."""
    keys = gguf.Keys.General
    said = {keys.SAMPLING_TEMP: 0.6, keys.SAMPLING_TOP_K: 20, keys.SAMPLING_PENALTY_REPEAT: 1.1}
    warned = {keys.SAMPLING_MIROSTAT: 2, keys.SAMPLING_PENALTY_LAST_N: 64}
    described = by_scores() | said | warned
    folder = checkpoint.locate(str(write_vocabulary(tmp_path / "tiny.gguf", described, "llama")))
    with caplog.at_level("INFO", "octavo.generation"):
        defaults = load_defaults(folder, checkpoint.read_config(folder), 100)
        log_fallback(defaults)
    assert defaults.values == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert "mirostat=2, penalty_last_n=64, which Octavo does not implement" in caplog.text
    said = "no default for top_p and min_p. Requests that set no temperature use llama.cpp's: top_p 0.95, min_p 0.05."
    assert said in caplog.text

    def filters(**asked: Any) -> tuple[float, int, float, float]:
        limits = {"prompt_len": 1, "max_model_len": 99, "vocab_size": 99, "random_seed": 0}
        found = resolve(SamplingParams(**asked), defaults, **limits)
        return found.temperature, found.top_k, found.top_p, found.min_p

    assert filters() == (0.6, 20, 0.95, 0.05)
    assert filters(top_p=0.5) == (0.6, 20, 0.5, 0.05)
    assert filters(temperature=1) == (1, 20, 1, 0)
    defaults = load_defaults(folder, checkpoint.read_config(folder), 100, honour=False)
    assert filters() == (1, 0, 1, 0)


UNKNOWN = {
    "split": (byte_level, {"ggml__pre": "poro-chat"}, r"it splits texts by 'poro-chat' \(tokenizer\.ggml\.pre\)"),
    "no-split": (byte_level, {}, r"it does not say how texts are split \(tokenizer\.ggml\.pre is absent\)"),
    "kind": (by_scores, {"ggml__model": "rwkv"}, r"its tokenizer\.ggml\.model is 'rwkv'; gpt2 and llama are supported"),
    "scores": (by_scores, {"ggml__scores": [0.0]}, r"it has 1 scores for \d+ tokens"),
    "twice": (by_scores, {"ggml__tokens": ["a", "a"]}, r"its vocabulary contains 'a' twice"),
    "merges": (byte_level, {"ggml__pre": "gpt-2", "ggml__merges": ["a b c"]}, r"its tokenizer\.ggml\.merges are"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_tokenizer_says_what_to_do(name: str, gguf: Any, tmp_path: Path) -> None:
    make, more, why = UNKNOWN[name]
    folder = checkpoint.locate(str(write_vocabulary(tmp_path / "tiny.gguf", make(**more))))
    with pytest.raises(ModelLoadError, match=rf"No tokenizer can be made from .*tiny\.gguf: {why}.*--tokenizer"):
        load_tokenizer(folder)


def test_more_tokens_than_rows(gguf: Any, tmp_path: Path) -> None:
    tokens = len(by_scores()["tokenizer.ggml.tokens"])
    folder = checkpoint.locate(str(write_vocabulary(tmp_path / "tiny.gguf", by_scores(), rows=tokens - 2)))
    why = f"its vocabulary has {tokens} tokens, but token_embd.weight has {tokens - 2} rows. Set --tokenizer"
    with pytest.raises(ModelLoadError, match=why):
        load_tokenizer(folder)


def letters() -> list[str]:
    return ["".join(each) for length in range(1, 18) for each in itertools.product("ab", repeat=length)]


def runs() -> list[str]:
    return [letter * length for letter in "ab" for length in range(1, 1025)]


@pytest.mark.parametrize(("make", "most"), [(letters, "2097152 pairs"), (runs, "pairs with 33554432")])
def test_a_vocabulary_of_too_many_merges_is_refused(make: Callable[[], list[str]], most: str, tmp_path: Path) -> None:
    """Small files, in which each part of a token is a token: all merges would take gigabytes."""
    tokens = make()
    metadata = {"ggml.model": "llama", "ggml.tokens": tokens, "ggml.scores": [0.0] * len(tokens)}
    file = Gguf(tmp_path / "x.gguf", 3, {f"tokenizer.{name}": value for name, value in metadata.items()}, {})
    with pytest.raises(UnsupportedModelError, match=rf"x\.gguf: the first \d+ of its {len(tokens)} tokens .*{most}"):
        tokenizer_files(file)


@pytest.mark.slow
def test_a_file_is_served(gguf: Any, tmp_path: Path) -> None:
    """Text in, text out: `octavo serve FILE`."""
    path = tmp_path / "tiny-chat.gguf"
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    described = byte_level(ggml__pre="qwen2", chat_template=template)
    kind = ARCHITECTURES["qwen2"]
    kind = replace(kind, shape=replace(kind.shape, vocab=len(described["tokenizer.ggml.tokens"])))
    write_file(path, kind, tokenizer=described)
    service = Service(str(path), "--device", "cpu", "--kv-cache-memory", "64MiB", log=tmp_path / "log.txt")
    try:
        url = service.wait_ready()
        (model,) = service.get("/v1/models").json()["data"]
        assert model["id"] == "tiny-chat"
        body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "seed": 1}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 3, "each of them is a token"
        body = {"model": "tiny-chat", "prompt": "a  b", "max_tokens": 1, "seed": 1}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 3, "the file has a token for two blanks"
    finally:
        service.stop()
