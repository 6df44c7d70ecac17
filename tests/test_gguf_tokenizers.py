"""Tokenizers of GGUF files: token ids are those of the tokenizers that transformers makes of the same files."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.gguf_files import KINDS, library, put, write_file
from support.service import Service
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers, trainers
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
CORPUS = [Path(__file__).read_text(encoding="utf-8"), "Ünïcödé Straße 12345 über  zwei   drei    vier\n\n" * 9]
TEXTS = (
    "Hello world, it's 2026: we'll see 1234567 things!", "  two blanks,   three\n\n\tand a tab \r\n", "", " ", "a",
    "Ünïcödé Straße 東京 🙂 and HTTPServer isn't DON'T", "<|im_start|>user\nhi<|im_end|>\n<think>x</think>",
    "x=1;\n\n  y",
)  # fmt: skip
END, START, THINK = "<|im_end|>", "<|im_start|>", "<think>"
SIZES = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
         "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip


@pytest.fixture(scope="module")
def gguf() -> Iterator[Any]:
    with library(ORACLE) as module:
        yield module


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "cache_folder", lambda name: tmp_path / "cache" / name)


def write(gguf: Any, path: Path, architecture: str, **tokenizer: Any) -> Path:
    """A file with a tokenizer and hardly a model."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, value in SIZES.items():
        put(writer, f"{architecture}.{name}", value)
    if architecture == "gemma3":
        writer.add_sliding_window(16)
    for name, value in tokenizer.items():
        dotted = name.replace("__", ".")
        put(writer, dotted if dotted.startswith("general.") else f"tokenizer.{dotted}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokenizer["ggml__tokens"]), 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(**more: Any) -> dict[str, Any]:
    """A small vocabulary of merged bytes."""
    trained = Fast(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    made = json.loads(trained.to_str())["model"]
    tokens = [*sorted(made["vocab"], key=made["vocab"].get), END, START, THINK]
    return {
        "ggml__model": "gpt2",
        "ggml__tokens": tokens,
        "ggml__merges": [" ".join(merge) for merge in made["merges"]],
        "ggml__token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "ggml__eos_token_id": tokens.index(END),
        "ggml__bos_token_id": tokens.index(START),
        **more,
    }


def by_scores(**more: Any) -> dict[str, Any]:
    """A small vocabulary with scores."""
    trained = Fast(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400))
    vocabulary = trained.get_vocab()
    pieces = sorted(vocabulary, key=lambda piece: vocabulary[piece])
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *octets, *pieces, END, START, THINK]
    plain = len(pieces)
    return {
        "ggml__model": "llama",
        "ggml__tokens": tokens,
        "ggml__scores": [0.0] * 259 + [-float(rank) for rank in range(plain)] + [0.0] * 3,
        "ggml__token_type": [2, 3, 3] + [6] * 256 + [1] * plain + [3, 3, 4],
        "ggml__unknown_token_id": 0,
        "ggml__bos_token_id": 1,
        "ggml__eos_token_id": 2,
        **more,
    }


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


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_merged_bytes(pre: str, gguf: Any, tmp_path: Path) -> None:
    path = write(gguf, tmp_path / "tiny.gguf", "qwen2", **byte_level(ggml__pre=pre))
    ours, theirs = both(path)
    check_same(ours, theirs)
    begins = pre in ("llama-bpe", "tekken")  # as llama.cpp has it where a file says nothing
    assert ours.encode("a")[:-1] == ([ours.bos_token_id] if begins else [])


def test_digits_alone(gguf: Any, tmp_path: Path) -> None:
    described = byte_level(ggml__pre="smollm")
    ours, _ = both(write(gguf, tmp_path / "tiny.gguf", "llama", **described))
    expected = Fast(models.BPE(vocab={token: number for number, token in enumerate(described["ggml__tokens"])},
                               merges=[tuple(merge.split(" ")) for merge in described["ggml__merges"]]))  # fmt: skip
    expected.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS[:3]:
        assert ours.encode(text) == expected.encode(text).ids


