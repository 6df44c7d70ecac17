"""`benchmarks/soak.py`: it finds what it is there to find, and its short form finds nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.service import environment

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from load.client import Target  # noqa: E402
from soaking import checks, shapes  # noqa: E402
from soaking.answers import Answer, Choice  # noqa: E402
from soaking.cases import COMPLETIONS, Case, make_cases  # noqa: E402
from soaking.checks import Sample, Tolerances, Usage  # noqa: E402
from soaking.comparing import differences, vector_differences  # noqa: E402
from soaking.ledger import Fate, Ledger  # noqa: E402
from soaking.raw import RawConnection  # noqa: E402

CASE = Case("several-1", COMPLETIONS, {"prompt": "a"}, 2)


# ---------------------------------------------------------------- the form of an answer


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def piece(index: int, text: str, ids: list[int], reason: str | None = None) -> str:
    return event(choices=[{"index": index, "text": text, "token_ids": ids, "finish_reason": reason}])


DONE = "data: [DONE]\n\n"
WHOLE = piece(0, "ab", [1]) + piece(1, "x", [7], "stop") + piece(0, "c", [2, 3], "length") + DONE


def streamed(text: str) -> Answer:
    answer = Answer()
    answer.on_head(200, "text/event-stream; charset=utf-8")
    for start in range(0, len(text), 11):
        answer.on_data(text[start : start + 11].encode(), 0.0)
    answer.finish(2)
    return answer


def test_a_stream_in_order() -> None:
    answer = streamed(WHOLE)
    assert answer.faults == []
    assert answer.choices == {0: Choice("abc", [1, 2, 3], "length"), 1: Choice("x", [7], "stop")}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (WHOLE.replace(DONE, ""), "without [DONE]"),
        (WHOLE + DONE, "after [DONE]"),
        (WHOLE.replace(DONE, piece(1, "", [], "stop") + DONE), "choice 1 went on after it had ended"),
        (piece(0, "a", [1], "stop") + DONE, "choices [1] never came"),
        (piece(0, "a", [1]) + piece(1, "x", [7], "stop") + DONE, "choice 0 has no finish_reason"),
        (event(error={"code": "engine_dead"}) + DONE, "after the error"),
        (piece(2, "a", [1], "stop") + WHOLE, "choice 2 was not asked for"),
    ],
)
def test_a_stream_that_does_not_end_once(text: str, fault: str) -> None:
    assert any(fault in found for found in streamed(text).faults)


def test_a_stream_that_an_error_ends_is_no_fault() -> None:
    answer = streamed(piece(0, "a", [1]) + event(error={"code": "engine_dead"}))
    assert (answer.error, answer.faults) == ("engine_dead", [])


# ---------------------------------------------------------------- against the answer alone

ALONE = {0: Choice("abcdef", [1, 2, 3, 4, 5], "length")}


@pytest.mark.parametrize(
    ("got", "cut", "problem"),
    [
        (ALONE[0], False, None),
        (Choice("abc", [1, 2, 3]), True, None),
        (Choice("", []), True, None),
        (Choice("abcdef", [1, 2, 2, 3, 4, 5], "length"), False, "token 2 of 5 is doubled"),
        (Choice("abcdef", [1, 2, 4, 5], "length"), False, "token 2 of 5 is lost"),
        (Choice("abc", [1, 2, 2]), True, "token 2 of 5"),
        (Choice("abc", [1, 2, 9, 4, 5], "length"), False, "token 2 of 5 differs"),
        (Choice("abccdef", [1, 2, 3, 4, 5], "length"), False, "character 3 of 6 is doubled"),
        (Choice("abc", [1, 2, 3]), False, "token 3 of 5"),
        (Choice("abcdef", [1, 2, 3, 4, 5], "stop"), False, "ended with stop, alone with length"),
    ],
)
def test_differences(got: Choice, cut: bool, problem: str | None) -> None:
    found = differences(ALONE, {0: got}, cut=cut)
    if problem is None:
        assert found == []
    else:
        assert len(found) == 1
        assert problem in found[0]


def test_vectors_that_differ() -> None:
    def of(*vectors: list[float]) -> dict[str, Any]:
        return {"data": [{"embedding": vector} for vector in vectors]}

    assert vector_differences(of([1, 0], [0, 1]), of([1, 0], [1e-6, 1])) == []
    assert vector_differences(of([1, 0]), of([0, 1])) == ["vector 0 is off by 1.4e+00"]
    assert vector_differences(of([1, 0]), of([float("nan"), 0]))
    assert vector_differences(of([1, 0], [0, 1]), of([1, 0]))
    assert vector_differences({"tokens": [1]}, {"tokens": [2]})


# ---------------------------------------------------------------- counters, log, leaks


def success(reason: str) -> str:
    return f'octavo_request_success_total{{finished_reason="{reason}"}}'


def rejected(reason: str) -> str:
    return f'octavo_requests_rejected_total{{reason="{reason}"}}'


def aborted(reason: str) -> str:
    return f'octavo_requests_aborted_total{{reason="{reason}"}}'


QUIET = {
    **{success(reason): 5.0 for reason in ("stop", "length", "abort", "error")},
    **{
        rejected(reason): 0.0
        for reason in ("queue_full", "queue_time", "queued_tokens", "engine_dead", "shutting_down")
    },
    **{aborted(reason): 0.0 for reason in ("disconnect", "stall", "shutdown", "deadline", "error")},
    "octavo_engine_restarts_total": 1.0,
}
LEFT = streamed(piece(0, "a", [1], "stop"))


def ledger_of(*entries: tuple[Fate, Answer]) -> Ledger:
    made = Ledger()
    for number, (fate, answer) in enumerate(entries):
        made.enter(f"id-{number}", CASE, answer, fate)
    return made


def test_counters_that_agree() -> None:
    ledger = ledger_of(("complete", streamed(WHOLE)), ("left", LEFT), ("refused", Answer()))
    after = QUIET | {
        success("stop"): 7.0,
        success("length"): 6.0,
        success("abort"): 6.0,
        rejected("queue_full"): 1.0,
        aborted("disconnect"): 1.0,
    }
    assert checks.check_counters(QUIET, after, ledger, kills=0) == []
    # The one that was left may have ended otherwise just as well.
    after |= {success("abort"): 5.0, success("length"): 7.0}
    assert checks.check_counters(QUIET, after, ledger, kills=0) == []


def test_malformed_requests_that_were_refused_unread_count_as_well() -> None:
    after = QUIET | {rejected("queue_full"): 1.0}
    ledger = Ledger()
    assert checks.check_counters(QUIET, after, ledger, kills=0)
    ledger.bad_away["overloaded"] += 1
    assert checks.check_counters(QUIET, after, ledger, kills=0) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (success("stop"), 8),  # counted twice
        (success("length"), 5),  # forgotten
        (rejected("queue_full"), 0),
        (rejected("shutting_down"), 1),
        (aborted("disconnect"), 9),
        ("octavo_engine_restarts_total", 2),
    ],
)
def test_counters_that_do_not_agree(name: str, value: float) -> None:
    ledger = ledger_of(("complete", streamed(WHOLE)), ("refused", Answer()))
    after = QUIET | {
        success("stop"): 6.0,
        success("length"): 6.0,
        rejected("queue_full"): 1.0,
    }
    assert checks.check_counters(QUIET, after, ledger, kills=0) == []
    assert checks.check_counters(QUIET, after | {name: value}, ledger, kills=0)


def test_a_request_that_never_ended_is_missing_among_the_counts() -> None:
    ledger = ledger_of(("left", LEFT))  # one choice ended, the other one must have, too
    assert checks.check_counters(QUIET, QUIET | {success("stop"): 6.0}, ledger, kills=0) == [
        "1 answers were counted; the clients know of 2 to 2"
    ]


async def answer_late(pause: float, connections: int) -> list[int]:
    """The statuses that senders get; the answers come at moments that are spread over a pause."""

    served = itertools.count()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(pause * (2 + next(served) / connections))
        writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def ask(target: Target) -> int:
        answer = Answer()
        async with RawConnection(target, answer) as connection:
            await connection.send(itertools.repeat(b" "), pause)
            await connection.receive_all()
        return answer.status

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=connections)
    async with server:
        target = Target.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        return await asyncio.gather(*(ask(target) for _ in range(connections)))


def test_an_answer_at_the_end_of_a_pause_is_not_lost() -> None:
    assert asyncio.run(answer_late(0.05, 400)) == [408] * 400


def ends(*outcomes: tuple[str, str]) -> Iterator[Mapping[str, Any]]:
    return ({"logger": "octavo.request", "request_id": name, "outcome": outcome} for name, outcome in outcomes)


def test_the_log_has_each_end_once() -> None:
    ledger = ledger_of(("complete", streamed(WHOLE)), ("left", LEFT))
    good = [("id-0", "ok"), ("id-1", "aborted:disconnect"), ("another's", "error")]
    assert checks.check_log(ends(*good), ledger) == []
    assert checks.check_log(ends(*good, good[0]), ledger) == ["request id-0 ended 2 times: ['ok', 'ok']"]
    assert checks.check_log(ends(good[0]), ledger) == ["request id-1 (left) never ended in the log"]
    (line,) = checks.check_log(ends(("id-0", "error"), good[1]), ledger)
    assert line == "request id-0 was complete to the client, and error to the server"


def test_the_log_has_no_surprises() -> None:
    killed = {"level": "error", "event": "The engine crashed: the engine's process was killed by SIGKILL (perhaps)"}
    assert checks.check_log([killed], Ledger()) == []
    assert checks.check_log([{"level": "info", "event": "e", "exception": "Traceback"}], Ledger()) == [
        "the log has 1 times: e"
    ]


def test_what_is_not_at_rest() -> None:
    quiet = {
        'octavo_kv_pages{state="held"}': 0.0, 'octavo_kv_pages{state="free"}': 3.0,
        'octavo_kv_pages{state="cached"}': 5.0, "octavo_num_requests_running": 0.0,
        "octavo_num_requests_waiting": 0.0, "octavo_num_requests_in_service": 0.0, "octavo_num_queued_tokens": 0.0,
    }  # fmt: skip
    assert checks.check_empty(quiet) == []
    assert checks.num_pages(quiet) == 8
    for name in ('octavo_kv_pages{state="held"}', "octavo_num_queued_tokens", "octavo_num_requests_in_service"):
        assert len(checks.check_empty(quiet | {name: 1.0})) == 1
    assert checks.check_empty({name: 0.0 for name in quiet if "running" not in name}), "a gauge that is gone"


@pytest.mark.parametrize(("what", "more"), [("rss_mib", 33.0), ("descriptors", 5), ("threads", 9)])
def test_a_leak_at_rest(what: str, more: float) -> None:
    before = Usage(100.0, 20, 8)
    values = {name: getattr(before, name) for name in ("rss_mib", "descriptors", "threads")}
    within = Usage(**(values | {what: values[what] + more - 1}))  # type: ignore[arg-type]
    beyond = Usage(**(values | {what: values[what] + more}))  # type: ignore[arg-type]
    assert checks.check_usage("api", before, within, Tolerances()) == []
    (line,) = checks.check_usage("api", before, beyond, Tolerances())
    assert what in line


def growing(mib_per_hour: float, pid: int = 1, begin: float = 0.0) -> list[Sample]:
    noise = random.Random(pid)
    return [
        Sample(begin + second, pid, 400 + mib_per_hour * second / 3600 + noise.uniform(-2, 2))
        for second in range(0, 1800, 2)
    ]


def test_a_leak_under_load() -> None:
    assert checks.check_slope("api", growing(10), Tolerances()) == []
    (line,) = checks.check_slope("api", growing(60), Tolerances())
    assert "MiB an hour" in line
    # A successor begins lower; that is no sign of a predecessor that did not grow.
    assert checks.check_slope("engine", growing(60) + growing(60, pid=2, begin=1800), Tolerances())
    # Too short to tell.
    assert checks.slope(growing(60)[:300], Tolerances()) is None


# ---------------------------------------------------------------- what is asked


def test_cases_are_all_kinds_and_fit() -> None:
    made = make_cases(48, shapes.synthetic(random.Random(1)), 512, [5, 6, 7], random.Random(2))
    again = make_cases(48, shapes.synthetic(random.Random(1)), 512, [5, 6, 7], random.Random(2))
    assert made == again
    assert len({case.name.partition("-")[0] for case in made}) == 12
    assert all(case.body["max_tokens"] <= 154 for case in made if case.streams)
    assert {len(case.body["prompt"]) for case in made if case.name.startswith("prompts")} == {2}


def test_shapes_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    rows = [{"timestamp": 1000 * n, "input_length": 10 * n + 1, "output_length": n + 1} for n in range(20)]
    (tmp_path / "deep" / "one.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "questions.jsonl").write_text(json.dumps({"turns": ["Why?", "And then?"]}))
    (tmp_path / "other.jsonl").write_text('{"something": "else"}\n')
    found = shapes.from_folder(tmp_path, random.Random(0))
    assert list(found.texts) == ["Why?"]
    assert set(found.gaps) == {1.0}
    assert max(found.lengths) == (1.0, 1.0)
    assert found.source == "one.jsonl, questions.jsonl"
    (tmp_path / "empty").mkdir()
    with pytest.raises(Exception, match="holds no trace"):
        shapes.from_folder(tmp_path / "empty", random.Random(0))


# ---------------------------------------------------------------- the real thing


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_short_form(tmp_path: Path) -> None:
    """Half a minute of load; what it is there for has happened, and nothing else."""
    output, log = tmp_path / "soak.json", tmp_path / "service.log"
    command = [
        sys.executable, str(BENCHMARKS / "soak.py"), "--minutes", "0.5", "--kill-every", "12", "--cases", "48",
        "--output", str(output), "--log", str(log),
    ]  # fmt: skip
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(output.read_text())
    assert found["violations"] == found["dropped_cases"] == []
    assert found["kills"] == found["counters"]["octavo_engine_restarts_total"] > 0
    assert found["compared"] > 50
    for fate in ("complete", "left", "dead"):
        assert found["requests"][fate] > 0, fate
    assert len(found["requests_by_kind"]) == 13


def test_a_service_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "soak.py"), "--url", "http://127.0.0.1:1", "--minutes", "0.1"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (ran.returncode, len(ran.stderr.splitlines())) == (1, 1), ran.stderr
