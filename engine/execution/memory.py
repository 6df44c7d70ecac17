"""The memory that is left for this process, and the signs that it has run out."""

from __future__ import annotations

from typing import Protocol

import torch

_NO_MEMORY = ("allocate memory", "out of memory", "not enough memory", "cublas_status_alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that the host or a GPU is out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _NO_MEMORY)


class DeviceMemory(Protocol):
    """The memory of a GPU, according to the GPU and to torch, in bytes."""

    def total(self) -> int:
        """The total memory."""

    def free(self) -> int:
        """The bytes that no process has."""

    def allocated(self) -> int:
        """The bytes of this process's tensors."""

    def peak(self) -> int:
        """The maximum of `allocated` since `reset`."""

    def reset(self) -> None:
        """Return what no tensor needs, and start `peak` again."""


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device):
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def reset(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory of a GPU; None for a CPU, whose memory is the host's (`available_memory`)."""
    return CudaMemory(device) if device.type == "cuda" else None


def gib(size: float) -> str:
    """Bytes in readable form, such as 1.25 GiB."""
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**28 else f"{size / 2**20:.1f} MiB"
