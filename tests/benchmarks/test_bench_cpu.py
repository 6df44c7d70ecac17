"""`benchmarks/cpu.py`: ratios and goals, settings, peers that fail or are not there, and a tiny run of Octavo alone."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.pages import load

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from peers import cases, checkpoints, engines, goals, page_cache, process, servers, stored, turns  # noqa: E402

pytestmark = pytest.mark.slow


def series(figure: str, *values: float) -> turns.Series:
    return turns.Series(setting="defaults", figures={figure: list(values)}, waiting=[0.0], disturbance=[0.0])


def goal(figure: str, ours: tuple[str, ...], theirs: tuple[str, ...], least: float) -> goals.Goal:
    return goals.Goal("case", "some work", figure, ours, theirs, least)


ALONE = {"octavo": series("tokens_per_second", 5)}


# ---------------------------------------------------------------- ratios and goals


def test_the_ratio_is_of_medians_and_also_given_by_rounds() -> None:
    ours, theirs = series("tokens_per_second", 90, 110, 1000), series("tokens_per_second", 100, 50, 200)
    whole, each = turns.ratios([ours], [theirs], "tokens_per_second")
    assert whole == pytest.approx(110 / 100)
    assert each == pytest.approx([0.9, 2.2, 5.0])


def test_less_is_better_for_latencies() -> None:
    ours, theirs = series("first_token_ms", 10, 20), series("first_token_ms", 30, 30)
    whole, each = turns.ratios([ours], [theirs], "first_token_ms")
    assert whole == pytest.approx(2.0)
    assert each == pytest.approx([3.0, 1.5])


def test_the_best_of_several_peers_counts() -> None:
    measured = {
        "octavo": series("tokens_per_second", 100),
        "one": series("tokens_per_second", 50),
        "other": series("tokens_per_second", 80),
    }
    row = goals.judge(goal("tokens_per_second", ("octavo",), ("one", "other"), 1.25), measured)
    assert row is not None
    assert (row["peer"], row["peer_figure"], row["ratio"], row["met"]) == ("other", 80, 1.25, True)
    first = {name: series("first_token_ms", value) for name, value in [("octavo", 9), ("one", 8), ("other", 20)]}
    row = goals.judge(goal("first_token_ms", ("octavo",), ("one", "other"), 1.0), first)
    assert row is not None
    assert (row["peer"], row["ratio"], row["met"]) == ("one", 0.889, False)


def test_a_missing_peer_leaves_octavo_alone_in_its_row() -> None:
    row = goals.judge(goal("tokens_per_second", ("octavo",), ("gone",), 1.0), ALONE)
    assert row is not None
    assert (row["octavo"], row["ratio"], row["met"], row["missing"]) == (5, None, None, ["gone"])
    assert "(gone: missing)" in goals.table([row])
    assert goals.judge(goal("tokens_per_second", ("octavo",), ("gone",), 1.0), {}) is None


@pytest.mark.parametrize(("value", "met"), [(9.9, True), (10.0, True), (10.1, False)])
def test_a_figure_of_octavo_s_own_has_a_limit(value: float, met: bool) -> None:
    measured = {"octavo": series("overhead_percent", value)}
    row = goals.judge(goal("overhead_percent", ("octavo",), (), 10.0), measured)
    assert row is not None
    assert row["met"] is met
    assert f"<= 10 %  -      {value:g} %" in goals.table([row])


def test_every_goal_has_a_case_that_measures_it() -> None:
    for one in goals.goals():
        assert one.figure in goals.UNITS
        assert one.goal > 0
    assert len({one.label for one in goals.goals()}) == len(goals.goals())


# ---------------------------------------------------------------- turns and settings


class Player:
    """A contestant whose figure depends on its setting."""

    def __init__(self, name: str, speeds: dict[str, float]):
        self.name, self.speeds, self.settings, self.pids = name, speeds, tuple(speeds), (os.getpid(),)
        self.setting, self.log = "", []  # type: ignore[var-annotated]

    def prepare(self, setting: str) -> None:
        if self.speeds[setting] < 0:
            raise process.PeerError(f"{setting} does not work\nand why")
        self.setting = setting


ORDER: list[str] = []


def play(one: Player) -> turns.Figures:
    ORDER.append(one.name)
    return {"tokens_per_second": one.speeds[one.setting]}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PAUSE", 0.0)
    ORDER.clear()


def test_the_fastest_setting_that_works_is_taken() -> None:
    player = Player("a", {"slow": 1.0, "fast": 3.0, "broken": -1.0, "middling": 2.0})
    chosen = turns.choose(player, play, "tokens_per_second")
    assert (chosen.setting, player.setting) == ("fast", "fast")
    assert chosen.tried == {"slow": 1.0, "fast": 3.0, "broken": "broken does not work", "middling": 2.0}


def test_without_time_the_first_setting_is_taken() -> None:
    player = Player("a", {"slow": 1.0, "fast": 3.0})
    assert turns.choose(player, play, "tokens_per_second", quick=True).setting == "slow"


def test_no_setting_that_works_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"a: no setting works.*'only': 'only does not work'"):
        turns.choose(Player("a", {"only": -1.0}), play, "tokens_per_second")


def test_turns_alternate_and_every_round_begins_with_another_one() -> None:
    players = [Player(name, {"only": 1.0}) for name in "abc"]
    noted = {one.name: turns.choose(one, play, "tokens_per_second") for one in players}
    ORDER.clear()
    turns.take_turns(players, play, 3, noted)
    assert "".join(ORDER) == "abcbcacab"
    assert all(len(one.figures["tokens_per_second"]) == 3 for one in noted.values())
    assert all(len(one.waiting) == len(one.disturbance) == 3 for one in noted.values())


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux's /proc")
def test_cpu_time_of_a_process_tree() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 60
        while process.tree_seconds(parent.pid) < 0.5:
            assert time.monotonic() < deadline, "the busy grandchild was not seen"
            time.sleep(0.05)
    finally:
        for child in (*process._tree(parent.pid)[1:], parent.pid):
            os.kill(child, 9)
        parent.wait()
    assert process.tree_seconds(parent.pid) == 0.0


# ---------------------------------------------------------------- peers


def test_a_peer_is_found_where_it_was_installed(tmp_path: Path) -> None:
    assert process.find("llama.cpp", tmp_path) is None
    (tmp_path / "ctranslate2" / "ctranslate2").mkdir(parents=True)
    found = process.find("ctranslate2", tmp_path)
    assert found is not None
    assert (found.python, found.path) == (sys.executable, (str(tmp_path / "ctranslate2"),))
    beside = process.find("transformers", tmp_path)
    assert beside is not None
    assert (beside.python, beside.path) == (sys.executable, ())


def test_an_environment_without_the_module_is_no_installation(tmp_path: Path) -> None:
    programs = tmp_path / "openvino" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (programs / "python").chmod(0o755)
    assert process.find("openvino", tmp_path) is None


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    script = tmp_path / "some_worker.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(BENCHMARKS / 'peers')!r})\n"
        "from protocol import serve\n"
        "def double(value):\n    print('noise')\n    return {'value': 2 * value}\n"
        "def fail():\n    raise ValueError('no such thing')\n"
        "def end():\n    print('last words', file=sys.stderr)\n    sys.exit(3)\n"
        "serve({'double': double, 'fail': fail, 'end': end})\n"
    )
    worker = process.Worker([sys.executable, str(script)], dict(os.environ), tmp_path / "log")
    assert worker.ask(op="double", value=21) == {"value": 42}
    with pytest.raises(process.PeerError, match="some_worker: ValueError: no such thing"):
        worker.ask(op="fail")
    assert worker.ask(op="double", value=1) == {"value": 2}
    with pytest.raises(process.PeerError, match=r"some_worker has ended:\n(.|\n)*last words"):
        worker.ask(op="end")
    worker.process.wait(30)
    for _ in range(2):
        with pytest.raises(process.PeerError, match="some_worker has ended"):
            worker.ask(op="double", value=1)
    worker.close()


def test_peers_get_none_of_octavo_s_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DTYPE", "float32")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    made = process.child_environment(3, ("first",), {"MORE": "1"})
    assert made["OMP_NUM_THREADS"] == "3"
    assert made["PYTHONPATH"] == f"first{os.pathsep}somewhere"
    assert made["MORE"] == "1"
    assert "OCTAVO_DTYPE" not in made
    assert process.child_environment(3)["PYTHONPATH"] == "somewhere"
    assert process.child_environment(3, ("first",), foreign=True)["PYTHONPATH"] == "first"
    assert "PYTHONPATH" not in process.child_environment(3, foreign=True)


# ---------------------------------------------------------------- checkpoints and conversion


@pytest.mark.parametrize("size", [300, 512, 2000])
def test_the_tokenizer_has_every_id_and_reads_what_it_writes(size: int) -> None:
    made = checkpoints.tokenizer(size)
    assert len(made) == size
    text = " tea rain sit, and Straße 7"
    assert made.decode(made.encode(text)) == text
    assert len(made.encode(" e")) == 1 or size < 3 + 256 + 2
    with pytest.raises(ValueError, match="needs 259 tokens, got 258"):
        checkpoints.tokenizer(258)


@pytest.mark.parametrize("method", list(stored.CONFIGS))
def test_a_checkpoint_of_4_bits_holds_about_the_same_weights(method: str, tmp_path: Path) -> None:
    checkpoints.make_decoder(tmp_path / "hf", checkpoints.SHAPES["tiny"])
    folder = engines.Files(tmp_path, {}, 1).stored(method)
    plain, found = load(tmp_path / "hf").state_dict(), load(folder).state_dict()
    assert plain.keys() == found.keys()
    rounded = [name for name in plain if not torch.equal(plain[name], found[name])]
    assert len(rounded) == 2 * 4, "what layers multiply with: joined, four of each"
    for name in rounded:
        groups, near = plain[name].unflatten(1, (-1, stored.GROUP)), found[name].unflatten(1, (-1, stored.GROUP))
        # Of 15 steps from the least to the largest number, and of 7 up to the larger of both sides.
        step = (groups.amax(-1) - groups.amin(-1)) / 15 if method == "awq" else groups.abs().amax(-1) / 7
        assert (groups - near).abs().amax(-1).le(step * 1.01).all(), name
        assert (groups - near).abs().mean() < step.mean() * 0.3


def test_a_server_gets_the_file_as_it_is_stored(tmp_path: Path) -> None:
    (tmp_path / "q4_k_m.gguf").touch()
    files = engines.Files(tmp_path, {}, 1)
    made = servers.make("octavo q4_k_m", files, {}, 2, 8)
    assert made._command[-1] == str(tmp_path / "q4_k_m.gguf")
    assert made._environment["OCTAVO_QUANTIZATION"] == "stored"
    assert "OCTAVO_DTYPE" not in made._environment
    plain = servers.make("octavo bfloat16", files, {}, 2, 8)
    assert plain._command[-1] == str(tmp_path / "hf")
    assert plain._environment["OCTAVO_DTYPE"] == "bfloat16"
    assert "OCTAVO_QUANTIZATION" not in plain._environment
    made.close()
    plain.close()


def test_requests_are_the_same_for_everybody_and_within_their_lengths() -> None:
    sizes = cases.Sizes()
    prompts, wanted = cases.mixed_requests(32, sizes, 49152)
    assert (prompts, wanted) == cases.mixed_requests(32, sizes, 49152)
    assert all(32 <= len(prompt) <= 256 for prompt in prompts)
    assert all(32 <= count <= 128 for count in wanted)
    assert all(3 <= token < 49152 for prompt in prompts for token in prompt)
    assert prompts != cases.mixed_requests(32, sizes, 49152, seed=1)[0]


def test_agreement_counts_first_tokens() -> None:
    answers = {"octavo": [[1, 2], [3, 4], [5, 6]], "peer": [[1, 9], [9, 4], [5, 6]]}
    assert cases.agreement(answers, "octavo") == {"peer": "2 of 3"}
    assert cases.agreement(answers, "gone") == {}


def test_rows_for_llama_cpp_s_rotation() -> None:
    """Pairs (i, i + half) of a head become neighbours, so that the rotated products stay the same."""
    source = (BENCHMARKS / "peers" / "llama_cpp_worker.py").read_text()
    start = source.index("def _interleaved")
    code: dict[str, Any] = {"np": np}
    exec(source[start : source.index("def _gguf_name")], code)
    rows = np.arange(8, dtype=np.uint16)[:, None] * np.ones((1, 3), dtype=np.uint16)
    assert code["_interleaved"](rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("crowd", [1, 8])
def test_settings_of_the_peers(crowd: int) -> None:
    for name, setting in engines.llama_cpp_settings(2, crowd).items():
        assert setting["n_seq_max"] == crowd, name
        assert setting["n_ctx"] >= 512 * crowd
    pipelines = {setting["pipeline"] for setting in engines.openvino_settings(2, crowd).values()}
    assert pipelines == ({"paged", "stateful"} if crowd == 1 else {"paged"})
    translators = [setting["translator"] for setting in engines.ctranslate2_settings("int8", crowd, 2).values()]
    assert all(one["inter_threads"] * one["intra_threads"] == 2 for one in translators)


# ---------------------------------------------------------------- loads from the disk


@pytest.mark.skipif(not page_cache.can_evict(), reason="needs Linux")
def test_a_file_leaves_the_memory_unless_it_is_mapped(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(1 << 20))
    assert page_cache.resident(file) == 1.0, "what was just written is in memory"
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        touched = sum(mapped[page] for page in range(0, len(mapped), mmap.PAGESIZE))
        assert page_cache.evict([file]) == 1.0
    assert touched > 0
    if page_cache.evict([file]) == 1.0:
        pytest.skip("this file system keeps its files in memory")
    assert page_cache.resident(file) == 0.0
    assert len(file.read_bytes()) == 1 << 20
    assert page_cache.resident(file) == 1.0


class Loader:
    """A worker that notes what it is asked for, and keeps a file of smaller weights at its first load."""

    def __init__(self, kept: Path):
        self.process, self.orders, self._kept = self, [], kept  # type: ignore[var-annotated]
        self.pid = os.getpid()

    def ask(self, op: str, **_order: Any) -> dict[str, Any]:
        self.orders.append(op)
        if op == "load":
            self._kept.mkdir(exist_ok=True)
            (self._kept / "int8-0.safetensors").write_bytes(b"weights")
        return {}


def test_a_cold_load_forgets_the_file_and_what_was_kept_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = tmp_path / "q8_0.gguf", tmp_path / "quantised"
    model.write_bytes(bytes(4096))
    worker = Loader(kept)
    forgotten: list[list[str]] = []

    def evict(files: list[Path]) -> float:
        assert worker.orders[-1] == "unload", "a file that is mapped stays in memory"
        forgotten.append([file.name for file in files])
        return 0.25

    monkeypatch.setattr(engines, "evict", evict)
    engine = engines.Engine("octavo q8_0", worker, model, {"as stored": {}}, kept)  # type: ignore[arg-type]
    figures = cases.load_cold(engine)
    assert figures["in_memory_percent"] == 25
    assert figures["load_seconds_per_gb"] > 0
    cases.load_cold(engine)
    assert forgotten == [["q8_0.gguf"], ["q8_0.gguf", "int8-0.safetensors"]]
    assert worker.orders == ["unload", "unload", "load", "unload"] * 2
    assert [file.name for file in engine.kept_files()] == ["int8-0.safetensors"]


# ---------------------------------------------------------------- a run


@pytest.mark.slow
def test_a_tiny_run_of_octavo_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import cpu

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    output = tmp_path / "result" / "tiny.json"
    arguments = ["--tiny", "--quick", "--threads", "1", "--peers-dir", str(tmp_path / "none"), "--output", str(output)]
    result = cpu.main([*arguments, "--peers", "openvino", "--work", "decode", "overhead"])
    assert result == json.loads(output.read_text())
    assert result["not_installed"] == ["openvino"]
    decoding = result["cases"]["decode"]["contestants"]
    assert set(decoding) == {"octavo bfloat16", "octavo int8", "octavo int4"}
    assert all(one["median"]["tokens_per_second"] > 0 for one in decoding.values())
    parts = result["cases"]["overhead"]["microseconds_of_a_step"]
    assert set(parts) == {"model", "schedule", "update", "prepare and sample"}
    assert all(spent > 0 for spent in parts.values())
    (overhead,) = [row for row in result["goals"] if row["case"] == "overhead"]
    assert 0 < overhead["octavo"] < 100
    assert result["machine"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "openvino is left out: it is not installed" in printed
    assert "decode, batch 1, bfloat16" in printed
    assert "(llama.cpp bf16: missing)" in printed


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = {"octavo": series("tokens_per_second", 100, 120), "peer": series("tokens_per_second", 80, 90)}
    row = goals.judge(goal("tokens_per_second", ("octavo",), ("peer",), 1.0), measured)
    assert row is not None
    goals.plot([row], "a machine", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_or_without_peers_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = goals.judge(goal("tokens_per_second", ("octavo",), ("gone",), 1.0), ALONE)
    assert row is not None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"needs matplotlib: .*pip install matplotlib"):
        goals.plot([row], "a machine", tmp_path / "plot.png")
