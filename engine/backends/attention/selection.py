"""The choice of the attention backend, made once at start."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from engine.backends.attention.base import AttentionBackend, AttentionPart
from engine.backends.native.attention import NativeAttention
from engine.backends.torch.attention import TorchReference
from engine.backends.triton.attention import TritonAttention
from engine.errors import ConfigError

# Fastest first; the reference computes everything and comes last.
BACKENDS: tuple[type[AttentionBackend], ...] = (TritonAttention, NativeAttention, TorchReference)

logger = logging.getLogger("octavo.attention")


def select(
    device: torch.device | str, parts: Iterable[AttentionPart] = (), cache_dtype: torch.dtype | None = None
) -> AttentionBackend:
    """The first backend that can compute all of a model's attention parts on a device, with pages of a format (None:
    without pages).

    The choice, and the reasons against faster backends, are logged here and nowhere else. Raises ConfigError if no
    backend can; lists the reasons of each.
    """
    device = torch.device(device)
    parts = list(parts)
    refusals: list[str] = []
    for backend in BACKENDS:
        if not backend.made_for(device):
            continue
        # Layers share parts, so reasons repeat; each is given once, in order of first occurrence.
        found = (reason for part in parts for reason in backend.unsupported(part, device, cache_dtype))
        reasons = list(dict.fromkeys(found))
        if not reasons:
            passed = f"; not usable: {'; '.join(refusals)}" if refusals else ""
            level = logging.INFO if passed else logging.DEBUG  # the usual choice is not logged
            logger.log(level, "Attention backend on %s: %s%s", device, backend.name, passed)
            return backend()
        refusals.append(f"{backend.name} ({', '.join(reasons)})")
    raise ConfigError(
        f"no attention backend supports this model on {device}: {'; '.join(refusals)}. Change --device or "
        f"--kv-cache-dtype"
    )
