"""A runner in a process of its own answers as one in this process does, and neither outlives the other."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import random_prompt
from support.driving import BOTH_DEPTHS, Job, Tokens, add, finish, make_engine, preempt_all, run, tokens_of
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.faults import signalled_at_birth
from support.jobs import MIXED, beams, greedy, prompt, sampled
from support.peft_folders import adapter_tensors, matrices, write_adapter
from support.runners import executor_of, is_running, wait_gone
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES

from engine import Engine, EngineDeadError, ModelLoadError, PoolingParams, Seq2SeqInput
from engine.backends import native
from engine.config import EngineConfig
from engine.errors import AdapterError
from engine.execution import starting
from engine.execution.executor import LocalExecutor
from engine.execution.pending import LateStep
from engine.host.logs import LineFormatter, LogFormat
from engine.interface.token_sides import SIDES
from engine.process.runner import AdapterRead, Failure, ProcessExecutor, RunnerAnswer, _encoder, _serve
from engine.scheduling.plan import StepPlan, StepResult

APART: dict[str, Any] = {"distributed_executor_backend": "mp"}


@pytest.mark.slow
@BOTH_DEPTHS
def test_the_same_answers(engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """Pages are few, all of them are taken away now and then, and prompts come in chunks."""
    settings = {"block_size": 4, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 24, "max_num_seqs": 16}
    one = engines(**APART, **settings)
    assert executor_of(one).pid != os.getpid()
    assert run(one, MIXED, between=lambda n: preempt_all(one) if n in (5, 15) else None) == mixed_answers
    stats = one.stats()
    assert stats.num_preemptions > 2
    assert stats.num_page_copies > 5


@pytest.mark.slow
def test_all_that_is_said(engines: Callable[..., Engine]) -> None:
    jobs = [
        Job(prompt(71, 30), sampled(3, 18, logprobs=2, prompt_logprobs=2)),
        Job(prompt(72, 12), beams(3, logprobs=1)),
        Job(prompt(73, 25), greedy(8, repetition_penalty=1.3, logit_bias={3: 2.0}, min_tokens=4)),
    ]
    said = []
    for one in (engines(), engines(**APART)):
        for number, job in enumerate(jobs):
            add(one, str(number), job)
        one.add_request("pooled", prompt(74, 40), PoolingParams(task="embed"))
        said.append(finish(one))
    assert said[0] == said[1]


@pytest.mark.slow
def test_adapters(tmp_path: Path) -> None:
    """They are read there. One of an encoder-decoder model changes the encoder's pages, too."""
    checkpoint = make_seq2seq_checkpoint(SHAPES["bart"], tmp_path / "bart")
    sizes = {name: size for name, size in matrices(checkpoint.model).items() if "layers" in name}
    folders = [write_adapter(tmp_path / str(seed), adapter_tensors(sizes, seed=seed)) for seed in range(2)]
    case, found = checkpoint.cases()[0], []
    for settings in ({}, APART):
        one = make_engine(tmp_path / "bart", max_model_len=100, max_loras=2, **settings)
        infos = [one.load_adapter(str(number), str(folder)) for number, folder in enumerate(folders)]
        assert one.adapters == {"0": infos[0], "1": infos[1]}
        for name in ("0", "1", None):
            one.add_request(str(name), Seq2SeqInput(case.source, case.begin), beams(2, 6), adapter=name)
        found.append({name: tokens_of(output) for name, output in finish(one).items()})
        one.unload_adapter("0")
        with pytest.raises(AdapterError, match="adapter '0' cannot be loaded"):
            one.load_adapter("0", str(tmp_path / "bart"))
        assert one.load_adapter("new", str(folders[1])).digest == infos[1].digest
        one.add_request("again", Seq2SeqInput(case.source, case.begin), beams(2, 6), adapter="new")
        assert tokens_of(finish(one)["again"]) == found[-1]["1"]
        one.close()
    assert found[0] == found[1]
    assert len({str(tokens) for tokens in found[0].values()}) == 3


@pytest.mark.slow
def test_encoders(tmp_path: Path) -> None:
    name = next(iter(ENCODER_SHAPES))
    make_encoder_checkpoint(ENCODER_SHAPES[name], tmp_path / "encoder")
    make_seq2seq_checkpoint(SHAPES["t5"], tmp_path / "t5")
    texts = [random_prompt(ENCODER_SHAPES[name].vocab, seed, 5 + seed) for seed in range(4)]
    for folder in ("encoder", "t5"):
        found = []
        for settings in ({}, APART):
            one = make_engine(tmp_path / folder, **({"max_model_len": 100} if folder == "t5" else {}), **settings)
            for number, text in enumerate(texts):
                how = PoolingParams(task="embed") if folder == "encoder" else beams(2, 6)
                one.add_request(str(number), text, how)
            found.append(finish(one))
            one.close()
        assert found[0] == found[1]


