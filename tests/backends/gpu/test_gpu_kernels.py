"""How kernels for GPUs are found, and how their tests compile them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.backends import triton as gpu

triton = pytest.importorskip("triton")

from support.gpu import kernels  # noqa: E402


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
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[3]), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "start the process with TRITON_INTERPRET=1" in done.stderr
