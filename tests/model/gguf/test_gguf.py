"""The container of GGUF files: what is read of sound ones, and that damaged ones are refused in bounded time."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.gguf_bytes import ARRAY, BOOL, F32, TEXT, U32, U64, entry, file_of, tensor, text
from support.gguf_files import library

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.gguf import architectures, blocks, container, vocabulary
from engine.model.gguf.blocks import BlockFormat, dequantise
from engine.model.gguf.container import Value, read_gguf
from engine.model.gguf.tensors import check_readable, mapped, read_tensor

ORACLE = Path(sys.prefix) / "clients" / "quantised"  # tools/setup.py puts it there
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()}  # fmt: skip
"""Where in a block float16 numbers are."""


SOUND = [
    entry("general.architecture", TEXT, text("llama")),
    entry("a.count", U32, struct.pack("<I", 7)),
    entry("a.flags", ARRAY, struct.pack("<IQ", BOOL, 3) + b"\1\0\1"),
    entry("a.numbers", ARRAY, struct.pack("<IQ", F32, 2) + struct.pack("<2f", 1.5, -2)),
    entry("a.words", ARRAY, struct.pack("<IQ", TEXT, 2) + text("ä") + text("")),
]
TENSORS = [tensor("one", (2, 4)), tensor("two", (3,), offset=32)]
DATA = np.arange(16, dtype=np.float32).tobytes()
WHOLE = file_of(SOUND, TENSORS, DATA)


@pytest.mark.parametrize("version", [2, 3])
def test_what_a_file_holds(version: int, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(file_of(SOUND, TENSORS, DATA, version=version))
    found = read_gguf(path)
    assert found.version == version
    assert found.metadata == {
        "general.architecture": "llama", "a.count": 7, "a.flags": [True, False, True], "a.numbers": [1.5, -2.0],
        "a.words": ["ä", ""],
    }  # fmt: skip
    data = mapped(path)
    assert torch.equal(read_tensor(data, found.tensors["one"]), torch.arange(8.0).view(2, 4))
    assert torch.equal(read_tensor(data, found.tensors["one"], 1, 2), torch.arange(4.0, 8).view(1, 4))
    assert torch.equal(read_tensor(data, found.tensors["two"]), torch.arange(8.0, 11))


def test_a_header_without_the_vocabulary(tmp_path: Path) -> None:
    """Lists about the tokenizer are passed over, and the rest is the same; a list beyond the end is refused."""
    lists = [
        entry("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", TEXT, 2) + text("ä") + text(b"\xc3")),
        entry("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ", F32, 2) + struct.pack("<2f", 1.5, -2)),
        entry("tokenizer.chat_template", TEXT, text("x")),
    ]
    path = tmp_path / "x.gguf"
    path.write_bytes(WHOLE)
    whole = read_gguf(path)
    path.write_bytes(file_of(lists + SOUND, TENSORS, DATA))
    found = read_gguf(path, vocabulary=False)
    assert found.metadata == whole.metadata | {
        "tokenizer.ggml.tokens": [], "tokenizer.ggml.scores": [], "tokenizer.chat_template": "x",
    }  # fmt: skip
    assert torch.equal(read_tensor(mapped(path), found.tensors["two"]), torch.arange(8.0, 11))
    for listed in lists[:2]:
        path.write_bytes(file_of([listed], [], alignment=1)[:-1])
        with pytest.raises(ModelLoadError, match="Download it again"):
            read_gguf(path, vocabulary=False)


def test_tensors_are_aligned_as_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    aligned = entry("general.alignment", U32, struct.pack("<I", 64))
    path.write_bytes(file_of([aligned], [tensor("two", (3,), offset=64)], bytes(64) + DATA, alignment=64))
    info = read_gguf(path).tensors["two"]
    assert torch.equal(read_tensor(mapped(path), info), torch.arange(3.0))


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a GGUF file: it begins with b''"),
    "magic": (b"GGML" + WHOLE[4:], "is not a GGUF file: it begins with b'GGML'"),
    "no-version": (WHOLE[:6], "ends before its version: 4 bytes are needed from byte 4 on.*has 6"),
    "version-1": (file_of(SOUND, TENSORS, DATA, version=1), "is GGUF version 1; versions 2 and 3 are supported"),
    "version-9": (file_of(SOUND, TENSORS, DATA, version=9), "is GGUF version 9"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + WHOLE[8:], "is a big-endian GGUF file"),
    "truncated-metadata": (WHOLE[:60], "ends before|it has room"),
    "truncated-tensors": (WHOLE[: WHOLE.index(b"two")], "the file ends before a tensor's name"),
    "truncated-data": (WHOLE[:-30], "the tensor 'two' takes 12 bytes from byte .* but the file has"),
    "many-tensors": (file_of(SOUND, TENSORS, DATA, counts=(1 << 60, 5)), "has 1152921504606846976 tensors, but at"),
    "more-tensors": (file_of(SOUND, TENSORS, DATA, counts=(99, 5)), "has 99 tensors, but it has room for only "),
    "many-keys": (file_of(SOUND, TENSORS, DATA, counts=(2, 1 << 63)), "metadata entries, but at most "),
    "long-key": (file_of([struct.pack("<Q", 1 << 62) + b"x"], [], DATA), "a metadata key is said to be .* bytes long"),
    "long-text": (file_of([entry("a", TEXT, struct.pack("<Q", 1 << 23))], [], DATA), "ends before the value of 'a'"),
    "bomb": (file_of([entry("a", ARRAY, struct.pack("<IQ", 0, 1 << 50))], [], DATA), "values of 'a', but at most"),
    "long-array": (file_of([entry("a", ARRAY, struct.pack("<IQ", U64, 999))], [], DATA), "says that it has 999 values"),
    "cut-texts": (
        file_of([entry("a", ARRAY, struct.pack("<IQ", TEXT, 2) + text("b") + struct.pack("<Q", 500))], [], DATA),
        "ends before a value of 'a'",
    ),
    "nested": (
        file_of([entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", U32, 0))], [], DATA),
        "'a' holds arrays within an array",
    ),
    "kind": (file_of([entry("a", 13, b"1234")], [], DATA), "the value of 'a' is of the kind 13"),
    "array-kind": (file_of([entry("a", ARRAY, struct.pack("<IQ", 99, 1))], [], DATA), "holds values of the kind 99"),
    "key-twice": (file_of([SOUND[1], SOUND[1]], [], DATA), "its metadata holds 'a.count' twice"),
    "not-utf-8": (file_of([entry(b"\xff", U32, b"1234")], [], DATA), "a metadata key is not UTF-8 text"),
    "not-utf-8-value": (
        file_of([entry("a", ARRAY, struct.pack("<IQ", TEXT, 1) + text(b"\xc3"))], [], DATA),
        "a value of 'a' is not UTF-8 text",
    ),
    "tensor-twice": (file_of(SOUND, [TENSORS[0], TENSORS[0]], DATA), "holds the tensor 'one' twice"),
    "no-dimensions": (file_of(SOUND, [tensor("one", ())], DATA), "'one' has 0 dimensions; 1 to 4"),
    "dimensions": (file_of(SOUND, [tensor("one", (1,) * 5)], DATA), "'one' has 5 dimensions"),
    "no-rows": (file_of(SOUND, [tensor("one", (0, 4))], DATA), r"'one' has the sizes \[4, 0\]"),
    "huge": (file_of(SOUND, [tensor("one", (1 << 40, 1 << 40))], DATA), "more than the file contains"),
    "beyond": (file_of(SOUND, [tensor("one", (2,), offset=1 << 40)], DATA), "but the file has"),
    "unaligned": (file_of(SOUND, [tensor("one", (2,), offset=4)], DATA), "begins at 4, which is not a multiple of 32"),
    "alignment": (
        file_of([entry("general.alignment", U32, struct.pack("<I", 3))], TENSORS, DATA),
        "general.alignment must be a power of two from 8 to 65536, but is 3",
    ),
    "format": (file_of(SOUND, [tensor("one", (2,), kind=77)], DATA), "'one' is stored in the unknown format 77"),
    "blocks": (file_of(SOUND, [tensor("one", (2, 31), kind=8)], DATA), "31 numbers.* 32, the size of a block of Q8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(name: str, tmp_path: Path) -> None:
    octets, message = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(octets)
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_too_many_values_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "_MOST_ITEMS", 6)
    path = tmp_path / "bad.gguf"
    path.write_bytes(WHOLE)
    with pytest.raises(ModelLoadError, match="its arrays hold more than 6 values"):
        read_gguf(path)


def test_formats_that_are_not_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(file_of(SOUND, [tensor("one", (256,), kind=16)], bytes(66)))
    with pytest.raises(
        UnsupportedModelError, match=r"one is stored as IQ2_XXS, which is not supported\. Supported: F32"
    ):
        check_readable(path, read_gguf(path).tensors["one"])


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The sound file with some bytes changed, left out or put in."""
    octets = bytearray(WHOLE)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(octets) - 1))
        match draw(st.sampled_from(["byte", "word", "cut", "drop", "insert"])):
            case "byte":
                octets[place] = draw(st.integers(0, 255))
            case "word":
                octets[place : place + 8] = struct.pack(
                    "<Q", draw(st.sampled_from([0, 1, 1 << 31, 1 << 40, 2**64 - 1]))
                )
            case "cut":
                del octets[max(place, 1) :]
            case "drop":
                del octets[place : place + draw(st.integers(1, 9))]
            case "insert":
                octets[place:place] = draw(st.binary(max_size=9))
        if not octets:
            break
    return bytes(octets)


