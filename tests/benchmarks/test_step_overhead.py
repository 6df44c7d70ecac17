"""`benchmarks/step_overhead.py` still drives the scheduler and the runner as they are."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["greedy, 8 rows", "penalties, 32 rows", "beam 4, 1 request"])
def test_every_part_of_a_step_is_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    import step_overhead

    case = step_overhead.Case(*step_overhead.CASES[name])
    with mock.patch.object(step_overhead.running, "sample", case._sample):
        for _ in range(4):
            times = case.step()
    assert set(step_overhead.COLUMNS) - set(times) == {"engine"}
    assert case.scheduler.stats.num_steps == 4
    assert case.scheduler.stats.computed_tokens > 4
