"""Explains why torch does not use the NVIDIA GPUs of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from engine.host import nvidia_smi
from engine.host.nvidia_smi import ListedGpu, NoAnswerError

_VERSION = Path("/proc/driver/nvidia/version")
_CONTROL = Path("/dev/nvidiactl")
# The oldest driver for each major version of CUDA on Linux (NVIDIA, CUDA Toolkit release notes).
_OLDEST = {11: 450, 12: 525, 13: 580}
_SETTING = "CUDA_VISIBLE_DEVICES"
_NAME_ONE = "set it to a number or UUID from nvidia-smi -L"
_CHECK = "Check nvidia-smi, CUDA_VISIBLE_DEVICES, and docker run --gpus all."


def has_driver() -> bool:
    """Whether NVIDIA's driver is loaded, or was passed to this container."""
    return _VERSION.exists() or _CONTROL.exists()


def driver_version() -> str | None:
    """The version of the loaded driver, such as "580.65.06"; None if it cannot be read."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _VERSION.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found and found[1]


def obstacle(cuda: str | None, rocm: str | None) -> tuple[str, str]:
    """The reason why torch sees no GPU, and how to fix it. `cuda`, `rocm`: the version that torch was built for; None
    if it was not. Without either it is a CPU build."""
    if rocm is not None:
        fix = "An NVIDIA GPU needs a CUDA build of torch, as listed on pytorch.org."
        return f"torch is built for ROCm {rocm} but sees no AMD GPU", fix
    if cuda is None:
        return "torch is a CPU build", "Install a CUDA build of torch, as listed on pytorch.org."
    if not has_driver():
        return "there is no NVIDIA driver", "Install the GPU's driver."
    driver, oldest = driver_version(), _OLDEST.get(int(cuda.partition(".")[0]))
    if driver is not None and oldest is not None and int(driver.partition(".")[0]) < oldest:
        return f"torch is built for CUDA {cuda}, which needs an NVIDIA driver {oldest} or newer; it is {driver}", (
            f"Install a driver {oldest} or newer, or a torch that is built for an older CUDA (for the image: the build "
            "argument TORCH_INDEX names the package index that has it)."
        )
    return _hidden()


def _hidden() -> tuple[str, str]:
    """The reason why CUDA shows no GPU although its driver exists and is new enough, and how to fix it."""
    listed = os.environ.get(_SETTING)
    if listed is not None and _names_none(listed):
        return f"{_SETTING} is {listed!r}, which hides every GPU", f"Unset it, or {_NAME_ONE}."
    try:
        gpus, divided = nvidia_smi.list_gpus(), nvidia_smi.divided_gpus()
    except NoAnswerError as problem:
        setting = "" if listed is None else f" ({_SETTING} is {listed!r})"
        return f"the NVIDIA driver shows no GPU{setting}: {problem}", _CHECK
    if not gpus:
        return "nvidia-smi lists none", _CHECK
    if listed is not None and (wrong := wrong_entry(listed, gpus)) is not None:
        return f"{_SETTING} is {listed!r}, {wrong}", f"Unset it, or {_NAME_ONE}. {_listed(gpus)}"
    bare = next((gpu for gpu in gpus if gpu.uuid in divided and not gpu.slices), None)
    if bare is not None:
        return f"{bare.name} ({bare.uuid}) has MIG enabled but no slices", (
            "As root, make some (nvidia-smi mig -lgip lists sizes, nvidia-smi mig -cgi SIZE -C makes one), or use it "
            "whole: nvidia-smi -mig 0."
        )
    return "the NVIDIA driver shows no GPU", _CHECK


def _names_none(listed: str) -> bool:
    """Whether a value of CUDA_VISIBLE_DEVICES hides all GPUs of any machine."""
    return not listed.strip() or listed.strip().startswith("-")


def wrong_entry(listed: str, gpus: list[ListedGpu]) -> str | None:
    """The first entry of CUDA_VISIBLE_DEVICES that is not a GPU, in words. CUDA shows only the GPUs before it."""
    seen: set[str] = set()
    for entry in map(str.strip, listed.split(",")):
        number = re.match(r"-?\d+", entry)
        if number is not None:
            index = int(number[0])
            there = [str(index)] if 0 <= index < len(gpus) else []
        elif entry.startswith("MIG-"):
            there = [part for gpu in gpus for part in gpu.slices if part == entry]
        else:
            there = [gpu.uuid for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(there) != 1:
            return f"but {entry!r} {'matches several GPUs' if there else 'matches no GPU'}"
        if there[0] in seen:
            return f"which contains {entry!r} twice"
        seen.add(there[0])
    return None


def _listed(gpus: list[ListedGpu]) -> str:
    names = []
    for number, gpu in enumerate(gpus):
        names.append(f"{number} or {gpu.uuid} ({gpu.name})" + "".join(f", its slice {part}" for part in gpu.slices))
    return f"Available: {'; '.join(names)}."


def shown_too_few(count: int) -> tuple[str, str] | None:
    """The error in CUDA_VISIBLE_DEVICES if torch sees fewer GPUs than it has entries, and how to fix it."""
    listed = os.environ.get(_SETTING)
    if listed is None or len(listed.split(",")) <= count:
        return None
    try:
        gpus = nvidia_smi.list_gpus()
    except NoAnswerError:
        return None
    wrong = wrong_entry(listed, gpus)
    if wrong is None:
        parts = [entry for entry in listed.split(",") if entry.strip().startswith("MIG-")]
        wrong = "and CUDA shows a process one slice alone (MIG)" if len(parts) > 1 else None
    if wrong is None:
        return None
    return f"{_SETTING} is {listed!r}, {wrong}: torch sees {count}", f"Correct it. {_listed(gpus)}"


def another(count: int) -> str:
    """A sentence on how to select another GPU that torch sees."""
    listed = os.environ.get(_SETTING)
    text = f"Use --device cuda:N with N from 0 to {count - 1}."
    if listed is not None:
        text += f" {_SETTING} is {listed!r}: GPUs are numbered in its order, and others are hidden."
    return text
