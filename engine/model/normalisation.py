"""The part that normalises a token's features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the features of one token.

    Attributes:
        kind: "rms" (arXiv:1910.07467) or "layer" (arXiv:1607.06450).
        eps: added to the mean square or variance.
        bias: has a learned bias (layer norm only).
        unit_offset: the stored weight is the deviation from 1, and is applied in float32.
        weight: has a learned weight.
        in_float32: the weight is applied in float32, before rounding, where it is no deviation, too.
    """

    kind: Literal["rms", "layer"]
    eps: float
    bias: bool = False
    unit_offset: bool = False
    weight: bool = True
    in_float32: bool = False
