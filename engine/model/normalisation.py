"""The part that normalises a token's features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the features of one token."""

    # "rms" (arXiv:1910.07467), "layer" (arXiv:1607.06450), or "affine": only weight and bias, without a statistic of
    # the features (arXiv:2004.02984)
    kind: Literal["rms", "layer", "affine"]
    eps: float  # added to the mean square or variance
    bias: bool = False  # whether it has a learned bias (not for an RMS norm)
    unit_offset: bool = False  # whether the stored weight is the deviation from 1, and is applied in float32
    weight: bool = True  # whether it has a learned weight
    in_float32: bool = False  # whether the weight is applied in float32, before rounding, even if it is not a deviation
