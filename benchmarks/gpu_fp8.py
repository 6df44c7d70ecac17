"""FP8 weights on a GPU: are the products right, and how fast are they beside bfloat16?

No download: weights are random, in the shapes of Llama-3.1-8B. Parts, each with its lines:

    checks    products of 1 to 2,048 rows with odd and published shapes against `engine.backends.torch.float8`; one
              that is wrong is named, and the status is 1. Each shape has a process of its own, side by side.
    products  one matrix: bfloat16, each of our kernels, and what torch's library offers, in microseconds
    steps     the matrices, norms and activations of all layers, as a CUDA graph: decode steps of 1, 32 and 128 rows
              and a prompt of 2,048 tokens

    python benchmarks/gpu_fp8.py
    python benchmarks/gpu_fp8.py --parts steps
    python benchmarks/gpu_fp8.py --device cpu --tiny      # a dry run by Triton's interpreter: shows that it works
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
PARTS = ("checks", "products", "steps")
LAYERS, HIDDEN, WIDTH, QKV = 32, 4096, 14336, 6144
PUBLISHED = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
ODD = ((771, 1001), (208, 304))
# Root mean squares of errors, in those of results. Results, and the weights of few rows, are rounded to bfloat16
# (2^-9 at most), and tensor cores add FP8 products with fewer bits than float32.
BOUND = 4e-3


class Work:
    """The device, the format and the random numbers of this run."""

    def __init__(self, options: argparse.Namespace):
        import torch

        self.options = options
        self.device = torch.device(options.device)
        self.dtype = torch.float16 if options.tiny else torch.bfloat16  # the interpreter's bfloat16 is wrong
        self.rows = (1, 2, 65, 130) if options.tiny else (1, 2, 16, 33, 64, 65, 128, 300, 2048)
        self.generator = torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int, deviation: float = 1.0) -> Any:
        """Random numbers in the rows' format."""
        import torch

        numbers = torch.randn(*shape, device=self.device, generator=self.generator, dtype=self.dtype)
        return numbers * deviation

    def weight(self, outputs: int, inputs: int, *, by_output: bool) -> Any:
        """A random weight of a deviation of inputs**-0.5, with scales for each output, or for blocks of 128 x 128."""
        import torch

        from engine.backends.native.gemm import FLOAT8, FLOAT8_GROUP, Quantised

        values = torch.empty(outputs, inputs, device=self.device, dtype=FLOAT8)
        for start in range(0, outputs, 4096):  # a draw of the whole matrix would take more memory than the model
            part = values[start : start + 4096]
            part.copy_(torch.randn(part.shape, device=self.device, generator=self.generator) * 48)
        groups = -(-inputs // FLOAT8_GROUP)
        lines = outputs if by_output else -(-outputs // FLOAT8_GROUP)
        columns = 1 if by_output else groups
        some = (0.5 + torch.rand(lines, columns, device=self.device, generator=self.generator)) * inputs**-0.5 / 48
        if by_output:
            return Quantised(values, some.expand(-1, groups).contiguous(), inputs, by_output=some[:, 0].contiguous())
        return Quantised(values, some.repeat_interleave(FLOAT8_GROUP, 0)[:outputs].contiguous(), inputs)


def checks(work: Work, outputs: int, inputs: int) -> Iterator[tuple[str, float]]:
    """Products with a matrix: a name and an error, see `BOUND`."""
    import torch
    from torch.nn import functional

    from engine.backends.torch import float8 as reference
    from engine.backends.triton import few_bits, float8, matvec
    from engine.backends.triton.norms import Norm

    for by_output in (True, False):
        kind = "channels" if by_output else "blocks"
        weight = work.weight(outputs, inputs, by_output=by_output)
        exact, plain = weight.dense().double(), weight.dense().to(work.dtype).double()
        for rows in work.rows:
            x = work.normal(rows, inputs, deviation=2.0)
            if rows == 1:
                yield f"{kind}, one row", error(matvec.product(x, weight), x.double() @ exact.T)
                if by_output and outputs % 2 == 0 and matvec.serves(weight, alone=False):
                    factors = work.normal(inputs)
                    norm = Norm(factors, 1e-5)
                    found = matvec.product(x, weight, norm=norm, function="silu", gated=True)
                    wide = x.double()
                    wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * factors.double()
                    gate, up = (wide @ exact.T).chunk(2, -1)
                    yield f"{kind}, one row, norm and gate", error(found, functional.silu(gate) * up) / 2
            with mock.patch.object(float8, "FEW", rows):
                yield f"{kind}, {rows} rows, widened", error(few_bits.product(x, weight), x.double() @ plain.T)
            if not float8.serves(x, weight):
                continue
            found = few_bits.product(x, weight)
            values, scales = float8.quantise(x, grouped=not by_output)
            same = reference.quantise(x, grouped=not by_output)
            equal = torch.equal(values.view(torch.uint8), same[0].view(torch.uint8)) and torch.equal(scales, same[1])
            yield f"{kind}, {rows} rows quantised", 0.0 if equal else float("inf")
            factors = weight.by_output[:, None] if by_output else weight.scales
            want = reference.scaled_product(values, scales, weight.values, factors)
            yield f"{kind}, {rows} rows", error(found, want)
            out = torch.empty_like(found)
            yield f"{kind}, {rows} rows, our kernel", error(float8.multiply(values, scales, weight, None, out), want)


def error(found: Any, want: Any) -> float:
    """The root mean square error, in units of the results'."""
    return float((found.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


def check_all(work: Work) -> bool:
    """One line for each shape; whether all are right."""
    shapes = ((96, 64), (33, 300)) if work.options.tiny else (*ODD, *PUBLISHED)
    if work.options.shape is not None:
        outputs, inputs = work.options.shape
        worst: tuple[float, str] = (0.0, "nothing")
        count, wrong = 0, []
        for name, found in checks(work, outputs, inputs):
            count += 1
            worst = max(worst, (found, name))
            if not found <= BOUND:
                wrong.append(f"{name}: {found:.2e}")
        said = "WRONG " + "; ".join(wrong) if wrong else "right"
        print(f"check {outputs} x {inputs}: {count} products, worst {worst[0]:.2e} ({worst[1]}): {said}", flush=True)
        return not wrong
    command = [sys.executable, __file__, *sys.argv[1:], "--parts", "checks", "--shape"]
    running = [subprocess.Popen([*command, *map(str, shape)]) for shape in shapes]
    codes = [process.wait() for process in running]
    for shape, code in zip(shapes, codes, strict=True):
        if code not in (0, 1):
            print(f"check {shape[0]} x {shape[1]}: FAILED with status {code}", flush=True)
    return not any(codes)


def microseconds(work: Work, run: Callable[[], object]) -> float:
    """The time of one product, from a CUDA graph of several."""
    import torch
    from gpu_parts.timing import seconds_of

    if work.device.type != "cuda":
        return 1e6 * seconds_of(work.device, run, 1)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            run()
    return 1e6 * seconds_of(work.device, graph.replay, 12) / 8


def products(work: Work) -> None:
    """A line for each matrix and number of rows. A small matrix may stay in a cache, which flatters few rows."""
    for outputs, inputs in ((96, 64),) if work.options.tiny else ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        plain = work.normal(outputs, inputs, deviation=inputs**-0.5)
        channels, blocks = (work.weight(outputs, inputs, by_output=one) for one in (True, False))
        for rows in (1, 65) if work.options.tiny else (1, 16, 32, 64, 128, 256, 2048):
            told = []
            for name, run in ways_of(work.normal(rows, inputs), plain, channels, blocks).items():
                try:
                    told.append(f"{name} {microseconds(work, run):.1f}")
                except Exception as problem:  # what a library does not offer here
                    told.append(f"{name}: {type(problem).__name__} {str(problem).splitlines()[0][:150]}")
            print(f"product {rows:4d} rows, {outputs} x {inputs}, us: {', '.join(told)}", flush=True)


def ways_of(x: Any, plain: Any, channels: Any, blocks: Any) -> dict[str, Callable[[], object]]:
    """How rows can be multiplied by a plain weight, and by weights with scales for outputs, and for blocks."""
    import torch
    from torch.nn import functional

    from engine.backends.triton import few_bits, float8, matvec

    def by_widening() -> object:
        with mock.patch.object(float8, "FEW", len(x)):
            return few_bits.product(x, channels)

    ways: dict[str, Callable[[], object]] = {"16 bits": lambda: functional.linear(x, plain)}
    if len(x) == 1:
        ways["16 bits, our row"] = lambda: matvec.product(x, plain)
        ways["row"] = lambda: matvec.product(x, channels)
    if len(x) <= few_bits.FEW:
        ways["widened"] = by_widening
    if len(x) == 1:
        return ways
    by_row, by_group = (float8.quantise(x, grouped=grouped) for grouped in (False, True))
    out = torch.empty(len(x), len(plain), dtype=x.dtype, device=x.device)
    squares = blocks.scales[::128].contiguous()

    def by_scaled_mm(fast: bool) -> object:
        return torch._scaled_mm(
            by_row[0], channels.values.t(), scale_a=by_row[1], scale_b=channels.by_output[None],
            out_dtype=torch.bfloat16, use_fast_accum=fast,
        )  # fmt: skip

    return ways | {
        "quantise": lambda: float8.quantise(x, grouped=False),
        "quantise groups": lambda: float8.quantise(x, grouped=True),
        "our kernel": lambda: float8.multiply(*by_row, channels, None, out),
        "our kernel, groups": lambda: float8.multiply(*by_group, blocks, None, out),
        "library": lambda: by_scaled_mm(False),
        "library, fast sums": lambda: by_scaled_mm(True),
        "library, groups": lambda: by_library(*by_group, blocks.values, squares),
    }


def by_library(x: Any, scales: Any, values: Any, squares: Any) -> Any:
    """torch's product with a scale for 128 features of a row and for 128 x 128 weights."""
    import torch
    from torch.nn.functional import ScalingType, scaled_mm

    return scaled_mm(
        x, values.t(), scales.t().contiguous().t(), ScalingType.BlockWise1x128, squares.t(),
        ScalingType.BlockWise128x128, output_dtype=torch.bfloat16,
    )  # fmt: skip


def steps(work: Work) -> None:
    """A line for each number of rows."""
    import torch
    from gpu_parts.timing import seconds_of

    tiny = work.options.tiny
    hidden, width, qkv, layers = (64, 96, 96, 2) if tiny else (HIDDEN, WIDTH, QKV, LAYERS)
    shapes = {"qkv": (qkv, hidden), "out": (hidden, hidden), "up": (2 * width, hidden), "down": (hidden, width)}
    held: dict[str, list[dict[str, Any]]] = {}
    for name, by_output in (("channels", True), ("blocks", False)):
        held[name] = [
            {part: work.weight(*shape, by_output=by_output) for part, shape in shapes.items()} for _ in range(layers)
        ]
    held["bf16"] = [
        {part: work.normal(*shape, deviation=shape[1] ** -0.5) for part, shape in shapes.items()} for _ in range(layers)
    ]
    for rows in (1, 3, 66) if tiny else (1, 32, 128, 2048):
        x, took = work.normal(rows, hidden), {}
        for name, weights in held.items():

            def run(x: Any = x, weights: list[dict[str, Any]] = weights) -> Any:
                return passed(x.clone(), weights, width)

            if work.device.type != "cuda":
                took[name] = seconds_of(work.device, run, 1)
                continue
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            took[name] = seconds_of(work.device, graph.replay, 12)
            del graph
        told = ", ".join(
            f"FP8 by {name} {1e3 * took[name]:.3f} ms ({took['bf16'] / took[name]:.2f}x)"
            for name in ("channels", "blocks")
        )
        print(f"step {rows:4d} rows, {layers} layers: bf16 {1e3 * took['bf16']:.3f} ms, {told}", flush=True)


def passed(x: Any, layers: list[dict[str, Any]], width: int) -> Any:
    """Rows after all layers, without attention: its result is the beginning of the queries."""
    import torch

    from engine.backends.triton import activations, matvec, norms
    from engine.backends.triton.norms import Norm

    norm = Norm(torch.ones_like(x[0]), 1e-5)
    for layer in layers:
        if len(x) == 1:
            heads = matvec.product(x, layer["qkv"], norm=norm)
            matvec.product(heads[:, : x.shape[1]], layer["out"], stream=x)
            up = matvec.product(x, layer["up"], norm=norm, function="silu", gated=True)
            matvec.product(up, layer["down"], stream=x)
            continue
        heads = multiplied(norms.norm(x, norm), layer["qkv"])
        made = x + multiplied(heads[:, : x.shape[1]].contiguous(), layer["out"])
        up = multiplied(norms.norm(made, norm), layer["up"])
        x = made + multiplied(activations.gate(up, "silu"), layer["down"])
    return x


def multiplied(x: Any, weight: Any) -> Any:
    """A product of any number of rows."""
    import torch

    from engine.backends.triton import few_bits

    return torch.nn.functional.linear(x, weight) if isinstance(weight, torch.Tensor) else few_bits.product(x, weight)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a dry run")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from engine.backends import triton as gpu

    began, right, work = time.perf_counter(), True, Work(options)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        if options.device == "cpu":
            stack.enter_context(gpu.interpreted())
        elif options.shape is None:
            print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
        if "checks" in options.parts:
            right = check_all(work)
        if "steps" in options.parts:
            steps(work)
        if "products" in options.parts:
            products(work)
    if options.shape is None:
        print(f"all of it took {time.perf_counter() - began:.0f} s: {'right' if right else 'WRONG'}", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
