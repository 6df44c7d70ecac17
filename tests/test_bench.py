"""The parts of `octavo bench serve`: arrivals, lengths, prompts, traces, events, figures, options."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.cli import add_arguments, check
from cli.bench.client import Target, error_message
from cli.bench.lengths import parse_lengths
from cli.bench.load import arrivals
from cli.bench.measure import Distribution, Goals, inter_token, percentile, summarise
from cli.bench.prompts import WORDS, TextPrompts, TokenPrompts
from cli.bench.record import UNKNOWN, AnswerSink, Failure, Record
from cli.bench.sse import SseDecoder
from cli.bench.trace import read_trace
from cli.bench.workload import Workload
from cli.errors import BenchError, OptionError

WORKLOADS = Path(__file__).resolve().parents[2] / "shared" / "data" / "workloads"


# ---------------------------------------------------------------- arrivals and lengths


def gaps(rate: float, burstiness: float, seed: int, count: int = 20_000) -> np.ndarray[Any, Any]:
    times = list(itertools.islice(arrivals(rate, burstiness, seed), count + 1))
    assert times[0] == 0
    return np.diff(times)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_follow_the_gamma_distribution(burstiness: float) -> None:
    rate = 7.0
    drawn = gaps(rate, burstiness, seed=3)
    expected = scipy.stats.gamma(a=burstiness, scale=1 / (rate * burstiness))
    assert scipy.stats.kstest(drawn, expected.cdf).pvalue > 0.01
    assert drawn.mean() == pytest.approx(1 / rate, rel=0.03)


def test_arrivals_are_the_seed_s() -> None:
    assert (gaps(5, 1, seed=1, count=50) == gaps(5, 1, seed=1, count=50)).all()
    assert (gaps(5, 1, seed=1, count=50) != gaps(5, 1, seed=2, count=50)).all()
    assert (gaps(math.inf, 1, seed=1, count=50) == 0).all()


def test_lengths() -> None:
    rng = random.Random(0)
    fixed, spread = parse_lengths("128", "--input-len"), parse_lengths("3:6", "--input-len")
    assert {fixed.draw(rng) for _ in range(9)} == {128}
    assert {spread.draw(rng) for _ in range(200)} == {3, 4, 5, 6}
    assert (fixed.highest, spread.highest) == (128, 6)
    normal, lognormal = parse_lengths("normal:100:20", "-"), parse_lengths("lognormal:100:1", "-")
    assert np.mean([normal.draw(rng) for _ in range(4000)]) == pytest.approx(100, rel=0.02)
    drawn = [lognormal.draw(rng) for _ in range(4000)]
    assert np.median(drawn) == pytest.approx(100, rel=0.06)
    assert np.std(np.log(drawn)) == pytest.approx(1, rel=0.05)
    assert min(parse_lengths("normal:1:50", "-").draw(rng) for _ in range(100)) == 1


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "5:4", "0:4", "a", "1:2:3", "normal:5", "normal:0:1", "lognormal:5:-1"]
)
def test_wrong_lengths_are_named(text: str) -> None:
    with pytest.raises(OptionError, match="--output-len.*" + text):
        parse_lengths(text, "--output-len")


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


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def read(*events: Any, status: int = 200, done: bool = True) -> Record:
    """The record of a stream whose event i comes at second i."""
    record = Record(index=0, input_len=4, output_len=4, scheduled=0.0)
    sink = AnswerSink(record)
    sink.on_head(status, "text/event-stream; charset=utf-8")
    for when, event in enumerate(events):
        sink.on_data(b"data: " + json.dumps(event).encode() + b"\n\n", float(when))
    if done:
        sink.on_data(b"data: [DONE]\n\n", float(len(events)))
    record.ended = float(len(events))
    sink.finish()
    return record


def usage(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens, **fields}}


def test_one_token_per_event_where_the_usage_agrees() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 3}}
    record = read(completion("a"), completion("b"), completion("", finish_reason="length"), usage(2, **details))
    assert record.failure is None
    assert (list(record.times), list(record.counts)) == ([0, 1], [1, 1])
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (4, 2, 3)
    assert record.finish_reason == "length"


def test_tokens_that_came_together_are_not_guessed() -> None:
    record = read(completion("a"), completion("bcd", finish_reason="stop"), usage(5))
    assert list(record.counts) == [UNKNOWN, UNKNOWN]
    assert record.output_tokens == 5
    assert inter_token(record) == [1.0]  # per event


def test_token_ids_and_running_usage_tell_how_many_came_together() -> None:
    record = read(
        completion("a", token_ids=[1]), completion("bcd", token_ids=[2, 3, 4], finish_reason="stop"), usage(4)
    )
    assert list(record.counts) == [1, 3]
    assert inter_token(record) == pytest.approx([1 / 3] * 3)
    running = read(
        completion("a") | {"usage": {"completion_tokens": 2}}, completion("b") | {"usage": {"completion_tokens": 7}}
    )
    assert (list(running.counts), running.output_tokens) == ([2, 5], 7)


def test_the_role_and_the_end_are_no_tokens() -> None:
    record = read(chat(role="assistant", content=""), chat(content="a"), chat(reasoning_content="b"), chat(), usage(2))
    assert (list(record.times), list(record.counts)) == ([1, 2], [1, 1])
    tokens_without_text = read(completion(""), completion("a", finish_reason="stop"), usage(2))
    assert list(tokens_without_text.times) == [0, 1]


def test_without_usage_events_are_counted() -> None:
    record = read(completion("a"), completion("b", finish_reason="stop"))
    assert (record.completion_tokens, record.output_tokens) == (None, 2)
    assert summarise([record]).tokens_counted_by == "events"


@pytest.mark.parametrize(
    ("events", "kind", "message"),
    [
        ([completion("a"), {"error": {"message": "the engine died", "code": None}}], "stream error", "the engine died"),
        ([completion("a")], "incomplete", "finish_reason"),
        ([["no", "object"]], "stream error", "not what the API promises"),
        ([{"choices": ["x"]}], "stream error", "not what the API promises"),
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


# ---------------------------------------------------------------- figures


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpy_s(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_a_distribution_is_numpy_s(values: list[float]) -> None:
    found = Distribution.of(values)
    assert found is not None
    assert found.percentiles == pytest.approx(tuple(np.percentile(values, [50, 90, 95, 99])), abs=1e-9)
    assert (found.mean, found.std) == pytest.approx((np.mean(values), np.std(values)), abs=1e-6)
    assert (found.lowest, found.highest, found.count) == (min(values), max(values), len(values))
    assert Distribution.of([]) is None


def make(
    scheduled: float, sent: float, times: list[float], failure: str | None = None, tokens: int | None = None
) -> Record:
    return Record(
        index=0, input_len=10, output_len=4, scheduled=scheduled, sent=sent, ended=times[-1] + 0.5 if times else sent,
        times=array("d", times), counts=array("i", [1] * len(times)), prompt_tokens=10,
        completion_tokens=len(times) if tokens is None else tokens,
        failure=None if failure is None else Failure(failure, "why"),
    )  # fmt: skip


def test_latencies_count_from_when_a_request_was_due() -> None:
    """A client that could not send in time must not make the server look fast (coordinated omission)."""
    summary = summarise([make(scheduled=1.0, sent=6.0, times=[7.0, 8.0, 9.0])])
    assert summary.ttft is not None
    assert summary.ttft.mean == 6.0
    assert summary.e2e is not None
    assert summary.e2e.mean == 8.5
    assert summary.lag is not None
    assert summary.lag.mean == 5.0
    assert summary.tpot is not None
    assert summary.tpot.mean == 1.0


def test_throughput_and_errors() -> None:
    records = [
        make(0.0, 0.0, [1.0, 2.0, 3.0]),
        make(1.0, 1.0, [2.0, 4.0]),
        make(1.0, 1.0, [], failure="http 503"),
        make(1.0, 1.0, [], failure="http 503"),
        make(2.0, 2.0, [3.0, 4.0], failure="stream error"),
        make(3.0, 3.0, [9.0], failure="interrupted"),
    ]
    summary = summarise(records, Goals(ttft=1.0, tpot=1.5))
    assert (summary.completed, summary.failed, summary.interrupted) == (2, 3, 1)
    assert summary.errors == {"http 503": 2, "stream error": 1}
    assert summary.seconds == 4.5
    assert (summary.input_tokens, summary.output_tokens) == (20, 5)
    assert summary.request_throughput == pytest.approx(2 / 4.5)
    assert summary.output_throughput == pytest.approx(5 / 4.5)
    assert summary.total_throughput == pytest.approx(25 / 4.5)
    assert summary.itl is not None
    assert (summary.itl.count, summary.itl.mean) == (3, pytest.approx(4 / 3))
    assert summary.good == 1  # the second one took 2 s per token
    assert summarise(records, Goals(ttft=1.0)).good == 2
    assert summarise(records, Goals(ttft=0.5)).good == 0
    assert summarise(records).good is None


def test_nothing_completed_is_no_division_by_zero() -> None:
    for records in ([], [make(0, 0, [], failure="connection")]):
        summary = summarise(records)
        assert (summary.completed, summary.output_throughput, summary.ttft) == (0, 0.0, None)


# ---------------------------------------------------------------- traces


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_trace_in_mooncake_s_form(tmp_path: Path) -> None:
    rows = read_trace(write(
        tmp_path,
        {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 2]},
        "",
        {"timestamp": 1000, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]},
    ))  # fmt: skip
    assert [(row.arrival, row.input_len, row.output_len, row.hash_ids) for row in rows] == [
        (0.0, 600, 7, (0, 1)),
        (2.0, 700, 5, (0, 2)),
    ]


def test_a_trace_in_azure_s_form(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.9799600,4808,10\n"
        "2023-11-17 00:00:01.2299600,110,27\n"
    )
    rows = read_trace(path)
    assert [(row.input_len, row.output_len) for row in rows] == [(4808, 10), (110, 27)]
    assert [row.arrival for row in rows] == pytest.approx([0, 1.25])


def test_texts_and_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows = read_trace(write(
        tmp_path, {"prompt": "once"}, {"prompt": [1, 2], "output_tokens": 3}, {"turns": ["why?", "and?"]},
        {"messages": messages},
    ))  # fmt: skip
    assert [row.prompt for row in rows] == ["once", [1, 2], "why?", None]
    assert rows[3].messages == messages
    assert [row.arrival for row in rows] == [None] * 4
    assert len(read_trace(tmp_path / "trace.jsonl", limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ({"output_length": 3}, "the input is missing: one of prompt"),
        ({"input_length": 0}, "input_length must be an integer of at least 1, got 0"),
        ({"input_length": "5"}, "input_length .* got '5'"),
        ({"input_length": 5, "output_length": 1.5}, "output_length .* got 1.5"),
        ({"input_length": 5, "timestamp": -1}, "timestamp must be a number of at least 0, got -1"),
        ({"input_length": 5, "timestamp": "now"}, "timestamp"),
        ({"input_length": 5, "hash_ids": ["a"]}, "hash_ids"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"turns": [3]}, "turns"),
        ({"messages": ["a"]}, "messages"),
        ({"input_length": 5, "arrival": 1}, "either all lines must have an arrival time, or none"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path, {"input_length": 5}, line)
    with pytest.raises(BenchError, match=f"trace.jsonl:2: .*{message}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens\n1,2\n", "trace.csv:1: the header lacks GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,2,3\n", "trace.csv:2: TIMESTAMP must be a date"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,2,x\n", "trace.csv:2: GeneratedTokens .* 'x'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,2\n", "trace.csv:2: expected TIMESTAMP"),
        ("\n", "has no requests"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BenchError, match=message):
        read_trace(path)
    with pytest.raises(BenchError, match="No such file"):
        read_trace(tmp_path / "other")


@pytest.mark.skipif(not WORKLOADS.is_dir(), reason="the real traces are not here")
def test_real_traces() -> None:
    conversation = read_trace(WORKLOADS / "mooncake" / "conversation_trace.jsonl")
    assert len(conversation) == 12_031
    assert np.mean([row.input_len or 0 for row in conversation]) == pytest.approx(12_035, rel=0.001)
    code = read_trace(WORKLOADS / "azure_llm_2023" / "AzureLLMInferenceTrace_code.csv")
    assert (code[0].input_len, code[0].output_len) == (4808, 10)
    assert code[1].arrival == pytest.approx(0.052)
    assert all(row.arrival is not None and row.arrival >= 0 for row in code)
    questions = read_trace(WORKLOADS / "mt_bench" / "question.jsonl")
    assert isinstance(questions[0].prompt, str)
    assert questions[0].prompt.startswith("Compose an engaging travel blog post")


# ---------------------------------------------------------------- what is sent


def workload(**fields: Any) -> Workload:
    one = parse_lengths("8", "-")
    given = {"model": "m", "chat": False, "maker": TokenPrompts(range(100)), "input_len": one, "output_len": one}
    return Workload(**(given | fields))


def bodies(work: Workload, count: int | None = None) -> list[dict[str, Any]]:
    return [json.loads(job.body) for job in work.jobs(count)]


def test_random_prompts_are_exact_and_the_seed_s() -> None:
    work = workload(input_len=parse_lengths("5:9", "-"), output_len=parse_lengths("2:3", "-"), seed=4)
    sent = bodies(work, 40)
    assert {len(body["prompt"]) for body in sent} == {5, 6, 7, 8, 9}
    assert {body["max_tokens"] for body in sent} == {2, 3}
    assert all(0 <= token < 100 for body in sent for token in body["prompt"])
    assert sent == bodies(work, 40)
    assert sent[:10] == bodies(work, 10)
    assert all(one["prompt"] != other["prompt"] for one, other in itertools.combinations(sent, 2))
    assert sent != bodies(workload(input_len=work.input_len, output_len=work.output_len, seed=5), 40)
    assert sent[0]["prompt"] != json.loads(next(work.warmup(1)).body)["prompt"]


def test_shared_prefixes() -> None:
    sent = bodies(workload(prefix_len=6, num_prefixes=3), 60)
    assert {len(body["prompt"]) for body in sent} == {14}
    assert len({tuple(body["prompt"][:6]) for body in sent}) == 3
    assert len({tuple(body["prompt"][6:]) for body in sent}) == 60


def test_hash_ids_become_shared_tokens(tmp_path: Path) -> None:
    rows = read_trace(write(
        tmp_path,
        {"input_length": 1100, "hash_ids": [7, 8, 9]},
        {"input_length": 1200, "hash_ids": [7, 8, 5]},
        {"input_length": 300, "hash_ids": [6]},
    ))  # fmt: skip
    one, two, three = (body["prompt"] for body in bodies(workload(trace=rows)))
    assert (len(one), len(two), len(three)) == (1100, 1200, 300)
    assert one[:1024] == two[:1024]
    assert one[1024:1100] != two[1024:1100]
    assert three[:100] != one[:100]
    one, two, three = (body["prompt"] for body in bodies(workload(trace=rows, scale=0.125)))
    assert (len(one), len(two), len(three)) == (138, 150, 38)
    assert one[:128] == two[:128] != one[1:129]
    cut = bodies(workload(trace=rows, max_input_len=50, max_output_len=3))
    assert [(len(body["prompt"]), body["max_tokens"]) for body in cut] == [(50, 3)] * 3


def test_bodies() -> None:
    (plain,) = bodies(workload(), 1)
    assert plain | {"prompt": None} == {
        "model": "m", "prompt": None, "max_tokens": 8, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    (other,) = bodies(
        workload(
            chat=True, maker=TextPrompts(1.0), stream=False, ignore_eos=False, return_token_ids=True,
            extra_body={"temperature": 1, "top_k": 5},
        ),
        1,
    )  # fmt: skip
    (message,) = other.pop("messages")
    assert message["role"] == "user"
    assert len(message["content"].split()) == 8
    assert set(message["content"].split()) <= set(WORDS)
    assert other == {"model": "m", "max_tokens": 8, "temperature": 1, "return_token_ids": True, "top_k": 5}


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--concurrency 2 --request-rate 3", "--concurrency and --request-rate exclude"),
        ("--trace t --input-len 3", "--trace and --input-len exclude"),
        ("--trace t --prefix-len 3", "--trace and --prefix-len exclude"),
        ("--trace t --concurrency 2 --trace-speed 2", "--trace-speed"),
        ("--burstiness 2", "--burstiness needs --request-rate"),
        ("--trace-scale 2", "--trace-scale needs --trace"),
        ("--save-requests", "--save-requests needs --json"),
        ("--num-prefixes 2", "--num-prefixes needs --prefix-len"),
        ("--endpoint chat --prompts ids", "--prompts ids needs --endpoint completions"),
        ("--prompts text --vocab-size 5", "--vocab-size needs --prompts ids"),
        ("--no-stream --slo-ttft 5", "--slo-ttft needs --stream"),
        ("--num-requests 0", "--num-requests must be at least 1, got 0"),
        ("--warmup -1", "--warmup must be at least 0, got -1"),
        ("--timeout 0", "--timeout must be a number above 0, got 0"),
        ("--duration nan", "--duration must be"),
        ("--request-rate 0", "--request-rate must be a number above 0 or inf, got '0'"),
        ("--request-rate fast", "--request-rate"),
        ("--request-rate inf --duration 3", "--request-rate inf"),
        ("--extra-body {", "--extra-body is not JSON"),
        ("--extra-body [1]", "--extra-body must be a JSON object"),
        ('--extra-body {"stream":true}', "--extra-body must not hold stream"),
        ("--json /no/such/folder/x.json", "the folder does not exist"),
    ],
)
def test_contradictory_and_wrong_options(arguments: str, message: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(OptionError, match=message):
        check(parser.parse_args(arguments.split()))


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
        with pytest.raises(OptionError, match="--url"):
            Target.parse(wrong)
    with pytest.raises(OptionError, match="--api-key"):
        Target.parse("http://x", "a\r\nb")
