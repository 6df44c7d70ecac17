"""Products with packed weights: our kernels, oneDNN's with packed weights, and plain `F.linear`, in turns.

For each kind of weight, shape and number of rows: time of a product, bytes of weights and operations per second, and
ratios to the others, which compute in the kind's own format (for int8 and 4-bit weights in bfloat16). Every product
has a weight that was not used lately, so that weights come from memory as they do in a model. Ratios are taken round by
round; their median and the fastest round of each are given, the latter because it holds on a busy machine.

    python benchmarks/native_gemm.py --kinds bfloat16 int8 --rows 1 8 128
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from offline import ROOT, machine
from torch import Tensor

from engine.backends import native
from engine.backends.native import gemm

KINDS = ("float32", "bfloat16", "int8", "int8_fast", "int4")
BY_TILES = ("amx_int8", "amx_int4")
# Of a 135M-parameter LLaMA shape: attention's output, qkv, gate and up, down, head.
SHAPES = ((576, 576), (960, 576), (3072, 576), (576, 1536), (49152, 576))
ROWS = (1, 4, 8, 32, 128, 1024)
OURS = "ours"

Product = Callable[[Tensor], Tensor]


def candidates(kind: str, weight: Tensor) -> dict[str, Product]:
    """The ways to multiply with a weight, its own copy each."""
    rotated = partial(gemm.quantise_int8, form="rotated")
    pack = {
        "int8": lambda weight: gemm.pack_int8(rotated(weight), amx=False),
        "int8_fast": gemm.pack_int8_fast,
        "int4": partial(gemm.pack_int4, amx=False),
        "amx_int8": lambda weight: gemm.pack_int8(rotated(weight), amx=True),
        "amx_int4": partial(gemm.pack_int4, amx=True),
    }.get(kind, gemm.pack)
    packed = pack(weight)
    found: dict[str, Product] = {OURS: lambda x: gemm.matmul(packed, x)}
    if torch.backends.mkldnn.is_available():
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        found["oneDNN packed"] = lambda x: torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")
    plain = weight.clone()
    found["F.linear"] = lambda x: F.linear(x, plain)
    return found


def measure(kind: str, outputs: int, inputs: int, rows: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One kind and shape, all numbers of rows."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    weight = torch.randn(outputs, inputs).to(dtype)
    bits = {"float32": 32, "bfloat16": 16, "int8": 8.25, "int8_fast": 8, "int4": 5}[kind.removeprefix("amx_")]
    size = outputs * inputs * bits / 8
    copies = [candidates(kind, weight) for _ in range(max(2, min(int(options.memory / size), 200)))]
    results = []
    for count in rows:
        x = torch.randn(count, inputs).to(dtype)
        times: dict[str, list[float]] = {name: [] for name in copies[0]}
        end = time.perf_counter() + options.seconds
        turn = 0
        while time.perf_counter() < end or turn < options.least:
            products = copies[turn % len(copies)]
            for name, product in products.items():
                start = time.perf_counter()
                product(x)
                times[name].append(time.perf_counter() - start)
            turn += 1
        results.append(summary(kind, outputs, inputs, count, size, {name: t[1:] for name, t in times.items()}))
    return results


def summary(
    kind: str, outputs: int, inputs: int, rows: int, size: float, times: dict[str, list[float]]
) -> dict[str, Any]:
    """The figures that are kept from the rounds."""
    best = {name: min(found) for name, found in times.items()}
    return {
        "kind": kind,
        "shape": f"{outputs}x{inputs}",
        "rows": rows,
        "rounds": len(times[OURS]),
        "microseconds": {name: round(seconds * 1e6, 1) for name, seconds in best.items()},
        "gigabytes_per_second": round(size / best[OURS] / 1e9, 1),
        "gigaoperations_per_second": round(2 * rows * outputs * inputs / best[OURS] / 1e9, 1),
        "ratio": {name: round(seconds / best[OURS], 2) for name, seconds in best.items() if name != OURS},
        "median_ratio": {
            name: round(statistics.median(theirs / ours for theirs, ours in zip(found, times[OURS], strict=True)), 2)
            for name, found in times.items()
            if name != OURS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS + BY_TILES, default=list(KINDS))
    parser.add_argument("--shapes", nargs="+", default=[f"{n}x{k}" for n, k in SHAPES], help="outputs x inputs")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="for each number of rows")
    parser.add_argument("--least", type=int, default=5, help="rounds at least")
    parser.add_argument("--memory", type=float, default=2e8, help="bytes of weights that products go through")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "native-gemm.json")
    options = parser.parse_args()
    library = native.current()
    if library is None:
        parser.error("there is no native library; the log says why")
    if not gemm.has_amx() and not set(options.kinds).isdisjoint(BY_TILES):
        parser.error("there are no matrix tiles")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    for kind in options.kinds:
        for shape in options.shapes:
            outputs, inputs = (int(size) for size in shape.split("x"))
            for row in measure(kind, outputs, inputs, options.rows, options):
                results.append(row)
                print(
                    f"{kind:8s} {shape:10s} rows {row['rows']:5d}: {row['microseconds'][OURS]:9.1f} us "
                    f"{row['gigabytes_per_second']:6.1f} GB/s {row['gigaoperations_per_second']:6.1f} GOP/s  "
                    + "  ".join(f"{ratio:.2f} x {name}" for name, ratio in row["ratio"].items()),
                    flush=True,
                )
    result = {
        "benchmark": "native_gemm",
        "machine": {**machine(), "instructions": library.isa, "threads": options.threads},
        "results": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
