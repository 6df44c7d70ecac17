"""Kernels that begin while the one before them ends (CUDA's programmatic dependent launch).

Such a kernel says at once that the one after it may begin, asks for what is never written (weights), and waits: until
the kernel before it has ended, and all that it wrote is there. As each of them waits, whatever came before that one has
ended as well; so a kernel that begins early may read and write after its wait what any other would.
"""

from __future__ import annotations

import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret  # by something that knows nothing of other kernels


def can_overlap(device: torch.device) -> bool:
    """Whether kernels on a device may begin before the one before them has ended."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapping(wanted: bool) -> dict[str, bool]:
    """The options of a launch: the kernel's EARLY, and the option of Triton's that goes with it."""
    early = wanted and not INTERPRETED
    return {"EARLY": early} | ({"launch_pdl": True} if early else {})
