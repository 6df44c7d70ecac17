"""`benchmarks/gpu.py`: floors, gaps, goals, and a dry run of all parts without a GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends import native
from engine.backends.triton import overlap
from engine.model.row_form import OVERLAPPING

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402
from gpu_parts import check, decode, floors, gaps, jobs, kernels, mixed, report, sampling, shapes  # noqa: E402
from gpu_parts.floors import LLAMA, QWEN, Rates  # noqa: E402
from gpu_parts.gaps import Interval  # noqa: E402

pytestmark = pytest.mark.slow

H200 = Rates(bandwidth=4.3e12, products=790e12)


# ---------------------------------------------------------------- floors


def test_what_the_models_read_and_multiply() -> None:
    qwen, llama = (shapes.Work.of(shapes.MODELS[name]) for name in (QWEN, LLAMA))
    assert qwen.weight_bytes == pytest.approx(1.19e9, rel=0.01)
    assert llama.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert (qwen.kv_bytes, llama.kv_bytes) == (112 * 1024, 128 * 1024)
    assert llama.products == pytest.approx(7.50e9, rel=0.01)
    assert llama.products - llama.layer_products == 128256 * 4096


@pytest.mark.parametrize(
    ("model", "rows", "milliseconds"),
    [(LLAMA, 1, 3.52), (LLAMA, 32, 4.49), (LLAMA, 256, 12.85), (QWEN, 1, 0.305), (QWEN, 32, 1.15), (QWEN, 256, 7.38)],
)
def test_floors_of_an_h200(model: str, rows: int, milliseconds: float) -> None:
    floor = floors.floor_seconds(shapes.Work.of(shapes.MODELS[model]), H200, rows, 1024)
    assert 1e3 * floor == pytest.approx(milliseconds, rel=0.02)


def test_the_floor_of_many_rows_is_arithmetic() -> None:
    work = shapes.Work.of(shapes.MODELS[LLAMA])
    rows = 1024
    assert floors.floor_seconds(work, H200, rows, 0) == pytest.approx(2 * work.products * rows / H200.products)
    flops, per_byte = floors.intensity(work, 1, 0)
    assert (flops, per_byte) == (2 * work.products, 1.0)


def test_the_floor_beside_a_prompt_is_that_of_all_tokens() -> None:
    """Logits are of the rows and of the prompt's last token alone."""
    work = shapes.Work(weight_bytes=10**9, products=10, layer_products=7, kv_bytes=6, pair_flops=3)
    flops = 2 * (7 * (5 + 4) + 3 * (5 + 1)) + 3 * (1 + 2 + 3 + 4)
    reading = Rates(bandwidth=1e9, products=1e12)
    assert floors.mixed_floor_seconds(work, reading, 5, 100, 4) == pytest.approx(1 + 5 * 100 * 6 / 1e9)
    computing = Rates(bandwidth=1e12, products=1.0)
    assert floors.mixed_floor_seconds(work, computing, 5, 0, 4) == pytest.approx(flops)


def test_operations_of_a_prompt() -> None:
    work = shapes.Work(weight_bytes=0, products=10, layer_products=7, kv_bytes=0, pair_flops=3)
    assert work.prefill_flops(4) == (2 * 7 * 4, 3 * (1 + 2 + 3 + 4))


# ---------------------------------------------------------------- gaps


def test_gaps_lie_between_the_last_end_and_the_first_start() -> None:
    steps = [
        [Interval(0, 4), Interval(1, 2)],  # the last to start is not the last to end
        [Interval(9, 10), Interval(6, 7)],
        [],
        [Interval(9.5, 12)],  # begun before the end of the step before
        [Interval(15, 15)],
    ]
    assert gaps.gaps(steps) == [2, 0, 3]
    assert gaps.gaps(steps[:1]) == gaps.gaps([]) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=20))
def test_a_union_covers_each_moment_once(drawn: list[tuple[int, int]]) -> None:
    intervals = [Interval(start, start + size) for start, size in drawn]
    covered = {moment for one in intervals for moment in range(int(one.start), int(one.end))}
    assert gaps.length(intervals) == len(covered)
    joined = gaps.union(intervals)
    assert all(early.end < late.start for early, late in pairwise(joined))


def event(cat: str, start: float, length: float, number: int | None = None, name: str = "") -> dict[str, Any]:
    args = {} if number is None else {"correlation": number}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "args": args}


