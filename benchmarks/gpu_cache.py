"""Triton's cache, filled without a GPU: what a model's start and steps compile, for generations of GPUs.

    python benchmarks/gpu_cache.py --cache triton-cache --models Qwen3-0.6B --capabilities 80 90
    python benchmarks/gpu_cache.py --cache triton-cache --config folder/config.json
    TRITON_CACHE_DIR=triton-cache octavo serve ...

A process for each model and capability, and one for Triton's module in C that starts kernels, if there is a C compiler
(with Python's headers). The folder serves the same versions of Octavo, Triton and Python, where it is: Triton keeps
whole paths there, so --home says where it will be, if that is another place.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

PAGES = ("auto", "int8", "fp8")
WEIGHTS = ("none", "int8", "int4")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill a cache; the exit status."""
    from gpu_parts import shapes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="the folder: TRITON_CACHE_DIR of the server")
    parser.add_argument("--models", nargs="+", choices=tuple(shapes.MODELS), help="default: all, without --config")
    parser.add_argument("--config", nargs="+", type=Path, default=[], help="config.json of models of the LLaMA family")
    parser.add_argument("--capabilities", nargs="+", type=int, default=[80, 86, 89, 90, 100, 120])
    parser.add_argument(
        "--kv-cache-dtypes", nargs="+", choices=PAGES, default=["auto"], help="formats of the pages (default: auto)"
    )
    parser.add_argument(
        "--quantizations", nargs="+", choices=WEIGHTS, default=["none"], help="formats of the weights (default: none)"
    )
    parser.add_argument("--home", type=Path, help="where the folder will be when it is used (default: where it is)")
    parser.add_argument("--child", choices=("kernels", "starter"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child == "kernels":
        return _compile(options)
    if options.child == "starter":
        return _compile_starter()
    options.cache.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(options.cache.resolve())}
    environment.pop("TRITON_INTERPRET", None)
    settle(options.cache, options.cache.resolve())
    command = [sys.executable, __file__, "--cache", str(options.cache), "--child"]
    failed = subprocess.run([*command, "starter"], env=environment, check=False).returncode != 0
    models = [["--models", model] for model in options.models or ([] if options.config else shapes.MODELS)]
    models += [["--config", str(config)] for config in options.config]
    for which, capability in product(models, options.capabilities):
        formats = ["--kv-cache-dtypes", *options.kv_cache_dtypes, "--quantizations", *options.quantizations]
        child = [*command, "kernels", *which, *formats, "--capabilities", str(capability)]
        failed |= subprocess.run(child, env=environment, check=False).returncode != 0
    settle(options.cache, options.home or options.cache.resolve())
    size = sum(file.stat().st_size for file in options.cache.rglob("*") if file.is_file())
    print(f"{options.cache}: {size / 1e6:.1f} MB")
    return int(failed)


def settle(cache: Path, home: Path) -> None:
    """Let a cache name its files as they are called where the folder is `home`: Triton passes over others."""
    for group in cache.glob("*/__grp__*.json"):
        files = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(home / group.parent.name / name) for name in files}}))


def _compile_starter() -> int:
    from gpu_parts.starter import compile_starter

    missing = compile_starter()
    print(f"starter: {missing} is missing, the first start compiles it" if missing else "starter: compiled", flush=True)
    return 0


def _compile(options: argparse.Namespace) -> int:
    from gpu_parts import ahead, shapes

    began = time.perf_counter()
    name = str(options.config[0]) if options.config else options.models[0]
    chosen = json.loads(Path(name).read_text()) if options.config else shapes.config_of(name, tiny=False)
    capability = options.capabilities[0]
    with ahead.compiling(capability) as hits:
        sizes = replace(shapes.TINY, chunk=512, batches=(1, 16), context=96)
        for weights, dtype in product(options.quantizations, options.kv_cache_dtypes):
            ahead.serve(chosen, sizes, kv_cache_dtype=dtype, quantization=weights)
    seconds = time.perf_counter() - began
    print(
        f"{name}, sm_{capability}: {hits.count(False)} compiled, {hits.count(True)} found, {seconds:.0f} s", flush=True
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
