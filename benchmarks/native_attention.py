"""Attention of one layer on a CPU: the native library and the torch backend, the same pages and queries, in turns.

Each round measures both, and the ratio is taken round by round. A round walks as many layers' pages as exceed the
caches, so that keys and values come from memory as they do in a model.

    python benchmarks/native_attention.py --threads 2 --output
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from offline import ROOT, machine

from engine.backends import native
from engine.backends.attention.base import AttentionBackend, AttentionMetadata, Paged
from engine.backends.attention.formats import quantise
from engine.backends.native.attention import NativeAttention
from engine.backends.torch.attention import TorchReference

# (heads, kv_heads, head_dim): SmolLM2-135M, Qwen2.5-0.5B.
SHAPES = {"S": (9, 3, 64), "M": (14, 2, 64)}
BLOCK = 16
CACHES = 64 << 20
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Work:
    """Rows of equal lengths."""

    name: str
    rows: int
    queries: int
    context: int


DECODE = [Work(f"decode {rows} x {n}", rows, 1, n) for rows in (1, 8, 32) for n in (128, 512, 2048)]
PREFILL = [Work(f"prefill {n}", 1, n, n) for n in (256, 1024)]


def make_layers(work: Work, shape: tuple[int, int, int], dtype: torch.dtype) -> list[Paged]:
    """Pages of as many layers as exceed the caches, at most 16, scattered."""
    _, kv_heads, head_dim = shape
    pages = -(-work.context // BLOCK)
    blocks = work.rows * pages + 1
    tables = (torch.randperm(blocks - 1, dtype=torch.int32) + 1).view(work.rows, pages)
    size = 2 * blocks * BLOCK * kv_heads * head_dim * dtype.itemsize
    layers = []
    for _ in range(max(1, min(16, CACHES // size + 1))):
        keys, values = (torch.randn(blocks, BLOCK, kv_heads, head_dim) for _ in range(2))
        if dtype == torch.int8:
            (keys, key_scales), (values, value_scales) = quantise(keys), quantise(values)
            centre = torch.zeros(kv_heads, head_dim)
            layers.append(Paged(keys, values, tables, key_scales, value_scales, centre))
        else:
            layers.append(Paged(keys.to(dtype), values.to(dtype), tables))
    return layers


def measure(work: Work, shape: tuple[int, int, int], pages: str, rounds: int) -> dict[str, Any]:
    """Milliseconds a layer of both backends, and their ratio."""
    layers = make_layers(work, shape, FORMATS[pages])
    dtype = torch.float32 if pages == "float32" else torch.bfloat16
    q = torch.randn(work.rows * work.queries, shape[0], shape[2]).to(dtype)
    metadata = AttentionMetadata.build([work.queries] * work.rows, [work.context] * work.rows, torch.device("cpu"))

    def run(backend: AttentionBackend) -> float:
        begin = time.perf_counter()
        for kv in layers:
            backend.attend(q, kv, metadata, scale=shape[2] ** -0.5)
        return (time.perf_counter() - begin) / len(layers) * 1e3

    backends = (NativeAttention(), TorchReference())
    for backend in backends:
        run(backend)
    times = [[run(backend) for backend in backends] for _ in range(rounds)]
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "native_ms": round(ours, 4),
        "torch_ms": round(theirs, 4),
        "ratio": round(statistics.median(reference / found for found, reference in times), 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--pages", nargs="+", default=["bfloat16", "int8"], choices=list(FORMATS))
    parser.add_argument("--output", action="store_true", help="write results/native-attention.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    library = native.current()
    if library is None:
        raise SystemExit("There is no native library to measure.")
    rows = []
    for shape in options.shapes:
        for pages in options.pages:
            for work in [*DECODE, *PREFILL]:
                found = measure(work, SHAPES[shape], pages, options.rounds)
                rows.append({"shape": shape, "pages": pages, "work": work.name, **found})
                print(
                    f"{shape}  {pages:9} {work.name:18} native {found['native_ms']:9.3f} ms"
                    f"  torch {found['torch_ms']:9.3f} ms  {found['ratio']:7.2f} times as fast",
                    flush=True,
                )
    if options.output:
        found = {"machine": machine(), "isa": library.isa, "rounds": options.rounds, "results": rows}
        path = ROOT / "benchmarks" / "results" / "native-attention.json"
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
