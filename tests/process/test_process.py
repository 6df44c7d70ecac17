"""The engine as a process: however either side ends, the other learns of it, and nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import httpx
import pytest
from support.checkpoints import Checkpoint
from support.faults import Gate, signalled_at_birth
from support.service import PATIENCE, Service, children, is_running, stopped, wait_for
from test_http_process import LONG

from engine import EngineConfig, EngineDeadError, ModelLoadError, OctavoError, RequestDelta, SamplingParams
from engine.engine import Engine
from engine.process import launch
from engine.process.client import EngineClient, RestartPolicy, start_engine
from engine.process.messages import Start

pytestmark = pytest.mark.slow

# Ids are sent as they come, and texts are empty without a tokenizer.
STREAM = {"prompt": [97], "stream": True, "return_token_ids": True, **LONG}
QUICK = RestartPolicy(max_failures=2, first_delay=0.01)


def status(service: Service, path: str = "/health") -> int:
    return service.get(path).status_code


def wait_back(service: Service) -> None:
    """Until an engine serves again."""
    wait_for(lambda: status(service) == 200, "the engine did not come back")


def events(answer: httpx.Response) -> Iterator[str]:
    """The lines of a stream's events."""
    return (line for line in answer.iter_lines() if line.startswith("data:"))


@contextmanager
def prefilling(service: Service) -> Iterator[list[httpx.Response | Exception]]:
    """A long prompt is being computed, for half a minute at most; at the end there is one answer to it,
    or what was raised."""
    answers: list[httpx.Response | Exception] = []

    def ask() -> None:
        body = {"prompt": [97] * 60_000, "max_tokens": 1}
        try:
            answers.append(httpx.post(f"{service.url}/v1/completions", json=body, timeout=PATIENCE))
        except Exception as error:
            answers.append(error)

    before = service.metric("octavo_computed_tokens_total")
    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: service.metric("octavo_computed_tokens_total") > before, "no prefill")
    yield answers
    asking.join()


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """Where all engines of this module make their folders; at the end there must be none."""
    folder = Path(tempfile.mkdtemp(prefix="oct-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield folder
        left = list(folder.glob("octavo-ipc-*"))
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture
def start(tiny: Path, sockets: Path, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts services; whatever a test does, none survives it."""
    started: list[Service] = []

    def begin(*arguments: str, under: Sequence[str] = ()) -> Service:
        log = tmp_path / f"log-{len(started)}"
        # Without a tokenizer, whose library takes long to load.
        common = ("--max-num-batched-tokens", "64", "--skip-tokenizer-init")
        started.append(Service(str(tiny), *common, *arguments, log=log, under=under))
        return started[-1]

    yield begin
    for service in started:
        service.process.kill()
        service.process.wait()
    wait_for(lambda: not list(sockets.glob("octavo-ipc-*")), "a socket's folder is left")


@pytest.fixture
def loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """While it is closed, engines stay at loading."""
    return Gate(tmp_path, monkeypatch)


def drain(service: Service) -> None:
    """Tell the service to end while a request runs, and wait until it has heard that."""
    service.process.send_signal(signal.SIGTERM)
    wait_for(lambda: status(service) == 503, "the service did not begin to stop")
    assert service.process.poll() is None


# ---------------------------------------------------------------- the engine dies under the service


def test_an_engine_that_is_killed_is_replaced(start: Callable[..., Service], loading: Gate) -> None:
    """When idle, in prefill and in decode: waiting requests are told before another one is there, which serves all."""
    service = start("--max-engine-failures", "9")
    service.wait_ready()
    url = f"{service.url}/v1/completions"

    def serves() -> bool:
        return httpx.post(url, json={"prompt": [97]}, timeout=PATIENCE).status_code == 200

    loading.close()
    os.kill(service.engine(), signal.SIGKILL)
    wait_for(lambda: status(service) == 503, "readiness did not change")
    assert status(service, "/health/live") == 200
    refused = httpx.post(url, json={"prompt": [97]}, timeout=PATIENCE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
    assert service.metric("octavo_engine_up") == 0
    loading.open()
    wait_back(service)
    assert service.metric("octavo_engine_restarts_total") == 1
    assert serves()

    loading.close()
    with prefilling(service) as answers:
        os.kill(service.engine(), signal.SIGKILL)
    assert isinstance(answers[0], httpx.Response)
    assert answers[0].status_code == 503, answers[0].text
    loading.open()
    wait_back(service)

    loading.close()
    with httpx.stream("POST", url, json=STREAM, timeout=PATIENCE) as answer:
        lines = events(answer)
        assert '"choices"' in next(lines)
        os.kill(service.engine(), signal.SIGKILL)
        *_, last = lines
    assert '"engine_dead"' in last
    loading.open()
    wait_back(service)
    assert serves()
    assert service.stop() == 0
    log = service.log.read_text()
    assert "SIGKILL" in log
    assert "Traceback" not in log


def test_an_engine_that_keeps_dying_ends_the_service(start: Callable[..., Service], loading: Gate) -> None:
    service = start("--max-engine-failures", "2")
    service.wait_ready()
    loading.close()
    pid = service.engine()
    os.kill(pid, signal.SIGKILL)
    os.kill(service.engine(but=pid), signal.SIGKILL)
    assert service.process.wait(PATIENCE) == 1
    last = service.log.read_text().splitlines()[-1]
    assert last.startswith("octavo: the engine keeps failing: ")
    assert "SIGKILL" in last


def test_an_engine_killed_while_it_loads_first(start: Callable[..., Service], loading: Gate) -> None:
    loading.close()
    service = start()
    os.kill(service.engine(), signal.SIGKILL)
    assert service.process.wait(PATIENCE) == 1
    log = service.log.read_text()
    assert "SIGKILL" in log.splitlines()[-1]
    assert log.splitlines()[-1].startswith("octavo: cannot start: ")
    assert "Traceback" not in log


def test_an_engine_killed_while_draining(start: Callable[..., Service]) -> None:
    service = start("--shutdown-timeout", "300")
    service.wait_ready()
    with httpx.stream("POST", f"{service.url}/v1/completions", json=STREAM, timeout=PATIENCE) as answer:
        lines = events(answer)
        next(lines)
        drain(service)
        os.kill(service.engine(), signal.SIGKILL)
        *_, last = lines
    assert '"engine_dead"' in last
    assert service.process.wait(PATIENCE) == 0
    assert "Traceback" not in service.log.read_text()


# ---------------------------------------------------------------- the service dies


@pytest.mark.parametrize("phase", ["loading", "idle", "prefill", "decoding"])
def test_a_killed_service_takes_its_engine_along(phase: str, start: Callable[..., Service], loading: Gate) -> None:
    if phase == "loading":
        loading.close()
    service = start("--shutdown-timeout", "300")
    if phase != "loading":
        service.wait_ready()
    engine = service.engine()
    if phase == "decoding":
        with httpx.stream("POST", f"{service.url}/v1/completions", json=STREAM, timeout=PATIENCE) as answer:
            lines = events(answer)  # kept: giving it up closes the connection
            next(lines)
            service.process.kill()
    elif phase == "prefill":
        with prefilling(service) as answers:
            service.process.kill()
        assert isinstance(answers[0], httpx.TransportError)
    else:
        service.process.kill()
    wait_for(lambda: not is_running(engine), "the engine outlived the service")


def test_a_second_signal_takes_the_engine_along(start: Callable[..., Service]) -> None:
    """Long before the time is over that requests are given."""
    service = start("--shutdown-timeout", "300")
    service.wait_ready()
    engine = service.engine()
    with httpx.stream("POST", f"{service.url}/v1/completions", json=STREAM, timeout=PATIENCE) as answer:
        lines = events(answer)  # kept: giving it up closes the connection
        next(lines)
        drain(service)
        assert service.stop() == 1
    wait_for(lambda: not is_running(engine), "the engine outlived the service")


def test_a_signal_while_loading(start: Callable[..., Service], loading: Gate) -> None:
    """Ctrl-C; test_http_processes.py ends a start by SIGTERM."""
    loading.close()
    service = start()
    engine = service.engine()
    assert service.stop(signal.SIGINT) == 0
    assert not is_running(engine)
    assert service.log.read_text().splitlines()[-1] == "octavo: stopped before the model was loaded."


def test_a_signal_while_the_engine_is_started(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when there is a process already; what its handler raises leaves none behind."""
    with signalled_at_birth(monkeypatch) as begun, pytest.raises(KeyboardInterrupt):
        start_engine(config(checkpoint))
    (process,) = begun
    assert not is_running(process.pid)


def test_the_engine_leaves_signals_to_the_service(start: Callable[..., Service]) -> None:
    """Ctrl-C in a terminal goes to both."""
    service = start("--shutdown-timeout", "300")
    service.wait_ready()
    engine = service.engine()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(engine, signum)
    body = STREAM | {"max_tokens": 300}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        lines = events(answer)
        next(lines)
        os.kill(engine, signal.SIGINT)
        service.process.send_signal(signal.SIGINT)
        *_, last = lines
    assert last == "data: [DONE]"
    assert service.process.wait(PATIENCE) == 0
    assert not is_running(engine)


# ---------------------------------------------------------------- the client alone


def test_a_client_needs_no_torch() -> None:
    """The engine's process imports as much before it watches its lifeline."""
    code = (
        "import engine, engine.process.client, engine.process.main, sys\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def config(checkpoint: Callable[[str], Checkpoint]) -> EngineConfig:
    return EngineConfig(model=str(checkpoint("llama-grouped").path), device="cpu", show_progress=False)


async def ask(
    client: EngineClient, request_id: str, max_tokens: int, prompt: Sequence[int] = (1, 2, 3)
) -> list[RequestDelta]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [delta async for delta in client.generate(request_id, list(prompt), params)]


def pages(folder: Path) -> int:
    """Pages that are kept on disk."""
    return sum(not path.name.startswith(".") for path in folder.glob("*/*"))


async def test_restart_and_giving_up(checkpoint: Callable[[str], Checkpoint], sockets: Path, tmp_path: Path) -> None:
    client = start_engine(replace(config(checkpoint), kv_disk=str(tmp_path / "pages")), QUICK)
    (folder,) = sockets.glob("octavo-ipc-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert client.progress.idle
    first = await ask(client, "one", 5, range(40))
    assert client.stats().num_steps > 0
    assert client.progress.idle
    async with asyncio.timeout(PATIENCE):  # an idle engine writes its pages, so that it may be killed
        while pages(tmp_path / "pages") < 2:
            await asyncio.sleep(0.01)
    given_up = asyncio.create_task(client.wait_failed())
    (engine,) = children(os.getpid())
    with stopped(engine):  # it computes nothing any more, and does not say why
        running = [asyncio.create_task(ask(client, str(number), 40)) for number in range(4)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not client.progress.idle
        await asyncio.sleep(0.3)
        assert client.progress.seconds > 0.2
        os.kill(engine, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        ends = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(end, EngineDeadError) and "SIGKILL" in str(end) for end in ends)
    assert not client.is_alive
    for call in (client.stats, lambda: client.abort("0")):
        with pytest.raises(EngineDeadError):
            call()
    with pytest.raises(EngineDeadError):
        await ask(client, "early", 5)
    async with asyncio.timeout(PATIENCE):
        while not client.is_alive:
            await asyncio.sleep(0.01)
    assert client.num_restarts == 1
    again = await ask(client, "one", 5, range(40))
    assert [delta.choices for delta in again] == [delta.choices for delta in first]
    assert max(delta.num_cached_tokens for delta in again) == 32
    assert len(list(folder.iterdir())) == 1  # the new engine's socket

    (engine,) = children(os.getpid())
    os.kill(engine, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        assert "SIGKILL" in await given_up
    assert not client.is_alive
    await client.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    "place", ["engine.process.launch.socket.socketpair", "engine.process.client.ProcessEngineClient._watch"]
)
async def test_a_restart_that_fails_in_any_way_is_tried_again(
    place: str, checkpoint: Callable[[str], Checkpoint], sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only in those that the engine explains: while too many connections are open, no process can be started."""

    def fail(*arguments: object) -> NoReturn:
        monkeypatch.undo()
        raise OSError(errno.EMFILE, "Too many open files")

    policy = RestartPolicy(max_failures=3, first_delay=0.01)
    client = start_engine(config(checkpoint), policy)
    first = await ask(client, "one", 3)
    (engine,) = children(os.getpid())
    monkeypatch.setattr(place, fail)
    os.kill(engine, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        while not client.num_restarts:
            await asyncio.sleep(0.01)
    (engine,) = children(os.getpid())
    again = await ask(client, "one", 3)
    assert [delta.choices for delta in again] == [delta.choices for delta in first]
    await client.close()
    assert children(os.getpid()) == []


def test_one_event_loop_after_the_other(checkpoint: Callable[[str], Checkpoint], sockets: Path, tmp_path: Path) -> None:
    client = start_engine(replace(config(checkpoint), kv_disk=str(tmp_path / "pages")), QUICK)
    answers = [asyncio.run(ask(client, "id", 8)) for _ in range(3)]
    assert answers[0][1:] == answers[1][1:] == answers[2][1:]
    asyncio.run(ask(client, "id", 8, range(40)))
    asyncio.run(client.close())
    assert pages(tmp_path / "pages") == 2
    assert children(os.getpid()) == []


def test_news_take_half_of_the_loops_time_at_most(checkpoint: Callable[[str], Checkpoint], sockets: Path) -> None:
    """What the tokens of one request cost here is what those of hundreds may cost: others have their turn between."""
    times: list[tuple[float, float]] = []
    tokens: list[int] = []

    async def scenario() -> None:
        client = start_engine(config(checkpoint), QUICK)
        ended = asyncio.Event()

        def deliver(item: RequestDelta | OctavoError) -> None:
            assert isinstance(item, RequestDelta)
            began = time.monotonic()
            busy = time.thread_time() + 0.02
            while time.thread_time() < busy:
                pass
            times.append((began, time.monotonic()))
            tokens.extend(token for choice in item.choices for token in choice.token_ids)
            if item.finished:
                ended.set()

        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        client.submit("one", [1, 2, 3], params, deliver)
        await asyncio.wait_for(ended.wait(), PATIENCE)
        alone = [
            token for delta in await ask(client, "two", 100) for choice in delta.choices for token in choice.token_ids
        ]
        assert tokens == alone
        await client.close()

    asyncio.run(scenario())
    # Those that were handed out together have no time between them.
    bursts: list[list[float]] = []
    for began, ended in times:
        if bursts and began - bursts[-1][1] < 0.01:
            bursts[-1][1] = ended
        else:
            bursts.append([began, ended])
    assert len(bursts) > 1
    for one, following in itertools.pairwise(bursts):
        assert following[0] - one[1] >= 0.95 * 0.02


def test_closing_while_the_engine_restarts(checkpoint: Callable[[str], Checkpoint], sockets: Path) -> None:
    async def scenario() -> None:
        client = start_engine(config(checkpoint), QUICK)
        await ask(client, "one", 1)
        (engine,) = children(os.getpid())
        os.kill(engine, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            while children(os.getpid()) in ([], [engine]):
                await asyncio.sleep(0.01)
        await client.close()

    asyncio.run(scenario())
    assert children(os.getpid()) == []


@pytest.mark.parametrize("problem", ["absent", "unsupported", "no such device"])
def test_what_prevents_the_start_is_told_as_it_was(
    problem: str, tmp_path: Path, checkpoint: Callable[[str], Checkpoint], sockets: Path
) -> None:
    if problem == "absent":
        wrong = EngineConfig(model=str(tmp_path / "absent"), device="cpu")
    elif problem == "unsupported":
        (tmp_path / "config.json").write_text('{"model_type": "bloom", "architectures": ["BloomForCausalLM"]}')
        wrong = EngineConfig(model=str(tmp_path), device="cpu")
    else:
        wrong = EngineConfig(model=str(checkpoint("llama-grouped").path), device="cuda:99")
    with pytest.raises(OctavoError) as here:
        Engine(wrong)
    with pytest.raises(OctavoError) as there:
        start_engine(wrong)
    assert type(there.value) is type(here.value)
    assert str(there.value) == str(here.value)
    assert children(os.getpid()) == []


def test_an_unexpected_error_at_the_start(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The cause reaches the client, and the trace the log."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Trap:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'engine.engine': raise MemoryError('made by the test')\n"
        "sys.meta_path.insert(0, Trap())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineDeadError, match="MemoryError: made by the test"):
        start_engine(EngineConfig(model="x"))
    assert "Traceback" in capfd.readouterr().err


def test_no_interpreter_no_engine(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(EngineDeadError, match="/nonexistent/python"):
        start_engine(EngineConfig(model="x"))


def test_a_long_temporary_folder_does_not_matter(
    sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(ModelLoadError, match="absent"):
        start_engine(EngineConfig(model=str(tmp_path / "absent")))
    assert list(deep.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_waiting_threads_spin_for_a_moment_only(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert launch._environment(EngineConfig(model="m")).get("GOMP_SPINCOUNT") == expected


# What a shell or a unit may have set, and what of it the engine is to find.
SECRETS = {
    "OCTAVO_API_KEY": "sk-1", "OCTAVO_SSL_KEYFILE_PASSWORD": "sk-2", "OCTAVO_HF_TOKEN": "sk-3", "OCTAVO_CONFIG": "sk-4",
    "OCTAVO_RATE_LIMIT_STORAGE": "sk-5", "OPENAI_API_KEY": "sk-6", "AWS_SECRET_ACCESS_KEY": "sk-7",
    "Db_Password": "sk-8",
}  # fmt: skip
HUB = {"HF_TOKEN": "hub-1", "HUGGING_FACE_HUB_TOKEN": "hub-2"}
PLAIN = {"OCTAVO_NATIVE": "off", "TOKENIZERS_PARALLELISM": "false", "HF_HOME": "/srv/hub", "MONKEY": "plain"}


@pytest.mark.parametrize("local", [True, False])
def test_an_engine_gets_no_secrets_that_it_does_not_need(
    local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in its environment, as the system shows it to this user's other processes, nor with its settings; the
    hub's tokens only where the model comes from the hub."""
    for name, value in (SECRETS | HUB | PLAIN).items():
        monkeypatch.setenv(name, value)
    sent: list[Start] = []  # but no byte of it, so that the engine waits

    def record(message: Start) -> bytes:
        sent.append(message)
        return b""

    monkeypatch.setattr(launch, "first_bytes", record)
    monkeypatch.setattr(launch, "send_framed", lambda line, message: None)
    config = EngineConfig(model=str(tmp_path) if local else "some/model", hf_token="hub-3")
    engine = launch.EngineProcess(config, tmp_path, 0)
    engine.start()
    environ = Path(f"/proc/{engine.pid}/environ")
    try:
        wait_for(environ.read_bytes, "the process did not begin")
        found = environ.read_bytes().decode()
    finally:
        engine.stop()
    variables = dict(line.split("=", 1) for line in found.split("\0") if line)
    assert "sk-" not in found
    assert variables.items() >= PLAIN.items()
    assert {name for name in HUB if name in variables} == (set() if local else HUB.keys())
    assert [first.config.hf_token for first in sent] == [None if local else "hub-3"]


def test_a_sockets_folder_is_kept_while_it_is_there(sockets: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = launch.make_folder()
    assert launch.kept_folder(folder) == folder
    assert caplog.records == []
    folder.rmdir()
    new = launch.kept_folder(folder)
    assert new.is_dir()
    assert new != folder
    launch.remove_folder(new)


def test_folders_of_killed_processes_are_removed(sockets: Path) -> None:
    """Socket folders that no process has locked are removed when the next one is made."""
    used, left = launch.make_folder(), launch.make_folder()
    launch._unlock(left)
    new = launch.make_folder()
    assert [folder.is_dir() for folder in (used, left, new)] == [True, False, True]
    for folder in (used, new):
        launch.remove_folder(folder)
    assert list(sockets.glob("octavo-ipc-*")) == []
    assert not launch._locks.keys() & {used, left, new}
