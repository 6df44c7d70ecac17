"""An answer as a client sees it, whole or streamed, and what is wrong with its form: each choice ends exactly once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from load.sse import DONE, SseDecoder


@dataclass(slots=True)
class Choice:
    """One choice of an answer, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Answer:
    """Takes an answer as it arrives (a sink of `load.client.Client`).

    Attributes:
        status: 0 until the head has come.
        choices: by index.
        error: code of the error that was answered, or that ended the stream.
        num_events: events of the stream so far.
        faults: what no answer may do, in words.
    """

    def __init__(self) -> None:
        self.status = 0
        self.streamed = False
        self.choices: dict[int, Choice] = {}
        self.error: str | None = None
        self.num_events = 0
        self.faults: list[str] = []
        self._sse = SseDecoder()
        self._whole = bytearray()
        self._done = False

    def on_head(self, status: int, content_type: str) -> None:
        """The status and headers have come."""
        self.status = status
        self.streamed = content_type.startswith("text/event-stream")

    def on_data(self, data: bytes, when: float) -> None:
        """A piece of the body has come."""
        if not self.streamed:
            self._whole += data
            return
        for event in self._sse.feed(data):
            self._take_event(event)

    def body(self) -> Any:
        """The body of an answer that is no stream, read as JSON; None if it is none."""
        try:
            return json.loads(self._whole)
        except ValueError:
            return None

    def finish(self, num_choices: int) -> None:
        """The answer is complete, as HTTP goes: note what is missing. `num_choices` is how many were asked for."""
        if self.streamed:
            if self._done == (self.error is not None):
                self.faults.append(
                    "a stream ended with [DONE] and an error" if self._done else "a stream ended without [DONE]"
                )
        else:
            self._take_whole()
        if self.error is not None or self.status != 200 or not num_choices:
            return
        if missing := set(range(num_choices)) - set(self.choices):
            self.faults.append(f"choices {sorted(missing)} never came")
        for index, choice in self.choices.items():
            if index >= num_choices:
                self.faults.append(f"choice {index} was not asked for")
            if choice.finish_reason is None:
                self.faults.append(f"choice {index} has no finish_reason")

    def _take_event(self, data: bytes) -> None:
        self.num_events += 1
        if self._done:
            self.faults.append("an event came after [DONE]")
        elif self.error is not None:
            self.faults.append("an event came after the error")
        elif data == DONE:
            self._done = True
        else:
            self._take_chunk(data)

    def _take_chunk(self, data: bytes) -> None:
        try:
            chunk = json.loads(data)
        except ValueError:
            self.faults.append(f"an event is no JSON: {data[:80]!r}")
            return
        if "error" in chunk:
            self.error = str(chunk["error"].get("code"))
            return
        for piece in chunk["choices"]:
            text = piece["delta"].get("content") if "delta" in piece else piece["text"]
            self._add(piece, text or "")

    def _take_whole(self) -> None:
        body = self.body()
        if not isinstance(body, dict):
            self.faults.append("the answer is no JSON object")
        elif self.status != 200:
            self.error = str(body.get("error", {}).get("code"))
        else:
            for piece in body.get("choices", ()):
                self._add(piece, (piece["message"]["content"] if "message" in piece else piece["text"]) or "")

    def _add(self, piece: dict[str, Any], text: str) -> None:
        choice = self.choices.setdefault(piece["index"], Choice())
        if choice.finish_reason is not None:
            self.faults.append(f"choice {piece['index']} went on after it had ended ({choice.finish_reason})")
        choice.text += text
        choice.token_ids += piece.get("token_ids") or ()
        choice.finish_reason = piece.get("finish_reason") or choice.finish_reason
