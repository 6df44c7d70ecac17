"""The host's time for a step on a GPU, measured without a GPU: the engine's launches start nothing.

    python benchmarks/gpu_host.py
    python benchmarks/gpu_host.py --models Qwen3-0.6B --rows 32 --chunk 512 --most 1.5
    python benchmarks/gpu_host.py --output benchmarks/results/gpu-host.json

A step is recorded by calling it once, under the driver of `gpu_cache.py`, and started again by doing nothing. So what
is timed is all that Python does for a step that is a CUDA graph, from its plan to its launch (`ModelRunner.launch`):
rows that decode, and the same rows beside a chunk of a prompt. What a GPU's own driver takes comes on top. The status
is 1 where a step takes more than --most, or ran eagerly.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

_CAPABILITY = 90


def main(arguments: Sequence[str] | None = None) -> int:
    """Time steps; the exit status."""
    os.environ.pop("TRITON_INTERPRET", None)
    from gpu_parts import shapes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(shapes.MODELS), default=list(shapes.MODELS))
    parser.add_argument("--config", type=Path, help="a config.json of the LLaMA family, instead of --models")
    parser.add_argument("--rows", type=int, default=32, help="rows that decode (default: 32)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt beside them (default: 512)")
    parser.add_argument("--steps", type=int, default=48, help="steps that are timed (default: 48)")
    parser.add_argument("--most", type=float, default=1.5, help="ms that a step may take (default: 1.5)")
    parser.add_argument("--output", type=Path, help="keep the result as JSON in this file")
    options = parser.parse_args(arguments)
    configs = {name: shapes.config_of(name, tiny=False) for name in options.models}
    if options.config:
        configs = {str(options.config): json.loads(options.config.read_text())}
    failed = False
    found: list[dict[str, Any]] = []
    for name, config in configs.items():
        row = of_model(config, options.rows, options.chunk, options.steps)
        found.append({"model": name, "rows": options.rows, "chunk": options.chunk, **row})
        print(
            f"{name}: {row['mixed_ms']:.2f} ms for a step of {options.rows} rows and {options.chunk} tokens of a "
            f"prompt, {row['decode_ms']:.2f} ms for one of the rows alone",
            flush=True,
        )
        if row["eager"] or max(row["mixed_ms"], row["decode_ms"]) > options.most:
            failed = True
            print(f"{name}: " + (row["eager"] or f"more than {options.most} ms"), file=sys.stderr)
    if options.output:
        from offline import machine

        result = {"benchmark": "gpu_host", "machine": machine(), "results": found}
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return int(failed)


def of_model(config: Mapping[str, Any], rows: int, chunk: int, steps: int) -> dict[str, Any]:
    """Medians of what launches take, in ms, and why steps ran eagerly ("" if none did)."""
    from gpu_parts import ahead, shapes
    from gpu_parts.decode import decoding_rows
    from gpu_parts.mixed import beside_prompts, timed_launches
    from torch.utils._python_dispatch import _disable_current_modes

    sizes = replace(
        shapes.TINY,
        batches=(rows,),
        beam_rows=(1,),
        mixed_rows=(rows,),
        mixed_chunk=chunk,
        chunk=2048,
        context=256,
        prompts=(chunk,),
        steps=steps,
        warm=8,
    )
    with ahead.compiling(_CAPABILITY), shapes.random_engine(config, "cpu", sizes) as engine:
        runner = engine.runner
        runner.warm()
        runner.use_prompt_graphs(rows + 2, sizes.chunk, _once)
        runner.use_graphs(rows + 2, _once)
        # Nothing computes from here on, so no results need be zeros.
        with _disable_current_modes(), decoding_rows(engine, rows, sizes, steps=3 * (steps + sizes.warm)) as ready:
            decoding: list[float] = []
            mixed: list[float] = []
            eager: list[str] = []
            ready.run(sizes.warm)
            with _noted(runner, eager):
                with timed_launches(runner, decoding):
                    ready.run(steps)
                with timed_launches(runner, mixed):
                    beside_prompts(engine, ready, sizes)
    return {
        "mixed_ms": 1e3 * statistics.median(mixed[-steps:]),
        "decode_ms": 1e3 * statistics.median(decoding),
        "eager": f"{', '.join(sorted(set(eager)))} ran eagerly, {len(eager)} times" if eager else "",
    }


@contextmanager
def _noted(runner: Any, eager: list[str]) -> Iterator[None]:
    """Collects what of steps is computed without a graph."""
    parts = ((runner.kind, "run"), (runner, "_logits"))
    plain = [getattr(owner, name) for owner, name in parts]

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*given: Any) -> Any:
            eager.append(name)
            return function(*given)

        return compute

    for (owner, name), function in zip(parts, plain, strict=True):
        setattr(owner, name, noting(name, function))
    try:
        yield
    finally:
        for (owner, name), function in zip(parts, plain, strict=True):
            setattr(owner, name, function)


def _once(function: Callable[[], None]) -> Callable[[], None]:
    function()
    return lambda: None


if __name__ == "__main__":
    sys.exit(main())
