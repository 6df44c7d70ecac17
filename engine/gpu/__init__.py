"""Kernels for GPUs, written in Triton: the counterpart of `engine.native`, which serves CPUs.

Triton comes with torch's CUDA builds and is optional: this module says whether it is there, and nothing else imports
the files beside it before that was asked. Kernels run on a CPU, too, by Triton's interpreter, if the process was
started with TRITON_INTERPRET=1: slowly, as a proof that they are right, never chosen for serving.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_interpreting = False


@functools.cache
def installed() -> bool:
    """Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def serves(device: torch.device) -> bool:
    """Whether these kernels compute on a device: on CUDA with Triton, on a CPU only within `interpreted`."""
    if device.type == "cuda":
        return installed()
    return device.type == "cpu" and _interpreting


@contextmanager
def interpreted() -> Iterator[None]:
    """Let these kernels serve the CPU, by Triton's interpreter, for as long as this lasts.

    Raises:
        RuntimeError: the process was started without TRITON_INTERPRET=1, or there is no Triton.
    """
    global _interpreting
    if not installed():
        raise RuntimeError("Triton is not installed: pip install triton")
    import triton

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("Triton's interpreter is off: start the process with TRITON_INTERPRET=1")
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before
