"""The notes on one request, taken while its answer arrives."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

from cli.bench.client import Whole, error_message
from cli.bench.sse import DONE, SseDecoder

UNKNOWN = -1  # of the number of tokens in an event


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a request has no complete answer.

    Attributes:
        kind: "http 503" and the like, "timeout", "connection", "stream error", "incomplete" or "interrupted".
    """

    kind: str
    message: str


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. Times are `time.perf_counter()` seconds.

    Attributes:
        scheduled: when it was due; latencies count from here, so that a late client hides nothing.
        sent: when it was sent.
        ended: when its answer was complete, or had failed.
        times: of the events that brought output.
        counts: tokens of each of them, or `UNKNOWN`.
        completion_tokens: as the server counted them; None if it did not.
    """

    index: int
    input_len: int | None
    output_len: int
    scheduled: float
    sent: float = 0.0
    ended: float = 0.0
    times: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("i"))
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def first(self) -> float | None:
        """When the first output came."""
        return self.times[0] if self.times else None

    @property
    def counts_known(self) -> bool:
        """The number of tokens in every event is known."""
        return UNKNOWN not in self.counts

    @property
    def output_tokens(self) -> int:
        """The number of tokens that the server counted; else the sum over the events, in which an unknown number
        counts as one."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return sum(1 if count == UNKNOWN else count for count in self.counts)


class AnswerSink:
    """Reads an answer, streamed or whole, into its record."""

    def __init__(self, record: Record):
        self._record = record
        self._status = 0
        self._whole: Whole | None = None
        self._decoder = SseDecoder()
        self._done = False
        self._counted = 0  # tokens that the usage of earlier events told of

    def on_head(self, status: int, content_type: str) -> None:
        self._status = status
        if status != 200 or not content_type.startswith("text/event-stream"):
            self._whole = Whole()

    def on_data(self, data: bytes, when: float) -> None:
        if self._whole is not None:
            self._whole.on_data(data, when)
            return
        for event in self._decoder.feed(data):
            if event == DONE:
                self._done = True
            else:
                self._on_event(event, when)

    def finish(self) -> None:
        """The answer has arrived; say what is wrong with it, if something is."""
        record = self._record
        if record.failure is not None:
            return
        if self._status != 200:
            body = "" if self._whole is None else self._whole.value()
            record.failure = Failure(f"http {self._status}", error_message(body))
        elif self._whole is not None:
            self._read_whole(self._whole.value())
        elif not self._done and record.finish_reason is None:
            record.failure = Failure("incomplete", "the stream ended without a finish_reason and without [DONE]")
        if not record.counts_known and record.completion_tokens == len(record.counts):
            record.counts = array("i", [1]) * len(record.counts)  # one token each, then

    def _on_event(self, event: bytes, when: float) -> None:
        try:
            self._read_event(json.loads(event), when)
        except (ValueError, AttributeError, TypeError):
            problem = f"an event is not what the API promises: {event[:80]!r}"
            self._record.failure = self._record.failure or Failure("stream error", problem)

    def _read_event(self, data: Any, when: float) -> None:
        record = self._record
        if data.get("error"):
            record.failure = record.failure or Failure("stream error", error_message(data))
            return
        brought, tokens = False, UNKNOWN
        for choice in data.get("choices") or ():
            if choice.get("finish_reason"):
                record.finish_reason = choice["finish_reason"]
            ids = choice.get("token_ids")
            if ids is not None:
                brought = brought or bool(ids)
                tokens = len(ids) + max(tokens, 0)
            elif _brings_output(choice):
                brought = True
        usage = data.get("usage")
        if usage:
            self._read_usage(usage)
            if brought and tokens == UNKNOWN and record.completion_tokens is not None:
                tokens = record.completion_tokens - self._counted
            self._counted = record.completion_tokens or self._counted
        if brought:
            record.times.append(when)
            record.counts.append(tokens)

    def _read_whole(self, body: Any) -> None:
        choices = body.get("choices") if isinstance(body, dict) else None
        if not choices:
            self._record.failure = Failure("incomplete", f"the answer holds no choices: {error_message(body)}")
            return
        try:
            self._record.finish_reason = choices[-1].get("finish_reason")
            self._read_usage(body.get("usage") or {})
        except (AttributeError, TypeError, KeyError):
            problem = f"the answer is not what the API promises: {error_message(body)}"
            self._record.failure = Failure("incomplete", problem)

    def _read_usage(self, usage: dict[str, Any]) -> None:
        record = self._record
        record.prompt_tokens = usage.get("prompt_tokens", record.prompt_tokens)
        record.completion_tokens = usage.get("completion_tokens", record.completion_tokens)
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens", record.cached_tokens)


def _brings_output(choice: dict[str, Any]) -> bool:
    """Whether a choice of an event stands for at least one token."""
    if "text" in choice:
        # Some servers send an event for a token that has no text yet; one that only ends the answer has none.
        return bool(choice["text"]) or not choice.get("finish_reason")
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
