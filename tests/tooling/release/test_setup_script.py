"""The decisions of tools/setup.py, with fakes in place of pip, the network and the driver."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"


def load(name: str) -> ModuleType:
    """A module of tools/, under a name of its own: "setup" is too common to be imported as it is."""
    sys.path.insert(0, str(TOOLS))
    try:
        spec = importlib.util.spec_from_file_location(f"octavo_tools_{name}", TOOLS / f"{name}.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(TOOLS))


setup = load("setup")
import early_kernels  # noqa: E402  (loaded by setup, from tools/)
import torch_source  # noqa: E402

from engine.backends.native import build  # noqa: E402
from engine.host import folders  # noqa: E402

Offer = torch_source.Offer
CPU, CUDA = Offer("2.13.0+cpu", True), Offer("2.13.0", False, 526.6)


class Probe:
    """Answers as told and counts the questions."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.asked = 0

    def __call__(self) -> object:
        self.asked += 1
        return self.answer


def choose(
    *,
    index: str | None = None,
    driver: bool = False,
    system: str = "Linux",
    configured: object = None,
    public: object = None,
) -> tuple[object, Probe, Probe]:
    first, second = Probe(configured), Probe(public)
    source = torch_source.choose_torch(
        "2.13.0", index=index, driver=driver, system=system, configured=first, public=second
    )
    return source, first, second


class TestTorchSource:
    def test_a_configured_cpu_build_is_taken_by_its_exact_version(self) -> None:
        source, _, public = choose(configured=CPU)
        assert source.requirement == "torch==2.13.0+cpu"
        assert source.options == ()
        assert public.asked == 0

    def test_else_the_public_cpu_index(self) -> None:
        source, configured, _ = choose(configured=CUDA, public=CPU)
        assert source.requirement == "torch==2.13.0+cpu"
        assert source.options == ("--index-url", torch_source.PUBLIC_CPU_INDEX)
        assert configured.asked == 1

    @pytest.mark.parametrize("public", [None, CUDA])
    def test_else_the_default_with_its_size_and_the_way_out(self, public: object) -> None:
        source, _, _ = choose(configured=CUDA, public=public)
        assert source.requirement == "torch==2.13.0"
        assert source.options == ()
        assert "GB" in source.why
        assert "TORCH_INDEX" in source.why

    def test_a_driver_takes_the_default_without_a_question(self) -> None:
        source, configured, public = choose(driver=True, configured=CPU, public=CPU)
        assert (source.requirement, source.options) == ("torch==2.13.0", ())
        assert (configured.asked, public.asked) == (0, 0)

    def test_only_linux_has_a_default_with_cuda(self) -> None:
        source, configured, _ = choose(system="Darwin", configured=CUDA)
        assert (source.requirement, source.options, configured.asked) == ("torch==2.13.0", (), 0)

    @pytest.mark.parametrize("driver", [True, False])
    def test_torch_index_overrides_everything(self, driver: bool) -> None:
        source, configured, public = choose(index="https://example.org/cu130", driver=driver, configured=CPU)
        assert (source.requirement, source.options) == ("torch==2.13.0", ("--index-url", "https://example.org/cu130"))
        assert (configured.asked, public.asked) == (0, 0)

    @pytest.mark.parametrize(
        ("version", "needs", "cpu"),
        [
            ("2.13.0+cpu", ["filelock"], True),
            ("2.13.0", ["filelock", "sympy>=1.13"], True),
            ("2.13.0", ["filelock", 'nvidia-cudnn-cu13==9.2; platform_system == "Linux"'], False),
            ("2.13.0", ["cuda-toolkit[cublas]==13.0.3"], False),
            ("2.13.0+cu130", ["filelock"], False),
        ],
    )
    def test_pips_report_tells_what_it_would_take(self, version: str, needs: list[str], cpu: bool) -> None:
        report = {"install": [{"metadata": {"name": "torch", "version": version, "requires_dist": needs}}]}
        assert torch_source.offer_from_report(report) == Offer(version, cpu)

    def test_an_empty_report_is_no_offer(self) -> None:
        assert torch_source.offer_from_report({"install": []}) is None

    @pytest.mark.parametrize(
        ("line", "offer"),
        [
            ("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (526.6 MB)", CUDA),
            (
                "  Downloading https://example.org/cpu/torch-2.13.0%2Bcpu-cp312-cp312-linux_x86_64.whl (190.1 MB)",
                Offer("2.13.0+cpu", True, 190.1),
            ),
            ("  Downloading torch-2.13.0-cp311-none-any.whl (2.5 GB)", Offer("2.13.0", False, 2500.0)),
            ("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)", None),
            ("Collecting torch==2.13.0", None),
        ],
    )
    def test_a_download_is_recognised_before_it_runs(self, line: str, offer: object) -> None:
        assert torch_source.offer_from_line(line) == offer

    def test_a_started_download_is_cut_off(self, tmp_path: Path) -> None:
        fake = "import time; print('  Downloading torch-2.13.0-cp311-x.whl (526.6 MB)', flush=True); time.sleep(600)"
        started = time.monotonic()
        offer = torch_source.ask_pip((sys.executable, "-c", fake), {}, "2.13.0", (), 250)
        assert offer == CUDA
        assert time.monotonic() - started < 200

    def test_no_answer_in_time_is_no_offer(self) -> None:
        fake = (sys.executable, "-c", "import time; time.sleep(600)")
        started = time.monotonic()
        assert torch_source.ask_pip(fake, {}, "2.13.0", (), 0.3) is None
        assert time.monotonic() - started < 200

    def test_the_pin_comes_from_the_constraints(self) -> None:
        assert torch_source.pinned_version("torchvision==1\ntorch==2.13.0\n", "torch") == "2.13.0"
        with pytest.raises(torch_source.SetupError, match="pins no torch"):
            torch_source.pinned_version("numpy==2.0\n", "torch")


