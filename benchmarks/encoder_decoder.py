"""Encoder-decoder requests with beams: `LLM.generate` against its peers, on one random checkpoint in one run.

The model has the shape of T5-small or of BART-base. Inputs have mixed lengths (16 to 200 tokens), and all answers
the same length, the end token being banned until then: so every peer does the same work, and what each one
pads is its own affair. Peers:

    transformers   `generate` over padded batches
    ctranslate2    `translate_batch` of the PyPI wheel, in a process of its own; left out where it is not installed

Every peer runs in each of its number formats and, in a first round that does not count, with several batch
settings; the fastest setting of each is measured. Then rounds alternate between all of them, and ratios are
taken round by round. In float32 the answers are compared, too: the same search has the same answer, but for
candidates that rounding brings into another order.

    python benchmarks/encoder_decoder.py
    python benchmarks/encoder_decoder.py --shape bart-base --requests 1 --beams 1
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from offline import ROOT, machine
from peers import process
from peers.checkpoints import EOS, make_encoder_decoder
from peers.engines import ctranslate2_settings
from peers.process import Worker

from engine import LLM, SamplingParams

SHAPES = ("bart-base", "t5-small")
LOADED: dict[Worker, dict[str, Any]] = {}  # what CTranslate2 was last loaded with
INPUT = (16, 200)
ANSWER = 64
FORMATS = {
    "octavo": ("float32", "bfloat16"),
    "transformers": ("float32", "bfloat16"),
    "ctranslate2": ("float32", "int8"),
}


@dataclass(frozen=True)
class Job:
    """The work of each peer.

    Attributes:
        inputs: token ids, the end token last.
        answer: tokens of each answer.
    """

    inputs: list[list[int]]
    answer: int
    beams: int

    @property
    def tokens(self) -> int:
        """Tokens of all best answers."""
        return len(self.inputs) * self.answer


@dataclass
class Run:
    """One round: how long it took, and the best answers."""

    seconds: float
    tokens: list[list[int]]


@dataclass
class Contestant:
    """A peer in one number format, with its fastest setting.

    Attributes:
        settings: those that were tried, with the tokens per second that each had.
        rates: output tokens per second in each round.
    """

    peer: str
    dtype: str
    run: Callable[[Job], Run]
    settings: dict[str, float] = field(default_factory=dict)
    chosen: str = ""
    rates: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.peer} {self.dtype}"


# -------------------------------------------------------------------- Octavo


def octavo(folder: Path, dtype: str) -> dict[str, Callable[[Job], Run]]:
    """The defaults with T5-small's published length, with and without a limit on how long a step may take."""

    def load(limit: float | None) -> LLM:
        return LLM(
            str(folder),
            dtype=dtype,
            max_model_len=512,
            max_step_time=limit,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            show_progress=False,
        )

    def run(job: Job, llm: LLM) -> Run:
        params = SamplingParams(
            temperature=0.0, max_tokens=job.answer, min_tokens=job.answer, num_beams=job.beams, length_penalty=1.0
        )
        started = time.perf_counter()
        outputs = llm.generate(job.inputs, params, use_tqdm=False)
        return Run(time.perf_counter() - started, [list(output.outputs[0].token_ids) for output in outputs])

    engines = {"defaults": load(None), "max_step_time 0": load(0)}
    return {name: (lambda job, llm=llm: run(job, llm)) for name, llm in engines.items()}


# -------------------------------------------------------------------- transformers


