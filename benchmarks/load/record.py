"""The record of one request: its times and token counts while its answer streams."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

from load.client import Whole, error_message
from load.sse import DONE, SseDecoder


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no complete answer.

    Attributes:
        kind: "http 503" and the like, "timeout", "connection", "stream error" or "incomplete".
    """

    kind: str
    message: str


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. Times are `time.perf_counter()` seconds.

    Attributes:
        ended: when its answer was complete, or had failed.
        times: of the events that brought output.
        completion_tokens: as the server counted them; None if it did not.
    """

    index: int
    output_len: int
    sent: float
    ended: float = 0.0
    times: array[float] = field(default_factory=lambda: array("d"))
    completion_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def first(self) -> float | None:
        """When the first output came."""
        return self.times[0] if self.times else None

    @property
    def output_tokens(self) -> int:
        """As the server counted them; without its count, one for each event."""
        return len(self.times) if self.completion_tokens is None else self.completion_tokens


class AnswerSink:
    """Reads a streamed answer into its record (a sink of `load.client.Client`)."""

    def __init__(self, record: Record):
        self._record = record
        self._status = 0
        self._whole: Whole | None = None
        self._decoder = SseDecoder()
        self._done = False

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
        if self._whole is not None:
            kind = "incomplete" if self._status == 200 else f"http {self._status}"
            record.failure = Failure(kind, error_message(self._whole.value()))
        elif not self._done and record.finish_reason is None:
            record.failure = Failure("incomplete", "the stream ended without a finish_reason and without [DONE]")

    def _on_event(self, event: bytes, when: float) -> None:
        try:
            self._read_event(json.loads(event), when)
        except (ValueError, AttributeError, TypeError, KeyError):
            problem = f"an event is not what the API promises: {event[:80]!r}"
            self._record.failure = self._record.failure or Failure("stream error", problem)

    def _read_event(self, data: Any, when: float) -> None:
        record = self._record
        if data.get("error"):
            record.failure = record.failure or Failure("stream error", error_message(data))
            return
        brought = False
        for choice in data.get("choices") or ():
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
            # Some servers send an event for a token that has no text yet; one that only ends the answer has none.
            brought = brought or bool(choice["text"]) or not choice.get("finish_reason")
        if data.get("usage"):
            record.completion_tokens = data["usage"].get("completion_tokens", record.completion_tokens)
        if brought:
            record.times.append(when)
