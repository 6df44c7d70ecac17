"""How many threads compute: what the settings, the environment, the container and the cores say, in this order; and
that the two processes do as they are told."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.driving import make_engine, run
from support.jobs import CHECKPOINT, MIXED

from engine import ConfigError, Engine, EngineConfig
from engine.backends import native
from engine.host import cpus
from engine.host.cpus import choose_threads, core_cache, cpu_share, cpus_of_rank, memory_nodes, num_cores
from engine.process import launch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """64 cores of two threads each, of which this process may use all."""
    for cpu in range(128):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 64},{cpu % 64 + 64}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(128)), raising=False)
    monkeypatch.setattr(num_cores, "__defaults__", (tmp_path,))
    monkeypatch.setattr(cpus, "cpu_share", lambda: float("inf"))
    return tmp_path


@pytest.mark.parametrize(
    ("listing", "files", "share"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a.slice/b.service\n", {"a.slice/b.service/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n", "cpu.max": "800000 100000\n"}, 3),
        ("0::/of/the/host\n", {"cpu.max": "200000 100000\n"}, 2),
        ("", {"cpu.max": "200000 100000\n"}, 2),
        ("1:cpu,cpuacct:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "25000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.25),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("3:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "25000\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/\n", {"cpu.max": "nonsense\n"}, None),
        ("0::/\n", {"cpu.max": ""}, None),
        ("0::/\n", {"cpu.max": "100000 0\n"}, None),
    ],
)
def test_a_containers_share_of_cpus(listing: str, files: dict[str, str], share: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "listing").write_text(listing)
    assert cpu_share(tmp_path, tmp_path / "listing") == (float("inf") if share is None else share)


def test_ranks_have_the_cpus_of_their_memory(machine: Path) -> None:
    for number, text in enumerate(("0-31,64-95\n", "32-63,96-127\n", "\n")):  # the last has memory only
        (machine / f"node{number}").mkdir()
        (machine / f"node{number}" / "cpulist").write_text(text)
    nodes = memory_nodes(machine)
    assert nodes == [{*range(32), *range(64, 96)}, {*range(32, 64), *range(96, 128)}]
    assert [cpus_of_rank(rank, 4, nodes) for rank in range(4)] == [nodes[0], nodes[0], nodes[1], nodes[1]]
    assert [cpus_of_rank(rank, 2, [{0}, {1}, {2}, {3}]) for rank in range(2)] == [{0, 1}, {2, 3}]
    assert cpus_of_rank(0, 3, nodes) is None
    assert cpus_of_rank(0, 2, nodes[:1]) is None


@pytest.mark.parametrize(("size", "found"), [("2048K", 2 << 20), ("", 0), ("many", 0)])
def test_the_cache_of_a_core(size: str, found: int, tmp_path: Path) -> None:
    for number, (level, text) in enumerate((("1", "48K"), ("2", size), ("3", "260096K"))):
        folder = tmp_path / "cpu0" / "cache" / f"index{number}"
        folder.mkdir(parents=True)
        (folder / "level").write_text(level + "\n")
        (folder / "size").write_text(text + "\n")
    assert core_cache(tmp_path) == found
    assert core_cache(tmp_path / "nothing") == 0


def test_cores(machine: Path) -> None:
    assert num_cores(set(range(128)), machine) == 64
    assert num_cores({0, 64}, machine) == 1
    assert num_cores({0, 1, 65, 70}, machine) == 3
    assert num_cores(set(range(6)), machine / "nothing") == 6, "where the system does not say"


@pytest.mark.parametrize(
    ("setting", "given", "share", "count", "reason"),
    [
        (None, None, float("inf"), 64, "one for each core"),
        (None, None, 2, 2, "what the container may use"),
        (None, None, 2.9, 2, "what the container may use"),
        (None, None, 0.5, 1, "what the container may use"),
        (None, None, 100, 64, "one for each core"),
        (None, "12", 2, 12, "OMP_NUM_THREADS"),
        (None, "4,2", 2, 4, "OMP_NUM_THREADS"),
        (None, "0", 2, 2, "what the container may use"),
        (None, "many", 2, 2, "what the container may use"),
        (None, "", float("inf"), 64, "one for each core"),
        (7, "12", 2, 7, "--threads"),
    ],
)
def test_what_counts(
    setting: int | None,
    given: str | None,
    share: float,
    count: int,
    reason: str,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The setting before the environment, that before the container and the cores."""
    monkeypatch.setattr(cpus, "cpu_share", lambda: share)
    found = choose_threads(setting, {} if given is None else {"OMP_NUM_THREADS": given})
    assert (found.count, found.reason, found.cpus) == (count, reason, min(128, share))
    assert found.too_many == (count > max(1, min(128, share)))