@pytest.mark.slow
def test_what_keeps_a_model_from_loading(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        make_engine(tmp_path, **APART)


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_runner_logs_as_its_engine_does(
    log_format: LogFormat,
    engines: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    handler, root = logging.StreamHandler(io.StringIO()), logging.getLogger()
    handler.setFormatter(LineFormatter(log_format))
    monkeypatch.setattr(root, "handlers", [*root.handlers, handler])
    monkeypatch.setattr(root, "level", logging.INFO)
    monkeypatch.setenv("OCTAVO_NATIVE", "off")  # the runner says so
    one = engines(**APART)
    one.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if "octavo.native" in line]
    assert lines
    for line in lines:
        if log_format == "json":
            assert json.loads(line)["level"] == "info"
        else:
            assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z INFO octavo\.native: ", line)


@pytest.mark.slow
def test_a_runner_that_is_killed(engines: Callable[..., Engine]) -> None:
    one = engines(**APART)
    add(one, "a", Job(prompt(1, 9), greedy(50)))
    one.step()
    pid = executor_of(one).pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"runner's process {pid} has ended \(with status -9\)"):
        finish(one)


@pytest.mark.slow
def test_a_runner_ends_with_its_engine(engines: Callable[..., Engine]) -> None:
    one = engines(**APART)
    pid = executor_of(one).pid
    assert is_running(pid)
    one.close()
    wait_gone(pid)


