"""Streamed answers: pieces of text, then facts such as the number of tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from cli.talking.model import CHAT, COMPLETIONS, Model

SHORT = 0.1  # seconds


@dataclass(slots=True)
class ChatAnswer:
    """One streamed answer."""

    text: str = ""
    finish_reason: str | None = None  # "stop" or "length"; None if the answer was interrupted
    tokens: int | None = None  # the number of tokens of the answer; None if the server does not report it
    first: float | None = None  # seconds until the first piece
    seconds: float = 0.0  # seconds from the request to the end

    def line(self) -> str:
        """Tokens, time to first token and speed after it, in words. If all tokens came within a moment, the speed
        counts from the request too."""
        parts = [] if self.tokens is None else [f"{self.tokens} token{'s' * (self.tokens != 1)}"]
        if self.first is not None:
            parts.append(f"{self.first:.2f} s to the first")
            after, since = self.seconds - self.first, (self.tokens or 0) - 1
            if after < SHORT:
                after, since = self.seconds, since + 1
            if since > 0 and after > 0:
                parts.append(f"{since / after:.1f} tokens/s")
        return ", ".join(parts)


def stream(model: Model, body: dict[str, Any], answer: ChatAnswer) -> Iterator[str]:
    """The pieces of one answer as they arrive, including reasoning. `answer` holds the facts known so far. `body`: the
    request's body, with `messages` for a chat, or `prompt`. Raises TalkError if the request was refused, or the answer
    broke off."""
    path = CHAT if "messages" in body else COMPLETIONS
    asked = {"model": model.id, **body, "stream": True, "stream_options": {"include_usage": True}}
    start, thinks = time.perf_counter(), False
    with closing(model.wire.events(path, asked)) as events:  # closing the iterator ends the request
        for event in events:
            answer.seconds = time.perf_counter() - start
            for choice in event.get("choices") or ():
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                delta = choice.get("delta") or {}
                piece = choice.get("text") or delta.get("content") or ""
                thought = delta.get("reasoning_content") or ""
                if piece or thought:
                    answer.first = answer.seconds if answer.first is None else answer.first
                if thought:  # shown, but not part of the answer
                    yield thought
                    thinks = True
                if piece:
                    answer.text += piece
                    yield f"\n\n{piece}" if thinks else piece
                    thinks = False
            usage = event.get("usage") or {}
            answer.tokens = usage.get("completion_tokens", answer.tokens)


def whole(model: Model, body: dict[str, Any]) -> dict[str, Any]:
    """The whole body of an answer. Raises TalkError if the request was refused, or the answer broke off."""
    path = CHAT if "messages" in body else COMPLETIONS
    answer: dict[str, Any] = model.wire.json("POST", path, {"model": model.id, **body})
    return answer