def test_device_work_belongs_to_the_step_that_launched_it() -> None:
    mark = "user_annotation"
    events = [
        event("cuda_runtime", 1, 1, 5),
        event("kernel", 2, 2, 5),  # of a prompt before the first step
        event(mark, 10, 5, name=gaps.MARK),
        event(mark, 11, 2, name=gaps.MARK),  # one method calls the other
        event("gpu_user_annotation", 30, 500, name=gaps.MARK),
        event("cuda_driver", 12, 1, 6),
        event("cuda_runtime", 13, 1, 7),  # a graph of two kernels
        event(mark, 20, 5, name=gaps.MARK),
        event("cuda_runtime", 21, 1, 8),
        event("cuda_runtime", 26, 1, 9),  # after the mark's end, before the next: still this step's
        event("kernel", 30, 10, 6),
        event("kernel", 41, 10, 7),
        event("kernel", 52, 10, 7),
        event("gpu_memcpy", 62, 1, 7),
        event("kernel", 70, 5, 8),
        event("kernel", 76, 5, 99),  # of an unknown call: follows the one before
        event("gpu_memset", 90, 1, 9),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    first, second = gaps.steps_of(events, "cuda")
    assert first.kernels == [(30, 40), (41, 51), (52, 62)]
    assert gaps.length(first.busy) == 31
    assert second.kernels == [(70, 75), (76, 81)]
    assert gaps.gaps([first.kernels, second.kernels]) == [8]
    assert len(gaps.on_device(events)) == 8
    named = [*events, event("kernel", 100, 400, 9, name="multiply"), event("kernel", 150, 2, 9, name="multiply")]
    assert gaps.by_name(named, "cuda", count=1) == [{"name": "multiply", "times": 2, "us": 402}]
    with pytest.raises(ValueError, match="no marks"):
        gaps.steps_of([one for one in events if one.get("cat") != mark], "cuda")
    with pytest.raises(ValueError, match="nothing that ran on the device"):
        gaps.steps_of([one for one in events if one.get("cat") == mark], "cuda")


class Doubler:
    def execute(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.launch(x)

    def launch(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_marked_steps_are_found_in_a_profile() -> None:
    runner, events = Doubler(), []  # type: ignore[var-annotated]
    x = torch.ones(8)
    with gaps.marked(runner), gaps.profiled(torch.device("cpu"), events):
        for _ in range(3):
            runner.execute(x)
    assert vars(runner) == {}
    steps = gaps.steps_of(events, "cpu")
    counts = [len(step.kernels) for step in steps]
    assert len(counts) == 3 == counts.count(counts[0])
    assert counts[0] >= 2
    assert all(gap > 0 for gap in gaps.gaps([step.kernels for step in steps]))


# ---------------------------------------------------------------- goals


def decoded(rows: int, percent: float, milliseconds: float) -> dict[str, Any]:
    return {"rows": rows, "percent_of_floor": percent, "step_ms": milliseconds}


def test_goals_are_judged_by_their_direction_and_missing_ones_are_open() -> None:
    parts: dict[str, Any] = {
        "decode": {LLAMA: [decoded(1, 80.0, 4.0), decoded(32, 74.9, 6.0)], QWEN: [decoded(1, 40.0, 0.9)]},
        "gap": {LLAMA: [{"gap_us": 4.0}], QWEN: [{"gap_us": 31.0}, {"gap_us": 3.0}]},
        "mixed": {LLAMA: [{"times_floor": 1.2}], QWEN: [{"times_floor": 1.4}]},
        "sampler": {"mixtures": [{"device_ms": 0.1}, {"device_ms": 0.6}]},
        "peer": {QWEN: {"ratio": 6.0}, LLAMA: {"skipped": "no such thing"}},
        "start": {QWEN: {"seconds": 90.0}, LLAMA: {"seconds": 19.0}},
    }
    rows = floors.judge(floors.goals(shapes.Sizes()), parts)
    assert [row["met"] for row in rows] == [True, False, None, True, None, False, True, None, False, None, True, True]
    assert [row["measured"] for row in rows][:6] == [80.0, 74.9, None, 0.9, None, 31.0]
    assert [row["goal"] for row in rows] == [75, 75, 75, 1.0, 70, 30, 0.6, 55, 1.3, 85, 5, 20]
    text = report.table(rows)
    assert "Llama-3.1-8B, batch 32: of the floor" in text
    assert "NO" in text
    assert "<= 30 us" in text
    assert {row["measured"] for row in floors.judge(floors.goals(shapes.Sizes()), {})} == {None}
    assert {row["met"] for row in floors.judge(floors.goals(shapes.Sizes()), parts, meant=False)} == {None}


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = decoded(1, 50.0, 1.0) | {"flops_per_byte": 1.0, "flops_per_second": 2e12}
    prompts = [{"flops_per_second": 4e14, "flops_per_byte": 3e3}]
    result = {
        "machine": {"gpu": "a GPU", "cpu": "a CPU", "date": "today"},
        "rates": {"bandwidth": 4e12, "products": 8e14},
        "parts": {"decode": {QWEN: [row, row | {"rows": 2, "flops_per_byte": 2.0}]}, "prefill": {QWEN: prompts}},
    }
    report.plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RuntimeError, match="no decode steps"):
        report.plot(result | {"parts": {}}, tmp_path / "plot.png")


# ---------------------------------------------------------------- parts


def test_the_way_of_one_row_is_told() -> None:
    timed, kept = {"layers": {"one": 3e-3, "other": 2e-3}}, {"layers": "other"}
    graphs = SimpleNamespace(one_row=SimpleNamespace(timed=timed, kept=kept))
    engine: Any = SimpleNamespace(runner=SimpleNamespace(graphs=graphs))
    assert shapes.ways_of_one_row(engine) == {"layers": {"ms": {"one": 3.0, "other": 2.0}, "kept": "other"}}
    engine.runner.graphs = None
    assert shapes.ways_of_one_row(engine) == {}


def test_the_same_prompts_for_the_same_numbers() -> None:
    assert shapes.prompt(3, 9, 100) == shapes.prompt(3, 20, 100)[:9] != shapes.prompt(4, 9, 100)
    assert set(shapes.prompt(3, 500, 8)) == {3, 4, 5, 6, 7}


def test_each_mixture_reaches_the_sampler() -> None:
    batch = sampling.batch_of(sampling.MIXTURES["a quarter of each"], 6)
    assert batch.table["temperature"].tolist() == pytest.approx([0.0, 0.8, 1.0, 1.0, 0.0, 0.8])
    assert batch.table["top_k"].tolist() == [0, 50, 0, 0, 0, 50]
    assert batch.table["top_p"].tolist() == pytest.approx([1, 1, 0.95, 1, 1, 1])
    assert batch.table["min_p"].tolist() == pytest.approx([0, 0, 0, 0.05, 0, 0])
    assert batch.rows.tolist() == list(range(6))


def test_a_pace_is_that_of_several_steps_together() -> None:
    assert decode.pace([1, 3] * 8 + [100] * 8) == 2  # neither 1 nor 3, and no pause
    assert decode.pace([1, 2, 6]) == 3


def test_steps_that_are_not_all_alike_are_no_figure() -> None:
    config = shapes.config_of(QWEN, tiny=True)
    with shapes.random_engine(config, "cpu", shapes.TINY) as engine:
        ready = decode.Rows(engine, 2, length=5, answer=4)
        with ready:
            assert len(ready.run(1)) == 1
            with pytest.raises(RuntimeError, match="not all alike"):
                ready.run(6)
        assert engine.stats().num_running == 0
        times, step = decode.answer_all(engine, [[3, 4, 5], [6, 7]], 4)
        assert 0 < step <= times


def test_a_timed_step_that_ran_eagerly_shows_beside_warm_ones_that_did_not() -> None:
    config, sizes, launched = shapes.config_of(QWEN, tiny=True), shapes.TINY, []
    with shapes.random_engine(config, "cpu", sizes) as engine:
        runner: Any = engine.runner
        launch, graphs = runner.launch, SimpleNamespace(num_replayed=0, serves=lambda plan: False)

        def counted(plan: Any) -> Any:
            launched.append(plan.num_tokens)
            graphs.num_replayed += len(launched) != sizes.warm + 1 + sizes.steps
            return launch(plan)

        with decode.decoding_rows(engine, 3, sizes, steps=2 * (sizes.steps + sizes.warm)) as ready:
            runner.prompt_graphs, runner.launch = graphs, counted
            times, replayed = mixed.beside_prompts(engine, ready, sizes)
            assert launched == [3 + sizes.mixed_chunk] * (sizes.warm + 1 + sizes.steps)
            assert (len(times), replayed) == (sizes.steps, sizes.steps - 1)


BLOCKED = (
    "fastapi",
    "starlette",
    "pydantic",
    "zmq",
    "msgspec",
    "uvicorn",
    "prometheus_client",
    "rich",
    "server",
    "cli",
)


def test_a_dry_run_of_all_parts(tmp_path: Path) -> None:
    """In a process that has nothing but what the engine's core needs."""
    output = tmp_path / "results" / "gpu.json"
    arguments = ["gpu.py", "--device", "cpu", "--tiny", "--together", "--goals", "--output", str(output)]
    code = (
        "import runpy, sys\n"
        f"for name in {BLOCKED}: sys.modules[name] = None\n"
        f"sys.argv = {arguments}\n"
        f"runpy.run_path({str(BENCHMARKS / 'gpu.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(output.read_text())
    assert result["failures"] == {}
    assert result["engines"][QWEN]["attention"] == "native" or not native.available()
    assert result["engines"][QWEN]["async_scheduling"] is True
    assert result["machine"]["torch"] == torch.__version__
    assert result["machine"]["commit"] == report.machine(torch.device("cpu"))["commit"]
    parts = result["parts"]
    assert set(parts) == {"kernels", "decode", "gap", "sampler", "mixed", "prefill", "beams", "peer", "start"}
    for model in (QWEN, LLAMA):
        assert [row["rows"] for row in parts["decode"][model]] == list(shapes.TINY.batches)
        assert all(row["step_ms"] > 0 and row["percent_of_floor"] > 0 for row in parts["decode"][model])
        assert all(abs(row["context"] - shapes.TINY.context) <= 4 for row in parts["decode"][model])
        assert all(row["steps_ahead"] == row["steps"] for row in parts["decode"][model])
        assert all(row["steps"] > 3 for row in parts["gap"][model])
        assert [row["tokens"] for row in parts["prefill"][model]] == list(shapes.TINY.prompts)
        assert all(row["busiest"] for part in ("gap", "prefill") for row in parts[part][model])
        assert [(row["rows"], row["chunk"]) for row in parts["mixed"][model]] == [(3, 16)]
        assert all(row["times_floor"] > 0 and row["launch_ms"] > 0 for row in parts["mixed"][model])
        assert all(row["percent_of_greedy"] > 0 for row in parts["beams"][model])
        assert all(row["steps"] == 2 * shapes.TINY.steps for row in parts["beams"][model])
        assert parts["start"][model]["seconds"] > 0
        peer = parts["peer"][model]
        # It may want a GPU that is there; and on a CPU transformers 5.17 finds no memory without psutil.
        if not torch.cuda.is_available() and "available memory 0" not in peer.get("skipped", ""):
            assert peer.get("ratio", 0) > 0, peer
    assert len(parts["kernels"]) >= 54
    assert all(check["passed"] for check in parts["kernels"])
    assert [row["mixture"] for row in parts["sampler"]["mixtures"]] == 2 * list(sampling.MIXTURES)
    assert "4 beams: of greedy, at equal rows" in done.stdout
    assert re.search(r"^Llama-3.1-8B +8 +4\d +\d+\.\d{3} ", done.stdout, re.MULTILINE), done.stdout  # all steps
    assert "Tiny shapes: the figures say nothing about the goals." in done.stdout


def test_full_sizes_are_for_gpus_and_a_failing_part_is_named(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device"]
    done = subprocess.run([*command, "cpu"], capture_output=True, text=True, timeout=540)
    assert done.returncode == 2
    assert "add --tiny" in done.stderr
    late = [*command, "cpu", "--tiny", "--together", "--parts", "sampler", "prefill", "--part-timeout", "0.01"]
    done = subprocess.run(late, capture_output=True, text=True, timeout=540)
    assert done.returncode == 1
    assert "FAILED: sampler: PartTimeoutError: it took longer than --part-timeout allows" in done.stderr
    if not torch.cuda.is_available():
        done = subprocess.run(command[:-1], capture_output=True, text=True, timeout=540)
        assert done.returncode == 2
        assert "sees no GPU" in done.stderr


def test_no_handler_of_what_a_part_can_do_without_takes_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that goes on all the same is told again."""
    assert not issubclass(gpu.PartTimeoutError, Exception)
    told: list[float] = []

    def act() -> None:
        for _ in range(3):
            try:
                time.sleep(20)
            except gpu.PartTimeoutError:
                told.append(time.monotonic())
        raise gpu.PartTimeoutError("late")

    monkeypatch.setattr(gpu, "_AGAIN", 0.05)
    run: Any = SimpleNamespace(options=SimpleNamespace(part_timeout=0.05), failures={}, seconds={}, write=lambda: None)
    before = signal.signal(signal.SIGALRM, gpu._late)
    try:
        gpu.Run._attempt(run, "decode", "decode X", act)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(told) == 3
    assert run.failures == {"decode X": "PartTimeoutError: late"}


def test_what_would_be_done_is_told_without_a_gpu() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--plan", "--models", LLAMA, "--part-timeout", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^kernels attention +160 s at most$", done.stdout, re.MULTILINE)
    assert re.search(r"^engine Llama-3.1-8B +300 s at most$", done.stdout, re.MULTILINE)
    assert f"{LLAMA}: weights 15.0 GB; pages 47.2 GB at most:" in done.stdout
    assert re.search(r"^  prefill +2048 tokens 1.3 GB, .*, 16384 tokens 3.2 GB$", done.stdout, re.MULTILINE)
    assert re.search(r"^all together +300 s at most$", done.stdout, re.MULTILINE)
    assert QWEN not in done.stdout


@pytest.mark.parametrize("parts", [("decode",), ("mixed",), ("prefill", "peer"), gpu.PARTS])
def test_the_memory_that_is_told_is_what_the_engine_is_asked_to_take(
    parts: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the parts that were asked for alone."""
    made: list[Any] = []

    def engine(config: Any) -> Any:
        made.append(config)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(shapes, "Engine", engine)
    arguments = ["--batches", "1", "--parts", *parts, "--models", LLAMA, "--plan"]
    assert gpu.main(arguments) == 0
    told = capsys.readouterr().out
    with shapes.random_engine(shapes.MODELS[LLAMA], "cpu", gpu.sizes_of(gpu._options(arguments))):
        asked = made[0].kv_cache_memory / 1e9
    assert f"{LLAMA}: weights 15.0 GB; pages {asked:.1f} GB at most:" in told
    assert re.findall(r"^  (\w+) ", told, re.MULTILINE) == [part for part in gpu._OF_AN_ENGINE if part in parts]
    if parts == ("decode",):
        assert asked == pytest.approx((1376 + 8192) * 128 * 1024 / 1e9)


def test_what_needs_no_engine_has_no_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--plan", "--parts", "kernels", "sampler"]) == 0
    assert "pages" not in capsys.readouterr().out


CRASHES = """
import json, os, signal, sys, time
part, output = sys.argv[2], sys.argv[-1]
if part != "early":
    json.dump({"parts": {"kernels": [{"kernel": part}]}, "machine": {"gpu": part}}, open(output, "w"))
if part == "hangs":
    time.sleep(100)
if part == "spoils":
    os.kill(os.getpid(), signal.SIGSEGV)
sys.exit(3 if part == "early" else 0)
"""


def test_a_process_that_dies_or_hangs_leaves_the_others(tmp_path: Path) -> None:
    names, kept = ("early", "good", "spoils", "hangs", "last"), []
    made = [jobs.Job(name, ("--parts", name), 2.0 if name == "hangs" else 60.0) for name in names]
    whole = jobs.run_all(made, [sys.executable, "-c", CRASHES], tmp_path, lambda so_far: kept.append(str(so_far)))
    assert whole["failures"] == {
        "early": "ended with the status 3", "spoils": "ended by SIGSEGV", "hangs": "killed after 2 s",
    }  # fmt: skip
    assert [one["kernel"] for one in whole["parts"]["kernels"]] == ["good", "spoils", "hangs", "last"]
    assert whole["machine"] == {"gpu": "good"}
    assert len(kept) >= len(names)
    assert kept[-1] == str(whole)


TORN = """
import sys
part, output = sys.argv[2], sys.argv[-1]
whole = '{"parts": {"kernels": ["' + part + '"]}}'
open(output, "w").write(whole[:-9] if part == "torn" else whole)
sys.exit(3 if part == "torn" else 0)
"""


def test_a_result_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    made = [jobs.Job(name, ("--parts", name), 60.0) for name in ("torn", "whole")]
    found = jobs.run_all(made, [sys.executable, "-c", TORN], tmp_path, lambda _: None)
    assert list(found["failures"]) == ["torn"]
    assert found["failures"]["torn"].startswith("ended with the status 3; what it kept cannot be read: ")
    assert found["parts"]["kernels"] == ["whole"]


def test_a_result_is_whole_though_a_process_ends_while_it_writes(tmp_path: Path) -> None:
    options: Any = SimpleNamespace(output=tmp_path / "results" / "gpu.json")
    gpu.write({"first": 1}, options)

    def torn(file: Path, text: str) -> None:
        with file.open("w") as stream:
            stream.write(text[: len(text) // 2])
        raise gpu.PartTimeoutError("late")

    with mock.patch.object(Path, "write_text", torn), pytest.raises(gpu.PartTimeoutError):
        gpu.write({"second": 2}, options)
    assert json.loads(options.output.read_text()) == {"first": 1}
    gpu.write({"third": 3}, options)
    assert json.loads(options.output.read_text()) == {"third": 3}
    assert [file.name for file in options.output.parent.iterdir()] == ["gpu.json"]


APPEARS = """
import json, os, sys, time
output, go = sys.argv[-1], sys.argv[1]
for rows in (["first"], ["first", "second"]):
    with open(output + ".draft", "w") as stream:
        json.dump({"parts": {"kernels": rows}, "machine": {"process": os.getpid()}}, stream)
    os.replace(output + ".draft", output)
    while not os.path.exists(go):
        time.sleep(0.02)
"""


def test_rows_are_merged_while_their_process_runs(tmp_path: Path) -> None:
    """It goes on when the first one has been kept."""
    kept, go = [], tmp_path / "go"

    def keep(whole: dict[str, Any]) -> None:
        kept.append(list(whole["parts"]["kernels"]))
        go.touch()

    whole = jobs.run_all([jobs.Job("two", (), 30.0)], [sys.executable, "-c", APPEARS, str(go)], tmp_path, keep)
    assert whole["failures"] == {}
    assert kept[0] == ["first"]
    assert kept[-1] == ["first", "second"] == whole["parts"]["kernels"]


def gone(process: int) -> bool:
    """No process has that number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_no_process_outlives_what_waits_for_it(tmp_path: Path) -> None:
    found: list[int] = []

    def keep(whole: dict[str, Any]) -> None:
        found.append(whole["machine"]["process"])
        raise KeyboardInterrupt

    command = [sys.executable, "-c", APPEARS, str(tmp_path / "never")]
    with pytest.raises(KeyboardInterrupt):
        jobs.run_all([jobs.Job("waits", (), 30.0)], command, tmp_path, keep)
    assert len(found) == 1
    assert gone(found[0])


def test_sigterm_ends_the_process_of_that_moment_and_leaves_what_it_kept(tmp_path: Path) -> None:
    output, child = tmp_path / "gpu.json", tmp_path / "child"
    found = "{'parts': {'kernels': [{'kernel': 'norms'}]}, 'machine': {'process': os.getpid()}}"
    child.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\n"
        f"with open(sys.argv[-1], 'w') as stream: json.dump({found}, stream)\ntime.sleep(300)\n"
    )
    child.chmod(0o755)
    arguments = ["--device", "cpu", "--tiny", "--parts", "kernels", "sampler", "--checks", "layers"]
    code = (
        f"import sys\nsys.path.append({str(BENCHMARKS)!r})\nimport gpu\nsys.executable = {str(child)!r}\n"
        f"sys.exit(gpu.main({[*arguments, '--output', str(output)]}))\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(1200):
            if output.exists() or run.poll() is not None:
                break
            time.sleep(0.1)
        kept = json.loads(output.read_text())
        assert kept["parts"]["kernels"] == [{"kernel": "norms"}]
        assert not gone(kept["machine"]["process"])
        run.terminate()
        told = run.communicate(timeout=60)[1]
    finally:
        run.kill()
    assert run.returncode == 1
    assert gone(kept["machine"]["process"])
    result = json.loads(output.read_text())
    assert result["parts"] == kept["parts"]
    assert result["failures"] == {"kernels layers": jobs.STOPPED, "sampler": f"not begun: {jobs.STOPPED}"}
    assert "FAILED: kernels layers: ended, as the whole run was told to by SIGTERM" in told


def test_the_whole_run_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process gets the time that is left, what it had by then is kept, and the rest is not begun."""
    now, limits = [100.0], []

    def run(job: jobs.Job, limit: float, *_: object) -> tuple[dict[str, Any], str | None]:
        limits.append(limit)
        now[0] += 1.0 if job.label == "good" else limit
        return {"parts": {"kernels": [job.label]}}, None if job.label == "good" else "killed"

    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(jobs, "run", run)
    made = [jobs.Job(name, ("--parts", name), 60.0) for name in ("good", "hangs", "never")]
    whole = jobs.run_all(made, [], tmp_path, lambda _: None, within=3.0)
    assert limits == [3.0, 2.0]
    assert whole["parts"]["kernels"] == ["good", "hangs"]
    assert whole["failures"] == {"hangs": "killed", "never": "not begun: the 3 s of all parts are over"}


def test_the_first_start_of_a_model_counts() -> None:
    """Only that one compiles kernels."""
    whole: dict[str, Any] = {"machine": {}, "rates": {}, "engines": {}, "parts": {}, "seconds": {}, "failures": {}}
    for model, seconds in ((LLAMA, 19.0), (QWEN, 8.0), (LLAMA, 4.0), (LLAMA, 5.0)):
        jobs.merge(whole, {"parts": {"start": {model: {"seconds": seconds}}}})
    assert whole["parts"]["start"] == {LLAMA: {"seconds": 19.0, "later_seconds": [4.0, 5.0]}, QWEN: {"seconds": 8.0}}
    assert floors._start(whole["parts"]) == 19.0


def test_a_model_starts_once_and_checks_come_first() -> None:
    made = jobs.plan(gpu.PARTS, gpu.MODELS, gpu.CHECKS, gpu._OF_AN_ENGINE, 60.0)
    checks = [f"kernels {name}" for name in gpu.CHECKS]
    assert [job.label for job in made] == [*checks, "sampler", f"engine {QWEN}", f"engine {LLAMA}"]
    assert [job.label for job in made if job.beside] == checks
    assert made[-1].arguments == ("--parts", *gpu._OF_AN_ENGINE, "--models", LLAMA)


MEETS = """
import json, os, sys, time
part, output = sys.argv[2], sys.argv[-1]
folder = os.path.dirname(output)
open(os.path.join(folder, part), "w").close()
while part != "alone" and not all(os.path.exists(os.path.join(folder, one)) for one in ("first", "second")):
    time.sleep(0.02)
met = os.path.exists(os.path.join(folder, "alone"))
json.dump({"parts": {"kernels": [part, met]}, "machine": {"gpu": part}}, open(output, "w"))
"""


def test_processes_side_by_side_wait_for_each_other(tmp_path: Path) -> None:
    """Two that end only when both run; what comes after them begins when both have ended."""
    made = [jobs.Job(name, ("--parts", name), 60.0, beside=name != "alone") for name in ("first", "second", "alone")]
    whole = jobs.run_all(made, [sys.executable, "-c", MEETS], tmp_path, lambda _: None)
    assert whole["failures"] == {}
    assert whole["parts"]["kernels"] == ["first", False, "second", False, "alone", True]


def test_rows_are_kept_as_they_appear() -> None:
    """Largest first; and a part whose steps were no CUDA graphs, though they can be, has failed."""
    kept: list[str] = []

    def found(broken: bool = False) -> Iterator[dict[str, Any]]:
        yield {"rows": 256, "steps": 48, "steps_as_graphs": 48}
        yield {"rows": 8, "steps": 48, "steps_as_graphs": 48 - broken}
        if not broken:
            raise ValueError("an illegal access")

    run: Any = SimpleNamespace(parts={}, device=torch.device("cuda"))
    run.write = lambda: kept.append(str(run.parts))
    with pytest.raises(ValueError, match="illegal"):
        gpu.Run._rows(run, "decode", QWEN, found())
    assert [row["rows"] for row in run.parts["decode"][QWEN]] == [8, 256]
    assert len(kept) == 2
    with pytest.raises(RuntimeError, match="only 47 of 48 steps of 8 rows ran as CUDA graphs"):
        gpu.Run._rows(run, "decode", LLAMA, found(broken=True))
    assert shapes.ran_eagerly([{"rows": 8, "steps": 9}, {"tokens": 2048}]) == ""


def test_a_step_of_beams_that_ran_eagerly_is_named() -> None:
    """Of the greedy steps and those of beams that are timed, each counts once; of the warm ones none does."""
    config, sizes = shapes.config_of(QWEN, tiny=True), replace(shapes.TINY, steps=6)
    launched: list[bool] = []  # whether of beams
    eager: set[int] = set()
    with shapes.random_engine(config, "cpu", sizes) as engine:
        runner: Any = engine.runner
        launch, graphs = runner.launch, SimpleNamespace(num_replayed=0)
        graphs.serves = graphs.sample = lambda *_: None  # all is computed as without it

        def counted(plan: Any) -> Any:
            if plan.num_tokens == plan.num_rows == 8:  # rows that decode, and no prompt beside them
                graphs.num_replayed += len(launched) not in eager
                launched.append(plan.searches is not None)
            return launch(plan)

        runner.graphs, runner.launch = graphs, counted
        (row,) = decode.beams(engine, sizes)
        assert (row["steps"], row["steps_as_graphs"]) == (12, 12)
        assert shapes.ran_eagerly([row]) == ""
        assert launched[-2]
        eager.add(2 * len(launched) - 2)  # the same steps come again, those of beams last
        (row,) = decode.beams(engine, sizes)
        assert shapes.ran_eagerly([row]) == "only 11 of 12 steps of 8 rows ran as CUDA graphs"


def test_rows_that_do_not_fit_are_left_out() -> None:
    sizes, work = shapes.Sizes(), shapes.Work.of(shapes.MODELS[LLAMA])
    assert sizes.within(work, 141 * 10**9) == sizes
    assert sizes.lacking(sizes) == {}
    small = sizes.within(work, 42 * 10**9)
    assert (small.batches, small.beam_rows, small.gap_batches) == ((1, 8, 32, 48), (32,), (1, 32))
    assert sizes.lacking(small) == {"decode": [128, 256], "gap": [256], "beams": [256]}
    least = sizes.within(work, 24 * 10**9)
    assert (least.batches, least.prompts, least.mixed_rows, least.beam_rows) == ((1, 8), sizes.prompts, (), ())
    assert least.parts == ("decode", "gap", "prefill")
    assert sizes.lacking(least)["peer"] == [32]
    with pytest.raises(RuntimeError, match=r"20 GB are free; weights of 15 GB, pages of 1\.3 GB and"):
        sizes.within(work, 20 * 10**9)
    with pytest.raises(RuntimeError, match=r"24 GB are free; weights of 15 GB, pages of 5\.6 GB and"):
        replace(sizes, parts=("peer", "beams")).within(work, 24 * 10**9)


@settings(deadline=None)
@given(
    st.integers(20, 150),
    st.sets(st.sampled_from(shapes.PARTS), min_size=1),
    st.sets(st.sampled_from((1, 8, 48, 300)), min_size=1),
    st.sampled_from((QWEN, LLAMA)),
)
def test_an_engine_has_what_its_parts_take_and_no_more_than_fits(
    memory: int, parts: set[str], batches: set[int], model: str
) -> None:
    work = shapes.Work.of(shapes.MODELS[model])
    sizes = replace(shapes.Sizes(), parts=tuple(sorted(parts)), batches=tuple(sorted(batches)))
    try:
        small = sizes.within(work, memory * 10**9)
    except RuntimeError:
        assert all(sizes.tokens(part, 1) * work.kv_bytes > (0.8 * memory - 17) * 1e9 for part in parts)
        return
    assert small.pages * work.kv_bytes + work.weight_bytes <= 0.8e9 * memory
    assert small.pages == max(small.tokens(part, max(small.numbers(part))) for part in small.parts)
    assert small.rows >= max((*small.batches, *small.gap_batches, *small.beam_rows, 1))
    for part in parts:
        kept = set(small.numbers(part)) if part in small.parts else set()
        assert kept.isdisjoint(lacking := sizes.lacking(small).get(part, []))
        assert kept.union(lacking) == set(sizes.numbers(part))


def test_what_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And a part that has nothing left has failed."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (24 * 10**9, 24 * 10**9))
    sizes, work = replace(shapes.Sizes(), parts=("decode", "gap", "mixed")), shapes.Work.of(shapes.MODELS[LLAMA])
    run: Any = SimpleNamespace(sizes=sizes, device=torch.device("cuda"), failures={})
    assert gpu.Run._fitting(run, LLAMA, work).parts == ("decode", "gap")
    assert run.failures == {f"mixed {LLAMA}": "no memory for pages of 32 rows"}
    assert capsys.readouterr().out.splitlines() == [
        "  decode: no memory for pages of 32, 48, 128, 256 rows: left out",
        "  gap: no memory for pages of 32, 256 rows: left out",
        "  mixed: no memory for pages of 32 rows: left out",
    ]


def test_what_is_not_as_it_is_meant_is_named() -> None:
    def found(attention: str, ways: dict[str, Any] | None, flash: bool = False) -> list[str]:
        graphs = ways and SimpleNamespace(one_row=SimpleNamespace(timed=ways, kept=dict.fromkeys(ways, "x")))
        module = SimpleNamespace(backend=SimpleNamespace(name=attention, flash=None))
        model = SimpleNamespace(device=torch.device("cuda"), modules=lambda: [module])
        names = (
            "dtype", "kv_cache_dtype", "block_size", "num_blocks", "async_scheduling", "enforce_eager", "flash_prefill",
        )  # fmt: skip
        some: Any = SimpleNamespace(**dict.fromkeys(names) | {"flash_prefill": flash})
        runner = SimpleNamespace(model=model, graphs=graphs, prompt_graphs=graphs)
        engine: Any = SimpleNamespace(runner=runner, info=some, config=some)
        return shapes.fallen_back(engine)

    with mock.patch.object(overlap, "can_overlap", return_value=True):
        assert found("triton", {"layers": {OVERLAPPING.name: 1.0}}) == []
        assert found("triton", {"layers": {OVERLAPPING.name: 1.0}}, flash=True) == [
            "torch's flash attention was asked for, and is not used"
        ]
        assert "attention is torch, not triton" in found("torch", {"layers": {OVERLAPPING.name: 1.0}})
        assert found("triton", None) == [
            f"{steps} were not recorded as CUDA graphs" for steps in ("steps with prompts", "decoding steps")
        ]
        assert found("triton", {"logits": {"other": 1.0}}) == [
            f"logits of one row cannot be computed by {OVERLAPPING.name}"
        ]
    with mock.patch.object(overlap, "can_overlap", return_value=False):
        assert found("triton", {"logits": {"other": 1.0}}) == []


# ---------------------------------------------------------------- checks of kernels


def test_errors_are_in_units_of_the_format() -> None:
    want = torch.tensor([1.0, -3.0], dtype=torch.float64)
    assert kernels.error_of(want.bfloat16(), want, torch.bfloat16) == 0
    wrong = torch.tensor([1.0, -3.0 - 2**-7 * 5])
    assert kernels.error_of(wrong, want, torch.bfloat16) == pytest.approx(1.0)
    assert kernels.error_of(torch.tensor([1.0, torch.nan]), want, torch.bfloat16) == float("inf")
    assert kernels.error_of(want[:1], want, torch.bfloat16) == float("inf")


def test_a_check_that_fails_is_told_from_one_that_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    setting = check.Setting(torch.device("cpu"), torch.float16, full=False)

    def close(setting: check.Setting) -> Iterator[check.Outcome]:
        x = setting.normal(3, 4)
        yield x, x.double()
        yield x.double() * (1 + 2**-11), x.double()

    def skipped(_: check.Setting) -> Iterator[check.Outcome]:
        raise check.SkippedError("not on this machine")

    def broken(setting: check.Setting) -> Iterator[check.Outcome]:
        yield setting.normal(2), torch.zeros(3, dtype=torch.float64)
        raise ValueError("never reached")

    assert kernels.run(check.Check("close", close, bound=2.0), setting)["passed"] is True
    assert kernels.run(check.Check("close", close, bound=0.1), setting)["passed"] is False
    assert kernels.run(check.Check("close", close, spread=0.4), setting)["passed"] is False
    assert kernels.run(check.Check("skipped", skipped), setting)["passed"] is None
    found = kernels.run(check.Check("broken", broken), setting)
    assert (found["passed"], found["note"]) == (False, "ValueError: never reached")
    assert "skipped  not on this machine" in capsys.readouterr().out


def test_a_wrong_kernel_is_named_and_the_status_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = [{"kernel": "norms", "passed": True}, {"kernel": "gates", "passed": False}, {"kernel": "x", "passed": None}]
    monkeypatch.setattr(kernels, "check_all", lambda *_: found)
    output = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--tiny", "--parts", "kernels", "--together", "--output", str(output)]
    for name in ("TRITON_INTERPRET", "DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"):
        monkeypatch.setenv(name, "1")  # what a run sets is gone afterwards
    assert gpu.main(arguments) == 1
    assert "FAILED: kernels: RuntimeError: wrong: gates" in capsys.readouterr().err
    assert json.loads(output.read_text())["parts"]["kernels"] == found
    found[1]["passed"] = True
    assert gpu.main(arguments) == 0
