"""Kills engines, loads and the whole service at random while clients ask several models and batches run. Nothing may be
lost, wrong or left behind:

- every answer with status 200 is the answer of the undisturbed service;
- every line of an accepted batch is answered exactly once, with that answer;
- at the end no process, no file of an upload and no socket's folder is left;
- the pages of `--kv-disk`, of which few fit, stay below their limit, and their files and those of weights are private.

    python benchmarks/random_kills.py --minutes 10 [--seed N]

It exits with status 1 and names what it found. Only engines that are killed may cost a client an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from server.config.settings import DEMOS  # noqa: E402

PROMPTS = {
    "chat": [5 * "Anna saw a cat and Ben liked a dog. ", "What is a KV cache?", "Hi", "Count: one two"],
    "translate": ["luma li ursu pika.", "luma li."],
}
PATIENCE = 600.0  # seconds for what must come in the end, on a busy machine
LINES = 6  # of a batch
KV_DISK_SIZE = 2**20  # bytes
_MARK = "OCTAVO_KILLS_MARK"


class Service:
    """`octavo serve`, which is started again after each kill."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.store, self.temporary, self.pages = folder / "batches", folder / "tmp", folder / "pages"
        self.weights = folder / "weights"
        self.temporary.mkdir()
        models = "".join(f"{name}: {DEMOS[kind]}\n" for name, kind in (("chat", "chat"), ("translate", "seq2seq")))
        (folder / "models.yaml").write_text(models)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [sys.executable, "-m", "octavo", "serve", "--models", str(self.folder / "models.yaml")]
        command += ["--port", str(self.port), "--batch-store", str(self.store), "--model-idle-time", "2"]
        command += ["--kv-disk", str(self.pages), "--kv-disk-size", str(KV_DISK_SIZE)]
        command += ["--quantization-cache", str(self.weights)]
        command += ["--max-engine-failures", "1000000", "--kv-cache-memory", "16MiB", "--log-format", "console"]
        environment = os.environ | {_MARK: self._mark, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        with (self.folder / "service.log").open("a") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise SystemExit(f"the service did not start; see {self.folder / 'service.log'}")

    def processes(self) -> list[int]:
        """Its processes, also those whose parent has ended."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                marked = entry.name.isdigit() and f"{_MARK}={self._mark}".encode() in (entry / "environ").read_bytes()
                if marked and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(entry.name))
        return found


class Trial:
    """The clients, the batches, and what was found."""

    def __init__(self, service: Service, seed: int):
        self.service = service
        self.random = random.Random(seed)
        self.ends = threading.Event()
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.batches: list[str] = []
        self.expected = {
            (model, prompt): self._text(self.ask(model, prompt)) for model in PROMPTS for prompt in PROMPTS[model]
        }

    def ask(self, model: str, prompt: str) -> httpx.Response:
        """One request; raises httpx.HTTPError if the connection breaks."""
        return httpx.post(f"{self.service.url}/v1/completions", json=_body(model, prompt), timeout=PATIENCE)

    def _text(self, answer: httpx.Response) -> str:
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    def client(self, seed: int) -> None:
        """Ask until the trial ends."""
        chance = random.Random(seed)
        while not self.ends.is_set():
            model = chance.choice(list(PROMPTS))
            prompt = chance.choice(PROMPTS[model])
            try:
                answer = self.ask(model, prompt)
            except httpx.HTTPError:
                self.counts["broken connections"] += 1
                time.sleep(0.1)
                continue
            self.counts[f"status {answer.status_code}"] += 1
            if answer.status_code == 200 and self._text(answer) != self.expected[model, prompt]:
                self.problems.append(f"wrong answer of {model} to {prompt!r}: {self._text(answer)!r}")
            elif answer.status_code not in (200, 500, 503):
                self.problems.append(f"status {answer.status_code}: {answer.text[:300]}")

    def batcher(self) -> None:
        """Begin a batch now and then. One is accepted once its creation is answered."""
        while not self.ends.wait(1.0):
            lines = [
                {
                    "custom_id": f"{model} {index}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": _body(model, prompt),
                }
                for index, (model, prompt) in enumerate(list(self.expected)[:LINES])
            ]
            content = "\n".join(map(json.dumps, lines)).encode()
            with contextlib.suppress(httpx.HTTPError):
                files = {"file": ("in.jsonl", content)}
                sent = httpx.post(f"{self.service.url}/v1/files", files=files, data={"purpose": "batch"}, timeout=30)
                body = {
                    "input_file_id": sent.json().get("id"),
                    "endpoint": "/v1/completions",
                    "completion_window": "24h",
                }
                made = httpx.post(f"{self.service.url}/v1/batches", json=body, timeout=30)
                if made.status_code == 200:
                    self.batches.append(made.json()["id"])

    def disturb(self, what: str) -> None:
        """Kill a child of the service or the service itself, stop the service, or unload a model."""
        self._count_hits()
        self.counts[what] += 1
        own = self.service.process.pid
        if what == "child":
            children = [pid for pid in self.service.processes() if pid != own]
            if children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.random.choice(children), signal.SIGKILL)
        elif what == "unload":
            with contextlib.suppress(httpx.HTTPError):
                model = self.random.choice(list(PROMPTS))
                httpx.post(f"{self.service.url}/v1/models/unload", json={"model": model}, timeout=30)
        else:
            self.service.process.send_signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)
            status = self.service.process.wait(PATIENCE)
            if what == "stop" and status != 0:
                self.problems.append(f"SIGTERM ended the service with status {status}")
            self._check_processes("the service had ended")
            self.service.start()

    def _count_hits(self) -> None:
        """Note how many requests have found pages on the disk, since an engine was loaded."""
        with contextlib.suppress(httpx.HTTPError):
            for line in httpx.get(f"{self.service.url}/metrics", timeout=30).text.splitlines():
                if line.startswith("octavo_kv_disk_hits_total"):
                    self.counts["most disk hits"] = max(self.counts["most disk hits"], int(float(line.split()[-1])))

    def _check_processes(self, when: str) -> None:
        deadline = time.monotonic() + 30
        while (left := self.service.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self.problems.append(f"{len(left)} processes are left after {when}: {left}")

    def check_batches(self) -> None:
        """Each accepted batch ends, with each line answered once and right."""
        deadline = time.monotonic() + PATIENCE
        for id_ in self.batches:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    batch = httpx.get(f"{self.service.url}/v1/batches/{id_}", timeout=30).json()
                    if batch.get("status") in ("completed", "failed", "expired", "cancelled"):
                        break
                if time.monotonic() > deadline:
                    self.problems.append(f"{id_} did not end: {batch}")
                    return
                time.sleep(0.1)
            self._check_batch(batch)

    def _check_batch(self, batch: dict[str, Any]) -> None:
        if batch["status"] != "completed":
            self.problems.append(f"{batch['id']} is {batch['status']}: {batch.get('errors')}")
            return
        entries = [*self._entries(batch.get("output_file_id")), *self._entries(batch.get("error_file_id"))]
        pairs = list(self.expected)[:LINES]
        seen = Counter(entry["custom_id"] for entry in entries)
        if seen != Counter(f"{model} {index}" for index, (model, _) in enumerate(pairs)):
            self.problems.append(f"{batch['id']} has the lines {dict(seen)}")
        for entry in entries:
            status, pair = entry["response"]["status_code"], pairs[int(entry["custom_id"].split()[1])]
            self.counts[f"line {status}"] += 1
            if status == 200 and entry["response"]["body"]["choices"][0]["text"] != self.expected[pair]:
                self.problems.append(f"wrong answer in {batch['id']}: {entry}")

    def _entries(self, id_: str | None) -> Iterator[dict[str, Any]]:
        if id_ is not None:
            text = httpx.get(f"{self.service.url}/v1/files/{id_}/content", timeout=30).text
            yield from map(json.loads, text.splitlines())

    def check_rest(self) -> None:
        """Stop the service; nothing is left behind."""
        listed = {
            file["id"] for file in httpx.get(f"{self.service.url}/v1/files?limit=10000", timeout=30).json()["data"]
        }
        self.service.process.send_signal(signal.SIGTERM)
        if status := self.service.process.wait(PATIENCE):
            self.problems.append(f"SIGTERM ended the service with status {status}")
        self._check_processes("the end")
        if (stored := {path.name for path in self.service.store.glob("file-*")}) != listed:
            self.problems.append(f"files that are not listed, or lack content: {stored ^ listed}")
        weights = list(self.service.weights.iterdir())
        if len(weights) != len(DEMOS) or any(path.stat().st_mode & 0o177 for path in weights):
            self.problems.append(f"cached weights are lacking, left over or not private: {weights}")
        files = [path.stat() for path in self.service.pages.rglob("*") if path.is_file()]
        self.counts["pages on disk"] = len(files) - 2  # without the lock and the key
        if any(file.st_mode & 0o177 for file in files):
            self.problems.append("a file of --kv-disk is not private")
        if (size := sum(file.st_size for file in files)) > KV_DISK_SIZE + 2**13:
            self.problems.append(f"--kv-disk holds {size} bytes")
        if left := [path.name for path in self.service.temporary.glob("octavo*")]:
            self.problems.append(f"left in the folder for temporary files: {left}")


def _body(model: str, prompt: str) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}


def disturbances(seconds: float, seed: int) -> Iterator[str]:
    """Random ones for this long."""
    chance, until = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < until:
        yield chance.choice(["child"] * 6 + ["unload"] * 2 + ["kill", "stop"])


def run(kinds: Iterable[str], seed: int, clients: int) -> Trial:
    """Disturb the service in these ways, and check what is left."""
    with tempfile.TemporaryDirectory(prefix="okill-", dir="/tmp") as folder:
        service = Service(Path(folder))
        try:
            trial = Trial(service, seed)
            work = [(trial.client, (seed + number,)) for number in range(clients)] + [(trial.batcher, ())]
            # Daemons, so that they end if the service does not start again.
            threads = [threading.Thread(target=each, args=arguments, daemon=True) for each, arguments in work]
            for thread in threads:
                thread.start()
            for kind in kinds:
                time.sleep(trial.random.uniform(0.2, 3.0))
                trial.disturb(kind)
            trial.ends.set()
            for thread in threads:
                thread.join()
            trial.check_batches()
            trial.check_rest()
            if trial.problems:
                print((service.folder / "service.log").read_text()[-4000:], file=sys.stderr)
        finally:
            for pid in service.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return trial


def main() -> int:
    """Run, and print the counts and the problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args()
    trial = run(disturbances(60 * given.minutes, given.seed), given.seed, given.clients)
    counts = dict(sorted(trial.counts.items()))
    print(
        json.dumps(
            {"seed": given.seed, "batches": len(trial.batches), "counts": counts, "problems": trial.problems}, indent=1
        )
    )
    return 1 if trial.problems else 0


if __name__ == "__main__":
    sys.exit(main())
