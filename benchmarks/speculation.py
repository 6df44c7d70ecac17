"""Speculative decoding on and off: the same requests to the same model in one run, in turns.

Each kind of work is a few chat requests, answered greedily, one at a time and several at once. Both engines are loaded
side by side and take turns. Answers must be equal, token for token. The result is the ratio of the seconds.

    python benchmarks/speculation.py --model SmolLM2-135M-Instruct.Q4_1.gguf --output
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offline import machine

from octavo import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent
DEFAULT = ROOT / "results" / "speculation.json"

CODE = '''class ShoppingCart:
    """A cart with items and their quantities."""

    def __init__(self, owner):
        self.owner = owner
        self.items = {}

    def add_item(self, name, price, quantity=1):
        if name in self.items:
            self.items[name]["quantity"] += quantity
        else:
            self.items[name] = {"price": price, "quantity": quantity}

    def remove_item(self, name):
        if name not in self.items:
            raise KeyError(f"{name} is not in the cart of {self.owner}")
        del self.items[name]

    def total(self):
        return sum(item["price"] * item["quantity"] for item in self.items.values())

    def describe(self):
        lines = [f"Cart of {self.owner}"]
        for name, item in self.items.items():
            lines.append(f"{item['quantity']} x {name} at {item['price']}")
        lines.append(f"Total: {self.total()}")
        return "\\n".join(lines)
'''
ARTICLE = (
    "The Antikythera mechanism is an ancient Greek hand-powered orrery. It is the oldest known example of an analogue "
    "computer. It could be used to predict astronomical positions and eclipses decades in advance. It could also be "
    "used to track the four-year cycle of athletic games similar to an Olympiad. The artefact was among wreckage "
    "retrieved from a shipwreck off the coast of the Greek island Antikythera in 1901. The device, housed in the "
    "remains of a wooden-framed case, was found as one lump, later separated into three main fragments."
)
PEOPLE = "\n".join(
    f"{name}, {age} years old, lives in {city} and works as a {job}"
    for name, age, city, job in (
        ("Ada Byron", 36, "London", "mathematician"),
        ("Alan Kay", 41, "Springfield", "designer"),
        ("Grace Murray", 52, "New York", "admiral"),
        ("Edgar Codd", 47, "Portland", "chemist"),
        ("Barbara Huberman", 39, "Los Angeles", "teacher"),
    )
)
WORK: dict[str, tuple[str, ...]] = {
    "code edit": (
        f"Rename the method add_item to insert in this file. Answer with the whole file.\n\n```python\n{CODE}```",
        f"Rename the class ShoppingCart to Basket in this file. Answer with the whole file.\n\n```python\n{CODE}```",
    ),
    "quotation": (f"Repeat this text word by word, then name its three most important sentences.\n\n{ARTICLE}",),
    "json": (
        "Turn each line into a JSON object with the keys name, age, city and job. Answer with a JSON list.\n\n"
        + PEOPLE,
    ),
    "free chat": (
        "Tell me a story about a lighthouse keeper who finds a strange map.",
        "Explain how a refrigerator works to a ten-year-old.",
    ),
}


def run(llm: LLM, prompts: Sequence[str], tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds of decoding and answers of requests that come together."""
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    conversations: list[Any] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    began = time.perf_counter()
    answers = llm.chat(conversations, sampling, use_tqdm=False)
    return time.perf_counter() - began, [list(answer.outputs[0].token_ids) for answer in answers]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a chat model: a folder or a GGUF file")
    parser.add_argument("--config", default='{"method": "ngram"}', help="speculative_config of the one engine")
    parser.add_argument("--chat-template", help="for models without one")
    parser.add_argument("--work", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=256, help="the most of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, nargs="?", const=DEFAULT, help="keep the result as JSON")
    options = parser.parse_args(arguments)
    engines = {
        name: LLM(
            options.model,
            speculative_config=config,
            chat_template=options.chat_template,
            max_model_len=4096,
            kv_cache_memory="512MiB",
        )
        for name, config in (("off", None), ("on", options.config))
    }
    rows = []
    for kind in options.work:
        for count in options.concurrency:
            prompts = [WORK[kind][number % len(WORK[kind])] for number in range(count)]
            groups = [prompts] if count > 1 else [[prompt] for prompt in WORK[kind]]
            seconds: dict[str, list[float]] = {"off": [], "on": []}
            told: dict[str, Any] = {}
            for turn in range(options.rounds + 1):
                for name, llm in engines.items():
                    took = 0.0
                    told[name] = []
                    for group in groups:
                        one, answers = run(llm, group, options.tokens)
                        took += one
                        told[name] += answers
                    if turn:  # the first one computes the prompts, which later turns find in the cache
                        seconds[name].append(took)
            if told["on"] != told["off"]:
                raise SystemExit(f"{kind}: answers differ with drafts and without")
            stats = engines["on"].engine.stats()
            ratio = statistics.median(seconds["off"]) / statistics.median(seconds["on"])
            tokens = sum(map(len, told["on"]))
            row = {"work": kind, "requests": count, "ratio": round(ratio, 3), "tokens": tokens} | {
                f"{name}_tokens_per_second": round(tokens / statistics.median(taken), 1)
                for name, taken in seconds.items()
            }
            rows.append(row | {"rounds": {name: [round(one, 3) for one in taken] for name, taken in seconds.items()}})
            print(
                row, f"drafted {stats.num_draft_tokens}, accepted {stats.num_accepted_draft_tokens} so far", flush=True
            )
    if options.output is not None:
        result = {"benchmark": "speculation", "model": Path(options.model).name, "config": options.config, "rows": rows}
        options.output.write_text(json.dumps(result | {"machine": machine()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