@pytest.fixture(scope="module")
def somewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.gguf"


@settings(max_examples=500, derandomize=True)
@given(octets=damaged())
@example(octets=WHOLE)
def test_no_damage_gives_another_error(octets: bytes, somewhere: Path) -> None:
    somewhere.write_bytes(octets)
    started = time.thread_time()
    try:
        found = read_gguf(somewhere)
        data = mapped(somewhere)
        for info in found.tensors.values():
            check_readable(somewhere, info)
            assert read_tensor(data, info).shape == info.shape
    except ModelLoadError as error:
        message = str(error)
    else:
        message = str(somewhere)
    assert str(somewhere) in message
    assert time.thread_time() - started < 1, "seconds of the CPU"


TOKENIZERS: dict[str, dict[str, Value]] = {
    "gpt2": {"pre": "llama-bpe", "tokens": ["a", "b", "ab"], "merges": ["a b"]},
    "llama": {
        "tokens": ["a", "b", "ab"],
        "scores": [0.0, 0.0, -1.0],
        "token_type": [1, 3, 4],
        "add_space_prefix": True,
    },
}
WRONG: tuple[Value, ...] = (
    0,
    -1,
    2**64 - 1,
    1.5,
    float("nan"),
    float("inf"),
    True,
    "",
    "x",
    [],
    [0],
    ["x"],
    [2**63] * 3,
)


