"""The times of a request in llama.cpp's form."""

from __future__ import annotations

import time

from server.answering.observation import RequestRecord
from server.api.schemas import Timings


def timings_of(record: RequestRecord) -> Timings:
    """The times so far: a prompt is read from its first step to the first token, then the answer is written."""
    usage, phases, now = record.usage(), record.phases(), time.monotonic()

    def milliseconds(phase: str) -> float:
        start, end = phases.get(phase, (now, now))
        return max(0.0, (now if end is None else end) - start) * 1000

    read, read_ms = usage.prompt_tokens - usage.cached_tokens, milliseconds("prefill")
    written, written_ms = usage.completion_tokens, milliseconds("decode")
    return Timings(
        cache_n=usage.cached_tokens,
        prompt_n=read,
        prompt_ms=read_ms,
        prompt_per_token_ms=read_ms / max(read, 1),
        prompt_per_second=1000 * read / read_ms if read_ms else 0.0,
        predicted_n=written,
        predicted_ms=written_ms,
        predicted_per_token_ms=written_ms / max(written, 1),
        predicted_per_second=1000 * written / written_ms if written_ms else 0.0,
    )
