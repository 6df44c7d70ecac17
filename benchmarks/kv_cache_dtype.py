"""The capacity, accuracy and speed of each format of the KV cache.

    tokens      how many tokens the pool holds in a given memory, by the shape of a head
    agreement   teacher-forced on stories that the trained model told itself in float32: at how many positions the most
                likely token is float32's, and how far the log-probabilities of the stories' tokens are from float32's
    speed       decode steps of a batch with a long context on a random 135M-parameter LLaMA shape; rounds alternate
                between the formats, and the ratio to the model's own format is taken round by round

Weights and activations have the same format throughout: float32 for agreement, `--dtype` for speed.

    python benchmarks/kv_cache_dtype.py --requests 8 --context 1536
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from offline import ROOT, SHAPE, machine, make_checkpoint

from engine import LLM, Engine, EngineConfig, SamplingParams
from engine.backends.attention.formats import PageShape, format_named
from engine.config import parse_bytes
from engine.execution.kv_cache import page_bytes

TRAINED = ROOT.parent / "shared" / "data" / "stories260k" / "hf"
FORMATS = ("float32", "bfloat16", "float16", "int8", "fp8")
# (layers, kv_heads, head_dim) of what is measured here, and of models that people serve.
SHAPES = {
    "stories260k": (5, 4, 8),
    "random 135M (SmolLM2-135M)": (30, 3, 64),
    "Llama 3.2 1B": (16, 8, 64),
    "Llama 3.1 8B": (32, 8, 128),
}
BLOCK = 16
STARTS = (
    "Once upon a time", "One day", "Tim had a", "Lily was", "The dog", "There was a big", "Mom said", "In the park",
    "A little bird", "Ben and Sam", "The sun was", "Sara liked", "Once there was", "The cat", "Tom saw", "Anna went",
)  # fmt: skip


def count_tokens(memory: int) -> list[dict[str, Any]]:
    """Tokens by shape and format."""
    rows = []
    for name, (layers, heads, dim) in SHAPES.items():
        sizes = {kind: page_bytes([PageShape(heads, dim)] * layers, BLOCK, format_named(kind)) for kind in FORMATS}
        rows.append(
            {
                "shape": name,
                "head_dim": dim,
                "bytes_per_token": {kind: size // BLOCK for kind, size in sizes.items()},
                "tokens": {kind: (memory // size - 1) * BLOCK for kind, size in sizes.items()},
                "int8_to_16_bits": round(sizes["bfloat16"] / sizes["int8"], 3),
            }
        )
    return rows


def open_trained(kind: str, model: Path = TRAINED) -> LLM:
    return LLM(str(model), device="cpu", dtype="float32", kv_cache_dtype=kind, show_progress=False)  # type: ignore[arg-type]


def tell_stories(count: int, length: int, model: Path = TRAINED, first: int = 1) -> dict[str, list[list[int]]]:
    """The float32 model's own stories: greedy from different beginnings, and drawn at temperature 1 after the first
    token."""
    llm = open_trained("float32", model)
    greedy = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    drawn = [SamplingParams(temperature=1.0, seed=i, max_tokens=length, ignore_eos=True) for i in range(count)]
    starts = [STARTS[i % len(STARTS)] for i in range(min(count, len(STARTS)))]
    told = {
        "greedy": llm.generate(starts, greedy, use_tqdm=False),
        "temperature 1": llm.generate([[first]] * count, drawn, use_tqdm=False),
    }
    llm.close()
    return {
        name: [[*(output.prompt_token_ids or ()), *output.outputs[0].token_ids] for output in outputs]
        for name, outputs in told.items()
    }


def score(llm: LLM, texts: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """The most likely token at each position of the texts but the first, and the text's token's log-probability."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    found = []
    for output in llm.generate([list(text) for text in texts], params, use_tqdm=False):
        for entry in (output.prompt_logprobs or [])[1:]:
            assert entry is not None
            best = next(token for token, scored in entry.items() if scored.rank == 1)
            found.append((best, next(iter(entry.values())).logprob))
    return found


def compare(count: int, length: int) -> list[dict[str, Any]]:
    """Agreement of each format with float32."""
    stories = tell_stories(count, length)
    scores: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for kind in FORMATS:
        llm = open_trained(kind)
        scores[kind] = {name: score(llm, texts) for name, texts in stories.items()}
        llm.close()
    rows = []
    for name in stories:
        for kind in FORMATS:
            rows.append({"text": name, "format": kind} | agreement(scores[kind][name], scores["float32"][name]))
            print(told(rows[-1]), flush=True)
    return rows


