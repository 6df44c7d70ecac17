"""Kernels for GPUs, written in Triton: the counterpart of `engine.backends.native`, which is for CPUs.

Triton comes with torch's CUDA builds and is optional. This module says whether it is installed; other code imports the
files beside it only after asking. With TRITON_INTERPRET=1 set at the start of the process, kernels also run on a CPU in
Triton's interpreter: slowly, to prove that they are right, and never for serving.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import pkgutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

OLDEST = (8, 0)  # compute capability with bfloat16 matrix instructions
FORMATS = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT8 = (8, 9)
_OLDEST_TRITON = (3, 6)

logger = logging.getLogger("octavo.gpu")

_interpreting = False


@functools.cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _computes(index: int | None) -> bool:
    """Whether Triton can start kernels on a GPU; if not, the reason is logged."""
    found, fix = obstacle(index)
    if found and installed():  # if Triton is missing, the choice of the attention backend logs it
        logger.warning("%s: torch computes everything, which is slower. %s", found, fix)
    return not found


@functools.cache
def obstacle(index: int | None) -> tuple[str, str]:
    """The reason why Triton cannot start kernels on a GPU, and what to do about it; empty if it can. `index`: index of
    the GPU; None for the current one."""
    if torch.version.hip is not None:
        return f"torch is built for ROCm {torch.version.hip}", "Octavo's kernels support NVIDIA GPUs only."
    if not installed():
        return "Triton is not installed", 'Install it, as with pip install "octavo[gpu]".'
    from triton import __version__, runtime

    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < OLDEST:
        return f"compute capability {major}.{minor} is below 8.0", "Octavo's kernels need a newer GPU."
    if _version(__version__) < _OLDEST_TRITON:
        return f"Triton {__version__} is older than 3.6", "Install a newer one."
    try:
        with torch.cuda.device(index):
            _ = runtime.driver.active.utils  # compiles a module of its own, the first time
    except Exception as error:  # whatever the error is, torch is used
        return f"Triton starts no kernels ({str(error).strip().split(chr(10))[-1]})", (
            "It needs a C compiler, Python's headers, and a cache folder from which programs may be loaded "
            "(TRITON_CACHE_DIR)."
        )
    return "", ""


@functools.cache
def settle_keys() -> None:
    """Let Triton compute the keys of our kernels in a fixed order, so that other processes find what one process has
    compiled: a kernel's key includes the globals of a function that it calls only if that function's key is already
    known (Triton's `JITCallable.cache_key`)."""
    from triton import JITFunction

    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        for value in vars(importlib.import_module(f"{__name__}.{name}")).values():
            if isinstance(value, JITFunction):
                _ = value.cache_key


def serves(device: torch.device) -> bool:
    """Whether these kernels compute on a device: on CUDA with Triton, on a CPU only within `interpreted`."""
    if device.type == "cuda":
        return _computes(device.index) if torch.cuda.is_available() else installed()
    return device.type == "cpu" and _interpreting


def takes(x: Tensor) -> bool:
    """Whether there are kernels for tensors like x on their device, with contiguous features."""
    return serves(x.device) and x.dtype in FORMATS and x.stride(-1) == 1


@functools.cache
def converts_float8(device: torch.device) -> bool:
    """Whether a device has instructions for FLOAT8: those with compute capability 8.9 or newer."""
    there = device.type == "cuda" and torch.backends.cuda.is_built() and torch.cuda.is_available()
    return there and torch.cuda.get_device_capability(device) >= _FLOAT8


@contextmanager
def interpreted() -> Iterator[None]:
    """Use these kernels on the CPU, in Triton's interpreter, within this block. Raises RuntimeError if the process was
    started without TRITON_INTERPRET=1, or Triton is missing."""
    global _interpreting
    if not installed():
        raise RuntimeError("Triton is not installed: pip install triton")
    import triton

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("Triton's interpreter is off: start the process with TRITON_INTERPRET=1")
    _bounds_of_loops()
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


@functools.cache
def _bounds_of_loops() -> None:
    """Let Triton 3.6 interpret loops: it converts an array with one element to a number, which numpy does not allow
    from 2.4 on."""
    from triton import __version__
    from triton.runtime import interpreter

    if _version(__version__) >= (3, 7):
        return
    plain = interpreter._patch_lang_tensor

    def patch(tensor: object, scope: interpreter._LangPatchScope) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


def current(device: torch.device) -> AbstractContextManager[object]:
    """Within this block, a GPU is the current device of this thread: Triton's kernels and torch's streams and events
    use the current device, not that of their tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to a device; on a CPU the tensor shares its memory.

    A GPU reads it from pinned memory in its own time, and nothing waits; a copy from other memory would wait until all
    earlier steps are computed. torch reuses such memory for the next upload once it has been read.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
