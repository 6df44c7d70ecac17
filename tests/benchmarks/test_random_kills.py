"""The trial of random kills (`benchmarks/random_kills.py`) in short: each kind of disturbance, once or twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from random_kills import run

pytestmark = pytest.mark.slow


def test_nothing_is_lost_wrong_or_left_behind() -> None:
    kinds = ["child", "unload", "kill", "child", "stop"]
    trial = run(kinds, seed=5, clients=2)
    assert trial.problems == []
    assert {kind: trial.counts[kind] for kind in kinds} == {"child": 2, "unload": 1, "kill": 1, "stop": 1}
    assert trial.counts["status 200"] > 0
