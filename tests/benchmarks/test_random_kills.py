"""The trial of random kills (`benchmarks/random_kills.py`) in short. It stops the service at its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from random_kills import run

pytestmark = pytest.mark.slow


def test_nothing_is_lost_wrong_or_left_behind() -> None:
    kinds = ["child", "unload", "kill"]
    trial = run(kinds, seed=5, clients=2)
    assert trial.problems == []
    assert [trial.counts[kind] for kind in kinds] == [1, 1, 1]
    assert trial.counts["status 200"] > 0
