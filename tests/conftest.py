"""Fixtures shared by all tests. Nothing heavy is imported before a test asks for it."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.without_server import pytest_addoption, pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401

if TYPE_CHECKING:
    from support.checkpoints import Checkpoint
    from support.driving import Tokens
    from support.service import Service

    from engine import LLM, Engine
    from engine.model.spec import ModelSpec

# Tests import from each other by name, whatever folder they are in.
FILES = (*Path(__file__).parent.glob("*/test_*.py"), *Path(__file__).parent.glob("*/*/test_*.py"))
sys.path.extend(sorted({str(file.parent) for file in FILES}))

# Tiny matrices gain nothing from threads, and threads that wait for each other on busy cores take ten
# times as long. Set before torch is imported; servers that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Modules are compiled once, not by each of the hundreds of programs that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Without a GPU, Triton's kernels run by its interpreter. It reads this when they are imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Cases of a parametrised test that `make test` runs.
SAMPLE = 3
# And what `make test-all` runs: the largest matrices have hundreds.
MOST = 48

# Files with tests of minutes, which run first: at the end, other processes would wait for them.
LONG = (
    "test_soak", "test_native_executor", "test_gpu_compiled", "test_native_sanitizer", "test_long_documents",
    "test_late_device", "test_gpu_step", "test_gpu_cache", "test_task_pages", "test_agents", "test_bench_gpu",
)  # fmt: skip

ROOMY: dict[str, Any] = {
    "device": os.environ.get("OCTAVO_TEST_DEVICE", "cpu"),
    "dtype": "float32",
    "show_progress": False,
    "max_num_seqs": 64,
    "num_gpu_blocks_override": 1024,
    "max_step_time": 0,  # how prompts are cut shall not depend on the clock
}


class _FailureLines:
    """Each failure has a line as soon as it is known, so that a run that is cut off tells what failed."""

    def __init__(self, config: pytest.Config):
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            message = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
            terminal.write_line(f"\n{report.nodeid} ({report.when}) after {report.duration:.0f} s: {message[:300]}")


def pytest_configure(config: pytest.Config) -> None:
    """An example of Hypothesis may take as long as a busy machine needs for it, and examples are the same each time, so
    that a failure is a change's; `--hypothesis-profile=explore` draws new ones. And Ctrl-C reaches the programs that
    tests start, even where a shell has started the tests in the background."""
    gc.disable()  # until all tests are collected: `pytest_collection_finish`
    from hypothesis import HealthCheck, settings

    from engine.configs.listing import list_models_once

    list_models_once()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("explore", patient)
    settings.register_profile("patient", patient, derandomize=True)
    settings.load_profile("patient")
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would run files with many tests first, however short
    if not hasattr(config, "workerinput"):  # the process that reports, not one of xdist's
        config.pluginmanager.register(_FailureLines(config))


@pytest.hookimpl(tryfirst=True)  # before -m is heeded
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with many cases, the fast part has SAMPLE, and the whole MOST: the first, the last and those between
    them, evenly. Cases of which some are marked slow one by one keep their marks, `whole` those of the whole, and
    `everyday` are in both. Cases marked exhaustive one by one are in neither."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for all_of_one in cases.values():
        last = len(all_of_one) - 1
        sample, most = ({round(place * last / (count - 1)) for place in range(count)} for count in (SAMPLE, MOST))
        chosen = any(item.get_closest_marker(mark) for item in all_of_one for mark in ("slow", "everyday"))
        for place, item in enumerate(all_of_one):
            everyday = chosen and item.get_closest_marker("slow") is None
            if place not in sample | most and not everyday and item.get_closest_marker("whole") is None:
                item.add_marker("exhaustive")
        if chosen:
            continue
        for place, item in enumerate(all_of_one):
            if place not in sample:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """The collector leaves out the millions of objects of modules and collected tests: each of its full runs would take
    more than a second for them."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in an event loop of its own, ends in time and leaves no task behind."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def in_time() -> None:
        async with asyncio.timeout(400):
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:  # cancelled ones, say, need a turn
            _, left = await asyncio.wait(left, timeout=60)
        assert not left, f"{pyfuncitem.nodeid} leaves tasks behind: {left}"

    asyncio.run(in_time())
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """What tests start later would inherit blocked signals, and could not be stopped."""
    yield
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    assert not blocked, f"{item.nodeid} leaves signals blocked: {blocked}"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Gives the tiny random checkpoint of a name (`support.checkpoints.SHAPES`), made once."""
    from support.checkpoints import make_checkpoint

    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelSpec]:
    """Gives the parts of a published config (`support.published`), some of its settings changed."""
    from support import published

    return functools.partial(published.read, tmp_path)


@pytest.fixture(scope="session")
def shared_llm(checkpoint: Callable[[str], Checkpoint]) -> Iterator[Callable[[str], LLM]]:
    """Gives an engine with room for everything for a checkpoint's name, loaded once."""
    from engine import LLM

    made: dict[str, LLM] = {}

    def get(name: str) -> LLM:
        if name not in made:
            made[name] = LLM(str(checkpoint(name).path), **ROOMY)
        return made[name]

    yield get
    for llm in made.values():
        llm.engine.check_integrity()
        llm.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random LLaMA over bytes."""
    import torch
    from fake_client import EOS, VOCAB_SIZE, hf_byte_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=65_536, bos_token_id=None, eos_token_id=EOS, pad_token_id=None,
        initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # it speaks printable ASCII, mostly
        model.lm_head.weight[:32] = 0
        model.lm_head.weight[127:] = 0
    model.save_pretrained(folder)
    hf_byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Service]]:
    """Gives the service of a bundled model with these flags, started once for all tests that leave it as it is."""
    from support.service import services_on_demand

    yield from services_on_demand(tmp_path_factory.mktemp("bundled"))


@pytest.fixture
def engines(checkpoint: Callable[[str], Checkpoint], request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """Makes engines (`support.driving.make_engine`) with the given settings and closes them. Tests with the mark
    `support.driving.BOTH_DEPTHS` run twice."""
    from support.driving import make_engine
    from support.jobs import CHECKPOINT

    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        made.append(make_engine(checkpoint(CHECKPOINT).path, **(getattr(request, "param", {}) | settings)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def mixed_answers(checkpoint: Callable[[str], Checkpoint]) -> list[Tokens]:
    """What each of `support.jobs.MIXED` answers alone in a roomy engine, nothing cached."""
    from support.driving import make_engine, run_alone
    from support.jobs import CHECKPOINT, MIXED

    plain = make_engine(checkpoint(CHECKPOINT).path, enable_prefix_caching=False)
    result = run_alone(plain, MIXED)
    assert plain.stats().num_preemptions == plain.stats().prefix_hits == 0
    plain.close()
    return result
