"""The machine, the table of goals, and the roofline."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def machine(device: torch.device) -> dict[str, Any]:
    """The machine and the software of the measurement."""
    facts: dict[str, Any] = {
        "device": str(device),
        "gpu": None,
        "driver": None,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,  # with the platform that it was built for
        "commit": _said(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "changed": bool(_said(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])),
        "date": date.today().isoformat(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "driver": _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        }
    for package in ("triton", "transformers"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    return facts


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())


def _said(command: Sequence[str]) -> str | None:
    """The output of a program; None if the program is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def steps(decoding: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Decode steps of all models."""
    lines = [("model", "batch", "context", "ms a step", "tokens/s", "floor, ms", "of the floor")]
    for model, rows in decoding.items():
        for row in rows:
            figures = (f"{row['step_ms']:.3f}", f"{row['tokens_per_second']:.0f}", f"{row['floor_ms']:.3f}")
            lines.append((model, str(row["rows"]), str(row["context"]), *figures, f"{row['percent_of_floor']:.0f}%"))
    return _aligned(lines)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Goals, what was measured, and whether they are met."""
    lines = [("goal", "limit", "stretch", "measured", "met")]
    for row in rows:
        sign, unit = ("<=" if row["at_most"] else ">="), row["unit"]
        stretch = "" if row["stretch"] is None else f"{sign} {row['stretch']:g} {unit}"
        measured = "-" if row["measured"] is None else f"{row['measured']:.3g} {unit}"
        met = "-" if row["met"] is None else ("yes" if row["met"] else "NO")
        lines.append((row["label"], f"{sign} {row['goal']:g} {unit}", stretch, measured, met))
    return _aligned(lines)


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def plot(result: Mapping[str, Any], file: Path) -> None:
    """Decode steps under the roofline of this machine, as a PNG.

    Raises:
        RuntimeError: matplotlib is not installed, or nothing was measured that has a place there.
    """
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("a plot needs matplotlib: pip install matplotlib") from None
    decoding = result["parts"].get("decode", {})
    if not decoding:
        raise RuntimeError("there is nothing to plot: no decode steps were measured")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    bandwidth, peak = result["rates"]["bandwidth"], result["rates"]["products"]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    prompts = result["parts"].get("prefill", {})
    places = [row["flops_per_byte"] for measured in (decoding, prompts) for rows in measured.values() for row in rows]
    corner = peak / bandwidth
    least, most = min([*places, corner]) / 2, max([*places, corner]) * 2
    axes.plot([least, corner, most], [least * bandwidth, peak, peak], "k-", linewidth=1)
    for number, (model, rows) in enumerate(decoding.items()):
        colour = f"C{number}"
        axes.plot(*_points(rows), "o-", color=colour, label=f"{model}, decode", markersize=4)
        for row, (x, y) in zip(rows, zip(*_points(rows), strict=True), strict=True):
            text = f"{row['rows']}: {row['percent_of_floor']:.0f}%"
            axes.annotate(text, (x, y), fontsize=7, color=colour, xytext=(5, -9) if number % 2 else (-34, 4),
                          textcoords="offset points")  # fmt: skip
    for number, (model, rows) in enumerate(prompts.items()):
        axes.plot(*_points(rows), "s", color=f"C{number}", label=f"{model}, prefill", markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(
        "floating-point operations for each byte that has to be read (labels: rows and percentage of the floor)"
    )
    axes.set_ylabel("floating-point operations a second")
    facts = result["machine"]
    axes.set_title(
        f"{facts['gpu'] or facts['cpu']}, {bandwidth / 1e12:.2f} TB/s copied, {peak / 1e12:.0f} TFLOP/s, "
        f"{facts['date']}",
        fontsize=9,
    )
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _points(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """The places of a result's rows in the plot."""
    return [row["flops_per_byte"] for row in rows], [row["flops_per_second"] for row in rows]