def agreement(ours: Sequence[tuple[int, float]], exact: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """How scores of one text differ from float32's."""
    pairs = list(zip(ours, exact, strict=True))
    apart = [abs(mine[1] - theirs[1]) for mine, theirs in pairs]
    return {
        "positions": len(pairs),
        "top1_agreement": round(statistics.fmean(mine[0] == theirs[0] for mine, theirs in pairs), 5),
        "mean_logprob_difference": round(statistics.fmean(apart), 5),
        "max_logprob_difference": round(max(apart), 5),
    }


def told(row: dict[str, Any]) -> str:
    """A row of agreement as a line."""
    return (
        f"{row['text']:14s} {row['format']:8s} {row['top1_agreement']:.2%} of {row['positions']}, log-probabilities "
        f"differ by {row['mean_logprob_difference']} in the mean and {row['max_logprob_difference']} at most"
    )


class Decoder:
    """An engine whose requests have computed their prompts and decode on.

    Args:
        settings: of `EngineConfig`: formats.
        steps: that it can be run.
    """

    def __init__(self, folder: str, settings: Mapping[str, Any], requests: int, context: int, steps: int):
        blocks = requests * -(-(context + steps) // BLOCK)
        self.engine = Engine(
            EngineConfig(
                model=folder,
                num_gpu_blocks_override=blocks,
                enable_prefix_caching=False,
                max_step_time=0,
                show_progress=False,
                **settings,
            )
        )
        rng = random.Random(0)
        for number in range(requests):
            prompt = [rng.randrange(SHAPE["vocab_size"]) for _ in range(context)]
            params = SamplingParams(temperature=0.0, max_tokens=steps, num_beams=1, ignore_eos=True)
            self.engine.add_request(str(number), prompt, params)
        while self.engine.stats().prompt_tokens < requests * context:
            self.engine.step_deltas()
        self.requests = requests

    def run(self, steps: int) -> float:
        """Tokens per second over so many steps."""
        before = self.engine.stats().generation_tokens
        started = time.perf_counter()
        for _ in range(steps):
            self.engine.step_deltas()
        seconds = time.perf_counter() - started
        made = self.engine.stats().generation_tokens - before
        if made != steps * self.requests:
            raise RuntimeError(f"{steps} steps of {self.requests} requests made {made} tokens")
        return made / seconds


def decode_in_turns(decoders: Mapping[str, Decoder], base: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Decode speed of several engines, in rounds that alternate, and its ratio to one of theirs, round by round."""
    speeds: dict[str, list[float]] = {kind: [] for kind in decoders}
    for decoder in decoders.values():
        decoder.run(2)
    for _ in range(rounds):
        for kind, decoder in decoders.items():
            speeds[kind].append(decoder.run(steps))
    results = []
    for kind, found in speeds.items():
        ratio = round(statistics.median(a / b for a, b in zip(found, speeds[base], strict=True)), 3)
        results.append(
            {
                "format": kind,
                "tokens_per_second": round(statistics.median(found), 1),
                "ratio": ratio,
                "rounds": [round(speed, 1) for speed in found],
            }
        )
        print(f"{kind:9s} {results[-1]['tokens_per_second']} tok/s, {ratio} of {base}", flush=True)
    return results


def measure_speed(options: argparse.Namespace) -> dict[str, Any]:
    """Decode speed by format."""
    # A step or two beyond what is timed: prompts end at different steps, and each engine warms up.
    steps = options.rounds * options.steps + 64
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), getattr(torch, options.dtype))
        decoders = {
            kind: Decoder(
                folder, {"dtype": options.dtype, "kv_cache_dtype": kind}, options.requests, options.context, steps
            )
            for kind in dict.fromkeys((options.dtype, *options.formats))
        }
        results = decode_in_turns(decoders, options.dtype, options.rounds, options.steps)
        device = decoders[options.dtype].engine.info.device
        for decoder in decoders.values():
            decoder.engine.close()
    return {
        "dtype": options.dtype,
        "device": device,
        "requests": options.requests,
        "context": options.context,
        "steps": options.steps,
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="1GiB", help="for the count of tokens")
    parser.add_argument("--stories", type=int, default=16, help="of each kind")
    parser.add_argument("--length", type=int, default=255, help="tokens of a story")
    parser.add_argument("--dtype", choices=FORMATS[:3], default="bfloat16", help="the model's own, for speed")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="whose speed is measured")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--context", type=int, default=1536, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=32, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-speed", action="store_true", help="leave the timing out: a busy machine spoils it")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "kv-cache-dtype.json")
    options = parser.parse_args()
    room = SHAPE["max_position_embeddings"] - options.rounds * options.steps - 64
    if options.context > room:
        parser.error(f"--context is {options.context}; with these rounds and steps it can be {room} at most")
    memory = parse_bytes(options.memory, "--memory")
    result: dict[str, Any] = {
        "benchmark": "kv_cache_dtype",
        "machine": machine(),
        "memory": memory,
        "tokens": count_tokens(memory),
        "agreement": None,
        "speed": None,
    }
    for row in result["tokens"]:
        print(f"{row['shape']}: {row['tokens']} tokens; int8 holds {row['int8_to_16_bits']} times what 16 bits hold")
    if TRAINED.is_dir():
        result["agreement"] = compare(options.stories, options.length)
    else:
        print(f"no trained model at {TRAINED}: agreement is left out")
    if not options.no_speed:
        result["speed"] = measure_speed(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
