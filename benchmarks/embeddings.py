"""Throughput of embeddings: the engine against `transformers` with padding, on one random checkpoint in one run.

The model has the shape of all-MiniLM-L6 or of BERT-base; a vector is the mean over an input's tokens. Inputs have the
lengths of a workload: the texts of MT-bench and Vicuna, questions and answers (`texts`), or the prompts of the Azure
LLM inference trace, cut at the model's 512 tokens (`prompts`). Where the workloads' folder is not there, lengths are
drawn from a log-normal distribution of like mean and spread, and the result says so. Token ids are random.

`transformers` pads batches of 8, 32 and 64 inputs, in the order in which they come and sorted by length, which is its
best case (and needs all inputs beforehand). The engine gets all inputs in the order in which they come, with its
default settings, and with no limit on how long a step may take. Rounds alternate between all of them, and ratios are
taken round by round, to the best batch size of each order. Vectors of both must agree.

    python benchmarks/embeddings.py --output
    python benchmarks/embeddings.py --shape bert-base --inputs 64 --dtypes bfloat16
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from offline import ROOT, machine

from engine import Engine, EngineConfig, PoolingParams

WORKLOADS = ROOT.parent / "shared" / "data" / "workloads"
LONGEST = 512
BATCHES = (8, 32, 64)
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # of the largest value
SHAPES: dict[str, dict[str, int]] = {
    "minilm-l6": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
        "vocab_size": 30522,
    },
    "bert-base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
    },
}

Vectors = list[np.ndarray]


@dataclass
class Contestant:
    """One way to compute the vectors.

    Attributes:
        rates: inputs per second in each round.
    """

    name: str
    run: Callable[[list[list[int]]], Vectors]
    rates: list[float] = field(default_factory=list)
    vectors: Vectors = field(default_factory=list)


# -------------------------------------------------------------------- lengths


def text_lengths(folder: Path) -> list[int]:
    """Words and signs of each text, as BERT splits them first, and its two special tokens."""
    texts: list[str] = []
    for file in ("question.jsonl", "vicuna_question.jsonl", "gpt4_reference.jsonl"):
        for line in (folder / "mt_bench" / file).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            texts += entry.get("turns") or [turn for choice in entry["choices"] for turn in choice["turns"]]
    return [len(re.findall(r"\w+|[^\w\s]", text)) + 2 for text in texts]


def prompt_lengths(folder: Path) -> list[int]:
    """Prompts of conversations, in tokens."""
    with (folder / "azure_llm_2023" / "AzureLLMInferenceTrace_conv.csv").open(encoding="utf-8") as file:
        return [int(row["ContextTokens"]) for row in csv.DictReader(file)]


WORKLOAD_LENGTHS: dict[str, Callable[[Path], list[int]]] = {"texts": text_lengths, "prompts": prompt_lengths}
# Mean and deviation of the logarithm of those lengths.
LIKE = {"texts": (3.9, 1.2), "prompts": (6.2, 1.2)}


def make_inputs(workload: str, count: int, folder: Path, vocab_size: int) -> tuple[list[list[int]], str]:
    """Inputs with lengths of a workload, in random order, and where the lengths are from."""
    rng = random.Random(count)
    try:
        known = WORKLOAD_LENGTHS[workload](folder)
        lengths, source = rng.choices(known, k=count), workload
    except FileNotFoundError:
        print(f"{folder} is not there: lengths are drawn from a log-normal distribution", flush=True)
        lengths = [round(rng.lognormvariate(*LIKE[workload])) for _ in range(count)]
        source = f"log-normal, like {workload}"
    lengths = [min(max(length, 3), LONGEST) for length in lengths]
    return [[rng.randrange(1, vocab_size) for _ in range(length)] for length in lengths], source


# -------------------------------------------------------------------- contestants


def octavo(folder: Path, dtype: str, limit: float | None) -> Callable[[list[list[int]]], Vectors]:
    """The engine, stepped until all inputs are done."""
    engine = Engine(EngineConfig(model=str(folder), dtype=dtype, max_step_time=limit, show_progress=False))  # type: ignore[arg-type]
    params = PoolingParams(pooling="mean", normalize=False)

    def run(inputs: list[list[int]]) -> Vectors:
        for number, tokens in enumerate(inputs):
            engine.add_request(str(number), tokens, params)
        found: dict[int, np.ndarray] = {}
        while engine.has_unfinished_requests():
            for delta in engine.step_deltas():
                assert delta.pooled is not None
                found[int(delta.request_id)] = delta.pooled.values()[0]
        return [found[number] for number in range(len(inputs))]

    return run


def hugging_face(model: Any, size: int, *, by_length: bool) -> Callable[[list[list[int]]], Vectors]:
    """Padded batches, masked, and the mean over what is not padding."""

    def batch(part: list[list[int]]) -> Any:
        longest = max(map(len, part))
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(part):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        weights = mask[:, :, None].float()
        return ((hidden * weights).sum(1) / weights.sum(1)).cpu().numpy()

    @torch.inference_mode()
    def run(inputs: list[list[int]]) -> Vectors:
        order = sorted(range(len(inputs)), key=lambda i: -len(inputs[i])) if by_length else list(range(len(inputs)))
        found: dict[int, np.ndarray] = {}
        for first in range(0, len(order), size):
            part = order[first : first + size]
            found.update(zip(part, batch([inputs[i] for i in part]), strict=True))
        return [found[number] for number in range(len(inputs))]

    return run


def make_checkpoint(folder: Path, shape: str) -> None:
    """Save the random model."""
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SHAPES[shape]), add_pooling_layer=False).save_pretrained(folder)


# -------------------------------------------------------------------- one format


def compare(folder: Path, dtype: str, inputs: list[list[int]], rounds: int) -> dict[str, Any]:
    """All contestants in one format: rates, ratios and agreement."""
    model = transformers.BertModel.from_pretrained(folder, dtype=getattr(torch, dtype), add_pooling_layer=False).eval()
    if torch.cuda.is_available():
        model = model.cuda()
    ours = [
        Contestant("octavo", octavo(folder, dtype, None)),
        Contestant("octavo, max_step_time 0", octavo(folder, dtype, 0)),
    ]
    orders = {"as they come": False, "sorted": True}
    theirs = {
        order: [
            Contestant(f"transformers, {order}, batches of {size}", hugging_face(model, size, by_length=by_length))
            for size in BATCHES
        ]
        for order, by_length in orders.items()
    }
    everyone = [*ours, *(one for group in theirs.values() for one in group)]
    for one in everyone:
        one.run(inputs[: max(len(inputs) // 8, 1)])  # nobody pays for a first time
    for _ in range(rounds):
        for one in everyone:
            started = time.perf_counter()
            one.vectors = one.run(inputs)
            one.rates.append(len(inputs) / (time.perf_counter() - started))
    truth = theirs["as they come"][0].vectors
    largest = max(float(np.abs(vector).max()) for vector in truth)
    apart = {
        one.name: max(float(np.abs(a - b).max()) for a, b in zip(one.vectors, truth, strict=True)) / largest
        for one in everyone
    }
    if max(apart.values()) > TOLERANCE[dtype]:
        raise SystemExit(f"the vectors do not agree: {apart}")
    return report(dtype, inputs, ours, theirs, apart)


def report(
    dtype: str,
    inputs: list[list[int]],
    ours: list[Contestant],
    theirs: dict[str, list[Contestant]],
    apart: dict[str, float],
) -> dict[str, Any]:
    """Medians and ratios, printed and as JSON."""
    tokens = sum(map(len, inputs)) / len(inputs)
    rows = []
    for one in [*ours, *(one for group in theirs.values() for one in group)]:
        rate = statistics.median(one.rates)
        rows.append(
            {
                "name": one.name,
                "inputs_per_second": round(rate, 2),
                "tokens_per_second": round(rate * tokens, 1),
                "rounds": [round(each, 2) for each in one.rates],
                "largest_difference": float(f"{apart[one.name]:.2g}"),
            }
        )
        print(f"{dtype:8s} {one.name:44s} {rate:9.1f} inputs/s {rate * tokens:10.0f} tokens/s", flush=True)
    ratios: dict[str, float] = {}
    for mine in ours:
        for group in theirs.values():
            best = max(group, key=lambda one: statistics.median(one.rates))
            each = [a / b for a, b in zip(mine.rates, best.rates, strict=True)]
            ratios[f"{mine.name} / {best.name}"] = round(statistics.median(each), 2)
    for name, ratio in ratios.items():
        print(f"{dtype:8s} {name}: {ratio}", flush=True)
    return {"dtype": dtype, "results": rows, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="minilm-l6")
    parser.add_argument("--workload", choices=sorted(WORKLOAD_LENGTHS), default="texts")
    parser.add_argument("--workloads", type=Path, default=WORKLOADS, help="folder with the workloads")
    parser.add_argument("--inputs", type=int, default=256)
    parser.add_argument("--dtypes", nargs="+", choices=sorted(TOLERANCE), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--output",
        type=Path,
        nargs="?",
        const=Path(),
        help="keep the result as JSON; without a name in benchmarks/results/, named after shape and workload",
    )
    options = parser.parse_args()
    inputs, source = make_inputs(
        options.workload, options.inputs, options.workloads, SHAPES[options.shape]["vocab_size"]
    )
    lengths = sorted(map(len, inputs))
    spread = {"least": lengths[0], "median": lengths[len(lengths) // 2], "most": lengths[-1], "all": sum(lengths)}
    print(f"{options.shape}: {len(inputs)} inputs, lengths of {source}: {spread}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name), options.shape)
        formats = [compare(Path(name), dtype, inputs, options.rounds) for dtype in options.dtypes]
    result = {
        "benchmark": "embeddings",
        "shape": options.shape,
        "lengths": source,
        "inputs": len(inputs),
        "tokens": spread,
        "formats": formats,
        "machine": machine(),
    }
    if options.output is not None:
        default = f"embeddings-{options.shape}-{options.workload}.json"
        output = options.output if options.output.name else ROOT / "benchmarks" / "results" / default
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written to {output}")


if __name__ == "__main__":
    main()
