"""How kernels for GPUs are found, and how their tests compile them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.backends import triton as gpu

triton = pytest.importorskip("triton")

from support.gpu import check_compiled, compile_variants, kernels  # noqa: E402


def test_a_cpu_is_served_within_interpreted_only() -> None:
    cpu = torch.device("cpu")
    assert not gpu.serves(cpu)
    if not torch.cuda.is_available():
        with kernels() as device:
            assert device == cpu
            assert gpu.serves(cpu)
        assert not gpu.serves(cpu)
    assert gpu.serves(torch.device("cuda"))
    assert not gpu.serves(torch.device("mps"))


@pytest.mark.slow
def test_without_the_variable_there_is_no_interpreter() -> None:
    code = "from engine.backends import triton as gpu\nwith gpu.interpreted(): pass"
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "start the process with TRITON_INTERPRET=1" in done.stderr


@pytest.mark.slow
def test_variants_are_compiled_and_what_fails_is_named(tmp_path: Path) -> None:
    found = compile_variants("support.variants_of_tests", tmp_path)
    names = ("doubled", "broken", "silent", "large")
    good, bad, silent, large = ([one for one in found if one.name == name] for name in names)
    assert [one.capability for one in good] == [80, 100]
    check_compiled(good)
    with pytest.raises(AssertionError, match="broken for sm_80: "):
        check_compiled(bad)
    with pytest.raises(AssertionError, match="silent for sm_80 stores nothing"):
        check_compiled(silent)
    with pytest.raises(AssertionError, match=r"large takes \d+ bytes of sm_80's 166912"):
        check_compiled(large)
