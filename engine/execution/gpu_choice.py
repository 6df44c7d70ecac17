"""A description of the GPU that serves, among those that torch sees, and of its use by other processes."""

from __future__ import annotations

from dataclasses import dataclass
from os import getpid

import torch

from engine.execution.memory import device_memory, gib
from engine.host import gpus, nvidia_smi
from engine.host.nvidia_smi import NoAnswerError

_OURS = 2**30  # bytes that CUDA itself may take for this process before anything is loaded
_NAMED = 4  # maximum number of named processes


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """The GPU that serves.

    Attributes:
        chosen: a text with its device, its name and the number of GPUs.
        warnings: problems with it, and what to do about them.
        no_kernels: why it computes only with torch, and what to do about it; empty if it has Octavo's kernels.
    """

    chosen: str
    warnings: tuple[tuple[str, str], ...] = ()
    no_kernels: tuple[str, str] = ("", "")


def look_at(device: torch.device, utilization: float) -> GpuFacts:
    """The facts about a GPU before anything is loaded onto it. `utilization`: share of its memory that may be used."""
    device, count = _numbered(device), torch.cuda.device_count()
    name = torch.cuda.get_device_name(device)
    slice_of = ", a slice, whose memory alone counts" if " MIG " in name else ""
    chosen = f"{device} ({name}{slice_of})"
    if count > 1:
        chosen += f", one of {count} GPUs; Octavo uses one, --device cuda:N chooses another"
    found = (gpus.shown_too_few(count), _held_by_others(device, utilization))
    return GpuFacts(chosen=chosen, warnings=tuple(one for one in found if one is not None))


def _held_by_others(device: torch.device, utilization: float) -> tuple[str, str] | None:
    memory = device_memory(device)
    assert memory is not None
    total, held = memory.total(), memory.total() - memory.free()
    if held <= max(_OURS, total // 10):
        return None
    allowed = utilization * total
    return f"Other processes use {gib(held)} of {device}'s {gib(total)}{holders(device)}", (
        f"--gpu-memory-utilization {utilization} allows {gib(allowed)} including theirs, which leaves "
        f"{gib(max(allowed - held, 0))}. Stop them, or use {another_gpu(device)}."
    )


def holders(device: torch.device) -> str:
    """The processes that use most of a GPU's memory, in brackets; "" if that cannot be determined, as in many
    containers."""
    if not torch.cuda.is_available():
        return ""
    try:
        held = nvidia_smi.memory_holders(_uuid(_numbered(device)))
    except NoAnswerError:
        return ""
    others = [f"process {pid} {gib(size)}" for pid, size in held.items() if pid != getpid()]
    return f" ({', '.join(others[:_NAMED])}{', …' if len(others) > _NAMED else ''})" if others else ""


def another_gpu(device: torch.device) -> str:
    """Another GPU as a setting: the one with the most free memory of those that torch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 1:
        return "another GPU"
    others = [torch.device("cuda", number) for number in range(count) if number != _numbered(device).index]
    try:
        free = nvidia_smi.free_memory() if others else {}
    except NoAnswerError:
        free = {}
    known = {free[_uuid(one)]: one for one in others if _uuid(one) in free}
    if not known:
        return "another GPU (--device cuda:1)"
    most = max(known)
    return f"another GPU (--device {known[most]} has {gib(most)} free)"


def _numbered(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _uuid(device: torch.device) -> str:
    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"
