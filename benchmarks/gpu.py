"""Octavo on a GPU: are its kernels right there, and how near is it to what the machine can do?

One command, no download: weights are random, in the shapes of Qwen3-0.6B and Llama-3.1-8B. Parts:

    kernels   each kernel in bfloat16 against float64; one that is wrong is named, and the status is 1
    decode    steps of 1 to 256 rows with 1k context: time, tokens/s, and how much of it is the floor, which is what
              reading weights and pages takes at the bandwidth (and multiplying at the rate) measured on this machine
    gap       how long the device is idle between two steps, from a profile
    sampler   256 rows of 128k logits: greedy, top-k, top-p, min-p
    mixed     steps of 32 rows beside 512 tokens of a prompt: time, that of the host, and the floor of that work
    prefill   prompts of 2k to 16k tokens: operations in matrices a second, against the measured peak
    beams     steps of 4 beams beside greedy ones with as many rows
    peer      transformers' continuous batching on the same work

Each model's parts run in a process of their own, and each family of checks as well, these side by side. Each row is
kept as it appears; SIGTERM ends the processes of that moment, too, and leaves what there is. A part fails where its
engine did not record its steps, overlap its kernels or use its own attention.

    python benchmarks/gpu.py --goals
    python benchmarks/gpu.py --plan                   # what it would do, and the memory that takes
    python benchmarks/gpu.py --parts decode gap --models Qwen3-0.6B
    python benchmarks/gpu.py --quantization int4 --parts decode prefill --output int4.json    # no goals for these
    python benchmarks/gpu.py --flash-prefill --parts prefill --output flash.json              # and none for these
    python benchmarks/gpu.py --device cpu --tiny      # a dry run without a GPU: shows that everything works
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

PARTS = ("kernels", "decode", "gap", "sampler", "mixed", "prefill", "beams", "peer")
MODELS = ("Qwen3-0.6B", "Llama-3.1-8B")
CHECKS = ("layers", "row", "attention", "experts", "sampler", "engine")
_OF_AN_ENGINE = ("decode", "gap", "mixed", "prefill", "beams", "peer")
# Seconds after which a part is told again that it is late.
_AGAIN = 5.0


class PartTimeoutError(BaseException):
    """A part took longer than it may; no handler of what a part can do without catches that."""


class Run:
    """One run: what was asked for, measured, and what failed."""

    def __init__(self, options: argparse.Namespace):
        import torch
        from gpu_parts import floors, timing
        from gpu_parts.report import machine

        self.options = options
        self.device = torch.device(options.device)
        self.sizes = sizes_of(options)
        self.machine = machine(self.device)
        self.parts: dict[str, Any] = {}
        self.engines: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.rates = None if options.rates is None else floors.Rates(*options.rates)
        if self.rates is not None or not self.sizes.parts:  # only engines' parts have floors
            return
        self.rates = timing.measure_rates(self.device, copied=self.sizes.copied, product=self.sizes.product)
        print(
            f"{self.machine['gpu'] or self.machine['cpu']}: it reads {self.rates.bandwidth / 1e12:.3f} "
            f"TB/s, a product of bfloat16 matrices makes {self.rates.products / 1e12:.1f} TFLOP/s",
            flush=True,
        )

    def all(self) -> None:
        """Every part that was asked for; what fails is noted, and the others go on."""
        wanted = self.options.parts
        if "kernels" in wanted:
            self._attempt("kernels", "kernels", self._kernels)
        if "sampler" in wanted:
            self._attempt("sampler", "sampler", self._sampler)
        if any(part in wanted for part in _OF_AN_ENGINE):
            for model in self.options.models:
                self._attempt("engine", f"engine {model}", lambda model=model: self._model(model))

    def _kernels(self) -> None:
        from gpu_parts import kernels

        checks = self.parts["kernels"] = []
        for found in kernels.check_all(self.device, self.options.checks):
            checks.append(found)
            self.write()
        wrong = [check["kernel"] for check in checks if check["passed"] is False]
        if wrong:
            raise RuntimeError(f"wrong: {', '.join(wrong)}")

    def _sampler(self) -> None:
        from gpu_parts import sampling

        rows, vocabulary = self.sizes.sampler
        self.parts["sampler"] = sampling.sampler(self.device, rows, vocabulary)

    def _model(self, model: str) -> None:
        """All parts that need an engine of one model; the peer's model comes when that engine is gone."""
        import torch
        from gpu_parts import shapes

        config = shapes.config_of(model, tiny=self.options.tiny)
        ours = self._with_engine(model, config)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if ours:
            self._attempt("peer", f"peer {model}", lambda: self._peer(model, config, ours))

    def _with_engine(self, model: str, config: dict[str, Any]) -> dict[str, float]:
        """Octavo's parts; its figures of the work that the peer will have."""
        from gpu_parts import decode, mixed, peer, shapes

        kind = self.options.quantization
        work, sizes, rates = shapes.Work.of(config, kind), self.sizes, self.rates
        ours: dict[str, float] = {}
        if self.device.type == "cuda":
            sizes = self._fitting(model, work)
        settings = {"quantization": kind, "flash_prefill": self.options.flash_prefill}
        began = time.perf_counter()
        with shapes.random_engine(config, self.options.device, sizes, **settings) as engine:
            decode.answer_all(engine, [shapes.prompt(0, 8, engine.info.vocab_size)], 1)
            self.parts.setdefault("start", {})[model] = {"seconds": round(time.perf_counter() - began, 2)}
            self.engines[model] = shapes.facts(engine)
            if problems := shapes.fallen_back(engine):
                self.failures[f"engine {model}"] = "; ".join(problems)
            acts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
                "decode": lambda: decode.decode(engine, work, rates, sizes),
                "gap": lambda: decode.gap(engine, sizes),
                "mixed": lambda: mixed.mixed(engine, work, rates, sizes),
                "prefill": lambda: decode.prefill(engine, work, rates, sizes),
                "beams": lambda: decode.beams(engine, sizes),
            }
            for part, act in acts.items():
                if part in sizes.parts:
                    self._attempt(part, f"{part} {model}", lambda part=part, act=act: self._rows(part, model, act()))
            if "peer" in sizes.parts:
                self._attempt("peer", f"peer {model}, octavo", lambda: ours.update(peer.octavo(engine, sizes)))
        return ours

    def _fitting(self, model: str, work: Any) -> Any:
        """The sizes that the memory is enough for; what is left out is named, and a part that has nothing left failed.

        Raises:
            RuntimeError: no part has anything left.
        """
        import torch

        sizes = self.sizes.within(work, torch.cuda.mem_get_info(self.device)[0])
        for part, numbers in self.sizes.lacking(sizes).items():
            unit = "tokens" if part == "prefill" else "rows"
            problem = f"no memory for pages of {', '.join(map(str, numbers))} {unit}"
            print(f"  {part}: {problem}: left out", flush=True)
            if part not in sizes.parts:
                self.failures[f"{part} {model}"] = problem
        return sizes

    def _rows(self, part: str, model: str, found: Iterator[dict[str, Any]]) -> None:
        """Keep the rows of a part as they appear: whatever ends the process, what came before it is there.

        Raises:
            RuntimeError: steps that can be CUDA graphs were not.
        """
        from gpu_parts import shapes

        rows = self.parts.setdefault(part, {}).setdefault(model, [])
        for row in found:
            rows.append(row)
            rows.sort(key=lambda one: one.get("rows", one.get("tokens")))
            self.write()
        if self.device.type == "cuda" and (problem := shapes.ran_eagerly(rows)):
            raise RuntimeError(problem)

    def _peer(self, model: str, config: dict[str, Any], ours: dict[str, float]) -> None:
        from gpu_parts import peer

        self.parts.setdefault("peer", {})[model] = peer.compare(config, self.device, self.sizes, ours)

    def _attempt(self, part: str, label: str, act: Callable[[], None]) -> None:
        """Do something within the time that a part may take."""
        print(f"{label}", flush=True)
        limit, started = self.options.part_timeout, time.perf_counter()
        if part == "engine":  # its parts have limits of their own
            limit *= 1 + len(_OF_AN_ENGINE)
        outer = signal.setitimer(signal.ITIMER_REAL, limit, _AGAIN)[0]
        # Where a kernel never ends, no exception comes through: then the process ends, with what was kept so far.
        faulthandler.dump_traceback_later(limit + 60, exit=True, file=sys.__stderr__)
        try:
            act()
        except (Exception, PartTimeoutError) as error:
            self.failures[label] = f"{type(error).__name__}: {error}"
            print(f"{label} FAILED: {self.failures[label]}", flush=True)
            if not isinstance(error, PartTimeoutError):
                traceback.print_exc()
        finally:
            faulthandler.cancel_dump_traceback_later()
            spent = time.perf_counter() - started
            signal.setitimer(signal.ITIMER_REAL, max(outer - spent, 1.0) if outer else 0.0, _AGAIN if outer else 0.0)
            self.seconds[label] = round(spent, 1)
            self.write()

    def result(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return judged(
            {
                "machine": self.machine,
                "rates": {} if self.rates is None else asdict(self.rates),
                "engines": self.engines,
                "parts": self.parts,
                "seconds": self.seconds,
                "failures": self.failures,
            },
            self.options,
        )

    def write(self) -> None:
        """Keep what there is so far."""
        write(self.result(), self.options)


def sizes_of(options: argparse.Namespace) -> Any:
    """How much is measured, of the parts that were asked for."""
    from gpu_parts import shapes

    sizes = shapes.TINY if options.tiny else shapes.Sizes()
    sizes = replace(sizes, parts=tuple(part for part in _OF_AN_ENGINE if part in options.parts))
    return replace(sizes, batches=tuple(sorted(options.batches))) if options.batches else sizes


def judged(found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The results with their goals, in the order in which they are kept."""
    from gpu_parts import floors

    meant = not options.tiny and options.quantization == "none" and not options.flash_prefill
    goals = floors.judge(floors.goals(sizes_of(options)), found["parts"], meant=meant)
    head = {"benchmark": "gpu", "shapes": "tiny" if options.tiny else "full"}
    head["quantization"] = options.quantization
    return head | {"machine": found["machine"], "rates": found["rates"], "goals": goals} | found


def write(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Keep a result. What is there is whole at each moment, as a process may be killed while it writes."""
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        draft = options.output.with_name(options.output.name + ".draft")
        draft.write_text(json.dumps(result, indent=2) + "\n")
        os.replace(draft, options.output)


def in_processes(options: argparse.Namespace) -> dict[str, Any]:
    """The result of all parts, each in a process of its own. SIGTERM ends the one that runs and begins no other."""
    from gpu_parts import jobs

    command = [sys.executable, str(Path(__file__).resolve()), "--together", "--child", "--device", options.device]
    command += ["--quantization", options.quantization, "--part-timeout", str(options.part_timeout)]
    command += ["--flash-prefill"] if options.flash_prefill else []
    command += ["--tiny"] if options.tiny else []
    if options.batches:
        command += ["--batches", *map(str, options.batches)]
    # Nothing is raised where the signal arrives: that may be between a process's start and what ends it.
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        with tempfile.TemporaryDirectory(prefix="octavo-gpu-") as folder:
            found = jobs.run_all(
                planned(options),
                command,
                Path(folder),
                lambda whole: write(judged(whole, options), options),
                within=options.within,
                stopped=told.is_set,
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    return judged(found, options)


def planned(options: argparse.Namespace) -> list[Any]:
    """The processes."""
    from gpu_parts import jobs

    return jobs.plan(options.parts, options.models, options.checks, _OF_AN_ENGINE, options.part_timeout + 60)


def tell_plan(options: argparse.Namespace) -> None:
    """What would be done, and the memory that it takes; what does not fit beside the weights is left out. An engine has
    the pages of the largest number of its part, or of all parts if they run together."""
    from gpu_parts import shapes

    sizes = sizes_of(options)
    for job in planned(options):
        print(f"{job.label:28s} {min(job.limit, options.within):5.0f} s at most")
    print(f"{'all together':28s} {options.within:5.0f} s at most")
    for model in options.models if sizes.parts else ():
        work = shapes.Work.of(shapes.config_of(model, tiny=options.tiny), options.quantization)
        pages = sizes.pages * work.kv_bytes / 1e9
        print(f"{model}: weights {work.weight_bytes / 1e9:.1f} GB; pages {pages:.1f} GB at most:")
        for part in sizes.parts:
            unit = "tokens" if part == "prefill" else "rows"
            needs = {number: sizes.tokens(part, number) * work.kv_bytes / 1e9 for number in sizes.numbers(part)}
            told = ", ".join(f"{number} {unit} {size:.1f} GB" for number, size in needs.items())
            print(f"  {part:26s} {told}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    options = _options(arguments)
    if options.plan:
        tell_plan(options)
        return 0
    if options.device == "cpu":  # before anything imports Triton
        os.environ["TRITON_INTERPRET"] = "1"
    # A profiler that is started again after CUDA graphs have run may crash where it was taken down in between.
    os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} sees no GPU. A dry run that shows that everything works needs none: "
            "benchmarks/gpu.py --device cpu --tiny",
            file=sys.stderr,
        )
        return 2

    from gpu_parts import report

    result = together(options) if options.together else in_processes(options)
    if options.child:
        return 1 if result["failures"] else 0
    if "decode" in result["parts"]:
        print("\n" + report.steps(result["parts"]["decode"]))
    if options.goals:
        if options.tiny:
            print("\nTiny shapes: the figures say nothing about the goals.")
        print("\n" + report.table(result["goals"]))
    if options.output is not None:
        write(result, options)
        print(f"written to {options.output}")
        try:
            report.plot(result, options.output.with_suffix(".png"))
            print(f"and {options.output.with_suffix('.png')}")
        except RuntimeError as error:
            print(f"not plotted: {error}")
    for label, error in result["failures"].items():
        print(f"FAILED: {label}: {error}", file=sys.stderr)
    return 1 if result["failures"] else 0


def together(options: argparse.Namespace) -> dict[str, Any]:
    """The result of all parts, in this process."""
    before = signal.signal(signal.SIGALRM, _late)
    try:
        run = Run(options)
        run.all()
    finally:
        signal.signal(signal.SIGALRM, before)
    run.write()
    return run.result()


def _late(*_: object) -> None:
    raise PartTimeoutError("it took longer than --part-timeout allows")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: shows that everything works")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none", help="of the weights")
    parser.add_argument("--flash-prefill", action="store_true", help="long prompts by torch's flash attention")
    parser.add_argument("--batches", nargs="+", type=int, metavar="ROWS", help="rows of decoding steps")
    parser.add_argument(
        "--checks", nargs="+", choices=CHECKS, default=list(CHECKS), help="families of checks of kernels"
    )
    parser.add_argument("--plan", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--together", action="store_true", help="all parts in this process, as in dry runs on a CPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rates", nargs=2, type=float, help=argparse.SUPPRESS)  # measured by the process before
    parser.add_argument("--part-timeout", type=float, default=90.0, help="seconds of each part (default: 90)")
    parser.add_argument(
        "--within", type=float, default=300.0, help="seconds of all parts together (default: 300), if in processes"
    )
    parser.add_argument("--goals", action="store_true", help="print the goals and how near they are")
    parser.add_argument(
        "--output",
        type=Path,
        help="where the result is kept, with a plot beside it (default: benchmarks/results/gpu.json; of tiny shapes, "
        "nowhere)",
    )
    options = parser.parse_args(arguments)
    if options.output is None and not options.tiny:
        options.output = ROOT / "benchmarks" / "results" / "gpu.json"
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for dry runs: add --tiny")
    return options


if __name__ == "__main__":
    sys.exit(main())