@pytest.mark.parametrize("architecture", architectures._ARCHITECTURES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_wrong_settings_give_no_other_error(kind: str, architecture: str, tmp_path: Path) -> None:
    """Each value of a sound file's metadata becomes one of another kind or size."""
    sizes = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
             "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.sliding_window",
             "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
             "rope.dimension_count", "rope.scaling.factor", "rope.scaling.type", "attention.key_length")  # fmt: skip
    sound: dict[str, Value] = {f"{architecture}.{name}": 1 for name in sizes}
    sound |= {f"tokenizer.ggml.{name}": value for name, value in TOKENIZERS[kind].items()}
    sound |= {"general.architecture": architecture, "tokenizer.ggml.model": kind, "tokenizer.chat_template": "x"}
    sound |= {f"tokenizer.ggml.{role}_token_id": 1 for role in ("bos", "eos", "unknown", "padding")}
    sound |= {"general.type": "model", "split.count": 1, "tokenizer.ggml.add_bos_token": True}
    plain = blocks.find_format(0)
    assert plain is not None
    info = container.TensorInfo("token_embd.weight", (3, 1), plain, 0, 12)
    for key in sound:
        for value in WRONG:
            file = container.Gguf(tmp_path, 3, sound | {key: value}, {info.name: info})
            with contextlib.suppress(ModelLoadError):
                json.dumps(architectures.describe(file)[1])
            with contextlib.suppress(ModelLoadError):
                json.dumps([vocabulary.special_ids(file), vocabulary.end_ids(file), vocabulary.tokenizer_files(file)])


@pytest.fixture(scope="module")
def gguf() -> Iterator[Any]:
    with library(ORACLE) as module:
        yield module


def test_formats_have_the_librarys_sizes(gguf: Any) -> None:
    for kind in gguf.GGMLQuantizationType:
        format = blocks.find_format(kind.value)
        assert format is not None
        assert format.name == kind.name
        assert (format.numbers, format.size) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("name", HALVES)
def test_numbers_are_the_librarys_to_the_last_bit(name: str, gguf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_CHUNK", 1 << 12)
    kind = gguf.GGMLQuantizationType[name]
    format: BlockFormat | None = blocks.find_format(kind.value)
    assert format is not None
    random = np.random.default_rng(7)
    octets = random.integers(0, 256, ((1 << 15) // format.numbers + 3, format.size), dtype=np.uint8)
    for place in HALVES[name]:
        halves = random.standard_normal((len(octets), 1)).astype(np.float16)
        octets[:, place : place + 2] = halves.view(np.uint8)
    if name == "MXFP4":
        octets[:, 0] = np.arange(len(octets)) % 250  # above, products exceed float32
    found = dequantise(torch.from_numpy(octets).view(-1), format)
    expected = torch.from_numpy(gguf.dequantize(octets, kind)).view(-1)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
