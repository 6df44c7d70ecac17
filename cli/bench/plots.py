"""PNG plots of a benchmark: how its latencies are distributed, and what more requests at a time bring."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cli.bench.measure import Summary, inter_token, percentile, time_to_first
from cli.bench.record import Record
from cli.bench.report import Run
from cli.errors import BenchError, OptionError

_WIDTH, _HEIGHT = 4.6, 3.6  # inches of a panel
_BINS = 40  # at most


def _first(records: Sequence[Record]) -> list[float]:
    return [value for record in records if (value := time_to_first(record)) is not None]


def _between(records: Sequence[Record]) -> list[float]:
    return [gap for record in records for gap in inter_token(record)]


def _whole(records: Sequence[Record]) -> list[float]:
    return [record.ended - record.scheduled for record in records]


_LATENCIES: tuple[tuple[str, Callable[[Sequence[Record]], list[float]]], ...] = (
    ("time to first token", _first),
    ("inter-token latency", _between),
    ("end-to-end latency", _whole),
)


def check_plots(folder: Path) -> None:
    """Plots can be drawn, and their folder can be made.

    Raises:
        OptionError: says what to install, or what stands in the folder's place.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError(
            "--plot needs matplotlib, which is not installed. Install it (pip install 'octavo[bench]'), or use "
            "--json instead"
        )
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"--plot {folder}: this is a file, but a folder is needed.")
    if not folder.absolute().parent.is_dir():
        raise OptionError(f"--plot {folder}: its parent folder does not exist.")


def draw(folder: Path, runs: Sequence[Run], summaries: Sequence[Summary]) -> list[Path]:
    """Write latencies.png, and throughput.png where there are several levels; returns their paths.

    Raises:
        BenchError: they cannot be written.
    """
    drawn = {"latencies.png": _draw_latencies(runs)}
    if len(runs) > 1:
        drawn["throughput.png"] = _draw_throughput(runs, summaries)
    paths = []
    try:
        folder.mkdir(exist_ok=True)
        for name, figure in drawn.items():
            paths.append(folder / name)
            figure.savefig(paths[-1], dpi=120)
    except OSError as problem:
        raise BenchError(f"--plot {folder}: {problem.strerror or problem}.") from None
    return paths


def _panels(count: int, title: str) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure  # without pyplot there is no display to ask for

    figure = Figure(figsize=(_WIDTH * count, _HEIGHT), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _title(runs: Sequence[Run]) -> str:
    return runs[0].facts.title.replace("$", r"\$")  # which would begin a formula


def _draw_latencies(runs: Sequence[Run]) -> Any:
    """Draw histograms for one load; for several levels, draw the share of values that each latency covers."""
    figure, axes = _panels(len(_LATENCIES), _title(runs))
    for axis, (label, values_of) in zip(axes, _LATENCIES, strict=True):
        axis.set_xlabel(f"{label} in ms")
        if len(runs) == 1:
            _histogram(axis, _sorted_ms(values_of, runs[0]))
            axis.set_ylabel("how often")
            continue
        for place, run in enumerate(runs):
            values = _sorted_ms(values_of, run)
            shares = [(rank + 1) / len(values) for rank in range(len(values))]
            axis.step(values, shares, where="post", color=_colour(place, len(runs)), label=f"{run.level} at a time")
        axis.set_ylabel("share of values up to it")
        axis.set_ylim(0, 1.02)
        if axis.lines:
            axis.set_xscale("log")
            _plain_ticks(axis.xaxis)
            axis.legend(fontsize=7, frameon=False)
    return figure


def _sorted_ms(values_of: Callable[[Sequence[Record]], list[float]], run: Run) -> list[float]:
    completed = [record for record in run.records if record.failure is None]
    return sorted(value * 1e3 for value in values_of(completed))


def _histogram(axis: Any, values: Sequence[float]) -> None:
    if not values:
        axis.text(0.5, 0.5, "none: answers came whole", ha="center", transform=axis.transAxes)
        return
    axis.hist(values, bins=min(_BINS, 4 + len(values) // 4), color="#4c72b0")
    for percent, style in ((50, "-"), (99, "--")):
        point = percentile(values, percent)
        axis.axvline(point, linestyle=style, color="#c44e52", label=f"p{percent}: {point:.1f} ms")
    axis.legend(fontsize=8, frameon=False)


def _draw_throughput(runs: Sequence[Run], summaries: Sequence[Summary]) -> Any:
    """Tokens per second, and what they cost in latency, against the requests at a time."""
    figure, (left, right) = _panels(2, _title(runs))
    levels = [run.level for run in runs]
    left.plot(levels, [summary.output_throughput for summary in summaries], marker="o", color="#4c72b0")
    left.set_ylabel("output tokens per second")
    left.set_ylim(bottom=0)
    for label, name, colour in (("TTFT", "ttft", "#55a868"), ("ITL", "itl", "#c44e52")):
        for percent, place, style in ((50, 0, "-"), (99, -1, "--")):
            points = [
                (run.level, found.percentiles[place] * 1e3)
                for run, summary in zip(runs, summaries, strict=True)
                if (found := getattr(summary, name)) is not None
            ]
            if points:
                right.plot(*zip(*points, strict=True), style, marker="o", color=colour, label=f"{label} p{percent}")
    right.set_ylabel("latency in ms")
    if right.lines:
        right.set_yscale("log")
        _plain_ticks(right.yaxis)
        right.legend(fontsize=8, frameon=False)
    for axis in (left, right):
        axis.set_xlabel("requests at a time")
        axis.set_xscale("log", base=2)
        axis.set_xticks(levels, [str(level) for level in levels])
        axis.minorticks_off()
    return figure


def _plain_ticks(axis: Any) -> None:
    """1, 2, 5, 10 ... instead of powers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _colour(place: int, count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](place / max(1, count - 1) * 0.9)
