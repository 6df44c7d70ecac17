"""Agents' conversations on a CPU: Octavo against llama-server, on one random checkpoint.

Three conversations share a system prompt of 20 thousand tokens and take turns; each turn adds 60 to 600 tokens. In the
middle, a subagent with a system prompt of its own asks three times. Requests come one at a time over
/v1/chat/completions, as streams of one token, so what counts is the prompt: seconds to the first token (its median and
95th percentile, with and without the first turns), the tokens that were computed, and the processor time.

llama-server runs with each of a few settings of its caches: slots of their own or one cache for all, and with
--cache-reuse. Both servers read the same weights in bfloat16 and make the same tokens.

    python benchmarks/agents.py --peers-dir .peers --output
    python benchmarks/agents.py --tiny
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from offline import ROOT, machine
from peers import process
from peers.checkpoints import LETTERS, make_decoder
from peers.engines import Files
from peers.process import child_environment, tree_seconds
from peers.servers import Server

MODEL = "octavo-benchmark"
CONTEXT = 32768
SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SYSTEM, SUBSYSTEM, CONVERSATIONS, TURNS, SUBTURNS = 20_000, 6_000, 3, 8, 3
LEAST, MOST = 60, 600  # tokens that a turn adds
# Options of llama-server by the name of a setting; each has room for all conversations.
SLOTS = {
    "4 slots": ("--parallel", "4", "--no-kv-unified", "--ctx-size", str(4 * CONTEXT)),
    "4 slots, one cache": ("--parallel", "4", "--kv-unified", "--ctx-size", str(4 * CONTEXT)),
    "4 slots, reuse": (
        "--parallel", "4", "--kv-unified", "--ctx-size", str(4 * CONTEXT), "--cache-reuse", "256",
    ),
}  # fmt: skip

Message = dict[str, str]


@dataclass
class Request:
    """A turn of a conversation, whose first one is `turn` 0."""

    name: str
    turn: int
    messages: list[Message]


@dataclass
class Answer:
    """The measurements of one request."""

    name: str
    turn: int
    seconds: float
    tokens: int
    computed: int


def words(rng: random.Random, count: int) -> str:
    """A text of `count` tokens: the vocabulary holds each word of up to four letters, with the space before it."""
    return "".join(" " + "".join(rng.choices(LETTERS, k=rng.randint(1, 4))) for _ in range(count))


def requests(scale: float = 1.0) -> Iterator[Request]:
    """All turns, in their order; the same ones in each call.

    Args:
        scale: of the lengths of system prompts.
    """
    rng = random.Random(0)
    system = words(rng, int(SYSTEM * scale))
    talks: list[tuple[str, list[Message]]] = [
        (f"conversation {number}", [{"role": "system", "content": system}]) for number in range(CONVERSATIONS)
    ]
    helper: tuple[str, list[Message]] = (
        "subagent",
        [{"role": "system", "content": words(rng, int(SUBSYSTEM * scale))}],
    )
    for turn in range(TURNS):
        rows = [(turn, talk) for talk in talks]
        if turn == TURNS // 2:
            rows[1:1] = [(number, helper) for number in range(SUBTURNS)]
        for number, (name, messages) in rows:
            messages.append({"role": "user", "content": words(rng, rng.randint(LEAST, MOST))})
            yield Request(name, number, list(messages))
            messages.append({"role": "assistant", "content": words(rng, 20)})


def ask(url: str, request: Request) -> Answer:
    """Send one request, and read its stream to the token.

    Raises:
        RuntimeError: it is refused.
    """
    body = {
        "model": MODEL, "messages": request.messages, "max_tokens": 1, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    began, first = time.perf_counter(), 0.0
    connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:500]!r}")
    tokens = computed = 0
    while not (line := answer.fp.readline()).startswith(b"data: [DONE]"):
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if not first and any(choice.get("finish_reason") for choice in event["choices"]):
            first = time.perf_counter() - began
        if (usage := event.get("usage")) is not None:
            tokens = usage["prompt_tokens"]
            computed = tokens - usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        if "timings" in event:  # llama-server's
            computed = event["timings"]["prompt_n"]
    connection.close()
    return Answer(request.name, request.turn, first, tokens, computed)


def summary(answers: list[Answer]) -> dict[str, float]:
    """Medians of all requests, and of the later turns of conversations alone."""
    seconds, later = ([one.seconds * 1e3 for one in answers if one.turn >= least] for least in (0, 1))
    return {
        "first_token_ms_p50": round(statistics.median(seconds), 1),
        "first_token_ms_p95": round(float(np.percentile(seconds, 95)), 1),
        "later_turns_ms_p50": round(statistics.median(later), 1),
        "later_turns_ms_p95": round(float(np.percentile(later, 95)), 1),
        "tokens_sent": sum(one.tokens for one in answers),
        "tokens_computed": sum(one.computed for one in answers),
    }


def measure(server: Server, setting: str, scale: float) -> dict[str, Any]:
    """One server with one of its settings, from a cold cache."""
    server.prepare(setting)
    try:
        before = sum(map(tree_seconds, server.pids))
        answers = [ask(server.url, request) for request in requests(scale)]
        return {
            **summary(answers),
            "processor_seconds": round(sum(map(tree_seconds, server.pids)) - before, 1),
            "requests": [asdict(answer) for answer in answers],
        }
    finally:
        server.stop()


def make_servers(folder: Path, options: argparse.Namespace) -> list[Server]:
    """Octavo, and llama-server if it is installed."""
    checkpoint = folder / "hf"
    if not (checkpoint / "config.json").exists():
        make_decoder(checkpoint, SHAPE | ({"num_hidden_layers": 1} if options.tiny else {}))
        template = checkpoint / "chat_template.jinja"
        template.write_text(TEMPLATE)
    environment = {"OCTAVO_SHOW_PROGRESS": "false", "OCTAVO_KV_CACHE_MEMORY": "1GiB", "OCTAVO_MAX_QUEUE_TIME": "0"}
    command = [sys.executable, "-m", "octavo", "serve", str(checkpoint), "--served-model-name", MODEL]
    threads, body = options.threads, dict[str, Any]()
    made = [
        Server("octavo", command, child_environment(threads, (str(ROOT),), environment), folder / "octavo.log", body)
    ]
    install = process.find("llama.cpp", options.peers_dir)
    if install is None or not (program := install.program_folder / "llama-server").exists():
        print(f"llama-server is not in {options.peers_dir}.", file=sys.stderr)
        return made
    model = Files(folder, {"llama.cpp": install}, threads).gguf("bf16")
    command = [str(program), "--host", "127.0.0.1", "--model", str(model), "--alias", MODEL, "--no-webui", "--jinja"]
    command += ["--chat-template-file", str(checkpoint / "chat_template.jinja")]
    command += ["--threads", str(threads), "--threads-batch", str(threads), "--batch-size", "2048"]
    libraries = {"LD_LIBRARY_PATH": install.environment.get("LLAMA_CPP_LIB_PATH", "")}
    environment = child_environment(threads, (), libraries, foreign=True)
    made.append(Server("llama-server", command, environment, folder / "llama-server.log", body, SLOTS))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, default=ROOT / ".peers", help="holds one folder for each peer")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each server (default: all cores)")
    parser.add_argument("--work-dir", type=Path, help="keeps the checkpoint and logs (default: none is kept)")
    parser.add_argument("--tiny", action="store_true", help="one layer and short prompts: shows that everything works")
    parser.add_argument(
        "--output",
        type=Path,
        nargs="?",
        const=ROOT / "benchmarks" / "results" / "agents.json",
        help="JSON file to write",
    )
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine() | {"load_average": list(os.getloadavg())}, "servers": {}}
    with tempfile.TemporaryDirectory() as spare:
        folder = (options.work_dir or Path(spare)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for server in make_servers(folder, options):
            for setting in server.settings:
                name = f"{server.name}, {setting}"
                found = result["servers"][name] = measure(server, setting, 0.05 if options.tiny else 1.0)
                print(name, {key: value for key, value in found.items() if key != "requests"}, flush=True)
            server.close()
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