def hugging_face(folder: Path, dtype: str, requests: int) -> dict[str, Callable[[Job], Run]]:
    """One padded batch of all requests, and smaller ones of requests of like length."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if torch.cuda.is_available():
        model = model.cuda()

    def batch(job: Job, part: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, part))
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(part):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                do_sample=False,
                num_beams=job.beams,
                length_penalty=1.0,
                min_new_tokens=job.answer,
                max_new_tokens=job.answer,
            )
        answers: list[list[int]] = output[:, 1:].tolist()  # without the decoder's start token
        return answers

    def run(job: Job, size: int) -> Run:
        order = sorted(range(len(job.inputs)), key=lambda i: -len(job.inputs[i]))
        answers: list[list[int]] = [[]] * len(order)
        started = time.perf_counter()
        for first in range(0, len(order), size):
            part = order[first : first + size]
            for place, tokens in zip(part, batch(job, [job.inputs[i] for i in part]), strict=True):
                answers[place] = tokens
        return Run(time.perf_counter() - started, answers)

    sizes = sorted({requests, *(size for size in (8, 16) if size < requests)})
    return {f"batches of {size}, sorted": (lambda job, size=size: run(job, size)) for size in sizes}


# -------------------------------------------------------------------- CTranslate2


def ctranslate2(
    worker: Worker, model: Path, dtype: str, requests: int, threads: int
) -> dict[str, Callable[[Job], Run]]:
    """All threads on one batch, or one batch a thread; batches of all requests or of fewer."""

    def run(job: Job, load: dict[str, Any]) -> Run:
        if LOADED.get(worker) != load:
            worker.ask(op="load", model=str(model), settings=load)
            LOADED[worker] = load
        answer = worker.ask(op="generate", prompts=job.inputs, new=[job.answer] * len(job.inputs), beams=job.beams)
        return Run(answer["seconds"], answer["tokens"])

    settings = ctranslate2_settings(dtype, requests, threads)
    return {name: (lambda job, load=load: run(job, load)) for name, load in settings.items()}


# -------------------------------------------------------------------- the run


def make_job(shape: str, requests: int, beams: int, answer: int, lengths: tuple[int, int]) -> Job:
    """Inputs, ending with the end token as those of trained models do."""
    rng = random.Random(requests)
    top = {"t5-small": 32000, "bart-base": 50000}[shape]
    inputs = [[rng.randrange(3, top) for _ in range(rng.randint(*lengths) - 1)] + [EOS] for _ in range(requests)]
    return Job(inputs, answer, beams)


def attempt(run: Callable[[Job], Run], job: Job) -> Run:
    """Run once, and check the answers' lengths."""
    result = run(job)
    if [len(tokens) for tokens in result.tokens] != [job.answer] * len(job.inputs):
        raise RuntimeError("an answer does not have the length that was asked for")
    time.sleep(0.3)  # threads that wait for more to do have gone to sleep when the next one's turn comes
    return result


def tune(contestant: Contestant, settings: dict[str, Callable[[Job], Run]], job: Job) -> None:
    """Take the fastest setting."""
    warm = Job(job.inputs[:2], 8, job.beams)
    for name, run in settings.items():
        attempt(run, warm)
        contestant.settings[name] = round(job.tokens / attempt(run, job).seconds, 1)
    contestant.chosen = max(contestant.settings, key=lambda name: contestant.settings[name])
    contestant.run = settings[contestant.chosen]
    print(f"{contestant.name}: {contestant.chosen}", flush=True)


