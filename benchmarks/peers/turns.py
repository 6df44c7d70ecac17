"""Contestants that take turns: one computes at a time, round by round, and the ratio of medians is what counts."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from peers.process import busy_seconds, tree_seconds

CALM = 0.1  # cores that others may use in a turn that is not repeated
PAUSE = 0.3  # seconds; threads that wait for more to do have gone to sleep when the next one's turn comes

# Figures of which less is better; of all others more is.
LESS_IS_BETTER = frozenset({"first_token_ms", "overhead_percent", "added_ms", "load_seconds_per_gb"})

Figures = dict[str, float]


class Contestant(Protocol):
    """An engine in one format, ready to work.

    Attributes:
        name: engine and format, such as "llama.cpp q8_0".
        pids: of its processes.
        settings: names of those that it can be prepared with.
    """

    name: str
    pids: tuple[int, ...]
    settings: Sequence[str]

    def prepare(self, setting: str) -> None:
        """Load with a setting."""


@dataclass
class Series:
    """The results of one contestant in a case.

    Attributes:
        setting: the one that was the fastest of those tried.
        tried: each setting's figure, or why it failed.
        figures: a value for each round.
        waiting: in each round, how many cores were busy with the contestants whose turn it was not.
        disturbance: and with anything else.
    """

    setting: str = ""
    tried: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)
    waiting: list[float] = field(default_factory=list)
    disturbance: list[float] = field(default_factory=list)

    def median(self, figure: str) -> float:
        """The median of all rounds."""
        return statistics.median(self.figures[figure])


def choose(one: Any, measure: Callable[[Any], Figures], figure: str, quick: bool = False) -> Series:
    """Prepare a contestant with its best setting; with its first one if there is no time to try.

    Raises:
        RuntimeError: no setting works.
    """
    series, best = Series(), None
    settings = list(one.settings)[:1] if quick else list(one.settings)
    for setting in settings:
        try:
            one.prepare(setting)
            measure(one)  # the first run of anything is slower
            if len(settings) == 1:
                best = setting
                break
            value = measure(one)[figure]
        except RuntimeError as error:
            series.tried[setting] = str(error).splitlines()[0]
            continue
        series.tried[setting] = round(value, 1)
        if best is None or is_better(figure, value, series.tried[best]):
            best = setting
        time.sleep(PAUSE)
    if best is None:
        raise RuntimeError(f"{one.name}: no setting works: {series.tried}")
    if best != settings[-1]:
        one.prepare(best)
        measure(one)
    series.setting = best
    time.sleep(PAUSE)
    return series


def is_better(figure: str, value: float, than: float) -> bool:
    """A figure is better than another."""
    return value < than if figure in LESS_IS_BETTER else value > than


def take_turns(
    contestants: Sequence[Any],
    measure: Callable[[Any], Figures],
    rounds: int,
    series: dict[str, Series],
    tries: int = 1,
) -> None:
    """Each contestant once a round; every round begins with another one.

    Args:
        tries: of a turn while something else was busy; the least disturbed one counts.
    """
    for number in range(rounds):
        start = number % len(contestants)
        for one in [*contestants[start:], *contestants[:start]]:
            noted, rest = series[one.name], [other for other in contestants if other is not one]
            turn = _turn(one, rest, measure)
            for _ in range(tries - 1):
                if turn[2] <= CALM:
                    break
                turn = min(turn, _turn(one, rest, measure), key=lambda each: each[2])
            figures, waiting, disturbance = turn
            for figure, value in figures.items():
                noted.figures.setdefault(figure, []).append(value)
            noted.waiting.append(waiting)
            noted.disturbance.append(disturbance)


def _turn(one: Any, rest: Sequence[Any], measure: Callable[[Any], Figures]) -> tuple[Figures, float, float]:
    """Figures, and how many cores were busy with those who wait, and with anything else."""
    before, began = _cpu(one, rest), time.perf_counter()
    figures = measure(one)
    seconds = time.perf_counter() - began
    whole, own, waiting = (now - then for now, then in zip(_cpu(one, rest), before, strict=True))
    time.sleep(PAUSE)
    return figures, waiting / seconds, max(0.0, whole - own - waiting) / seconds


def _cpu(one: Any, rest: Sequence[Any]) -> tuple[float, float, float]:
    """CPU seconds so far: of the machine, of a contestant with this process, which loads servers, and of the rest."""
    times = os.times()
    own = sum(map(tree_seconds, one.pids)) + times.user + times.system
    return busy_seconds(), own, sum(tree_seconds(pid) for other in rest for pid in other.pids)


def ratios(ours: Sequence[Series], theirs: Sequence[Series], figure: str) -> tuple[float, list[float]]:
    """How many times better ours is than the best of theirs: by medians, and round by round."""
    pick = min if figure in LESS_IS_BETTER else max

    def ratio(mine: float, other: float) -> float:
        return other / mine if figure in LESS_IS_BETTER else mine / other

    whole = ratio(pick(one.median(figure) for one in ours), pick(one.median(figure) for one in theirs))
    mine = [pick(values) for values in zip(*(one.figures[figure] for one in ours), strict=True)]
    other = [pick(values) for values in zip(*(one.figures[figure] for one in theirs), strict=True)]
    return whole, [ratio(a, b) for a, b in zip(mine, other, strict=True)]
