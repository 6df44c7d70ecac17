"""NVIDIA's tool nvidia-smi, which lists this machine's or container's GPUs, even those that CUDA_VISIBLE_DEVICES hides.

It may take seconds if no process keeps the driver awake, so it is only run to explain a problem.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

_PATIENCE = 20.0  # seconds
_GPU = re.compile(r"GPU \d+: (.*) \(UUID: (\S+)\)")
_SLICE = re.compile(r"\s+MIG \S+\s+Device\s+\d+: \(UUID: (\S+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedGpu:
    """A GPU that the driver shows."""

    name: str
    uuid: str
    slices: tuple[str, ...] = ()


class NoAnswerError(Exception):
    """A failure of the tool: it is missing or returns an error. The message has the reason."""


def list_gpus() -> list[ListedGpu]:
    """All GPUs, in the tool's order, which is the order on the PCI bus. Raises NoAnswerError if the tool is missing or
    fails."""
    gpus: list[ListedGpu] = []
    for line in _said("-L"):
        if (one := _GPU.match(line)) is not None:
            gpus.append(ListedGpu(name=one[1], uuid=one[2]))
        elif (part := _SLICE.match(line)) is not None and gpus:
            last = gpus[-1]
            gpus[-1] = ListedGpu(name=last.name, uuid=last.uuid, slices=(*last.slices, part[1]))
    return gpus


def divided_gpus() -> list[str]:
    """UUIDs of the GPUs in MIG mode, even if they have no slice yet. Raises NoAnswerError if the tool is missing or
    fails."""
    rows = _rows("--query-gpu=uuid,mig.mode.current")
    return [uuid for uuid, mode in rows if mode == "Enabled"]


def free_memory() -> dict[str, int]:
    """Free bytes of each GPU by UUID, for GPUs that report it. Raises NoAnswerError if the tool is missing or fails."""
    return {uuid: int(free) << 20 for uuid, free in _rows("--query-gpu=uuid,memory.free") if free.isdigit()}


def memory_holders(uuid: str) -> dict[int, int]:
    """Bytes of a GPU that each computing process uses, by process id, largest first. Processes of other containers may
    be missing. Raises NoAnswerError if the tool is missing or fails."""
    rows = _rows("--query-compute-apps=gpu_uuid,pid,used_memory")
    held = {int(pid): int(size) << 20 for gpu, pid, size in rows if gpu == uuid and pid.isdigit() and size.isdigit()}
    return dict(sorted(held.items(), key=lambda item: -item[1]))


def _rows(query: str) -> list[list[str]]:
    width = query.count(",") + 1
    rows = [[cell.strip() for cell in line.split(",")] for line in _said(query, "--format=csv,noheader,nounits")]
    return [row for row in rows if len(row) == width]


def _said(*arguments: str) -> list[str]:
    """The tool's output lines. Raises NoAnswerError if the tool is missing or fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=False
        )
    except FileNotFoundError as error:
        raise NoAnswerError("there is no nvidia-smi") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswerError(f"nvidia-smi cannot be run: {error}") from error
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"status {done.returncode}"]
        raise NoAnswerError(f"nvidia-smi fails: {lines[0].strip().rstrip('.')}")
    return done.stdout.splitlines()
