"""Kernels that begin before the previous one ends (CUDA's programmatic dependent launch).

Such a kernel signals at once that the next one may begin, loads data that is never written (weights), and then waits
until the previous kernel has ended and all its results are visible. Since each of them waits, everything before the
previous kernel has ended as well. So after its wait, a kernel that began early may read and write like any other.
"""

from __future__ import annotations

import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret  # by code that knows nothing of other kernels


def can_overlap(device: torch.device) -> bool:
    """Whether kernels on a device may begin before the previous one has ended."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapping(wanted: bool) -> dict[str, bool]:
    """The options of a launch: the kernel's EARLY, and the corresponding option of Triton."""
    early = wanted and not INTERPRETED
    return {"EARLY": early} | ({"launch_pdl": True} if early else {})
