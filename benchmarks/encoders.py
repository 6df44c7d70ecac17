"""Encoders: Octavo against ONNX Runtime, OpenVINO and sentence-transformers, in throughput, latency and memory.

Random weights in the shapes of all-MiniLM-L6, BERT-base, bge-m3 (XLM-RoBERTa large) and a cross-encoder (MiniLM-L6
with a score). Inputs are token ids in the lengths of a workload (see `embeddings.py`). Everybody runs in a process of
its own and takes turns. Octavo gets the inputs as they come; the others sort them by length and pad batches of 8, 32
or 64, whichever is the fastest. Vectors must agree with float32's.

ONNX Runtime has a graph that its optimiser fused, which is what optimum and fastembed run, in float32 and with its
dynamic int8. The ratios compare Octavo in float32 with the best float32, and its best format with anybody's best.

    python benchmarks/encoders.py --peers-dir PEERS --output
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from embeddings import BATCHES, SHAPES, WORKLOADS, make_inputs
from offline import ROOT, machine
from peers import process
from peers.memory import memory_of
from peers.turns import PAUSE

M3 = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
MODELS: dict[str, tuple[str, dict[str, int], str]] = {
    "minilm-l6": ("Bert", SHAPES["minilm-l6"], "mean"),
    "bert-base": ("Bert", SHAPES["bert-base"], "mean"),
    "bge-m3": ("XLMRoberta", M3 | {"vocab_size": 250002, "max_position_embeddings": 1026}, "mean"),
    "cross-encoder": ("Bert", SHAPES["minilm-l6"], "score"),
}
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.08, "int8": 0.25}
"""Largest difference from float32, as a share of the largest value. Dynamic int8 of whole tensors is the coarsest."""
DEFAULT = ROOT / "benchmarks" / "results" / "encoders.json"


@dataclass
class Contestant:
    """An engine in one format.

    Attributes:
        size: inputs of a batch; 0: the engine's own affair.
        rates: texts per second in each round.
        singles: median milliseconds of one text alone in each round.
    """

    name: str
    format: str
    worker: process.Worker
    settings: dict[str, Any]
    size: int = 0
    rates: list[float] = field(default_factory=list)
    singles: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)

    def run(self, inputs: list[list[int]]) -> dict[str, Any]:
        """Encode them."""
        return self.worker.ask(op="encode", inputs=inputs)


def make_checkpoint(folder: Path, name: str) -> str:
    """Save a random model; returns what its result is."""
    kind, shape, head = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape, num_labels=1)
    if head == "score":
        model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    else:
        model = getattr(transformers, f"{kind}Model")(config, add_pooling_layer=False)
    model.save_pretrained(folder)
    return head


def start_all(model: Path, head: str, install: process.Install | None, threads: int, logs: Path) -> list[Contestant]:
    """Everybody who can take part, not loaded yet."""
    plans: list[tuple[str, str, dict[str, Any]]] = [
        ("octavo-encoder", "float32", {"dtype": "float32"}),
        ("octavo-encoder", "bfloat16", {"dtype": "bfloat16"}),
        ("octavo-encoder", "int8", {"dtype": "bfloat16", "quantization": "int8", "quantization_cache": "off"}),
    ]
    if install is not None:
        plans += [
            ("onnxruntime", "float32", {"weights": "float32", "threads": threads}),
            ("onnxruntime", "int8", {"weights": "int8", "threads": threads}),
            ("openvino-encoder", "float32", {"precision": "f32", "threads": threads}),
            ("openvino-encoder", "bfloat16", {"precision": "bf16", "threads": threads}),
            ("sentence-transformers", "float32", {"dtype": "float32"}),
            ("sentence-transformers", "bfloat16", {"dtype": "bfloat16"}),
        ]
        converter = process.start("onnxruntime", install, threads, logs)
        print("converted:", converter.ask(op="convert", model=str(model), head=head), flush=True)
        converter.close()
    made = []
    for peer, format, settings in plans:
        worker = process.start(peer, None if peer.startswith("octavo") else install, threads, logs)
        name = f"{peer.removesuffix('-encoder')} {format}"
        made.append(Contestant(name, format, worker, settings))
    return made


def choose_size(one: Contestant, model: Path, head: str, inputs: list[list[int]]) -> None:
    """Load with the fastest batch."""
    if one.name.startswith("octavo"):
        one.worker.ask(op="load", model=str(model), head=head, settings=one.settings)
        one.run(inputs)
        return
    rates = {}
    for size in BATCHES:
        one.worker.ask(op="load", model=str(model), head=head, settings=one.settings | {"size": size})
        one.run(inputs[: len(inputs) // 4])  # the first run of anything is slower
        rates[size] = one.run(inputs)["seconds"]
    one.size = min(rates, key=lambda size: rates[size])
    one.worker.ask(op="load", model=str(model), head=head, settings=one.settings | {"size": one.size})
    one.run(inputs)


def compare(name: str, options: argparse.Namespace, install: process.Install | None) -> dict[str, Any]:
    """One model: rates, times, memory and ratios."""
    vocabulary = MODELS[name][1]["vocab_size"]
    count = options.inputs if name != "bge-m3" else max(options.inputs // 8, 4)
    inputs, source = make_inputs("texts", count, options.workloads, vocabulary)
    singles = random.Random(1).sample(inputs, min(options.singles, count))
    with tempfile.TemporaryDirectory() as folder:
        model, logs = Path(folder) / "model", Path(folder)
        head = make_checkpoint(model, name)
        everyone = start_all(model, head, install, options.threads, logs)
        try:
            for one in everyone:
                choose_size(one, model, head, inputs)
            truth = torch.tensor(everyone[0].run(inputs)["vectors"])
            for _ in range(options.rounds):
                for one in everyone:
                    time.sleep(PAUSE)
                    made = one.run(inputs)
                    one.rates.append(count / made["seconds"])
                    one.singles.append(statistics.median(one.run([text])["seconds"] for text in singles) * 1e3)
                    apart = float((torch.tensor(made["vectors"]) - truth).abs().max() / truth.abs().max())
                    if apart > TOLERANCE[one.format]:
                        raise SystemExit(f"{name}: vectors of {one.name} are {apart:.3g} of the largest value apart")
            for one in everyone:
                one.memory = memory_of([one.worker.process.pid])
        finally:
            for one in everyone:
                one.worker.close()
    return {"model": name, "lengths": source, "inputs": count, **report(name, everyone)}


def report(name: str, everyone: Sequence[Contestant]) -> dict[str, Any]:
    """Medians and ratios, printed and as JSON."""
    rows = []
    for one in everyone:
        rate, single = statistics.median(one.rates), statistics.median(one.singles)
        rows.append(
            {"name": one.name, "batch": one.size, "texts_per_second": round(rate, 2), "one_text_ms": round(single, 2)}
            | {"memory_mib": one.memory, "rounds": [round(each, 2) for each in one.rates]}
        )
        print(f"{name:14s} {one.name:32s} {rate:8.1f} texts/s {single:8.2f} ms  {one.memory}", flush=True)
    ratios: dict[str, float] = {}
    for label, formats in (("float32", {"float32"}), ("best", set(TOLERANCE))):
        ours = [one for one in everyone if one.name.startswith("octavo") and one.format in formats]
        theirs = [one for one in everyone if not one.name.startswith("octavo") and one.format in formats]
        if theirs:
            best = [max(statistics.median(one.rates) for one in group) for group in (ours, theirs)]
            soonest = [min(statistics.median(one.singles) for one in group) for group in (ours, theirs)]
            ratios |= {f"{label}, throughput": round(best[0] / best[1], 2)}
            ratios |= {f"{label}, one text": round(soonest[1] / soonest[0], 2)}
    print(f"{name:14s} {ratios}", flush=True)
    return {"results": rows, "ratios": ratios}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--inputs", type=int, default=128, help="of a turn (an eighth with bge-m3)")
    parser.add_argument("--singles", type=int, default=8, help="texts of a turn that come alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--workloads", type=Path, default=WORKLOADS, help="folder with the workloads")
    parser.add_argument("--peers-dir", type=Path, default=ROOT / ".peers", help="has the peers in encoders/")
    parser.add_argument("--output", type=Path, nargs="?", const=DEFAULT, help="keep the result as JSON")
    options = parser.parse_args(arguments)
    install = process.find("encoders", options.peers_dir, "onnxruntime")
    if install is None:
        print("only Octavo takes part: the peers are not installed (see benchmarks/README.md)", flush=True)
    models: list[dict[str, Any]] = []
    for name in options.models:
        models.append(compare(name, options, install))
        if options.output is not None:  # after each model: a run may be cut off
            result = {"benchmark": "encoders", "models": models, "machine": machine()}
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
