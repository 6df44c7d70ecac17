"""What keeps torch from a GPU that is there, in words."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.checkpoints import Checkpoint
from support.driving import make_engine
from test_attention_reference import Part

from engine import ConfigError, EngineConfig, ModelLoadError
from engine.backends import triton
from engine.backends.triton.attention import TritonAttention
from engine.execution import gpu_choice, starting
from engine.execution.gpu_choice import another_gpu, look_at
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
        (None, None, "torch is a CPU build"),
        (CLOSED, "13.0", "needs an NVIDIA driver 580 or newer; it is 535.104.05"),
        (CLOSED, "12.8", "shows no GPU"),
        (OPEN, "13.0", "shows no GPU"),
        (OPEN, "99.1", "shows no GPU"),
        ("nothing that is known", "13.0", "shows no GPU"),
    ],
)
def test_what_prevents_it(text: str | None, cuda: str | None, said: str, loaded: Callable[[str], None]) -> None:
    if text is not None:
        loaded(text)
    assert gpus.has_driver() == (text is not None)
    why, fix = gpus.obstacle(cuda, None)
    assert said in why
    assert fix.endswith(".")
    why, fix = gpus.obstacle(None, "7.0")
    assert why == "torch is built for ROCm 7.0 but sees no AMD GPU"
    assert "An NVIDIA GPU needs a CUDA build" in fix


def test_a_gpu_that_was_asked_for_is_an_error(loaded: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(CLOSED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"sees 0 GPUs: .* driver 580 or newer; it is 535.* Or use --device cpu\."):
        choose_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ConfigError, match=r"sees 0 GPUs: torch is built for ROCm 7\.0.* Or use --device cpu\."):
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
        "Running on the CPU although there is an NVIDIA driver: torch is a CPU build. Install a CUDA build of torch, "
        "as listed on pytorch.org."
    ]


@pytest.mark.parametrize(
    ("capability", "version", "fails", "said", "told"),
    [
        ((9, 0), "3.6.0", None, "", ""),
        ((7, 5), "3.6.0", None, "compute capability 7.5 is below 8.0", "newer GPU"),
        ((9, 0), "3.5.1", None, "Triton 3.5.1 is older than 3.6", "Install a newer one."),
        (
            (9, 0),
            "3.6.0",
            "gcc: not found",
            "Triton starts no kernels (gcc: not found)",
            "C compiler, Python's headers",
        ),
        ((9, 0), None, None, "Triton is not installed", "octavo[gpu]"),
        ((9, 4), "3.6.0", "rocm", "torch is built for ROCm 7.0", "support NVIDIA GPUs only"),
    ],
)
def test_what_keeps_kernels_from_a_gpu(
    capability: tuple[int, int], version: str | None, fails: str | None, said: str, told: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The log says it, where Triton is there, and the doctor."""

    class Driver:
        @property
        def utils(self) -> object:
            if fails is not None:
                raise RuntimeError(f"several lines\n{fails}\n")
            return self

    made = {"triton": ModuleType("triton"), "triton.runtime": ModuleType("triton.runtime")}
    made["triton"].__version__ = version  # type: ignore[attr-defined]
    made["triton"].runtime = made["triton.runtime"]  # type: ignore[attr-defined]
    made["triton.runtime"].driver = SimpleNamespace(active=Driver())  # type: ignore[attr-defined]
    monkeypatch.setattr(triton, "installed", lambda: version is not None)
    monkeypatch.setattr(torch.version, "hip", "7.0" if fails == "rocm" else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    with mock.patch.dict(sys.modules, made), caplog.at_level(logging.WARNING, "octavo.gpu"):
        found, fix = triton.obstacle.__wrapped__(0)
        monkeypatch.setattr(triton, "obstacle", lambda index: (found, fix))
        assert triton._computes.__wrapped__(0) == (not said)
    if said:
        monkeypatch.setattr(triton, "serves", lambda device: False)
        assert TritonAttention.unsupported(Part(), torch.device("cuda:0")) == [f"triton attention: {said}"]
    assert found == said
    assert told in fix
    assert caplog.messages == (
        [f"{said}: torch computes everything, which is slower. {fix}"] if said and version else []
    )


# ---------------------------------------------------------------- what nvidia-smi knows

FIRST, SECOND, SLICES = "GPU-1aa0", "GPU-1bb0", ("MIG-c6d4", "MIG-c6d5")
TWO = f"GPU 0: NVIDIA L4 (UUID: {FIRST})\nGPU 1: NVIDIA H200 (UUID: {SECOND})\n"
DIVIDED = f"GPU 0: NVIDIA H200 (UUID: {FIRST})\n" + "".join(
    f"  MIG 1g.18gb     Device  {number}: (UUID: {one})\n" for number, one in enumerate(SLICES)
)
WHOLE = f"{FIRST}, Disabled\n{SECOND}, [N/A]\n"
TOOL = """#!/bin/sh
cat "$(dirname "$0")/${1##*=}" 2>/dev/null && exit 0
echo "Failed to initialize NVML: Driver/library version mismatch"
exit 18
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives a machine an nvidia-smi, and what it answers to each query; nothing said makes it fail."""
    place = tmp_path / "bin"

    def make(gpus: str | None = None, **said: str) -> None:
        place.mkdir(exist_ok=True)
        (place / "nvidia-smi").write_text(TOOL)
        (place / "nvidia-smi").chmod(0o755)
        answers = {"-L": gpus, "uuid,mig.mode.current": said.get("divided", WHOLE)} | {
            "uuid,memory.free": said.get("free"), "gpu_uuid,pid,used_memory": said.get("held"),
        }  # fmt: skip
        for name, answer in answers.items():
            if answer is not None:
                (place / name).write_text(answer)

    monkeypatch.setenv("PATH", f"{place}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


@pytest.mark.parametrize(
    ("setting", "listed", "divided", "said", "told"),
    [
        ("", TWO, WHOLE, "CUDA_VISIBLE_DEVICES is '', which hides every GPU", "Unset it"),
        ("-1", TWO, WHOLE, "is '-1', which hides every GPU", "a number or UUID"),
        ("2", TWO, WHOLE, "is '2', but '2' matches no GPU", f"Available: 0 or {FIRST} (NVIDIA L4); 1 or {SECOND}"),
        ("GPU-9", TWO, WHOLE, "but 'GPU-9' matches no GPU", "1 or GPU-1bb0 (NVIDIA H200)."),
        ("GPU-1", TWO, WHOLE, "but 'GPU-1' matches several GPUs", "Unset it"),
        ("0,0", TWO, WHOLE, "which contains '0' twice", "Unset it"),
        ("MIG-c6d9", DIVIDED, f"{FIRST}, Enabled", "'MIG-c6d9' matches no GPU", f"its slice {SLICES[1]}"),
        ("GPU-1b", TWO, WHOLE, "the NVIDIA driver shows no GPU", "docker run --gpus all"),
        (None, TWO, WHOLE, "the NVIDIA driver shows no GPU", "docker run --gpus all"),
        (None, TWO, f"{FIRST}, Enabled\n", f"NVIDIA L4 ({FIRST}) has MIG enabled", "-mig 0"),
        (None, DIVIDED, f"{FIRST}, Enabled\n", "the NVIDIA driver shows no GPU", "docker run"),
        (None, "", "", "nvidia-smi lists none", "docker run --gpus all"),
        ("1", None, WHOLE, "(CUDA_VISIBLE_DEVICES is '1'): nvidia-smi fails: Failed to initialize NVML", "nvidia-smi"),
    ],
)
def test_gpus_that_are_hidden(
    setting: str | None, listed: str | None, divided: str, said: str, told: str,
    loaded: Callable[[str], None], tool: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loaded(OPEN)
    tool(listed, divided=divided)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    why, fix = gpus.obstacle("13.0", None)
    assert said in why
    assert told in fix


def play_gpus(monkeypatch: pytest.MonkeyPatch, *uuids: str, name: str = "NVIDIA H200", free: int = 80) -> None:
    """torch sees these GPUs, of 80 GiB each, `free` of which are free."""
    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: len(uuids),
        "current_device": lambda: 0,
        "get_device_name": lambda device: name,
        "get_device_properties": lambda device: SimpleNamespace(uuid=uuids[device.index].removeprefix("GPU-")),
        "mem_get_info": lambda device: (free << 30, 80 << 30),
    }
    for attribute, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, attribute, fake)


CUDA = torch.device("cuda")


def test_one_gpu_needs_no_words(tool: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the tool asked, which is slow; a slice says that it is one."""
    tool()
    play_gpus(monkeypatch, FIRST, free=79)
    assert look_at(CUDA, 0.9) == gpu_choice.GpuFacts(chosen="cuda:0 (NVIDIA H200)")
    play_gpus(monkeypatch, FIRST, name="NVIDIA H200 MIG 1g.18gb")
    assert "1g.18gb, a slice, whose memory alone counts)" in look_at(CUDA, 0.9).chosen


def test_several_gpus(tool: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    tool(TWO)
    play_gpus(monkeypatch, FIRST, SECOND)
    facts = look_at(torch.device("cuda:1"), 0.9)
    assert facts.chosen.startswith("cuda:1 (NVIDIA H200), one of 2 GPUs")
    assert facts.warnings == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    play_gpus(monkeypatch, SECOND)
    with pytest.raises(
        ConfigError, match=r"N from 0 to 0\. CUDA_VISIBLE_DEVICES is '1': GPUs are numbered in its order"
    ):
        choose_device("cuda:1")
    assert look_at(CUDA, 0.9).warnings == ()


@pytest.mark.parametrize(
    ("setting", "listed", "said"),
    [
        ("1,2", TWO, "CUDA_VISIBLE_DEVICES is '1,2', but '2' matches no GPU: torch sees 1"),
        (",".join(SLICES), DIVIDED, "CUDA shows a process one slice alone (MIG): torch sees 1"),
    ],
)
def test_fewer_gpus_than_were_named(
    setting: str, listed: str, said: str, tool: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(listed)
    play_gpus(monkeypatch, FIRST)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    ((found, fix),) = look_at(CUDA, 0.9).warnings
    assert said in found
    assert "Correct it. Available: 0 or" in fix


def test_memory_that_others_hold(tool: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    held = [(FIRST, 41, 2048), (FIRST, 42, 57344), (SECOND, 43, 9), (FIRST, os.getpid(), 500), (FIRST, 4, "[N/A]")]
    tool(
        TWO,
        free=f"{FIRST}, 20480\n{SECOND}, 71680\n",
        held="".join(f"{gpu}, {pid}, {size}\n" for gpu, pid, size in held),
    )
    play_gpus(monkeypatch, FIRST, SECOND, free=20)
    ((found, fix),) = look_at(CUDA, 0.9).warnings
    assert found == ("Other processes use 60.00 GiB of cuda:0's 80.00 GiB (process 42 56.00 GiB, process 41 2.00 GiB)")
    assert "allows 72.00 GiB including theirs, which leaves 12.00 GiB" in fix
    assert fix.endswith("Stop them, or use another GPU (--device cuda:1 has 70.00 GiB free).")
    play_gpus(monkeypatch, FIRST, free=20)
    assert look_at(CUDA, 0.9).warnings[0][1].endswith("or use another GPU.")


def test_memory_is_told_without_the_tool(tool: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpus(monkeypatch, FIRST, SECOND, free=20)
    assert look_at(CUDA, 0.9).warnings[0][0].endswith("60.00 GiB of cuda:0's 80.00 GiB")
    assert another_gpu(CUDA) == "another GPU (--device cuda:1)"


def test_a_start_says_it_before_it_loads(
    tool: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    play_gpus(monkeypatch, FIRST, SECOND, free=20)
    with (
        caplog.at_level(logging.INFO, "octavo.execution"),
        pytest.raises(ModelLoadError, match="does not exist"),
        mock.patch.object(starting.gpu, "current", return_value=nullcontext()),
    ):
        starting.start(EngineConfig(model="/absent/model"))
    said = [record for record in caplog.records if record.name == "octavo.execution"]
    assert [record.levelname for record in said] == ["INFO", "WARNING"]
    assert said[0].getMessage().startswith("GPU: cuda:0 (NVIDIA H200), one of 2")
    assert "Stop them, or use another GPU" in said[1].getMessage()
