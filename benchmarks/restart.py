"""An agent's second turn after a restart: `octavo serve` with `--kv-disk` against the same service without it.

A first turn of 14,000 tokens is answered and the service stops. Then a new service gets the second turn, which goes on
after that answer. Seconds count from the request to the first token:

    computed        without --kv-disk
    from_disk       with it, after the files of the pages have left the memory of the system
    from_memory     with it, while the system still holds them, as after an ordinary restart

The three answers must have the same tokens and log-probabilities. `others` are prompts that the folder does not
know, in turns of both services: they show the price for requests that do not use it.

    python benchmarks/restart.py build/sizes/1.5B/q4_k_m.gguf
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from offline import ROOT, machine
from start import free_port

TURN, MORE, ANSWER, OTHER = 14_000, 64, 8, 256  # tokens
PATIENCE = 600.0  # seconds


class Service:
    """A service under test."""

    def __init__(self, model: Path, *more: str):
        self.port = free_port()
        command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", str(self.port), *more]
        command += ["--max-model-len", "16384", "--log-level", "warning"]
        self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        end = time.monotonic() + PATIENCE
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the service did not start (exit status {self.process.poll()})")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self._send("GET", "/health").status == 200
        return False

    def _send(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        return connection.getresponse()

    def metric(self, name: str) -> float:
        text = self._send("GET", "/metrics").read().decode()
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")))

    def ask(self, prompt: list[int], tokens: int = ANSWER) -> tuple[float, list[Any]]:
        """Seconds to the first token; tokens with their log-probabilities."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "logprobs": 0}
        body |= {"ignore_eos": True, "return_tokens_as_token_ids": True}
        began, first, found = time.perf_counter(), 0.0, []
        for line in self._send("POST", "/v1/completions", body):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                if logprobs := choice.get("logprobs"):
                    first = first or time.perf_counter() - began
                    found += zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        assert len(found) == tokens, found
        return first, found

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


@contextlib.contextmanager
def service(model: Path, *more: str) -> Iterator[Service]:
    one = Service(model, *more)
    try:
        yield one
    finally:
        one.stop()


def forget(folder: Path) -> None:
    """Have the system drop the files from memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file or a folder")
    parser.add_argument("--tokens", type=int, default=TURN, metavar="N", help="of the first turn")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the pages' folder is made (default: $TMPDIR)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "restart.json", metavar="FILE")
    args = parser.parse_args()
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(1000, 20_000) for _ in range(count)]

    first, more, others = tokens(args.tokens), tokens(MORE), [tokens(OTHER) for _ in range(6)]
    seconds: dict[str, float] = {}
    answers: list[list[Any]] = []
    beside: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder, keep = Path(name), ("--kv-disk", name)
        with service(args.model, *keep) as one:
            seconds["first_turn"], answer = one.ask(first)
        second = [*first, *(int(token.removeprefix("token_id:")) for token, _ in answer), *more]
        pages = sum(1 for path in folder.glob("*/*"))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        for case in ("from_disk", "from_memory"):
            if case == "from_disk":
                forget(folder)
            with service(args.model, *keep) as one:
                seconds[case], found = one.ask(second)
                answers.append(found)
                assert one.metric("octavo_kv_disk_hits_total") == 1
                read = one.metric("octavo_kv_disk_pages_read_total")
        with service(args.model) as plain, service(args.model, *keep) as one:
            seconds["computed"], found = plain.ask(second)
            answers.append(found)
            for prompt in others:
                beside["without"].append(plain.ask(prompt, 2)[0])
                beside["with"].append(one.ask(prompt, 2)[0])
    result = {
        "benchmark": "restart",
        "machine": machine(),
        "model": args.model.name,
        "tokens": {"first_turn": len(first), "second_turn": len(second)},
        "pages": {"written": pages, "read": int(read), "bytes": size},
        "seconds_to_first_token": {case: round(value, 3) for case, value in seconds.items()},
        "times_sooner": {case: round(seconds["computed"] / seconds[case], 1) for case in ("from_disk", "from_memory")},
        "same_answer": answers[0] == answers[1] == answers[2],
        "others": {case: round(median(values), 4) for case, values in beside.items()},
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "machine"}))


if __name__ == "__main__":
    main()