class TestStamp:
    WANTED = frozenset({"test"})

    def decide(self, stamp: dict[str, object], damage: str = "", root: str = "/a", key: str = "k") -> str:
        return setup.decide(stamp, damage=damage, key=key, root=root, wanted=self.WANTED)

    def test_complete_is_ready(self) -> None:
        assert self.decide({"root": "/a", "key": "k", "extras": ["lint", "test"]}) == "ready"

    @pytest.mark.parametrize(
        "stamp",
        [
            {},
            {"root": "/a", "torch": "2.13.0 cpu", "extras": ["test"]},
            {"root": "/a", "key": "old", "extras": ["test"]},
            {"root": "/a", "key": "k", "extras": ["lint"]},
        ],
        ids=["nothing known", "only torch", "requirements changed", "an extra more"],
    )
    def test_anything_less_is_installed_again(self, stamp: dict[str, object]) -> None:
        assert self.decide(stamp) == "install"

    def test_damage_or_a_move_makes_it_anew(self) -> None:
        complete = {"root": "/a", "key": "k", "extras": ["test"]}
        assert self.decide(complete, damage="its Python does not run") == "build"
        assert self.decide(complete, root="/b") == "build"

    def test_the_key_follows_each_of_its_parts(self, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_text("a")
        (tmp_path / "constraints.txt").write_text("b")
        first = setup.stamp_key(tmp_path, "3.11", "2.13.0 cpu")
        assert first == setup.stamp_key(tmp_path, "3.11", "2.13.0 cpu")
        keys = {first, setup.stamp_key(tmp_path, "3.12", "2.13.0 cpu"), setup.stamp_key(tmp_path, "3.11", "x")}
        (tmp_path / "constraints.txt").write_text("c")
        keys.add(setup.stamp_key(tmp_path, "3.11", "2.13.0 cpu"))
        (tmp_path / "pyproject.toml").write_text("d")
        keys.add(setup.stamp_key(tmp_path, "3.11", "2.13.0 cpu"))
        pins = tmp_path / setup.CLIENTS / "old.txt"
        pins.parent.mkdir(parents=True)
        for content in ("e", "f"):
            pins.write_text(content)
            keys.add(setup.stamp_key(tmp_path, "3.11", "2.13.0 cpu"))
        assert len(keys) == 7

    def test_a_torn_stamp_counts_as_none(self, tmp_path: Path) -> None:
        path = tmp_path / "stamp.json"
        assert setup.read_stamp(path) == {}
        path.write_text('{"key": "k", "ext')
        assert setup.read_stamp(path) == {}
        setup.write_stamp(path, {"key": "k"})
        assert setup.read_stamp(path) == {"key": "k"}
        assert [file.name for file in tmp_path.iterdir()] == ["stamp.json"]

    def test_a_chosen_index_outlives_a_plain_run_but_not_a_new_pin(self) -> None:
        chosen = setup.torch_label("https://example.org/cu130", False, "2.13.0", "")
        assert setup.index_of(chosen) == "https://example.org/cu130"
        assert setup.torch_label(None, False, "2.13.0", chosen) == chosen
        assert setup.torch_label(None, False, "2.14.0", chosen) == "2.14.0 cpu"
        assert setup.torch_label(None, True, "2.13.0", "2.13.0 cpu") == "2.13.0 default"
        assert setup.index_of("2.13.0 cpu") is None

    def test_a_package_without_its_record_is_half_installed(self, tmp_path: Path) -> None:
        for name in ("good-1.dist-info", "torn-2.dist-info"):
            (tmp_path / name).mkdir()
        (tmp_path / "good-1.dist-info" / "RECORD").touch()
        assert setup.half_installed(tmp_path) == ["torn-2.dist-info"]
        (tmp_path / "~orch").mkdir()
        assert setup.half_installed(tmp_path) == ["torn-2.dist-info", "~orch"]


class TestClients:
    def install(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> list[str]:
        """The folders that pip was asked to fill."""
        filled = []

        def pip(command: list[str], lock: object, problem: str) -> None:
            target = Path(command[command.index("--target") + 1])
            assert not target.exists(), "what was there before is in the way of pip --target"
            target.mkdir(parents=True)
            filled.append(target.name)
            if fails:
                raise torch_source.SetupError(problem)

        monkeypatch.setattr(setup, "run", pip)
        with pytest.raises(torch_source.SetupError) if fails else contextlib.nullcontext():
            setup.install_clients(root, root / ".venv", None)
        return filled

    def test_only_what_is_not_complete_is_installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / setup.CLIENTS
        folder.mkdir(parents=True)
        (folder / "new.txt").write_text("a==1")
        (folder / "old.txt").write_text("a==0")
        assert self.install(tmp_path, monkeypatch, fails=True) == ["new"]
        assert self.install(tmp_path, monkeypatch) == ["new", "old"]
        assert self.install(tmp_path, monkeypatch) == []
        (folder / "old.txt").write_text("a==0.1")
        assert self.install(tmp_path, monkeypatch) == ["old"]

    def test_the_clients_are_pinned_with_all_they_need(self) -> None:
        for pins in [
            *(ROOT / setup.CLIENTS).glob("*.txt"),
            *(ROOT / setup.SCALE).glob("*.txt"),
            *(ROOT / setup.REAL).glob("*.txt"),
        ]:
            lines = [line for line in pins.read_text().splitlines() if not line.startswith("#")]
            assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9.]+(b[0-9]+)?", line) for line in lines), pins


class TestCommandLine:
    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOLS / "setup.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    def test_help_names_every_command(self) -> None:
        done = self.run("--help")
        assert done.returncode == 0
        assert all(f"setup.py {name}" in done.stdout for name in setup.EXTRAS)

    def test_what_commands_ask_for_is_there(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert frozenset().union(*setup.EXTRAS.values()) <= project["optional-dependencies"].keys()
        assert setup.TESTS.keys() <= setup.EXTRAS.keys()
        assert all((ROOT / part).is_file() for tests in setup.TESTS.values() for part in tests if part.endswith(".py"))

    @pytest.mark.parametrize("arguments", [("bake",), ("lint", "--fast"), ()])
    def test_a_wrong_call_changes_nothing_and_ends_with_2(self, arguments: tuple[str, ...]) -> None:
        assert self.run(*arguments).returncode == 2

    @pytest.mark.parametrize(
        ("command", "tool"), [("docs", "families_table.py"), ("lock", "lock.py"), ("release", "release.py")]
    )
    def test_a_command_runs_the_tool_that_is_there(
        self, monkeypatch: pytest.MonkeyPatch, command: str, tool: str
    ) -> None:
        done: list[object] = []
        monkeypatch.setattr(setup, "set_up", done.append)
        monkeypatch.setattr(setup, "become", done.append)
        monkeypatch.setattr(setup.signal, "signal", lambda *arguments: None)
        assert setup.main([command]) == 0
        assert done == [command, [str(setup.program("python")), str(TOOLS / tool)]]
        assert (TOOLS / tool).is_file()

    def test_an_old_python_is_told_what_to_do(self) -> None:
        assert setup.version_problem((3, 11)) == ""
        message = setup.version_problem((3, 8))
        assert "3.11 or newer" in message
        assert "3.8" in message
        assert "make PYTHON=" in message

    def test_the_version_check_precedes_every_other_import(self) -> None:
        text = (TOOLS / "setup.py").read_text(encoding="utf-8")
        imports = re.findall(r"^(?:import|from) .*$", text[: text.index("sys.exit(version_problem")], re.MULTILINE)
        assert imports == ["import sys"]

    def test_a_python_without_ensurepip_is_told_which_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
        with pytest.raises(torch_source.SetupError, match=r"apt-get install python3\.\d+-venv"):
            setup.make_venv(None)


class TestEarlyKernels:
    def test_they_lie_where_the_engine_looks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for cache in (None, str(tmp_path)):
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
            if cache:
                monkeypatch.setenv("XDG_CACHE_HOME", cache)
            assert early_kernels.cache_folder() == folders.cache_folder("native")

    def test_they_are_made_beside_the_installation(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where and under the name that the engine will look for; by a compiler that writes what it is asked for."""
        compiler = tmp_path / "compiler"
        compiler.write_text(
            '#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; [ "$1" = -o ] && echo made > "$2"; done; echo 1.0\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with early_kernels.compiling(ROOT):
            pass
        name = build.file_name(build.supported_sets()[0], build.find_compiler())
        assert [path.name for path in folders.cache_folder("native").iterdir()] == [name]

    def test_a_failed_installation_ends_the_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started = []
        plain = subprocess.Popen

        def popen(*arguments: object, **options: object) -> object:
            started.append(plain([sys.executable, "-c", "import time; time.sleep(600)"]))
            return started[0]

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(early_kernels.subprocess, "Popen", popen)
        with pytest.raises(RuntimeError, match="pip failed"), early_kernels.compiling(ROOT):
            raise RuntimeError("pip failed")
        assert started[0].poll() is not None

    def test_without_a_place_the_rest_goes_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "octavo").write_text("a file")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        done = []
        with early_kernels.compiling(ROOT):
            done.append(True)
        assert done
