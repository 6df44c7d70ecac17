"""Sampling from logits on a CPU: the native library and torch, in turns, each a whole `sample` of a step.

For each kind of request, vocabulary and number of rows: time of a step's sampling, the logits that it goes through in
gigabytes per second, and the ratio to torch. Logits are random normal numbers: `--scale` is their standard deviation,
and decides how many tokens a top-p of 0.9 keeps (half of them at 1, some dozens at 4). Ratios are taken round by
round; their median and the fastest round of each are given, the latter because it holds on a busy machine.

    python benchmarks/native_sampling.py --kinds greedy beams top_p --rows 1 32 128 --vocabulary 32128
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from offline import ROOT, machine

from engine.backends import native
from engine.execution import sampler, sampler_torch
from engine.interface.sampling_table import EDIT, Kind, neutral_rows
from engine.scheduling.plan import SamplingBatch

KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "logprobs": {"temperature": 0.0, "num_logprobs": 5},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1},
    "temperature": {},
    "top_k": {"top_k": 50},
    "top_k_top_p": {"top_k": 50, "top_p": 0.9},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "beams": {"beam_width": 8},
}
VOCABULARIES = (32128, 49152, 151936)
ROWS = (1, 32, 128)
# Tokens that a row with penalties has seen.
HISTORY = 300


def batch_of(kind: str, rows: int, vocabulary: int) -> SamplingBatch:
    """A step's requests, all of one kind."""
    chosen = {"temperature": 0.8, **KINDS[kind]}
    generator = np.random.default_rng(0)

    table = neutral_rows(rows, **({"num_draws": "beam_width" not in chosen} | chosen))
    edits = np.zeros(rows * HISTORY if kind == "penalties" else 0, dtype=EDIT)
    uniforms = generator.random((rows, 1))
    if len(edits):
        edits["row"] = np.repeat(np.arange(rows), HISTORY)
        edits["token"] = generator.integers(0, vocabulary, rows * HISTORY, dtype=np.int32)
        edits["kind"], edits["value"] = Kind.HISTORY, 1.0
    return SamplingBatch(rows=np.arange(rows, dtype=np.int32), table=table, uniforms=uniforms, edits=edits)


def measure(kind: str, vocabulary: int, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both ways in turns, each time with logits that were not used lately."""
    size = 4 * rows * vocabulary
    copies = max(2, min(int(options.memory / size), 50))
    logits = [torch.randn(rows, vocabulary) * options.scale for _ in range(copies)]
    batch = batch_of(kind, rows, vocabulary)
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    end, turn = time.perf_counter() + options.seconds, 0
    while time.perf_counter() < end or turn < options.least:
        for name, sample in (("ours", sampler.sample), ("torch", sampler_torch.sample)):
            start = time.perf_counter()
            sample(logits[turn % copies], batch)
            times[name].append(time.perf_counter() - start)
        turn += 1
    times = {name: found[1:] for name, found in times.items()}
    best = {name: min(found) for name, found in times.items()}
    return {
        "kind": kind,
        "vocabulary": vocabulary,
        "rows": rows,
        "rounds": len(times["ours"]),
        "microseconds": {name: round(seconds * 1e6, 1) for name, seconds in best.items()},
        "gigabytes_per_second": round(size / best["ours"] / 1e9, 1),
        "ratio": round(best["torch"] / best["ours"], 2),
        "median_ratio": round(
            statistics.median(theirs / ours for theirs, ours in zip(times["torch"], times["ours"], strict=True)), 2
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--vocabulary", nargs="+", type=int, default=list(VOCABULARIES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--scale", type=float, default=4.0, help="standard deviation of the logits")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each kind, vocabulary and number of rows")
    parser.add_argument("--least", type=int, default=4, help="rounds at least")
    parser.add_argument("--memory", type=float, default=2e8, help="bytes of logits that rounds go through")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "native-sampling.json")
    options = parser.parse_args()
    library = native.current()
    if library is None:
        parser.error("there is no native library; the log says why")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = []
    for vocabulary in options.vocabulary:
        for rows in options.rows:
            for kind in options.kinds:
                result = measure(kind, vocabulary, rows, options)
                results.append(result)
                print(
                    f"{kind:12s} vocabulary {vocabulary:6d} rows {rows:4d}: {result['microseconds']['ours']:9.1f} us "
                    f"{result['gigabytes_per_second']:5.1f} GB/s  {result['ratio']:6.2f} x torch "
                    f"(median {result['median_ratio']:.2f})",
                    flush=True,
                )
    result = {
        "benchmark": "native_sampling",
        "machine": {**machine(), "instructions": library.isa, "threads": options.threads},
        "scale": options.scale,
        "results": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
