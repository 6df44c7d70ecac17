"""`benchmarks/load`: its HTTP client, events, records, and a closed load."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_server import FakeServer

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from load.client import Client, Target, error_message
from load.closed import send, streamed
from load.record import AnswerSink, Record
from load.sse import SseDecoder

# ---------------------------------------------------------------- events


def decode(stream: bytes, cuts: list[int]) -> list[bytes]:
    decoder, events = SseDecoder(), []
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(edges):
        events += decoder.feed(stream[start:end])
    return events


PAYLOAD = st.text(
    alphabet=st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), min_size=1, max_size=20
)
NOISE = st.sampled_from(["", ": keep-alive\n\n", ":\n", "event: message\n", "id: 7\nretry: 10\n"])


@given(
    events=st.lists(st.tuples(NOISE, st.lists(PAYLOAD, min_size=1, max_size=3)), max_size=6),
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    mark=st.booleans(),
    space=st.booleans(),
)
def test_events_come_out_however_the_bytes_are_split(
    events: list[tuple[str, list[str]]], cuts: list[int], end: str, mark: bool, space: bool
) -> None:
    text = ""
    for noise, lines in events:
        text += noise + "".join(f"data:{' ' if space or line.startswith(' ') else ''}{line}\n" for line in lines) + "\n"
    stream = ("\ufeff" if mark else "").encode() + text.replace("\n", end).encode()
    wanted = ["\n".join(lines).encode() for _, lines in events]
    # A last carriage return may be half of a line's end, so it shows only with what follows it.
    assert decode(stream + (b":" if end == "\r" else b""), cuts) == wanted


def test_an_event_that_is_cut_off_never_comes() -> None:
    assert decode(b"data: 1\n\ndata: 2\n", []) == [b"1"]


def completion(text: str, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **fields}]}


def read(*events: Any, status: int = 200, kind: str = "text/event-stream; charset=utf-8", done: bool = True) -> Record:
    """The record of a stream whose event i comes at second i."""
    record = Record(index=0, output_len=4, sent=0.0)
    sink = AnswerSink(record)
    sink.on_head(status, kind)
    for when, event in enumerate(events):
        sink.on_data(b"data: " + json.dumps(event).encode() + b"\n\n", float(when))
    if done:
        sink.on_data(b"data: [DONE]\n\n", float(len(events)))
    record.ended = float(len(events))
    sink.finish()
    return record


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}}


def test_the_server_counts_the_tokens() -> None:
    record = read(completion("a"), completion("bcd", finish_reason="stop"), usage(5))
    assert (record.failure, list(record.times), record.output_tokens) == (None, [0, 1], 5)
    assert record.finish_reason == "stop"
    uncounted = read(completion("a"), completion("b", finish_reason="stop"))
    assert (uncounted.completion_tokens, uncounted.output_tokens) == (None, 2)


def test_the_end_is_no_token() -> None:
    """A token may have no text yet; an event that only ends the answer is none."""
    record = read(completion(""), completion("a"), completion("", finish_reason="stop"), usage(2))
    assert list(record.times) == [0, 1]


@pytest.mark.parametrize(
    ("events", "kind", "message"),
    [
        ([completion("a"), {"error": {"message": "the engine died", "code": None}}], "stream error", "the engine died"),
        ([completion("a")], "incomplete", "finish_reason"),
        ([["no", "object"]], "stream error", "not what the API promises"),
        ([{"choices": ["x"]}], "stream error", "not what the API promises"),
        ([{"choices": [{}]}], "stream error", "not what the API promises"),
    ],
)
def test_a_stream_that_goes_wrong(events: list[Any], kind: str, message: str) -> None:
    record = read(*events, done=False)
    assert record.failure is not None
    assert record.failure.kind == kind
    assert message in record.failure.message


def test_error_bodies_of_several_servers() -> None:
    assert error_message({"error": {"message": "too long", "code": 400}}) == "too long"
    assert error_message({"detail": "Not Found"}) == "Not Found"
    assert error_message("<html>\n Bad   Gateway") == "<html> Bad Gateway"
    assert len(error_message("x" * 5000)) < 400


# ---------------------------------------------------------------- the load


def load(server: FakeServer, count: int, concurrency: int, timeout: float = 60.0) -> list[Record]:
    """The records of `count` requests for two tokens each."""

    async def run() -> list[Record]:
        client = Client(Target.parse(server.url))
        jobs = [streamed(index, [1, 2], 2) for index in range(count)]
        try:
            return await send(client, "/v1/completions", jobs, concurrency, timeout)
        finally:
            client.close()

    return asyncio.run(run())


def test_a_closed_load() -> None:
    async def gather(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        while len(server.bodies) < 6:
            await asyncio.sleep(0.001)
        return False

    with FakeServer() as server:
        server.token_delay, server.play = 0.002, gather
        records = load(server, 30, 6)
        assert server.most_running == 6
        assert server.connections == 6, "they are used again"
    assert server.bodies[0] == {
        "prompt": [1, 2], "max_tokens": 2, "temperature": 0.0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert sorted(record.index for record in records) == list(range(30))
    for record in records:
        assert (record.failure, record.output_tokens, len(record.times)) == (None, 2, 2)
        assert record.sent + 0.002 <= record.times[0] <= record.times[1] <= record.ended


def test_failures_are_recorded() -> None:
    async def by_turns(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        number = len(server.bodies) % 4
        if number == 0:
            server.whole(writer, 503, {"error": {"message": "too many requests wait", "code": "overloaded"}})
        elif number == 1:
            server.begin(writer)
            server.event(writer, server.piece("", "x", None))
            await writer.drain()
            writer.close()
        elif number == 2:
            await asyncio.Event().wait()
        return number < 3

    with FakeServer() as server:
        server.play = by_turns
        records = load(server, 4, 4, timeout=1.0)
    found = {record.failure.kind: record.failure.message for record in records if record.failure}
    assert set(found) == {"http 503", "connection", "timeout"}
    assert found["http 503"] == "too many requests wait"
    assert "closed the connection" in found["connection"]
    assert "within 1 seconds" in found["timeout"]


def test_a_server_that_closes_after_each_answer() -> None:
    """A connection that was closed meanwhile is no error."""
    with FakeServer() as server:
        server.keep_alive = False
        assert not any(record.failure for record in load(server, 20, 2))
    assert server.connections >= 20


def test_urls() -> None:
    target = Target.parse("http://[::1]:81/some/where/v1/", "key")
    assert (target.host, target.port, target.prefix, target.tls) == ("::1", 81, "/some/where", None)
    head = target.head("POST", "/v1/completions", 3).decode()
    assert head.startswith("POST /some/where/v1/completions HTTP/1.1\r\nHost: [::1]:81\r\n")
    assert "\r\nAuthorization: Bearer key\r\n" in head
    secure = Target.parse("https://example.org")
    assert (secure.port, secure.prefix) == (443, "")
    assert secure.tls is not None
    for wrong in ("localhost:8000", "ftp://x", "http://", "http://x:y", "http://x?a=b"):
        with pytest.raises(ValueError, match="--url"):
            Target.parse(wrong)
    with pytest.raises(ValueError, match="--api-key"):
        Target.parse("http://x", "a\r\nb")
