"""Each kernel in the format that models are served in, against float64.

A check makes inputs in that format, runs a kernel, and computes the same from the same inputs in float64 by plain
torch, nowhere with the kernels' own code. Errors are given in units of the format's epsilon (2^-7 of bfloat16). The
largest one is that of a number, |got - want| / (|want| + mean |want|), where one rounding is half a unit. The spread is
that of a result, |got - want| / |want| by their norms, where one rounding of each number is about a fifth of a unit.

Without a GPU kernels run by Triton's interpreter, on small shapes and in float16, since it multiplies no matrices of
bfloat16.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from engine.backends import triton as gpu
from gpu_parts.check import Check, Setting, SkippedError


def error_of(got: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    """The largest error in units of a format's epsilon; infinite where a number is missing."""
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    difference = (got.double() - want).abs()
    size = want.abs() + want.abs().mean()
    return float((difference / size.clamp(min=1e-30)).max()) / torch.finfo(dtype).eps if got.numel() else 0.0


def spread_of(got: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    """The root mean square error in units of a format's epsilon, of the root mean square."""
    if not got.numel():
        return 0.0
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30)) / torch.finfo(dtype).eps


def run(check: Check, setting: Setting) -> dict[str, Any]:
    """The result of a check: `passed` is None if it was skipped."""
    started = time.perf_counter()
    found: dict[str, Any] = {"kernel": check.kernel, "bound": check.bound, "error": None, "passed": None, "note": ""}
    found["spread"] = 0.0
    try:
        errors = []
        for one in check.run(setting):
            errors.append(one if isinstance(one, float) else error_of(*one, setting.dtype))
            if not isinstance(one, float) and math.isfinite(errors[-1]):
                found["spread"] = max(found["spread"], spread_of(*one, setting.dtype))
        found["error"] = max(errors)
        found["passed"] = found["error"] <= check.bound and found["spread"] <= check.spread
        if not math.isfinite(found["error"]):
            found["error"], found["note"] = None, "numbers are missing, or not finite"
    except SkippedError as reason:
        found["note"] = str(reason)
    except Exception as error:  # a kernel that does not compile is wrong, too, and the others are checked
        found["passed"] = False
        found["note"] = f"{type(error).__name__}: {str(error).strip()[:500]}"
    found["seconds"] = round(time.perf_counter() - started, 1)
    word = {True: "right", False: "WRONG", None: "skipped"}[found["passed"]]
    figure = (
        ""
        if found["error"] is None
        else (
            f"error {found['error']:.2f} of at most {check.bound:g}, spread {found['spread']:.2f} of {check.spread:g}"
        )
    )
    print(f"  {check.kernel:44s} {word:8s} {figure}{found['note']}", flush=True)
    return found


def check_all(device: torch.device, families: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The result of each check of these families.

    Raises:
        RuntimeError: Triton is not there.
    """
    if not gpu.installed():
        raise RuntimeError("Triton is not installed: pip install triton")
    full = device.type == "cuda"
    setting = Setting(device, torch.bfloat16 if full else torch.float16, full)
    for check in _checks(families):
        with contextlib.nullcontext() if full or check.served else gpu.interpreted():
            found = run(check, setting)
        yield found


def _checks(families: Sequence[str]) -> Iterator[Check]:
    for name in families:
        yield from import_module(f"gpu_parts.checks_{name}").CHECKS  # it imports Triton
