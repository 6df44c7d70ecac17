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

    python benchmarks/encoder_decoder.py --peers .peers
    python benchmarks/encoder_decoder.py --shape bart-base --requests 1 --beams 1 --peers .peers
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from offline import ROOT, machine
from tokenizers import Tokenizer, models

from engine import LLM, SamplingParams

WORKER = Path(__file__).with_name("ctranslate2_worker.py")
INPUT = (16, 200)
ANSWER = 64
FORMATS = {
    "octavo": ("float32", "bfloat16"),
    "transformers": ("float32", "bfloat16"),
    "ctranslate2": ("float32", "int8"),
}
EOS = 1


def make_t5() -> Any:
    """T5-small: 6 + 6 layers, hidden 512, 8 heads, FFN 2048, vocabulary 32128, tied."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(decoder_start_token_id=0, pad_token_id=0, eos_token_id=EOS)
    )


def make_bart() -> Any:
    """BART-base: 6 + 6 layers, hidden 768, 12 heads, FFN 3072, vocabulary 50265, tied."""
    config = transformers.BartConfig(
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        vocab_size=50265,
        bos_token_id=2,
        pad_token_id=0,
        eos_token_id=EOS,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        normalize_before=False,  # CTranslate2's converter asks for it, as the published file has it
        normalize_embedding=True,
    )
    return transformers.BartForConditionalGeneration(config)


SHAPES: dict[str, Callable[[], Any]] = {"t5-small": make_t5, "bart-base": make_bart}


@dataclass(frozen=True)
class Job:
    """What each peer is to do.

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


class Worker:
    """CTranslate2 in another process.

    Args:
        python_path: where the package is, if this interpreter does not find it by itself.
    """

    def __init__(self, python_path: Path | None):
        self.environment = dict(os.environ)
        if python_path is not None:
            paths = [str(python_path.resolve()), self.environment.get("PYTHONPATH", "")]
            self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.process: subprocess.Popen[str] | None = None
        self.loaded: dict[str, Any] = {}  # keywords

    def convert(self, checkpoint: Path, folder: Path) -> None:
        """Convert the checkpoint; nothing is loaded from anywhere else."""
        command = [sys.executable, str(WORKER), "convert", str(checkpoint), str(folder)]
        environment = self.environment | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"CTranslate2 could not convert the checkpoint:\n{done.stderr}")

    def start(self, folder: Path) -> None:
        command = [sys.executable, str(WORKER), "serve", str(folder)]
        self.process = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send one line, and wait for its answer."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("CTranslate2's process has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(timeout=60)


def has_ctranslate2(python_path: Path | None) -> bool:
    """The package can be imported."""
    if python_path is not None:
        return (python_path / "ctranslate2").is_dir()
    return importlib.util.find_spec("ctranslate2") is not None


def ctranslate2(worker: Worker, dtype: str, requests: int, threads: int) -> dict[str, Callable[[Job], Run]]:
    """All threads on one batch, or one batch a thread; batches of all requests or of fewer."""
    settings: dict[str, Callable[[Job], Run]] = {}

    def run(job: Job, load: dict[str, Any], size: int) -> Run:
        if worker.loaded != load:
            worker.ask({"load": load})
            worker.loaded = load
        options = {
            "beam_size": job.beams,
            "length_penalty": 1.0,
            "max_batch_size": size,
            "min_decoding_length": job.answer,
            "max_decoding_length": job.answer,
        }
        answer = worker.ask(
            {"inputs": [[word(token) for token in tokens] for tokens in job.inputs], "options": options}
        )
        return Run(answer["seconds"], [[number(word) for word in tokens] for tokens in answer["tokens"]])

    for inter in sorted({1, threads}):
        load = {"compute_type": dtype, "inter_threads": inter, "intra_threads": threads // inter}
        for size in sorted({requests, *(size for size in (4, 8, 16) if size < requests)}):
            name = f"batches of {size}, {inter} at a time on {threads // inter} threads each"
            settings[name] = lambda job, load=load, size=size: run(job, load, size)
    return settings


def word(token: int) -> str:
    """A token id as a token of the checkpoint's vocabulary."""
    return {0: "<pad>", EOS: "</s>", 2: "<unk>"}.get(token, f"w{token}")


def number(word: str) -> int:
    """The id of a token."""
    special = {"<pad>": 0, "</s>": EOS, "<unk>": 2}
    return special[word] if word in special else int(word[1:])


# -------------------------------------------------------------------- the run


def make_checkpoint(folder: Path, shape: str) -> None:
    """Save the random model, and a tokenizer whose tokens are numbers (CTranslate2 takes no ids)."""
    torch.manual_seed(0)
    model = SHAPES[shape]()
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)
    vocabulary = {word(token): token for token in range(model.config.vocab_size)}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        pad_token="<pad>",
        bos_token="<unk>",
        eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(folder)


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
    parser.add_argument("--shape", choices=sorted(SHAPES), default="t5-small")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of each answer")
    parser.add_argument("--input", type=int, nargs=2, default=INPUT, help="fewest and most tokens of an input")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, help="folder that CTranslate2 was installed into (pip install --target)")
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
    worker = Worker(options.peers)
    version = None
    with tempfile.TemporaryDirectory() as name:
        folder, converted = Path(name) / "hf", Path(name) / "ct2"
        make_checkpoint(folder, options.shape)
        peers = [peer for peer in FORMATS if peer in options.only]
        if "ctranslate2" in peers and not has_ctranslate2(options.peers):
            print("ctranslate2 is left out: it is not installed (see benchmarks/README.md, and --peers)", flush=True)
            peers.remove("ctranslate2")
        if "ctranslate2" in peers:
            worker.convert(folder, converted)
            worker.start(converted)
            version = worker.ask({"load": {}})["version"]
        try:
            for peer in peers:
                for dtype in FORMATS[peer]:
                    if peer == "octavo":
                        settings = octavo(folder, dtype)
                    elif peer == "transformers":
                        settings = hugging_face(folder, dtype, options.requests)
                    else:
                        settings = ctranslate2(worker, dtype, options.requests, threads)
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