def test_a_process_bound_to_few_cpus(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 67, 9})
    assert choose_threads(None, {}).count == 2
    assert choose_threads(None, {}).cpus == 3


@pytest.mark.parametrize("value", [0, -3, True, 1.5, "2"])
def test_settings_that_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"threads must be an integer of at least 1, got {value!r}.")):
        EngineConfig(model="m", threads=value)  # type: ignore[arg-type]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    from support.checkpoints import make_checkpoint

    tmp_path = request.getfixturevalue("tmp_path")
    make_checkpoint(CHECKPOINT, tmp_path / "model")
    loaded = make_engine(tmp_path / "model", threads=2)
    yield loaded
    loaded.close()


def test_an_engine_computes_in_so_many(engine: Engine, mixed_answers: list[list[list[int]]]) -> None:
    """torch and our kernels; what they answer does not depend on it."""
    assert torch.get_num_threads() == 2
    library = native.current()
    assert library is None or library.threads() == 2
    assert run(engine, MIXED) == mixed_answers


def test_more_threads_than_cpus_are_a_warning(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpus, "cpu_share", lambda: 1.5)
    with caplog.at_level(logging.WARNING, "octavo.engine"):
        make_engine(engine.config.model, threads=3).close()
    assert "threads is 3 (--threads), but only 1.5 CPUs are available" in caplog.text
    assert "Lower --threads." in caplog.text
    assert torch.get_num_threads() == 3
    caplog.clear()
    make_engine(engine.config.model, threads=1).close()
    assert "threads is" not in caplog.text


def test_without_a_setting_no_program_gets_more_than_before(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that uses this process's torch may have chosen fewer."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for before, after in ((1, 1), (2, 2), (5, 3)):
        torch.set_num_threads(before)
        make_engine(engine.config.model).close()
        assert torch.get_num_threads() == after


def environment_of(threads: int | None = None) -> dict[str, str]:
    return launch._environment(EngineConfig(model="m", threads=threads))


def test_the_engines_process_is_told_before_it_loads_anything(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert environment_of()["OMP_NUM_THREADS"] == "64"
    assert environment_of()["OPENBLAS_NUM_THREADS"] == "1"
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    assert environment_of()["OPENBLAS_NUM_THREADS"] == "5"
    assert environment_of(7)["OMP_NUM_THREADS"] == "7"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment_of()["OMP_NUM_THREADS"] == "3"
    assert environment_of(7)["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize("given", [None, "3"])
@pytest.mark.slow
def test_a_process_that_leaves_the_cores_to_the_engine(given: str | None) -> None:
    """It computes in one thread, and the engine's gets what the user has given."""
    script = """
import json, os
from engine import EngineConfig
from engine.host.cpus import compute_in_one_thread, choose_threads
from engine.process.launch import _environment
default = choose_threads(None, {}).count
compute_in_one_thread()
compute_in_one_thread()
import torch
engine = _environment(EngineConfig(model="m"))
threads = int(engine["OMP_NUM_THREADS"])
print(json.dumps([default, torch.get_num_threads(), threads, os.environ["TOKENIZERS_PARALLELISM"]]))
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if given is None else {"OMP_NUM_THREADS": given})
    environment.pop("TOKENIZERS_PARALLELISM", None)
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    default, here, there, parallelism = json.loads(ran.stdout)
    assert here == 1
    assert there == (default if given is None else 3)
    assert parallelism == "false"
