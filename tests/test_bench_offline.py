"""`octavo bench offline`, several levels of concurrency, and the plots."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from test_bench_serve import FakeServer
from test_cli import in_terminal, octavo

from cli.bench.plots import check_plots
from cli.errors import OptionError
from cli.main import main
from server.config.settings import DEMO_MODEL

FEW = ("--num-requests", "5", "--input-len", "5:9", "--output-len", "4", "--warmup", "1")


def size(path: Path) -> tuple[int, int]:
    """Pixels of a PNG."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


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
        assert row["scheduled"] <= row["event_times"][0] <= row["event_times"][-1] <= row["ended"] + 1e-6
        assert sum(row["event_tokens"]) == row["output_tokens"] == 4
    # Two at a time: whenever one begins, at most one other has not ended.
    for row in result["rows"]:
        others = [o for o in result["rows"] if o["index"] < row["index"] and o["ended"] > row["scheduled"]]
        assert len(others) <= 1
    shown = capsys.readouterr()
    assert "5 completed, 0 failed" in shown.out
    assert "in this process" in shown.out
    assert shown.err == ""


@pytest.mark.slow
def test_levels_and_plots_of_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path, plots = tmp_path / "result.json", tmp_path / "plots"
    arguments = ["--concurrency", "1,3", "--json", str(path), "--plot", str(plots)]
    assert main(["bench", "offline", str(DEMO_MODEL), *FEW, *arguments]) == 0
    levels = json.loads(path.read_text())["levels"]
    assert [level["settings"]["concurrency"] for level in levels] == [1, 3]
    assert [level["tokens"]["output"] for level in levels] == [20, 20]
    assert levels[1]["tokens"]["cached"] == 0, "a level's prompts helped another"
    assert sorted(file.name for file in plots.iterdir()) == ["latencies.png", "throughput.png"]
    assert all(min(size(file)) > 300 for file in plots.iterdir())
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[:1].isdigit()]
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


@pytest.mark.slow
def test_levels_and_plots_of_a_server(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path, plots = tmp_path / "result.json", tmp_path / "plots"
    few = ("--num-requests", "6", "--output-len", "3", "--json", str(path), "--plot", str(plots))
    with FakeServer() as server:
        run = octavo("bench", "serve", "--url", server.url, "--concurrency", "1,2,4", *few)
        assert run.returncode == 0, run.stderr
        prompts = [tuple(body["prompt"]) for body in server.sent]
    assert len(set(prompts)) == len(prompts) == 18, "a level's prompts are another's"
    assert [level["settings"]["concurrency"] for level in json.loads(path.read_text())["levels"]] == [1, 2, 4]
    assert sorted(file.name for file in plots.iterdir()) == ["latencies.png", "throughput.png"]
    assert "fake/model at http" in run.stdout
    assert "Plotted in" in run.stdout

    (plots / "throughput.png").unlink()
    with FakeServer() as server:
        assert octavo("bench", "serve", "--url", server.url, *few).returncode == 0
        assert octavo("bench", "serve", "--url", server.url, "--no-stream", *few).returncode == 0, "no times of tokens"
    assert sorted(file.name for file in plots.iterdir()) == ["latencies.png"]


def test_a_terminal_shows_progress_and_a_table() -> None:
    with FakeServer() as server:
        server.token_delay = 0.05
        few = ("--num-requests", "6", "--output-len", "3", "--concurrency", "1,2")
        status, shown = in_terminal("bench", "serve", "--url", server.url, *few)
    assert status == 0
    assert "1 at a time: " in shown
    assert "2 at a time: " in shown
    assert "requests/s" in shown
    assert "TTFT" in shown


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match="--plot needs matplotlib, which is not installed"):
        check_plots(tmp_path / "plots")


def test_a_folder_for_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="this is a file"):
        check_plots(tmp_path / "file")
    with pytest.raises(OptionError, match="does not exist"):
        check_plots(tmp_path / "no" / "plots")
