"""The parts that are read from configs: published ones, others of the same families, and transformers' defaults. No
setting is lost, old names included. The golden tests check that the parts compute the right numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.published import cases, parts_of_case


def named(case: dict[str, Any]) -> str:
    """The config, and the names of what is changed."""
    changed = [*case.get("changes", {}), *(f"no {name}" for name in case.get("without", ()))]
    return " ".join([case.get("config") or case["type"], *changed[:4]])


@pytest.mark.everyday
@pytest.mark.parametrize("case", cases(), ids=named)
def test_parts_are_as_recorded(case: dict[str, Any], tmp_path: Path) -> None:
    """`python -m support.published` records them anew."""
    assert parts_of_case(tmp_path, case) == case["parts"]
