"""States of layers that carry one from token to token, as operations read and write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class States:
    """The states of a pass's rows (`engine.scheduling.plan.StateRows`)."""

    layers: Sequence[Tensor]  # for each layer with a state, [slots + 1, numbers] float32; slot 0 is zeros
    # sources, targets, snapshots, afters: [rows] int32 on the host
    sources: Tensor
    targets: Tensor
    snapshots: Tensor
    afters: Tensor
