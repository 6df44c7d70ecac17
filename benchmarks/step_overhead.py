"""The cost of a step besides the model: planning, filling buffers, applying candidates, telling the client.

The scheduler and the runner are real; the model is a stand-in that computes nothing, and candidates are made up
beforehand (sampling has its own costs). Each case runs decoding rows only, over answers in the middle of their way.
Times are microseconds of the thread's CPU time for one step, the median: others may use the machine.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.backends.attention.formats import PageShape  # noqa: E402
from engine.execution import runner as running  # noqa: E402
from engine.execution.kv_cache import KVCache  # noqa: E402
from engine.interface.request import Decoding, Request  # noqa: E402
from engine.model import spec  # noqa: E402
from engine.model.inputs import Inputs  # noqa: E402
from engine.model.row_form import LIBRARY, RowForm  # noqa: E402
from engine.process.messages import News, decode_news, encode  # noqa: E402
from engine.scheduling.block_pool import BlockPool  # noqa: E402
from engine.scheduling.budget import Costs, StepBudget, StepWork  # noqa: E402
from engine.scheduling.limits import SchedulerConfig  # noqa: E402
from engine.scheduling.plan import SamplingBatch, StepPlan, StepResult  # noqa: E402
from engine.scheduling.scheduler import Scheduler  # noqa: E402

PROMPT, STEPS, WARM = 128, 96, 16
# name: requests, layers, encoder tokens, how to decode.
VOCABULARY = 32128
MANY_STOPS = frozenset(range(VOCABULARY, VOCABULARY + 1024))  # as many as a request may send, none of which comes
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "greedy, 1 row": (1, 30, 0, {"temperature": 0.0}),
    "greedy, 8 rows": (8, 30, 0, {"temperature": 0.0}),
    "greedy, 32 rows": (32, 30, 0, {"temperature": 0.0}),
    "greedy, 256 rows": (256, 30, 0, {"temperature": 0.0}),
    "sampled, 1 row": (1, 30, 0, {"temperature": 0.8, "top_p": 0.9}),
    "sampled, 8 rows": (8, 30, 0, {"temperature": 0.8, "top_p": 0.9}),
    "sampled, 32 rows": (32, 30, 0, {"temperature": 0.8, "top_p": 0.9}),
    "sampled, 128 rows": (128, 30, 0, {"temperature": 0.8, "top_p": 0.9}),
    "1024 stop ids, 128 rows": (128, 30, 0, {"temperature": 0.8, "top_p": 0.9, "stop_ids": MANY_STOPS}),
    "the same, not yet": (128, 30, 0, {"temperature": 0.8, "top_p": 0.9, "stop_ids": MANY_STOPS, "min_tokens": 10**6}),
    "penalties, 32 rows": (32, 30, 0, {"temperature": 0.8, "repetition_penalty": 1.1}),
    "beam 4, 1 request": (1, 6, 128, {"num_beams": 4, "temperature": 0.0}),
    "beam 4, 32 requests": (32, 6, 128, {"num_beams": 4, "temperature": 0.0}),
    "beam 4, 64 of a decoder": (64, 30, 0, {"num_beams": 4, "temperature": 0.0}),
}
# Parts of a step; `engine` is the sum of those before it, the others are the news on their way to the client.
COLUMNS = ("schedule", "execute", "update", "observe", "engine", "encode", "decode")
# Bytes that the stand-in reads, as a model reads its weights: whatever comes after it begins with cold caches.
MEMORY = 64 * 2**20


class Stand(torch.nn.Module):
    """Answers like a `Transformer`, having read memory but computed nothing."""

    def __init__(self, encoder: bool):
        super().__init__()
        self.encoder = object() if encoder else None
        self.decoder = object()
        self.device, self.unplaced = torch.device("cpu"), None
        trunk = SimpleNamespace(embedding=None)
        self.spec = SimpleNamespace(head=spec.Lm(tied=True), signal=None, trunk=trunk)
        self.head = self.twin = self.ranks = None
        self.hidden = torch.zeros(8192, 8)
        self.weights = torch.zeros(MEMORY // 4)
        self.seconds = 0.0

    def forward(self, inputs: Inputs) -> torch.Tensor:
        began = time.thread_time()
        self.weights.sum()
        self.seconds = time.thread_time() - began
        return self.hidden[: len(inputs.token_ids)]

    def encode(self, inputs: Inputs) -> None:
        """Nothing is stored."""

    def logits(
        self, hidden: torch.Tensor, form: RowForm = LIBRARY, head: torch.nn.Module | None = None
    ) -> torch.Tensor:
        return hidden


def candidates(batch: SamplingBatch, rng: np.random.Generator) -> StepResult:
    """Made-up candidates of falling probability."""
    rows, width = len(batch.rows), max(int(batch.table["beam_width"].max()), 1)
    scores = -np.cumsum(rng.exponential(0.7, (rows, width)), axis=1).astype(np.float32)
    tokens = rng.integers(10, VOCABULARY, (rows, width)).astype(np.int32)
    empty = np.zeros((rows, 0), dtype=np.int32)
    return StepResult(
        tokens=tokens,
        scores=scores,
        logprobs=scores,
        ranks=np.zeros_like(tokens),
        top_ids=empty,
        top_logprobs=empty.astype(np.float32),
    )


class Case:
    """One kind of step, again and again."""

    def __init__(self, requests: int, layers: int, encoder_len: int, decoding: dict[str, Any]):
        self._rng = np.random.default_rng(0)
        config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192, block_size=16)
        self.scheduler = Scheduler(config, BlockPool(8192))
        cache = KVCache([PageShape(1, 8)] * layers, 8192, 16, torch.float32, torch.device("cpu"))
        model: Any = Stand(bool(encoder_len))
        self.runner = running.ModelRunner(model, cache, max_num_batched_tokens=8192)
        self.budget = StepBudget(0.25, Costs(0.001, 1.0, 16))
        for number in range(requests):
            self.scheduler.add(
                Request(
                    request_id=f"cmpl-0123456789abcdef0123456789abcdef-{number}",
                    prompt_token_ids=(0,) if encoder_len else tuple(self._ids(PROMPT)),
                    encoder_token_ids=tuple(self._ids(encoder_len)),
                    decoding=Decoding(
                        max_tokens=WARM + STEPS + 64, **{"seed": number, "stop_ids": frozenset((2,)), **decoding}
                    ),
                )
            )
        self.result = StepResult.empty()

    def _ids(self, count: int) -> list[int]:
        return self._rng.integers(10, VOCABULARY, count).tolist()  # type: ignore[no-any-return]

    def step(self) -> dict[str, float]:
        """Seconds of each part."""
        times: dict[str, float] = {}
        plan: StepPlan = self._timed(times, "schedule", lambda: self.scheduler.schedule(self.budget.limit))
        self.result = StepResult.empty() if plan.sampling is None else candidates(plan.sampling, self._rng)
        self._timed(times, "execute", lambda: self.runner.execute(plan))
        times["execute"] -= self.runner.model.seconds
        deltas = self._timed(times, "update", lambda: self.scheduler.update(self.result))
        self._timed(times, "observe", lambda: self.budget.observe(StepWork.of(plan), 0.03))
        data = self._timed(times, "encode", lambda: encode(News(deltas, {}, self.scheduler.snapshot(), 1)))
        self._timed(times, "decode", lambda: decode_news(data))
        return times

    def _sample(self, logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
        return self.result

    @staticmethod
    def _timed(times: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        value = work()
        times[name] = time.thread_time() - began
        return value

    def run(self) -> dict[str, float]:
        """Median microseconds of each part."""
        steps = []
        with mock.patch.object(running, "sample", self._sample):
            while len(steps) < WARM + STEPS:
                steps.append(self.step())
        steps = steps[WARM:]
        return {name: statistics.median(step[name] for step in steps) * 1e6 for name in steps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    rows = {}
    print(" " * 24 + "".join(f"{part:>10}" for part in COLUMNS))
    for name in options.case or CASES:
        rounds = [Case(*CASES[name]).run() for _ in range(options.rounds)]
        found = {part: min(times[part] for times in rounds) for part in rounds[0]}
        found["engine"] = sum(found[part] for part in COLUMNS[: COLUMNS.index("engine")])
        rows[name] = {part: round(found[part], 1) for part in COLUMNS}
        print(f"{name:24}" + "".join(f"{value:10.1f}" for value in rows[name].values()), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
