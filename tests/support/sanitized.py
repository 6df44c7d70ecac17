"""Code to run under AddressSanitizer (`test_native_sanitizer.py`): readers of files that are damaged, and kernels."""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
from pathlib import Path

import numpy as np
import soundfile
import torch
from test_gguf import WHOLE

from engine import LLM, ModelLoadError, SamplingParams
from engine.audio.decoding import decode_part
from engine.backends import native
from engine.backends.native.gguf import count_infinite, take_q4_1, take_q4_k, take_q8_0, widen_q6_k
from engine.model.gguf.container import read_gguf
from engine.model.gguf.tensors import check_readable, mapped, read_tensor

MODEL = Path(__file__).resolve().parents[2] / "server" / "demo" / "chat"
DAMAGED = 300  # files of each kind
SOUNDS = (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III"))


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """A file with some bytes changed, left out or doubled, or without its end."""
    octets = bytearray(whole)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(max(len(octets), 1))
        match rng.randrange(4):
            case 0:
                octets[at : at + 1] = bytes((rng.randrange(256),))
            case 1:
                del octets[at : at + rng.randint(1, 64)]
            case 2:
                octets[at:at] = octets[at : at + rng.randint(1, 64)]
            case _:
                octets[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7))
    return bytes(octets[: rng.randrange(len(octets) + 1)] if rng.random() < 0.2 else octets)


def read_models(rng: random.Random, folder: Path) -> None:
    """GGUF files, and blocks of numbers that a kernel turns into others."""
    file = folder / "x.gguf"
    for _ in range(DAMAGED):
        file.write_bytes(damaged(WHOLE, rng))
        with contextlib.suppress(ModelLoadError):
            found, data = read_gguf(file), mapped(file)
            for info in found.tensors.values():
                check_readable(file, info)
                read_tensor(data, info)
    for count in (1, 3, 64):
        blocks = torch.randint(0, 256, (count, 144), dtype=torch.uint8)
        take_q4_k(blocks, torch.empty(count, 8, 4, dtype=torch.int32), torch.empty(count, 8, 2, dtype=torch.float16))
        small = blocks.view(-1)[: count * 34].view(count, 34)
        take_q8_0(small, torch.empty(count, 32, dtype=torch.int8), torch.empty(count, dtype=torch.float16))
        small = blocks.view(-1)[: count * 20].view(count, 20)
        take_q4_1(small, torch.empty(count, 4, dtype=torch.int32), torch.empty(count, 2, dtype=torch.float16))
        count_infinite(blocks, 142)
        widen_q6_k(torch.randint(0, 256, (count, 210), dtype=torch.uint8), torch.empty(count, 256))


def read_sounds(rng: random.Random) -> None:
    """Files of all formats."""
    samples = np.sin(np.arange(12_000) / 9).astype(np.float32)
    for form, kind in SOUNDS:
        file = io.BytesIO()
        soundfile.write(file, samples, 16_000, format=form, subtype=kind)
        for _ in range(DAMAGED // 5):
            with contextlib.suppress(ValueError):
                decode_part(damaged(file.getvalue(), rng), rate=16_000, count=20_000, most_seconds=60.0)


def compute() -> None:
    """Steps of all kinds, with weights and pages in several formats."""
    for settings in ({}, {"quantization": "int8", "kv_cache_dtype": "int8"}, {"quantization": "int4"}):
        with LLM(str(MODEL), max_num_seqs=8, **settings) as llm:
            prompts = ["Once", "A longer prompt of several words, and then some more of them", "x " * 90]
            for params in (
                {"temperature": 0.0},
                {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "logprobs": 3, "n": 2},
                {"num_beams": 3, "temperature": 0.0},
            ):
                llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True, seed=1, **params))


def main() -> None:
    """Run all of it."""
    assert native.available()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        read_models(rng, Path(folder))
    read_sounds(rng)
    compute()
    print("nothing was found")


if __name__ == "__main__":
    main()
