"""The cost of LoRA adapters on a CPU: decoding steps of 1 and 8 rows, with adapters and without, in turns of one run.

Two engines have the same random model: one takes no adapters (`max_loras` 0), the other has as many as rows, all with
the same rank. Each turn times decoding steps of rows that have each its own adapter, of rows of the base model beside
loaded adapters, and of rows of the engine that takes none. Figures are the medians of all steps, in milliseconds. Then
a prompt of 512 tokens is timed in the same turns.

    python benchmarks/adapters.py --output benchmarks/results/adapters.json
    python benchmarks/adapters.py --model FOLDER --dtype bfloat16 --targets attention
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from offline import machine, make_checkpoint

from engine import Engine, EngineConfig, SamplingParams
from engine.model.adapters import Adapter, LowRank
from engine.model.layers import Linear

PROMPT, LONG = 64, 512
TARGETS = {"all": ("qkv", "out", "gate_up", "up", "down"), "attention": ("qkv",)}


def make_adapter(engine: Engine, number: int, rank: int, targets: str, dtype: torch.dtype) -> Adapter:
    """A random adapter of these products: of queries and values for "attention", else of every matrix."""
    generator = torch.Generator().manual_seed(number)
    products = {}
    for path, linear in engine.runner.model.named_modules():
        name = path.rpartition(".")[2]
        if not isinstance(linear, Linear) or linear.adapters is None or name not in TARGETS[targets]:
            continue
        parts = _heights(engine, name, linear)
        if targets == "attention":
            parts = [parts[0], parts[2]]
        downs, ups, first = [], [], 0
        for place, height in enumerate(parts):
            first = linear.outputs - height if targets == "attention" and place == 1 else first
            up = torch.zeros(linear.outputs, rank)
            up[first : first + height] = 0.01 * torch.randn(height, rank, generator=generator)
            downs.append(0.01 * torch.randn(rank, linear.inputs, generator=generator))
            ups.append(up)
            first += height
        down, up = (part.to(dtype).float() for part in (torch.cat(downs), torch.cat(ups, dim=1)))
        products[path] = LowRank(down, up)
    return Adapter(name=str(number), path="random", digest=bytes([number]), products=products)


def _heights(engine: Engine, name: str, linear: Linear) -> list[int]:
    """Rows of a checkpoint's matrices that a product joins."""
    part = engine.runner.model.spec.trunk.attentions[0]
    if name == "qkv":
        return [heads * part.head_dim for heads in (part.heads, part.kv_heads, part.kv_heads)]
    return [linear.outputs // 2] * 2 if name == "gate_up" else [linear.outputs]


def decode(engine: Engine, rows: int, steps: int, adapters: bool, turn: int) -> list[float]:
    """Milliseconds of decoding steps of so many rows."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 4, ignore_eos=True)
    for row in range(rows):
        prompt = [(turn * 131 + row * 17 + i * 7) % 30000 + 10 for i in range(PROMPT)]
        engine.add_request(f"{row}", prompt, params, adapter=str(row) if adapters else None)
    taken: list[float] = []
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        deltas = engine.step_deltas()
        seconds = time.perf_counter() - began
        if len(deltas) == rows and not any(delta.finished for delta in deltas):
            taken.append(1000 * seconds)
    return taken[2:]


def prefill(engine: Engine, adapters: bool, turn: int) -> list[float]:
    """Milliseconds of a prompt."""
    prompt = [(turn * 977 + i * 13 + adapters) % 30000 + 10 for i in range(LONG)]
    engine.add_request("0", prompt, SamplingParams(temperature=0.0, max_tokens=1), adapter="0" if adapters else None)
    began = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step_deltas()
    return [1000 * (time.perf_counter() - began)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or GGUF file (default: a random model of the shape of SmolLM2-135M)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=TARGETS, default="all", help="attention: queries and values alone")
    parser.add_argument(
        "--numbers", choices=("float32", "bfloat16", "float16"), default="float32", help="of the adapters"
    )
    parser.add_argument("--lora-dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", help="a JSON file, to which this run is added")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            model = folder
            make_checkpoint(Path(folder), torch.bfloat16)
        report = run(options, model)
    print(json.dumps(report, indent=1))
    if options.output:
        path = Path(options.output)
        before = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*before, report], indent=1) + "\n")


def run(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """All figures of a model."""
    most = max(options.rows)
    settings = {"model": model, "dtype": options.dtype, "quantization": options.quantization, "device": "cpu",
                "skip_tokenizer_init": True, "num_gpu_blocks_override": 256, "enable_prefix_caching": False,
                "max_model_len": 1024, "max_step_time": 0, "show_progress": False}  # fmt: skip
    plain = Engine(EngineConfig(**settings))
    engine = Engine(EngineConfig(**settings, max_loras=most, max_lora_rank=options.rank, lora_dtype=options.lora_dtype))
    for number in range(most):
        dtype = getattr(torch, options.numbers)
        engine.load_adapter(str(number), make_adapter(engine, number, options.rank, options.targets, dtype))
    figures: dict[str, dict[str, list[float]]] = {}
    cases = {"no adapters taken": (plain, False), "base": (engine, False), "adapters": (engine, True)}
    for turn in range(options.turns):
        for rows in options.rows:
            for name, (which, with_adapters) in cases.items():
                found = figures.setdefault(f"decode, {rows} rows", {}).setdefault(name, [])
                found += decode(which, rows, options.steps, with_adapters, turn)
        for name, (which, with_adapters) in cases.items():
            figures.setdefault(f"prompt of {LONG}", {}).setdefault(name, []).extend(prefill(which, with_adapters, turn))
    medians = {work: {name: statistics.median(times) for name, times in by.items()} for work, by in figures.items()}
    return {
        "model": "random, 135M" if options.model is None else Path(options.model).name,
        "dtype": engine.info.dtype,
        "quantization": engine.info.quantization,
        "rank": options.rank,
        "targets": options.targets,
        "adapters": options.numbers,
        "lora_dtype": options.lora_dtype,
        "adapter_bytes": next(iter(engine.adapters.values())).num_bytes,
        "milliseconds": {work: {name: round(ms, 3) for name, ms in by.items()} for work, by in medians.items()},
        "over_base": {work: round(by["adapters"] / by["base"] - 1, 4) for work, by in medians.items()},
        "base_over_none": {work: round(by["base"] / by["no adapters taken"] - 1, 4) for work, by in medians.items()},
        "machine": machine(),
    }


if __name__ == "__main__":
    main()
