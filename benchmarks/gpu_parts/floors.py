"""The least time that a step can take on a machine, and what is to be reached of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_parts.shapes import Work

QWEN, LLAMA = "Qwen3-0.6B", "Llama-3.1-8B"


@dataclass(frozen=True)
class Rates:
    """The measured rates of a machine.

    Attributes:
        bandwidth: bytes a second that are read.
        products: floating-point operations a second of a large matrix product.
    """

    bandwidth: float
    products: float


def floor_seconds(work: Work, rates: Rates, rows: int, context: float) -> float:
    """Seconds of a decode step: max(W / BW, 2PB / F) + B * context * kv / BW.

    Weights are read while matrices are multiplied; what attention reads of the pages comes on top, as it does in
    between.
    """
    matrices = max(work.weight_bytes / rates.bandwidth, 2.0 * work.products * rows / rates.products)
    return matrices + rows * context * work.kv_bytes / rates.bandwidth


def mixed_floor_seconds(work: Work, rates: Rates, rows: int, context: float, chunk: int) -> float:
    """Seconds of a step that decodes rows beside the first `chunk` tokens of a prompt: logits are of the rows and of
    the prompt's last token, and the prompt reads no page that it has not written."""
    in_layers, attention = work.prefill_flops(chunk)
    head = work.products - work.layer_products
    flops = in_layers + attention + 2.0 * (work.products * rows + head)
    matrices = max(work.weight_bytes / rates.bandwidth, flops / rates.products)
    return matrices + rows * context * work.kv_bytes / rates.bandwidth


def intensity(work: Work, rows: int, context: float) -> tuple[float, float]:
    """Floating-point operations of a decode step, and those for each byte that it has to read."""
    flops = rows * (2.0 * work.products + work.pair_flops * context)
    return flops, flops / (work.weight_bytes + rows * context * work.kv_bytes)


@dataclass(frozen=True)
class Goal:
    """A figure and what it should be.

    Attributes:
        label: for people.
        figure: finds it in a result; raises KeyError or IndexError where it was not measured.
        limit: at least this, or at most where `at_most`.
        stretch: what would be even better.
    """

    label: str
    figure: Callable[[Mapping[str, Any]], float]
    limit: float
    unit: str
    stretch: float | None = None
    at_most: bool = False


def _decode(model: str, rows: int, figure: str) -> Callable[[Mapping[str, Any]], float]:
    def find(parts: Mapping[str, Any]) -> float:
        return float(next(row[figure] for row in parts["decode"][model] if row["rows"] == rows))

    return find


def _worst_gap(parts: Mapping[str, Any]) -> float:
    return max(float(row["gap_us"]) for rows in parts["gap"].values() for row in rows)


def _sampler(parts: Mapping[str, Any]) -> float:
    return max(float(row["device_ms"]) for row in parts["sampler"]["mixtures"])


def _prefill(parts: Mapping[str, Any]) -> float:
    return min(float(row["percent_of_peak"]) for row in parts["prefill"][LLAMA])


def _mixed(parts: Mapping[str, Any]) -> float:
    return max(float(row["times_floor"]) for rows in parts["mixed"].values() for row in rows)


def _beams(parts: Mapping[str, Any]) -> float:
    return min(float(row["percent_of_greedy"]) for rows in parts["beams"].values() for row in rows)


def _start(parts: Mapping[str, Any]) -> float:
    return float(parts["start"][LLAMA]["seconds"])


def _peer(parts: Mapping[str, Any]) -> float:
    return min(float(row["ratio"]) for row in parts["peer"].values() if "ratio" in row)


def goals(sizes: Any) -> list[Goal]:
    """All goals, in the order of the report; of tiny sizes those that have the same meaning."""
    few, some, many = sizes.batches[0], sizes.batches[(len(sizes.batches) - 1) // 2], sizes.batches[-1]
    made = [
        Goal(f"{LLAMA}, batch {rows}: of the floor", _decode(LLAMA, rows, "percent_of_floor"), 75.0, "%", 85.0)
        for rows in (few, some, many)
    ]
    made += [
        Goal(f"{QWEN}, batch {few}: a step", _decode(QWEN, few, "step_ms"), 1.0, "ms", 0.7, at_most=True),
        Goal(f"{QWEN}, batch {many}: of the floor", _decode(QWEN, many, "percent_of_floor"), 70.0, "%"),
        Goal("gap between steps, the larger median", _worst_gap, 30.0, "us", at_most=True),
        Goal(f"sampler, {sizes.sampler[0]} x {sizes.sampler[1]}, slowest mixture", _sampler, 0.6, "ms", at_most=True),
        Goal(f"{LLAMA}, prefill: of the matrix peak", _prefill, 55.0, "%"),
        Goal(f"{sizes.mixed_chunk} tokens of a prompt beside rows: times the floor", _mixed, 1.3, "x", at_most=True),
        Goal("4 beams: of greedy, at equal rows", _beams, 85.0, "%"),
        Goal(f"times transformers' continuous batching, batch {sizes.peer_rows}", _peer, 5.0, "x"),
        Goal(f"{LLAMA}, start of the engine to its first token", _start, 20.0, "s", at_most=True),
    ]
    return made


def judge(made: Sequence[Goal], parts: Mapping[str, Any], *, meant: bool = True) -> list[dict[str, Any]]:
    """The goals with what was measured; None where nothing was.

    Args:
        meant: the goals are for these figures; else none is met or missed.
    """
    rows = []
    for goal in made:
        try:
            value: float | None = goal.figure(parts)
        except (KeyError, IndexError, ValueError, StopIteration):
            value = None
        met = None if value is None or not meant else (value <= goal.limit if goal.at_most else value >= goal.limit)
        rows.append(
            {
                "label": goal.label,
                "goal": goal.limit,
                "stretch": goal.stretch,
                "at_most": goal.at_most,
                "unit": goal.unit,
                "measured": value,
                "met": met,
            }
        )
    return rows
