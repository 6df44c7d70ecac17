"""A soak as JSON."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from soaking.checks import slope
from soaking.running import Found, Plan
from soaking.shapes import Shapes

_SHOWN = 200  # violations
_COUNTED = ("octavo_num_preemptions_total", "octavo_engine_restarts_total", "octavo_steps_total",
            "octavo_generation_tokens_total", "octavo_prompt_tokens_cached_total")  # fmt: skip


def report(found: Found, plan: Plan, shapes: Shapes, model: str) -> dict[str, Any]:
    """All that is worth keeping."""
    before, after = found.metrics
    ledger = found.ledger
    return {
        "benchmark": "soak",
        "machine": _machine(),
        "model": model,
        "workload": shapes.source,
        "plan": asdict(plan),
        "seconds": round(found.seconds, 1),
        "kills": found.kills,
        "requests": dict(ledger.fates),
        "requests_by_kind": dict(sorted(ledger.by_kind.items())),
        "compared": ledger.compared,
        "tokens": ledger.tokens,
        "malformed": dict(sorted(ledger.bad.items())),
        "dropped_cases": found.dropped,
        "counters": {name: after.get(name, 0) - before.get(name, 0) for name in _COUNTED},
        "at_rest": {
            name: {"before": asdict(found.before[name]), "after": asdict(found.after[name])} for name in found.before
        },
        "memory_mib_per_hour": {name: slope(samples, plan.tolerances) for name, samples in found.samples.items()},
        "num_violations": len(found.violations),
        "violations": found.violations[:_SHOWN],
    }


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