@pytest.mark.slow
def test_a_runner_ends_with_a_killed_engine(engines: Callable[..., Engine]) -> None:
    path = engines().config.model
    program = (
        "import sys, time; sys.path.insert(0, 'tests'); from support.driving import make_engine\n"
        f"e = make_engine({path!r}, distributed_executor_backend='mp')\n"
        "print(e.executor.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_running(pid)
        process.kill()
    wait_gone(pid)


def test_a_signal_while_the_runner_is_started(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when there is a process already; what its handler raises leaves none behind."""
    config = engines().config
    with signalled_at_birth(monkeypatch) as begun, pytest.raises(KeyboardInterrupt):
        ProcessExecutor(config)
    (process,) = begun
    assert not is_running(process.pid)


class InThread:
    """In the place of a process: a runner in a thread, in which a test can break something."""

    pid = 0

    def __init__(self, command: list[str], *, stdin: int, env: dict[str, str], pass_fds: tuple[int, ...]):
        line = Connection(os.dup(stdin))
        self._thread = threading.Thread(target=self._run, args=(line,), daemon=True)
        self._thread.start()

    def _run(self, line: Connection) -> None:
        try:
            _serve(line)
        except (EOFError, OSError):
            line.close()

    def wait(self, timeout: float) -> int:
        self._thread.join(timeout)
        assert not self._thread.is_alive()
        return 0


@BOTH_DEPTHS
@pytest.mark.parametrize("short", [False, True], ids=["error", "out of memory"])
def test_what_fails_there_is_dealt_with_here(
    short: bool, engines: Callable[..., Engine], mixed_answers: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that breaks each step that it is in ends, alone; steps that lack memory are made smaller."""
    raised, start = [], starting.start

    def fragile(config: Any) -> LocalExecutor:
        executor = start(config)
        launch = executor.launch

        def broken(plan: StepPlan) -> LateStep:
            step = launch(plan)
            if ((plan.positions == 0) & (plan.token_ids == 300)).any():
                raised.append(plan)
                raise RuntimeError("the poison was computed")
            if short and plan.num_tokens > 20:
                raised.append(plan)
                raise torch.OutOfMemoryError("made by the test")
            return step

        executor.launch = broken  # type: ignore[method-assign]
        return executor

    native.current()
    monkeypatch.setattr(starting, "start", fragile)
    monkeypatch.setattr(subprocess, "Popen", InThread)
    one = engines(**APART)
    for number, job in enumerate([Job([300, 4, 5], greedy()), *MIXED]):
        add(one, str(number), job)
    outputs = finish(one)
    assert len(raised) > 1
    assert "RunnerError: RuntimeError: the poison was computed" in str(outputs["0"].error)
    assert [tokens_of(outputs[str(1 + number)]) for number in range(len(MIXED))] == mixed_answers
    assert (one.stats().num_oom_retries > 0) == short


def test_a_plan_survives_the_way(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Array by array, and what arrives can be written."""
    from engine.process import runner as wire

    one, plans = engines(), list[StepPlan]()
    launch = one.runner.launch
    monkeypatch.setattr(one.runner, "launch", lambda plan: (plans.append(plan), launch(plan))[1])
    run(one, MIXED)
    assert len(plans) > 10

    def compare(sent: Any, found: Any) -> None:
        if isinstance(sent, np.ndarray):
            assert found.dtype == sent.dtype
            assert found.flags.writeable
            np.testing.assert_array_equal(found, sent)
        elif isinstance(sent, dict):
            assert found.keys() == sent.keys()
            for name in sent:
                compare(sent[name], found[name])
        elif hasattr(sent, "__dataclass_fields__"):
            for name in sent.__dataclass_fields__:
                compare(getattr(sent, name), getattr(found, name))
        else:
            assert found == sent

    width = len(plans[0].token_ids)
    sides = {name: side.array([*range(side.width * width)]) for name, side in SIDES.items()}
    for plan in (*plans, replace(plans[0], sides=sides)):
        order = wire._orders.decode(wire._encoder.encode(wire.LaunchStep(plan)))
        assert isinstance(order, wire.LaunchStep)
        compare(plan, order.plan)


@pytest.mark.timeout(60)
def test_much_to_send_both_ways(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and answers that no socket's buffer holds: neither side waits for the other to read first."""
    one, plans = engines(), list[StepPlan]()
    launch = one.runner.launch
    monkeypatch.setattr(one.runner, "launch", lambda plan: (plans.append(plan), launch(plan))[1])
    run(one, MIXED[:1])
    numbers = np.arange(2**21, dtype=np.int32)
    large = replace(plans[0], token_ids=numbers)
    answer = replace(StepResult.empty(), tokens=numbers.reshape(-1, 1))

    class Heavy:
        facts = one.executor.facts

        def launch(self, plan: StepPlan) -> LateStep:
            assert len(plan.token_ids) == 2**21
            return LateStep(candidates=answer)

    monkeypatch.setattr(starting, "start", lambda config: Heavy())
    monkeypatch.setattr(subprocess, "Popen", InThread)
    executor = ProcessExecutor(one.config)
    late = [executor.launch(large) for _ in range(6)]
    for step in reversed(late):
        np.testing.assert_array_equal(step.result().tokens[:, 0], numbers)
    executor.close()


def test_an_interrupted_message_is_not_taken_for_another(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a reply is read: whatever is left of it, no later request gets it."""
    native.current()  # which may start a compiler
    monkeypatch.setattr(subprocess, "Popen", InThread)
    one = engines(**APART)

    def interrupted() -> bytes:
        raise KeyboardInterrupt

    add(one, "a", Job(prompt(1, 9), greedy(5)))
    monkeypatch.setattr(executor_of(one)._runners[0], "recv_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.step()
    assert not one.has_unfinished_requests()
    add(one, "b", Job(prompt(2, 9), greedy(5)))
    with pytest.raises(EngineDeadError, match=r"runner's process .* has ended"):
        finish(one)


def test_an_answer_that_nobody_waits_for_is_not_taken_for_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter whose read was interrupted is read again."""
    ours, theirs = Pipe()
    facts = SimpleNamespace(answer=lambda: SimpleNamespace(facts="some"))
    with monkeypatch.context() as patch:
        patch.setattr(ProcessExecutor, "_begin", lambda self, config, memory: self._runners.append(ours))
        patch.setattr(ProcessExecutor, "send", lambda self, *messages: facts)
        executor = ProcessExecutor(EngineConfig(model="m"))
    executor.read_adapter("a", "path")
    again = executor.read_adapter("a", "path")
    theirs.send_bytes(_encoder.encode(AdapterRead("a", Failure("AdapterError", "damaged", False), 1)))
    assert not again.ready
    theirs.send_bytes(_encoder.encode(AdapterRead("a", RunnerAnswer(), 2)))
    again.wait()
    theirs.close()


def test_a_runner_that_dies_between_two_parts_is_no_requests_fault(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = starting.start

    def short(config: Any) -> LocalExecutor:
        executor = start(config)
        launch = executor.launch

        def limited(plan: StepPlan) -> LateStep:
            if plan.num_rows > 1:
                raise torch.OutOfMemoryError("made by the test")
            return launch(plan)

        executor.launch = limited  # type: ignore[method-assign]
        return executor

    native.current()
    monkeypatch.setattr(starting, "start", short)
    monkeypatch.setattr(subprocess, "Popen", InThread)
    one = engines(**APART)
    for number in range(3):
        add(one, str(number), Job(prompt(number, 9), greedy(5)))
    while not one.stats().num_steps:
        one.step()
    assert len(one.scheduler.in_flight) > 0, "parts are left"
    executor_of(one)._runners[0].close()
    with pytest.raises(EngineDeadError, match="steps can no longer be computed"):
        finish(one)
