"""`octavo bench offline`, its figures, and the answer to `octavo bench serve`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.bench.figures import Level, Record, distribution
from cli.bench.lengths import parse_lengths
from cli.errors import OptionError
from cli.main import main
from server.config.settings import DEMO_MODEL

FEW = ("--num-requests", "5", "--input-len", "5:9", "--output-len", "4", "--warmup", "1")


def test_the_engine_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert (
        main(["bench", "offline", *FEW, "--concurrency", "2", "--json", str(path), "--save-requests", "--quiet"]) == 0
    )
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["benchmark"] == "offline"
    assert result["settings"]["concurrency"] == 2
    assert result["requests"]["completed"] == 5
    assert result["tokens"]["output"] == 20
    assert result["tokens"]["input"] == sum(row["input_tokens"] for row in result["rows"])
    assert all(5 <= row["input_tokens"] <= 9 for row in result["rows"])
    assert result["latency_ms"]["ttft"]["count"] == 5
    assert result["latency_ms"]["itl"]["count"] == 15
    for row in result["rows"]:
        assert row["started"] <= row["event_times"][0] <= row["event_times"][-1] <= row["ended"] + 1e-6
        assert sum(row["event_tokens"]) == row["output_tokens"] == 4
    # Two at a time: whenever one begins, at most one other has not ended.
    for row in result["rows"]:
        others = [o for o in result["rows"] if o["index"] < row["index"] and o["ended"] > row["started"]]
        assert len(others) <= 1
    shown = capsys.readouterr()
    head, table = shown.out.split("\n\n")[:2]
    assert head == "the bundled model chat, float32 on cpu, in this process, latencies in ms"
    assert table.splitlines()[1].split()[:3] == ["2", "5", "0"]
    assert shown.err == ""


@pytest.mark.slow
def test_levels_and_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    path = tmp_path / "result.json"
    arguments = ["--concurrency", "1,3", "--json", str(path)]
    assert main(["bench", "offline", str(DEMO_MODEL), *FEW, *arguments]) == 0
    levels = json.loads(path.read_text())["levels"]
    assert [level["settings"]["concurrency"] for level in levels] == [1, 3]
    assert [level["tokens"]["output"] for level in levels] == [20, 20]
    assert levels[1]["tokens"]["cached"] == 0, "a level's prompts helped another"
    shown = capsys.readouterr()
    assert "1 at a time: " in shown.err
    assert "3 at a time: " in shown.err
    assert "TTFT" in shown.out
    rows = [line.split() for line in shown.out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "3"]
    assert [row[1:3] for row in rows] == [["5", "0"], ["5", "0"]]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--concurrency", "0"], 2, "--concurrency must be an integer of at least 1, or several different ones"),
        (["--concurrency", "2,2"], 2, "--concurrency must be"),
        (["--input-len", "long"], 2, "--input-len must be"),
        (["--num-requests", "0"], 2, "--num-requests must be at least 1, got 0"),
        (["--save-requests"], 2, "--save-requests needs --json"),
        (["--json", "no/such/folder/x.json"], 2, "the folder does not exist"),
        (["--max-num-seq", "3"], 2, "did you mean --max-num-seqs?"),
        (["--port", "80"], 2, "unknown flag --port"),
        (["--input-len", "100000"], 1, "but the model has room for"),
        (["./nope"], 1, "nope"),
    ],
)  # fmt: skip
def test_what_is_wrong(arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        sys.exit(main(["bench", "offline", *arguments]))
    assert stopped.value.code == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.startswith("octavo bench offline: ")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        ([], "target=http://127.0.0.1:8000 "),
        (["--url", "https://example.org:81/v1/", "--concurrency", "3"], "target=https://example.org:81 "),
        (["--concurrency", "3", "--url=http://h"], "target=http://h "),
        (["--url"], "target=URL "),
    ],
)
def test_another_program_measures_servers(
    arguments: list[str], target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert f"guidellm run --backend kind=openai_http,{target}" in shown.err


# ---------------------------------------------------------------- figures


def record(started: float, times: list[float], counts: list[int], failure: str | None = None) -> Record:
    ended = 0.0 if failure == "interrupted" else times[-1] if times else started
    given = None if failure is None else (failure, "why")
    return Record(prompt_tokens=10, started=started, ended=ended, times=times, counts=counts, failure=given)


def test_latencies_throughput_and_errors() -> None:
    found = Level(
        [
            record(0.0, [1.0, 2.0, 4.0], [1, 1, 2]),
            record(1.0, [2.0], [3]),
            record(1.0, [2.0], [1], "engine"),
            record(3.0, [9.0], [1], "interrupted"),
        ],
        {"concurrency": 2}, {}, 0.0,
    ).summary()  # fmt: skip
    assert found["duration_s"] == 4.0
    assert found["requests"] == {
        "completed": 2, "failed": 1, "interrupted": 1, "errors": {"engine": 1}, "error_examples": {"engine": "why"},
    }  # fmt: skip
    assert found["tokens"] == {"input": 20, "cached": 0, "output": 7}
    assert found["throughput"] == {"requests_per_s": 0.5, "output_tokens_per_s": 1.75, "total_tokens_per_s": 6.75}
    means = {name: latency["mean"] for name, latency in found["latency_ms"].items()}
    assert means == {"ttft": 1000.0, "itl": 1000.0, "tpot": 1000.0, "e2e": 2500.0}
    assert found["latency_ms"]["itl"]["count"] == 3, "two tokens of one step share the gap"


def test_nothing_completed_is_no_division_by_zero() -> None:
    for records in ([], [record(0.0, [], [], "engine")], [record(0.0, [], [], "interrupted")]):
        found = Level(records, {}, {}, 0.0).summary()
        assert found["requests"]["completed"] == 0
        assert found["throughput"]["output_tokens_per_s"] == 0.0
        assert found["latency_ms"]["ttft"] is None


def test_a_distribution_is_in_milliseconds() -> None:
    points = ("p50", "p90", "p95", "p99")
    assert distribution([]) is None
    assert distribution([0.5]) == {"count": 1, "std": 0.0, **dict.fromkeys(("mean", "min", *points, "max"), 500.0)}
    drawn = [random.Random(index).random() for index in range(37)]
    found = distribution(drawn)
    assert found is not None
    assert [found[point] for point in points] == pytest.approx(np.percentile(drawn, (50, 90, 95, 99)) * 1e3)
    assert distribution([0.001, 0.003]) == pytest.approx(
        {"count": 2, "mean": 2.0, "std": 1.0, "min": 1.0, "p50": 2.0, "p90": 2.8, "p95": 2.9, "p99": 2.98, "max": 3.0}
    )


# ---------------------------------------------------------------- lengths


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
