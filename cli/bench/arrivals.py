"""When requests are due in an open load: seconds after the start."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """An endless arrival process, the same for the same seed; the first request is due at once.

    Gaps follow a gamma distribution of shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less is
    burstier, more is steadier. An infinite rate has no gaps.

    Args:
        rate: requests per second.
    """
    rng = random.Random(f"arrivals {seed}")
    now = 0.0
    while True:
        yield now
        if not math.isinf(rate):
            now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
