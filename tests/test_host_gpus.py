"""What keeps torch from a GPU that is there, in words."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checkpoints import Checkpoint
from support.driving import make_engine

from engine import ConfigError
from engine.execution.starting import choose_device
from engine.host import gpus

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)\n"


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives a machine a driver that says this of itself."""
    monkeypatch.setattr(gpus, "_VERSION", tmp_path / "version")
    monkeypatch.setattr(gpus, "_CONTROL", tmp_path / "control")
    return lambda text: (tmp_path / "version").write_text(text) and None


@pytest.mark.parametrize(
    ("text", "cuda", "said"),
    [
        (None, "13.0", "there is no NVIDIA driver"),
        (CLOSED, None, "torch is a CPU build"),
        (CLOSED, "13.0", "needs an NVIDIA driver 580 or newer; it is 535.104.05"),
        (CLOSED, "12.8", "shows it none"),
        (OPEN, "13.0", "shows it none"),
        (OPEN, "99.1", "shows it none"),
        ("nothing that is known", "13.0", "shows it none"),
    ],
)
def test_what_prevents_it(text: str | None, cuda: str | None, said: str, loaded: Callable[[str], None]) -> None:
    if text is not None:
        loaded(text)
    assert gpus.has_driver() == (text is not None)
    why, fix = gpus.obstacle(cuda)
    assert said in why
    assert fix.endswith(".")


def test_a_gpu_that_was_asked_for_is_an_error(loaded: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(CLOSED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"sees 0 GPUs: .* driver 580 or newer; it is 535.* Or use --device cpu\."):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"sees 2 GPUs\. Use --device cuda:N with N from 0 to 1\."):
        choose_device("cuda:2")


def test_a_cpu_that_computes_instead_is_told(
    loaded: Callable[[str], None],
    checkpoint: Callable[[str], Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = checkpoint("llama-grouped").path
    with caplog.at_level(logging.WARNING, "octavo.execution"):
        make_engine(path, device="auto").close()
        assert caplog.messages == []
        loaded(CLOSED)
        make_engine(path, device="cpu").close()
        assert caplog.messages == []
        make_engine(path, device="auto").close()
    assert caplog.messages == [
        "the CPU computes, although there is an NVIDIA driver: torch is a CPU build. Install a CUDA build of torch, as "
        "listed on pytorch.org."
    ]