def same_answers(one: Contestant, other: Contestant) -> dict[str, Any]:
    """How many answers are equal."""
    pairs = list(zip(one.tokens, other.tokens, strict=True))
    return {"equal": sum(a == b for a, b in pairs), "of": len(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="t5-small")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of each answer")
    parser.add_argument("--input", type=int, nargs=2, default=INPUT, help="fewest and most tokens of an input")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers-dir", type=Path, default=ROOT / ".peers", help="holds ctranslate2/ (default: .peers)")
    parser.add_argument("--only", nargs="+", choices=sorted(FORMATS), default=sorted(FORMATS))
    parser.add_argument(
        "--output",
        type=Path,
        nargs="?",
        const=Path(),
        help="keep the result as JSON; without a name in benchmarks/results/, named after shape, beams and requests",
    )
    options = parser.parse_args()
    job = make_job(options.shape, options.requests, options.beams, options.answer, tuple(options.input))
    threads = torch.get_num_threads()
    contestants: list[Contestant] = []
    worker, version = None, None
    with tempfile.TemporaryDirectory() as name:
        folder, converted = Path(name) / "hf", Path(name) / "ct2"
        make_encoder_decoder(folder, options.shape)
        peers = [peer for peer in FORMATS if peer in options.only]
        install = process.find("ctranslate2", options.peers_dir)
        if "ctranslate2" in peers and install is None:
            print("ctranslate2 is left out: it is not installed (see benchmarks/README.md)", flush=True)
            peers.remove("ctranslate2")
        if "ctranslate2" in peers:
            worker = process.start("ctranslate2", install, threads, Path(name))
            worker.ask(op="convert", model=str(folder), folder=str(converted))
            loading = next(iter(ctranslate2_settings("float32", options.requests, threads).values()))
            version = worker.ask(op="load", model=str(converted), settings=loading)["version"]
        try:
            for peer in peers:
                for dtype in FORMATS[peer]:
                    if peer == "octavo":
                        settings = octavo(folder, dtype)
                    elif peer == "transformers":
                        settings = hugging_face(folder, dtype, options.requests)
                    else:
                        assert worker is not None
                        settings = ctranslate2(worker, converted, dtype, options.requests, threads)
                    contestant = Contestant(peer, dtype, run=next(iter(settings.values())))
                    tune(contestant, settings, job)
                    contestants.append(contestant)
            for _ in range(options.rounds):
                for contestant in contestants:
                    if contestant.peer == "ctranslate2":
                        contestant.run(Job(job.inputs[:1], 1, job.beams))  # loads its format again
                    result = attempt(contestant.run, job)
                    contestant.rates.append(job.tokens / result.seconds)
                    contestant.tokens = result.tokens
        finally:
            if worker is not None:
                worker.close()
    result = report(contestants, options, job)
    result["machine"] = machine() | {"ctranslate2": version}
    if options.output is not None:
        default = f"encoder-decoder-{options.shape}-beams{options.beams}-x{options.requests}.json"
        output = options.output if options.output.name else ROOT / "benchmarks" / "results" / default
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written to {output}")


def report(contestants: list[Contestant], options: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Medians, ratios and agreement, printed and as JSON."""
    rows = []
    for one in contestants:
        rows.append(
            {
                "peer": one.peer,
                "dtype": one.dtype,
                "setting": one.chosen,
                "settings_tried": one.settings,
                "tokens_per_second": round(statistics.median(one.rates), 1),
                "rounds": [round(rate, 1) for rate in one.rates],
            }
        )
        print(f"{one.name:22s} {rows[-1]['tokens_per_second']:8} tok/s  ({one.chosen})")
    ours = [one for one in contestants if one.peer == "octavo"]
    ratios: dict[str, float] = {}
    for mine in ours:
        for other in contestants:
            if other.peer != "octavo":
                each = [a / b for a, b in zip(mine.rates, other.rates, strict=True)]
                ratios[f"{mine.name} / {other.name}"] = round(statistics.median(each), 2)
    exact = [one for one in contestants if one.dtype == "float32"]
    agreement = {f"{a.name}, {b.name}": same_answers(a, b) for i, a in enumerate(exact) for b in exact[i + 1 :]}
    for name, ratio in ratios.items():
        print(f"{name}: {ratio}")
    for name, found in agreement.items():
        print(f"equal answers of {name}: {found['equal']} of {found['of']}")
    return {
        "benchmark": "encoder_decoder",
        "shape": options.shape,
        "requests": options.requests,
        "beams": options.beams,
        "input_tokens": [min(map(len, job.inputs)), max(map(len, job.inputs))],
        "output_tokens": job.tokens,
        "results": rows,
        "ratios": ratios,
        "equal_answers": agreement,
    }


if __name__ == "__main__":
    main()
