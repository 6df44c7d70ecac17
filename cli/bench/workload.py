"""The bodies of the requests to send, in order, made one at a time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cli.bench.lengths import Lengths
from cli.bench.prompts import Prompt, PromptMaker
from cli.bench.trace import HASH_BLOCK, TraceRow


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send.

    Attributes:
        arrival: seconds after the start at which it is due, if the trace says so.
        input_len: tokens of the prompt, if they are known exactly.
    """

    index: int
    arrival: float | None
    input_len: int | None
    output_len: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Makes the jobs; job i is the same for the same settings, whatever came before it.

    Attributes:
        prefix_len: tokens of the shared prefixes, which come before the input length.
        num_prefixes: how many different ones; each request takes one at random.
        scale: factor of the trace's lengths.
        max_input_len, max_output_len: lengths are cut to these.
        stream, ignore_eos, return_token_ids: fields of the body.
        extra_body: further fields, which win.
    """

    model: str
    chat: bool
    maker: PromptMaker
    input_len: Lengths
    output_len: Lengths
    prefix_len: int = 0
    num_prefixes: int = 1
    trace: list[TraceRow] | None = None
    scale: float = 1.0
    max_input_len: int | None = None
    max_output_len: int | None = None
    stream: bool = True
    ignore_eos: bool = True
    return_token_ids: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def jobs(self, count: int | None, *, name: str = "run") -> Iterator[Job]:
        """The first `count` jobs; None: endless, or the whole trace. Another name gives other prompts."""
        if self.trace is not None:
            rows = self.trace if count is None else self.trace[:count]
            for index, row in enumerate(rows):
                yield self._from_row(index, row, random.Random(f"{self.seed} {name} {index}"))
            return
        index = 0
        while count is None or index < count:
            rng = random.Random(f"{self.seed} {name} {index}")
            yield self._random(index, rng)
            index += 1

    def warmup(self, count: int) -> Iterator[Job]:
        """Jobs of the same lengths but with prompts of their own; shared prefixes are the shared ones."""
        for index in range(count):
            rng = random.Random(f"{self.seed} warmup {index}")
            if self.trace is None:
                yield self._random(index, rng)
                continue
            row = self.trace[index % len(self.trace)]
            length = row.input_len or (len(row.prompt) if isinstance(row.prompt, list) else 16)
            fresh = TraceRow(input_len=length, output_len=row.output_len)
            yield self._from_row(index, fresh, rng)

    def lengths(self, count: int | None) -> Iterator[tuple[int, int]]:
        """Input and output length of each job of a trace that has them."""
        for row in (self.trace or [])[:count]:
            if row.input_len is not None or isinstance(row.prompt, list):
                length = len(row.prompt) if isinstance(row.prompt, list) else self._input(row.input_len or 1)
                yield length, self._output(row, random.Random(0))

    def _random(self, index: int, rng: random.Random) -> Job:
        length = self._cut(self.input_len.draw(rng), self.max_input_len)
        output = self._cut(self.output_len.draw(rng), self.max_output_len)
        prompt = self.maker.make(rng, length)
        if self.prefix_len:
            shared = random.Random(f"{self.seed} prefix {rng.randrange(self.num_prefixes)}")
            prefix = self.maker.make(shared, self.prefix_len)
            prompt = self.maker.join([prefix, prompt])
        return self._job(index, None, prompt, None, output)

    def _from_row(self, index: int, row: TraceRow, rng: random.Random) -> Job:
        output = self._output(row, rng)
        prompt = row.prompt
        if prompt is None and row.messages is None:
            prompt = self._from_hashes(row, rng)
        return self._job(index, row.arrival, prompt, row.messages, output)

    def _from_hashes(self, row: TraceRow, rng: random.Random) -> Prompt:
        length = self._input(row.input_len or 1)
        block = max(1, round(HASH_BLOCK * self.scale))
        parts = []
        left = length
        for value in row.hash_ids[: -(-length // block)]:
            size = min(block, left)
            shared = random.Random(f"{self.seed} hash {value}")
            parts.append(self.maker.make(shared, size))
            left -= size
        if left:
            parts.append(self.maker.make(rng, left))
        return self.maker.join(parts)

    def _input(self, length: int) -> int:
        return self._cut(max(1, round(length * self.scale)), self.max_input_len)

    def _output(self, row: TraceRow, rng: random.Random) -> int:
        if row.output_len is None:
            return self._cut(self.output_len.draw(rng), self.max_output_len)
        return self._cut(max(1, round(row.output_len * self.scale)), self.max_output_len)

    @staticmethod
    def _cut(length: int, limit: int | None) -> int:
        return length if limit is None else min(length, limit)

    def _job(
        self,
        index: int,
        arrival: float | None,
        prompt: Prompt | None,
        messages: list[dict[str, Any]] | None,
        output: int,
    ) -> Job:
        body: dict[str, Any] = {"model": self.model, "max_tokens": output, "temperature": 0.0}
        if self.chat:
            body["messages"] = messages or [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.return_token_ids:
            body["return_token_ids"] = True
        body |= self.extra_body
        input_len = len(prompt) if isinstance(prompt, list) else None
        return Job(index, arrival, input_len, output, json.dumps(body, separators=(",", ":")).encode())
