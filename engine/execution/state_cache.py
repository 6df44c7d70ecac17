"""The tensors behind state slots (`engine.scheduling.state_slots`), and how many slots memory allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.backends.native import memory
from engine.backends.states import States
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.scheduling.plan import StateRows

# The maximum share of the memory for pages and slots that slots take.
LARGEST_SHARE = 0.5
# Slots that one sequence needs: for the state that it reads, the one that it writes, and one between these if a step is
# divided.
FEWEST = 3


class StateCache:
    """The states of each layer that has some, [slots + 1, numbers] float32. `sizes`: number of values in each layer's
    state."""

    def __init__(self, sizes: Sequence[int], slots: int, device: torch.device):
        self.slots = slots
        shapes = [(slots + 1, size) for size in sizes]
        if device.type == "cpu":  # the operating system provides such memory only when it is written
            self.layers = [memory.zeros(*shape, dtype=torch.float32) for shape in shapes]
        else:
            self.layers = [torch.zeros(shape, device=device) for shape in shapes]

    def rows(self, plan: StateRows | None) -> States | None:
        """The states of a plan's rows; None: they begin as zeros and are not kept."""
        if plan is None:
            return None
        arrays = (plan.sources, plan.targets, plan.snapshots, plan.afters)
        return States(self.layers, *(torch.from_numpy(array) for array in arrays))


def slot_bytes(sizes: Sequence[int]) -> int:
    """Bytes of one slot over all layers."""
    return sum(sizes) * torch.float32.itemsize


def count_slots(config: EngineConfig, sizes: Sequence[int], room: int, setting: str) -> int:
    """The number of slots to allocate: two for each sequence of a step and two for snapshots, as far as there is
    memory; 0 for models without states. Raises ConfigError if there is no room for a single sequence. `room`: bytes for
    pages and slots."""
    if not sizes:
        return 0
    wanted, size = 4 * config.most_seqs, slot_bytes(sizes)
    if config.num_gpu_blocks_override is not None:
        return wanted
    slots = min(wanted, int(LARGEST_SHARE * room) // size - 1)
    if slots < FEWEST:
        raise ConfigError(
            f"No memory for the states of this model's layers: {max(room, 0)} bytes are available for states and "
            f"pages, but one sequence needs {FEWEST} slots of {size} bytes, in at most half of them. Raise {setting}."
        )
    return slots
