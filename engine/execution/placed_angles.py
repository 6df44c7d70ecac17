"""The angles of tokens whose positions have several axes that differ: those of images."""

from __future__ import annotations

import numpy as np
import torch

from engine.interface.token_sides import Sides
from engine.model.transformer import Transformer
from engine.scheduling.plan import StepPlan


def place_angles(plan: StepPlan, model: Transformer) -> Sides:
    """The plan's sides. The angles of such tokens are written to rotary tables, where their offsets point."""
    if "rotary_axes" not in plan.sides:
        return plan.sides
    assert model.decoder is not None
    sides = dict(plan.sides)
    axes = sides.pop("rotary_axes")
    offsets = sides.get("rotary_offsets", np.zeros(len(axes), dtype=np.int32)).copy()
    found = np.flatnonzero(axes.any(axis=1))
    first = plan.positions[found] + offsets[found]
    places = torch.from_numpy(np.stack((first, *(first + axis for axis in axes[found].T)), axis=1))
    for table in model.decoder.placed_tables:  # all of one length
        table.place(places)
        offsets[found] = table.placed + np.arange(len(found), dtype=np.int32) - plan.positions[found]
    sides["rotary_offsets"] = offsets
    return sides
