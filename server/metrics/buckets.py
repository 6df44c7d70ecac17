"""The buckets of the histograms. They include the bounds of dashboards for other servers, and reach down to the times
of a small model on a fast machine."""

from __future__ import annotations

# Seconds to the first token, and between tokens: vLLM's bounds, which include those of OpenTelemetry's GenAI
# conventions.
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0
)  # fmt: skip
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# Seconds of a whole request or a part of it: 0.01 to 655.36, doubling. vLLM's begin at 0.3.
DURATION = tuple(round(0.01 * 2**power, 2) for power in range(17))
STEP = (0.0005, *PER_TOKEN, 5.0, 10.0)
EVENT_LOOP_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def token_counts(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to the first number that is at least `largest`."""
    bounds: list[float] = []
    while not bounds or bounds[-1] < largest:
        bounds.append(float((1, 2, 5)[len(bounds) % 3] * 10 ** (len(bounds) // 3)))
    return tuple(bounds)


ITERATION_TOKENS = token_counts(20_000)
