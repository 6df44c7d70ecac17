"""What keeps a model from being loaded besides the checkpoint itself, said so that it can be acted on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.errors import ModelLoadError
from engine.execution.memory import available_memory
from engine.model.weights import weight_files

_NO_MEMORY = ("allocate memory", "out of memory", "not enough memory")


def check_weights_fit(path: Path, stored: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that exceed the free memory of a CPU.

    The system hands out memory that it does not have, and kills who uses it.

    Raises:
        ModelLoadError: they take more than there is.
    """
    if device.type != "cpu":
        return
    size = sum(file.stat().st_size for file in weight_files(path)) * dtype.itemsize // stored.itemsize
    free = available_memory()
    if size > free:
        raise ModelLoadError(
            f"The weights of {path} take {size} bytes as {dtype}, but {free} bytes of memory are free. Use a smaller "
            "model, a 16-bit --dtype, or a machine (a container's limit) with more memory."
        )


@contextmanager
def explained(model: str) -> Iterator[None]:
    """Turn memory that is not there, and files that may not be read, into errors that say what to do.

    Raises:
        ModelLoadError: instead of MemoryError, PermissionError, and what torch raises for want of memory.
    """
    try:
        yield
    except PermissionError as error:
        raise ModelLoadError(
            f"{error.filename} cannot be read: permission denied. Make it readable for the user that runs Octavo."
        ) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(text in str(error).lower() for text in _NO_MEMORY):
            raise
        raise ModelLoadError(
            f"The memory does not suffice to load {model} ({str(error).strip() or type(error).__name__}). Use a "
            "smaller model, a 16-bit --dtype, a lower --max-model-len or --kv-cache-memory, or a machine (a "
            "container's limit) with more memory."
        ) from error