@pytest.mark.parametrize("architecture", ["llama", "gemma", "gemma3", "phi3"])
def test_scores(architecture: str, gguf: Any, tmp_path: Path) -> None:
    spaced = not architecture.startswith("gemma")
    described = by_scores(ggml__add_space_prefix=spaced)
    ours, theirs = both(write(gguf, tmp_path / "tiny.gguf", architecture, **described))
    check_same(ours, theirs)
    assert ours.encode("a")[0] == 1, "BOS, unless the file says otherwise"


def test_what_a_file_says_of_texts(gguf: Any, tmp_path: Path) -> None:
    """Ends, frames and the chat template."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    described = by_scores(ggml__add_bos_token=False, ggml__add_eos_token=True, chat_template=template)
    folder = checkpoint.locate(str(write(gguf, tmp_path / "tiny.gguf", "llama", **described)))
    ours = load_tokenizer(folder)
    assert ours is not None
    assert ours.encode("a")[-1] == 2
    assert ours.encode("a")[0] != 1
    assert ours.chat_template == template
    assert (ours.eos_token_id, ours.bos_token_id, ours.unk_token_id) == (2, 1, 0)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, described["ggml__tokens"].index(END)], "its own, and those known by name"
    assert generation["sampling_fallback"] == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def test_what_a_file_says_of_sampling(gguf: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its own values come first, then a request's temperature, then llama.cpp's defaults."""
    keys = gguf.Keys.General
    said = {keys.SAMPLING_TEMP: 0.6, keys.SAMPLING_TOP_K: 20, keys.SAMPLING_PENALTY_REPEAT: 1.1}
    warned = {keys.SAMPLING_MIROSTAT: 2, keys.SAMPLING_PENALTY_LAST_N: 64}
    described = by_scores() | {name.replace(".", "__"): value for name, value in (said | warned).items()}
    folder = checkpoint.locate(str(write(gguf, tmp_path / "tiny.gguf", "llama", **described)))
    with caplog.at_level("INFO", "octavo.generation"):
        defaults = load_defaults(folder, checkpoint.read_config(folder), 100)
        log_fallback(defaults)
    assert defaults.values == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert "mirostat=2, penalty_last_n=64, which Octavo does not implement" in caplog.text
    assert (
        "sets no top_p or min_p: requests without a temperature use llama.cpp's defaults, top_p 0.95, min_p 0.05"
        in (caplog.text)
    )

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
    "kind": (by_scores, {"ggml__model": "rwkv"}, r"its tokenizer\.ggml\.model is 'rwkv', and gpt2 and llama are known"),
    "scores": (by_scores, {"ggml__scores": [0.0]}, r"it has 1 scores for \d+ tokens"),
    "twice": (by_scores, {"ggml__tokens": ["a", "a"]}, r"its vocabulary holds 'a' twice"),
    "merges": (byte_level, {"ggml__pre": "gpt-2", "ggml__merges": ["a b c"]}, r"its tokenizer\.ggml\.merges are"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_tokenizer_says_what_to_do(name: str, gguf: Any, tmp_path: Path) -> None:
    make, more, why = UNKNOWN[name]
    folder = checkpoint.locate(str(write(gguf, tmp_path / "tiny.gguf", "llama", **make(**more))))
    with pytest.raises(ModelLoadError, match=rf"No tokenizer can be made of .*tiny\.gguf: {why}.*by --tokenizer"):
        load_tokenizer(folder)


def letters() -> list[str]:
    return ["".join(each) for length in range(1, 18) for each in itertools.product("ab", repeat=length)]


def runs() -> list[str]:
    return [letter * length for letter in "ab" for length in range(1, 1025)]


@pytest.mark.parametrize(("make", "most"), [(letters, "2097152 pairs"), (runs, "pairs of 33554432")])
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
    kind = KINDS["qwen2"]
    kind = replace(kind, shape=replace(kind.shape, vocab=len(described["ggml__tokens"])))
    write_file(
        path, kind, tokenizer={f"tokenizer.{name.replace('__', '.')}": value for name, value in described.items()}
    )
    service = Service(str(path), "--device", "cpu", "--kv-cache-memory", "64MiB", log=tmp_path / "log.txt")
    try:
        url = service.wait_ready()
        (model,) = service.get("/v1/models").json()["data"]
        assert model["id"] == "tiny-chat"
        body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "seed": 1}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] > 3
    finally:
        service.stop()
