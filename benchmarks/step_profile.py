"""The time of a decode step on a CPU, by operation, against its lower bounds.

A random LLaMA shape of 135M parameters, or a model of your own, decodes greedily, so many rows at once. Each operation
of the layers is timed inside the one call that computes them; the parts around it by the clock. The bound of a product
is the time that reading its weights takes at the bandwidth with which torch adds up numbers that lie in large pages,
measured right before and after: on a machine that others share it changes within seconds.

    python benchmarks/step_profile.py --rows 1 32 --quantization none int8 int4 --output
    python benchmarks/step_profile.py --rows 1 --model build/sizes/1.5B/q4_k_m.gguf --quantization stored
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.offline import machine, make_checkpoint  # noqa: E402
from engine import Engine, EngineConfig, SamplingParams  # noqa: E402
from engine.backends.native import memory  # noqa: E402
from engine.execution import runner as running  # noqa: E402
from engine.model.executors.native import NativeExecutor  # noqa: E402
from engine.model.layers import Linear  # noqa: E402

PROMPT, STEPS, WARM = 128, 60, 6
AROUND = ("schedule", "program", "head", "sample", "update")


def bandwidth() -> float:
    """Bytes a second that torch's threads read."""
    numbers = memory.zeros(2**26, dtype=torch.float32).fill_(1)
    best = min(timed(lambda: numbers.sum()) for _ in range(8))
    return numbers.nbytes / best


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def watch(owner: Any, name: str, times: list[float]) -> None:
    """Time each call of a method from now on."""
    plain = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        result = plain(*arguments, **named)
        times.append(time.perf_counter() - started)
        return result

    setattr(owner, name, call)


def profile(path: Path, dtype: str, quantization: str | None, rows: int) -> dict[str, Any]:
    """Microseconds of a step by part, and of its layers by operation."""
    engine = Engine(
        EngineConfig(
            model=str(path),
            dtype=dtype,
            quantization=quantization,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            show_progress=False,
            max_model_len=1024,
            max_step_time=0.0,
        )
    )
    model = engine.runner.model
    assert model.decoder is not None
    if not isinstance(model.decoder.executor, NativeExecutor):
        raise SystemExit("torch runs all layers here: there is no native library, see octavo doctor.")
    program = model.decoder.executor.native
    generator = torch.Generator().manual_seed(0)
    for number in range(rows):
        prompt = torch.randint(1000, (PROMPT,), generator=generator).tolist()
        engine.add_request(
            str(number), prompt, SamplingParams(temperature=0.0, max_tokens=STEPS + WARM, ignore_eos=True)
        )
    steps: list[list[tuple[str, int, int]]] = []
    around: dict[str, list[float]] = {name: [] for name in AROUND}
    for _ in range(WARM):
        engine.step_deltas()
    program.watch = steps.append
    watch(engine.scheduler, "schedule", around["schedule"])
    watch(engine.scheduler, "update", around["update"])
    watch(program, "run", around["program"])
    watch(model, "logits", around["head"])
    plain, running.sample = running.sample, lambda *given: timed_sample(plain, given, around["sample"])
    whole = []
    while engine.has_unfinished_requests():
        whole.append(timed(engine.step_deltas))
    running.sample = plain
    engine.close()
    by_name: dict[str, list[float]] = defaultdict(list)
    waits = []
    for step in steps:
        sums: dict[str, float] = defaultdict(float)
        for name, work, _ in step:
            sums[name] += work / 1e3
        for name, value in sums.items():
            by_name[name].append(value)
        waits.append(sum(wait for *_, wait in step) / 1e3)
    weights: dict[str, int] = defaultdict(int)
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.packed is not None and module.packed.native is not None:
            label = f"product {module.inputs} to {module.outputs}"
            weights["head" if name.startswith("head") else label] += module.packed.native.nbytes
    parts = {name: 1e6 * median(times) for name, times in around.items()}
    step = 1e6 * median(whole)
    return {
        "dtype": dtype,
        "quantization": quantization,
        "rows": rows,
        "step_us": step,
        "parts_us": parts | {"rest": step - sum(parts.values())},
        "operations_us": {name: median(values) for name, values in by_name.items()} | {"waiting": median(waits)},
        "weight_bytes": dict(weights),
    }


def timed_sample(plain: Any, given: tuple[Any, ...], times: list[float]) -> Any:
    """The sampler's result; how long it took is kept."""
    started = time.perf_counter()
    result = plain(*given)
    times.append(time.perf_counter() - started)
    return result


def show(result: dict[str, Any]) -> None:
    """Print one table."""
    weights, step = result["weight_bytes"], result["step_us"]
    speed = max(result["bandwidth_bytes_per_second"])
    bound = 1e6 * sum(weights.values()) / speed
    kind = result["quantization"] or result["dtype"]
    print(
        f"\n{kind}, {result['rows']} rows: {step:.0f} us a step, {1e6 * result['rows'] / step:.0f} tokens/s; reading "
        f"{sum(weights.values()) / 1e6:.0f} MB of weights at {speed / 1e9:.0f} GB/s takes {bound:.0f} us "
        f"({100 * bound / step:.0f}%)"
    )
    for name, spent in (result["operations_us"] | result["parts_us"]).items():
        if name == "program":
            continue
        size = weights.get(name)
        least = f"bound {1e6 * size / speed:6.0f} us" if size else ""
        print(f"  {name:24} {spent:8.0f} us {100 * spent / step:5.1f}%  {least}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    kinds = ("none", "int8", "int4", "stored")
    parser.add_argument("--quantization", choices=kinds, nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--model", type=Path, help="folder or GGUF file, instead of the random shape")
    parser.add_argument("--output", action="store_true", help="keep the result in benchmarks/results/")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or Path(folder)
        if arguments.model is None:
            make_checkpoint(path, torch.bfloat16)
        for quantization in arguments.quantization:
            for rows in arguments.rows:
                kind = None if quantization == "none" else quantization
                before = bandwidth()
                result = profile(path, arguments.dtype, kind, rows)
                results.append(result | {"bandwidth_bytes_per_second": [before, bandwidth()]})
                show(results[-1])
    if arguments.output:
        target = ROOT / "benchmarks" / "results" / "step-profile.json"
        report = {"machine": machine(), "prompt": PROMPT, "results": results}
        target.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"\nkept in {target}")


if __name__ == "__main__":
    main()
