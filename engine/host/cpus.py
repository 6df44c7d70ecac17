"""The number of CPUs that this process may use, and the number of computing threads.

It only counts and does not import torch, so that a process can be given its environment before torch is loaded in it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.host.cgroups import MOUNT, OWN_GROUPS, own_groups, text_of

CPUS = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")
_NAME = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Threads:
    """The number of computing threads, and the setting or limit that determines it. `cpus`: CPUs that this process may
    use, within the container's limit."""

    count: int
    reason: str
    cpus: float

    @property
    def too_many(self) -> bool:
        """Whether the threads would wait for each other."""
        return self.count > max(1.0, self.cpus)


def choose_threads(setting: int | None, environment: Mapping[str, str]) -> Threads:
    """The engine's threads: `setting` (`EngineConfig.threads`), else OMP_NUM_THREADS, else one per core.

    A core's second hardware thread shares the multiplication units, so dense products gain almost nothing from it, and
    threads that wait for each other wait for the slowest.
    """
    allowed = _allowed()
    share = cpu_share()
    cpus = min(float(len(allowed)), share)
    if setting is not None:
        return Threads(setting, "--threads", cpus)
    given = environment.get(_NAME, "").split(",")[0].strip()
    if given.isdigit() and int(given) > 0:
        return Threads(int(given), _NAME, cpus)
    cores = num_cores(allowed)
    if share < cores:
        return Threads(max(1, int(share)), "what the container may use", cpus)
    return Threads(cores, "one for each core", cpus)


def cpu_share(cgroups: Path = MOUNT, listing: Path = OWN_GROUPS) -> float:
    """CPUs that the control groups of this process may keep busy; infinity without a limit."""
    share = float("inf")
    for version, group in own_groups("cpu", cgroups, listing):
        if version == 2:
            words = text_of(group / "cpu.max").split()
        else:
            words = [text_of(group / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        quota, period = (int(word) if word.isdigit() else 0 for word in (*words, "", "")[:2])
        if quota > 0 < period:  # otherwise there is no such group, or it contains "max" or -1
            share = min(share, quota / period)
    return share


def num_cores(cpus: set[int], topology: Path = CPUS) -> int:
    """Physical cores of these CPUs; the number of CPUs if the system does not report it."""
    cores = set()
    for cpu in cpus:
        siblings = text_of(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").strip()
        cores.add(siblings or str(cpu))
    return max(1, len(cores))


@functools.cache
def core_cache(topology: Path = CPUS) -> int:
    """Bytes of the second-level cache, which most processors have per core; 0 if the system does not report it."""
    for level in (topology / "cpu0" / "cache").glob("index*"):
        size = re.fullmatch(r"(\d+)K", text_of(level / "size").strip())
        if size and text_of(level / "level").strip() == "2":
            return int(size[1]) << 10
    return 0


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


_given: list[str | None] = []


def compute_in_one_thread() -> None:
    """Make libraries that this process loads from now on start no threads: the cores are for the engine, which runs in
    a separate process and gets `given_environment`."""
    if not _given:
        _given.append(os.environ.get(_NAME))
    os.environ[_NAME] = "1"
    # Texts are tokenised one by one, so a pool with a thread for each CPU would be idle.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def given_environment() -> dict[str, str]:
    """The environment without the changes of `compute_in_one_thread`."""
    environment = dict(os.environ)
    for value in _given:
        if value is None:
            environment.pop(_NAME, None)
        else:
            environment[_NAME] = value
    return environment


def threads_of_rank(setting: int | None, ranks: int) -> int | None:
    """The number of threads of each process, if several processes divide a model: the setting, else an equal share of
    the cores. None: no setting, and only one process."""
    if setting is not None or ranks == 1:
        return setting
    return max(1, choose_threads(None, given_environment()).count // ranks)


def memory_nodes(root: Path = NODES) -> list[set[int]]:
    """The CPUs that this process may use, by the memory that is near to them; a machine with one socket usually has one
    node."""
    allowed, found = _allowed(), []
    for folder in sorted(root.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        ends = (part.partition("-") for part in text_of(folder / "cpulist").strip().split(",") if part)
        cpus = {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}
        found.append(cpus & allowed)
    return [cpus for cpus in found if cpus]


def cpus_of_rank(rank: int, ranks: int, nodes: list[set[int]]) -> set[int] | None:
    """The CPUs for one of the processes that divide a model: those of its own nodes, so that its weights are in near
    memory. None if there is one node, or the nodes cannot be divided evenly."""
    if len(nodes) < 2 or (ranks % len(nodes) and len(nodes) % ranks):
        return None
    if ranks >= len(nodes):
        return nodes[rank * len(nodes) // ranks]
    each = len(nodes) // ranks
    return set().union(*nodes[rank * each : (rank + 1) * each])


def engine_environment(setting: int | None) -> dict[str, str]:
    """The environment for the engine's process, which its libraries read when they are loaded."""
    environment = given_environment()
    environment[_NAME] = str(choose_threads(setting, environment).count)
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's thread pool, which has nothing to multiply here
    return environment
