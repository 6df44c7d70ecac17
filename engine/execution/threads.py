"""The threads that compute in the engine's process."""

from __future__ import annotations

import logging
import os

import torch

from engine.config import EngineConfig
from engine.host.cpus import choose_threads

logger = logging.getLogger("octavo.engine")


def use_threads(config: EngineConfig) -> int:
    """Let torch and Octavo's kernels compute in as many threads as the settings say; returns the number.

    Without a setting, the number is never raised: fewer threads may have been chosen for this process.
    """
    chosen = choose_threads(config.threads, os.environ)
    count = chosen.count if config.threads is not None else min(chosen.count, torch.get_num_threads())
    if count != torch.get_num_threads():
        torch.set_num_threads(count)
    if chosen.too_many:
        logger.warning(
            "threads is %d (%s), but only %g CPUs are available: more threads slow each other down. Lower --threads.",
            chosen.count,
            chosen.reason,
            chosen.cpus,
        )
    return count
