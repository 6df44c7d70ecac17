"""The shapes of the load: texts, lengths and gaps, made up or taken from traces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cli.errors import BenchError
from soaking.traces import TraceRow, read_trace

_ROWS = 5000  # of each trace
_TALE = (
    "once upon a time there lived an old fox who kept the key of every garden under a stone and told nobody what the "
    "river had said on the day when the moon forgot to rise how does a cache help the model and why is a page small"
)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of requests.

    Attributes:
        texts: prompts.
        lengths: pairs of prompt and answer, as shares of the longest ones, in (0, 1].
        gaps: pauses between two requests, as multiples of the mean.
        source: in words, for the report.
    """

    texts: Sequence[str]
    lengths: Sequence[tuple[float, float]]
    gaps: Sequence[float]
    source: str


def synthetic(rng: random.Random) -> Shapes:
    """Log-normal lengths, exponential gaps, texts of common words."""
    words = _TALE.split()
    texts = [" ".join(rng.choices(words, k=rng.randint(3, 60))) for _ in range(64)]
    raw = [(rng.lognormvariate(0, 1), rng.lognormvariate(0, 0.8)) for _ in range(400)]
    return Shapes(texts, _shares(raw), [rng.expovariate(1) for _ in range(400)], "synthetic")


def from_folder(folder: Path, rng: random.Random) -> Shapes:
    """From all traces in a folder and below it. What they lack is made up.

    Raises:
        BenchError: there is no trace at all.
    """
    rows: list[TraceRow] = []
    gaps: list[float] = []
    names: list[str] = []
    for path in sorted([*folder.rglob("*.csv"), *folder.rglob("*.jsonl")]):
        try:
            found = read_trace(path, _ROWS)
        except ValueError:
            continue  # another kind of file
        rows += found
        names.append(path.name)
        arrivals = [row.arrival for row in found if row.arrival is not None]
        between = [later - earlier for earlier, later in pairwise(arrivals)]
        if mean := sum(between) / max(len(between), 1):
            gaps += [gap / mean for gap in between]
    if not rows:
        raise BenchError(f"--workloads {folder}: it holds no trace.")
    made = synthetic(rng)
    texts = [row.prompt for row in rows if isinstance(row.prompt, str)] or made.texts
    raw = [(row.input_len, row.output_len) for row in rows if row.input_len and row.output_len]
    return Shapes(texts, _shares(raw) if raw else made.lengths, gaps or made.gaps, ", ".join(names))


def _shares(raw: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Lengths as shares of the one that 95% do not exceed."""
    highest = [sorted(column)[int(0.95 * (len(raw) - 1))] for column in zip(*raw, strict=True)]
    return [(min(1.0, one / highest[0]), min(1.0, two / highest[1])) for one, two in raw]
