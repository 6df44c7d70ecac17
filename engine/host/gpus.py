"""An NVIDIA GPU that this machine has and torch does not use: what prevents it."""

from __future__ import annotations

import re
from pathlib import Path

_VERSION = Path("/proc/driver/nvidia/version")
_CONTROL = Path("/dev/nvidiactl")
# The oldest driver for each major version of CUDA, on Linux (NVIDIA, CUDA Toolkit release notes).
_OLDEST = {11: 450, 12: 525, 13: 580}


def has_driver() -> bool:
    """NVIDIA's driver is loaded, or was passed to this container."""
    return _VERSION.exists() or _CONTROL.exists()


def driver_version() -> str | None:
    """That of the loaded driver, such as "580.65.06"; None where it cannot be read."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _VERSION.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found and found[1]


def obstacle(cuda: str | None) -> tuple[str, str]:
    """Why torch sees no GPU, and what to do about it.

    Args:
        cuda: the version that torch was built for; None: it is a CPU build.
    """
    if cuda is None:
        return "torch is a CPU build", "Install a CUDA build of torch, as listed on pytorch.org."
    if not has_driver():
        return "there is no NVIDIA driver", "Install the GPU's driver."
    driver, oldest = driver_version(), _OLDEST.get(int(cuda.partition(".")[0]))
    if driver is not None and oldest is not None and int(driver.partition(".")[0]) < oldest:
        return f"torch is built for CUDA {cuda}, which needs an NVIDIA driver {oldest} or newer; it is {driver}", (
            f"Install a driver {oldest} or newer, or a torch that is built for an older CUDA."
        )
    return "the NVIDIA driver shows it none", "Check nvidia-smi, CUDA_VISIBLE_DEVICES, and docker run --gpus all."
