"""Speculative decoding on and off: the same requests to the same model in one run, in turns.

Each kind of work is a few chat requests, answered greedily, one at a time and several at once. All engines are loaded
side by side and take turns. Answers with drafts and without must be equal, token for token. The result is the ratio of
the seconds, and the tokens per second of each engine. llama-server may be one, with its kinds of n-gram speculation.

    python benchmarks/speculation.py --model SmolLM2-135M-Instruct.Q4_1.gguf --output --llama-server bin/llama-server
    python benchmarks/speculation.py --model random-1.5b.gguf --output --work "wrong drafts" --concurrency 1 4 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from offline import machine

from octavo import LLM, SamplingParams, TokenInput

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


WRONG = "wrong drafts"  # drawn from a few tokens, with a prediction that is never right
FEW_TOKENS = range(1000, 1006)

Answer = tuple[float, list[list[int]]]  # seconds of decoding, tokens of each answer


class Ours:
    """A model in this process.

    Args:
        config: its speculative_config.
    """

    def __init__(self, options: argparse.Namespace, config: str | None):
        self.llm = LLM(
            options.model,
            speculative_config=config,
            chat_template=options.chat_template,
            max_model_len=options.max_model_len,
            kv_cache_memory="512MiB",
        )

    def run(self, prompts: Sequence[str], tokens: int) -> Answer:
        """Answer requests that come together."""
        sampling = SamplingParams(temperature=0, max_tokens=tokens)
        conversations: list[Any] = [[{"role": "user", "content": prompt}] for prompt in prompts]
        began = time.perf_counter()
        answers = self.llm.chat(conversations, sampling, use_tqdm=False)
        return time.perf_counter() - began, [list(answer.outputs[0].token_ids) for answer in answers]

    def run_wrong(self, count: int, tokens: int, drafts: bool) -> Answer:
        """Answer requests whose drafts are never right: the answers have six tokens, the prediction has others."""
        shared = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
        wrong = [2000 + number % 50 for number in range(tokens)] if drafts else None
        sampling = [
            SamplingParams(seed=n, logit_bias=dict.fromkeys(FEW_TOKENS, 100.0), predicted_token_ids=wrong, **shared)
            for n in range(count)
        ]
        prompts = [[FEW_TOKENS[(place * place + n) % 6] for place in range(300)] for n in range(count)]
        began = time.perf_counter()
        answers = self.llm.generate([TokenInput(prompt) for prompt in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - began, [list(answer.outputs[0].token_ids) for answer in answers]


class LlamaServer:
    """llama-server with one kind of speculation. For one request its own time of decoding counts, without HTTP.

    Args:
        program: llama-server.
        spec: its --spec-type.
    """

    def __init__(self, program: Path, options: argparse.Namespace, spec: str, port: int):
        slots = max(options.concurrency)
        command = [program, "-m", options.model, "--port", port, "-np", slots, "-c", 4096 * slots, "--spec-type", spec]
        template = ["--chat-template", options.chat_template] if options.chat_template else []
        if options.threads:
            template += ["-t", str(options.threads)]
        self._port = port
        self._process = subprocess.Popen(
            [*map(str, command), *template], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(600):
            try:
                self._ask("/health", None)
                return
            except OSError:
                time.sleep(0.1)
        raise SystemExit("llama-server does not start")

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def run(self, prompts: Sequence[str], tokens: int) -> Answer:
        """Answer requests that come together. Only the number of tokens is known."""

        def chat(prompt: str) -> Any:
            message = {"role": "user", "content": prompt}
            body = {"messages": [message], "temperature": 0, "max_tokens": tokens, "cache_prompt": True}
            return self._ask("/v1/chat/completions", body)["timings"]

        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            timings = list(pool.map(chat, prompts))
        took = time.perf_counter() - began if len(prompts) > 1 else timings[0]["predicted_ms"] / 1000
        return took, [[0] * timing["predicted_n"] for timing in timings]

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait(30)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a chat model: a folder or a GGUF file")
    parser.add_argument("--config", default='{"method": "ngram"}', help="speculative_config of the one engine")
    parser.add_argument("--chat-template", help="for models without one")
    parser.add_argument("--work", nargs="+", choices=[*WORK, WRONG], default=list(WORK))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--max-model-len", type=int, default=4096, help="of both engines")
    parser.add_argument("--tokens", type=int, default=256, help="the most of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-server", type=Path, help="measure this program, too, with a GGUF file")
    parser.add_argument(
        "--spec-type", nargs="+", default=["none", "ngram-simple", "ngram-cache"], help="llama-server's"
    )
    parser.add_argument("--threads", type=int, help="of llama-server")
    parser.add_argument("--output", type=Path, nargs="?", const=DEFAULT, help="keep the result as JSON")
    options = parser.parse_args(arguments)
    engines: dict[str, Ours | LlamaServer] = {"off": Ours(options, "off"), "on": Ours(options, options.config)}
    kinds = options.spec_type if options.llama_server is not None else []
    try:
        for number, kind in enumerate(kinds):
            engines[f"llama-server {kind}"] = LlamaServer(options.llama_server, options, kind, 18300 + number)
        rows = [
            measure(engines, kind, count, options.tokens, options.rounds)
            for kind in options.work
            for count in options.concurrency
        ]
    finally:
        for engine in engines.values():
            if isinstance(engine, LlamaServer):
                engine.close()
    if options.output is not None:
        run = {"model": Path(options.model).name, "config": options.config, "rows": rows, "machine": machine()}
        known = json.loads(options.output.read_text())["runs"] if options.output.exists() else []
        known = [one for one in known if one["model"] != run["model"]]
        result = {"benchmark": "speculation", "runs": [*known, run]}
        options.output.write_text(json.dumps(result, indent=2) + "\n")


def measure(engines: dict[str, Ours | LlamaServer], kind: str, count: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Let all engines answer the same requests, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    told: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):
        order = list(engines.items())
        for name, engine in order if turn % 2 else order[::-1]:
            took, told[name] = 0.0, []
            for group in groups_of(kind, count):
                if kind != WRONG:
                    one, answers = engine.run(group, tokens)
                elif isinstance(engine, Ours):
                    one, answers = engine.run_wrong(count, tokens, name == "on")
                else:
                    continue
                took += one
                told[name] += answers
            if turn and took:  # the first one computes the prompts, which later turns find in the cache
                seconds[name].append(took)
    if told["on"] != told["off"]:
        raise SystemExit(f"{kind}: answers differ with drafts and without")
    medians = {name: statistics.median(taken) for name, taken in seconds.items() if taken}
    made = {name: sum(map(len, answers)) for name, answers in told.items()}
    row: dict[str, Any] = {
        "work": kind,
        "requests": count,
        "ratio": round(medians["off"] / medians["on"], 3),
        "tokens": made["on"],
        "tokens_per_second": {name: round(made[name] / median, 1) for name, median in medians.items()},
    }
    ours = engines["on"]
    assert isinstance(ours, Ours)
    stats = ours.llm.engine.stats()
    print(row, f"drafted {stats.num_draft_tokens}, accepted {stats.num_accepted_draft_tokens} so far", flush=True)
    return row | {"rounds": {name: [round(one, 3) for one in taken] for name, taken in seconds.items() if taken}}


def groups_of(kind: str, count: int) -> list[list[str]]:
    """The requests that come together: each kind's prompts in turn."""
    texts = WORK.get(kind, ("",))
    if count == 1:
        return [[text] for text in texts]
    return [[texts[number % len(texts)] for number in range(count)]]


if __name__ == "__main__":
    main()
