"""Steps on a device that computes late: nothing races, nothing is waited for, and graphs hold what they need."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

if torch.cuda.is_available():
    pytest.skip("a GPU is here, which does all that itself", allow_module_level=True)

from support.driving import Job, make_engine, run, run_alone, watching
from support.jobs import CHECKPOINT, beams, greedy, prompt, sampled
from support.late_device import LateDevice, late_device

from engine import Engine
from engine.execution import prompt_graphs
from engine.execution.buffers import PinnedRing
from engine.execution.one_row import FUSED
from engine.execution.recording import CudaRecorder
from engine.execution.transfers import Download, Uploads

pytestmark = pytest.mark.slow

CUDA = torch.device("cuda:1")
SETTINGS: dict[str, Any] = {"max_model_len": 48, "num_gpu_blocks_override": 12, "max_num_seqs": 2, "block_size": 16}


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with late_device() as device, torch.cuda.device(CUDA):
        yield device


# ---------------------------------------------------------------- the stand-in finds what races


def test_what_was_not_waited_for_is_not_there(device: LateDevice) -> None:
    values = torch.zeros(3, device=CUDA) + 5
    host = torch.empty(3, pin_memory=True)
    host.copy_(values, non_blocking=True)
    assert host.isnan().all()
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    event.synchronize()
    assert host.tolist() == [5, 5, 5]
    assert device.waited == []
    assert values.sum().item() == 15
    assert len(device.waited) == 1


def test_pinned_memory_that_is_written_too_early(device: LateDevice) -> None:
    host = torch.ones(3, pin_memory=True)
    there = host.to(CUDA, non_blocking=True)
    host[1] = 2
    with pytest.raises(AssertionError, match="written again before its copy was done"):
        there.cpu()


def test_memory_that_was_not_written(device: LateDevice) -> None:
    assert torch.empty(2, device=CUDA).isnan().all().item()
    assert torch.empty(2, dtype=torch.int32, device=CUDA).tolist() == [-77, -77]


def test_a_graph_does_the_same_again(device: LateDevice) -> None:
    numbers, add = torch.zeros(4, device=CUDA), torch.ones(2, device=CUDA)
    replay = CudaRecorder(CUDA)(lambda: numbers[1:3].add_(add * 2))  # once before it is recorded
    add.fill_(10)
    replay()
    replay()
    assert numbers.tolist() == [0, 42, 42, 0]


def test_a_graph_is_timed(device: LateDevice) -> None:
    numbers = torch.zeros(1, device=CUDA)
    recorder = CudaRecorder(CUDA)
    replay = recorder(lambda: numbers.add_(1))
    with torch.cuda.device(0):
        seconds = recorder.seconds(replay)
    replays = float(numbers.cpu()) - 1
    assert replays >= 10
    assert seconds * 1000 < 1.0 == round(seconds * 1000 * replays / 6, 6)  # each round is said to take a millisecond


def test_a_graph_whose_memory_is_freed(device: LateDevice) -> None:
    numbers = torch.zeros(2, device=CUDA)

    def recorded() -> Callable[[], None]:
        gone = torch.ones(2, device=CUDA)
        return CudaRecorder(CUDA)(lambda: numbers.add_(gone))

    replay = recorded()
    with pytest.raises(RuntimeError, match="uses memory that has been freed"):
        replay()


@pytest.mark.parametrize(
    "waiting",
    [
        lambda there: there.sum().item(),
        lambda there: there.cpu(),
        lambda there: there.copy_(torch.ones(2)),
        lambda there: torch.cuda.synchronize(),
        lambda there: there[there > 0],
    ],
    ids=["item", "to the host", "from the host", "synchronize", "mask"],
)
def test_no_wait_while_a_graph_is_recorded(device: LateDevice, waiting: Callable[[Any], object]) -> None:
    there, before = torch.zeros(2, device=CUDA), torch.cuda.current_stream(CUDA)
    with pytest.raises(RuntimeError, match="previous error during capture") as raised:
        CudaRecorder(CUDA)(lambda: waiting(there))
    assert re.search("capturing|recorded", str(raised.value.__context__))
    assert torch.cuda.current_stream(CUDA) is before
    assert torch.cuda.current_device() == 1


def test_after_a_recording_that_failed_others_succeed(device: LateDevice) -> None:
    """And the one before it goes on."""
    numbers = torch.zeros(1, device=CUDA)
    recorder = CudaRecorder(CUDA)
    replays = [recorder(lambda: numbers.add_(1))]
    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorder(lambda: numbers.add_(numbers.sum().item()) if device.recording else numbers)
    replays.append(recorder(lambda: numbers.add_(10)))
    assert device.filling == set()
    for replay in replays:
        replay()
    assert numbers.tolist() == [22]


# ---------------------------------------------------------------- transfers


def test_more_is_sent_than_pieces_are_pinned(device: LateDevice) -> None:
    target = torch.zeros(4, dtype=torch.int64, device=CUDA)
    ring, sums = PinnedRing(4, torch.int64, CUDA), torch.zeros(4, dtype=torch.int64, device=CUDA)
    for number in range(10):
        ring.send(np.full(4, number), target)
        sums += target
    assert device.waited == []
    assert sums.tolist() == [45] * 4


def test_what_is_uploaded_and_fetched_is_what_was_meant_then(device: LateDevice) -> None:
    uploads, fetched = Uploads(CUDA), []
    for number in range(4):
        given = uploads.put({"a": np.full(3, number, dtype=np.int32), "b": np.full(2, number / 2)})
        fetched.append(Download(given["a"] + given["b"].sum().to(torch.int32)))
        given["a"].fill_(-1)
    assert device.waited == []
    assert not fetched[0].ready
    assert [download.wait().tolist() for download in fetched] == [[2 * number] * 3 for number in range(4)]


# ---------------------------------------------------------------- steps


def started(path: Path, **settings: Any) -> Engine:
    """An engine on the device. Whatever it records last is said to be the fastest: nothing is timed, which takes a
    minute here."""
    with (
        mock.patch.object(CudaRecorder, "seconds", side_effect=count(9, -1)),
        mock.patch.object(prompt_graphs, "_APART", ((12, 12),)),
    ):
        return make_engine(path, **settings, device=str(CUDA))


def test_steps(checkpoint: Callable[[str], Any]) -> None:
    """The same tokens as on a CPU; from launch to launch the host never waits, and only pinned memory is copied."""
    path: Path = checkpoint(CHECKPOINT).path
    jobs = [
        Job(prompt(1, 7), greedy(6)),
        Job(prompt(2, 3), sampled(3, 6)),
        Job(prompt(4, 5), beams(2, 3)),
        Job(prompt(5, 4), sampled(4, 2, repetition_penalty=1.2, logprobs=1, prompt_logprobs=1)),
    ]
    plain = make_engine(path, **SETTINGS)
    expected = run_alone(plain, jobs)
    plain.close()
    with late_device() as device:
        engine = started(path, **SETTINGS)
        try:
            assert engine.runner.graphs is not None
            assert engine.runner.graphs.one_row.kept == dict.fromkeys(("layers", "logits"), FUSED.name)
            device.waited.clear()
            assert run(engine, jobs) == expected
            assert device.waited == []
            graphs = engine.runner.graphs
            prompts = engine.runner.prompt_graphs.num_replayed
            assert prompts >= 3
            assert graphs.num_replayed + prompts > graphs.sampling.num_replayed > graphs.sampling.num_sent
            assert engine.stats().num_steps_ahead > 2
            assert torch.cuda.current_device() == 0
        finally:
            engine.close()


def test_beams_go_on_without_a_wait(checkpoint: Callable[[str], Any]) -> None:
    """A crowd of searches, whose pages begin and part: what they go on with is chosen, copied and put in order without
    the host."""
    path: Path = checkpoint(CHECKPOINT).path
    jobs = [
        Job(prompt(1, 7), beams(3, 4, ignore_eos=True)),
        Job(prompt(2, 3), beams(2, 6, length_penalty=0.0, early_stopping=True)),
        Job(prompt(3, 2), greedy(5)),
    ]
    settings = SETTINGS | {"max_num_seqs": 6, "block_size": 4, "num_gpu_blocks_override": 40, "max_model_len": 16}
    plain = make_engine(path, **settings)
    expected = run_alone(plain, jobs)
    plain.close()
    with late_device() as device:
        engine = started(path, **settings)
        try:
            device.waited.clear()
            with watching(engine) as plans:
                assert run(engine, jobs) == expected
            assert device.waited == []
            searches = [plan.searches for plan in plans if plan.searches is not None]
            assert len(searches) > 3
            assert any(one.fresh.any() for one in searches)
            assert not all(one.fresh.all() for one in searches)
            assert engine.stats().num_page_copies > 3
        finally:
            engine.close()
