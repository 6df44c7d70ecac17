"""`benchmarks/compare_trees.py`: numbers are found by their names, and a turn's noise is not taken for a change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_numbers_by_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from compare_trees import compare, numbers

    value = {"machine": {"cores": 2}, "works": True, "rows": [{"name": "one", "ms": 2}, {"ms": 4.5}], "text": "x"}
    assert numbers(value) == {"rows / one / ms": 2.0, "rows / 1 / ms": 4.5}
    turns = {
        "before": [{"a": 10.0, "b": 1.0}, {"a": 12.0, "b": 1.0}, {"a": 90.0, "b": 1.0}],
        "after": [{"a": 9.0}, {"a": 5.0}, {"a": 6.0}],
    }
    assert compare(turns) == {"a": {"before": 12.0, "after": 6.0, "ratio": 0.5}}


@pytest.mark.slow
def test_two_checkouts_take_turns(tmp_path: Path) -> None:
    trees = []
    for name, seconds in (("before", 4), ("after", 2)):
        tree = tmp_path / name
        (tree / "benchmarks").mkdir(parents=True)
        (tree / "benchmarks" / "it.py").write_text(
            "import json, sys, pathlib\n"
            "where = pathlib.Path(sys.argv[sys.argv.index('--output') + 1])\n"
            f"where.write_text(json.dumps({{'seconds': {seconds}, 'rounds': int(sys.argv[2])}}))\n"
        )
        for command in (
            ["init", "-q"],
            ["add", "."],
            ["-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "x"],
        ):
            subprocess.run(["git", *command], cwd=tree, check=True)
        trees.append(str(tree))
    output = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "compare_trees.py"), *trees, "--turns", "2"]
    command += ["--output", str(output), "it.py", "--rounds", "3"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told.split() == ["seconds", "4", "2", "0.500"]
    result = json.loads(output.read_text())
    assert result["numbers"]["seconds"] == {"before": 4.0, "after": 2.0, "ratio": 0.5}
    assert result["numbers"]["rounds"]["ratio"] == 1.0
    assert set(result["commits"]) == {"before", "after"}
