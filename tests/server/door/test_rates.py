"""Limits of a key: requests a minute, here and in Redis, and requests at the same time."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_client import FakeClient, byte_tokenizer
from support.asgi import Call
from support.service import PATIENCE, wait_for
from test_http_door import KEY, Door, bearer, call, echo, error, lines
from test_http_door import logged as logged  # a fixture

from engine import ConfigError
from server.app import create_app
from server.config.settings import ServerSettings
from server.door import rates
from server.door.key_counts import KeyCounts
from server.door.key_limits import KeyLimitsMiddleware
from server.door.keys import ApiKey
from server.door.rates import RequestRates, check_storage

NAMES = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")


@pytest.fixture
def minute(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The library's clock, which stands still; told how many seconds later it is."""
    now = [1_800_000_000.0]  # a window begins
    monkeypatch.setattr(time, "time", lambda: now[0])

    def later(seconds: float) -> None:
        now[0] += seconds

    return later


def rejections(door: Door) -> dict[str, float]:
    registry = door.app.state.service.metrics.registry
    found = {reason: registry.get_sample_value("octavo_requests_rejected_total", {"reason": reason})
             for reason in ("key_rate", "key_concurrency")}  # fmt: skip
    return {reason: count for reason, count in found.items() if count}


# ---------------------------------------------------------------- requests a minute


def test_beyond_its_requests_a_key_is_refused_until_there_is_room(minute: Callable[[float], None]) -> None:
    door = Door(api_key=(KEY, "other"), key_requests_per_minute=3)
    for left in (2, 1, 0):
        answer = door.complete(headers=bearer(KEY))
        assert answer.status_code == 200
        assert [answer.headers[name] for name in NAMES] == ["3", str(left), "61s"]
    refused = door.complete(headers=bearer(KEY))
    said = error(refused, 429, "rate_limit_exceeded")
    assert said.startswith("This API key has made all 3 requests that it may make per minute. Try again in 61 seconds;")
    assert "--key-requests-per-minute" in said
    assert [refused.headers[name] for name in ("retry-after", *NAMES)] == ["61", "3", "0", "61s"]
    assert door.complete(headers=bearer("other")).status_code == 200
    assert rejections(door) == {"key_rate": 1}
    assert len(door.client.asked) == 4
    minute(59)
    assert door.complete(headers=bearer(KEY)).headers["retry-after"] == "2"
    minute(2)  # two of the three still count
    assert [door.complete(headers=bearer(KEY)).status_code for _ in range(2)] == [200, 429]
    minute(130)
    assert [door.complete(headers=bearer(KEY)).status_code for _ in range(4)] == [200, 200, 200, 429]


def test_after_the_time_that_it_is_told_a_key_has_room(minute: Callable[[float], None]) -> None:
    """However its requests lie in the minute."""
    door = Door(api_key=KEY, key_requests_per_minute=7)
    for step in range(40):
        answer = door.complete(headers=bearer(KEY))
        if answer.status_code == 429:
            minute(int(answer.headers["retry-after"]))
            assert door.complete(headers=bearer(KEY)).status_code == 200
        minute(step * 0.7 % 5)
    assert rejections(door)["key_rate"] > 3


def test_only_what_asks_the_model_is_counted() -> None:
    door = Door(api_key=KEY, key_requests_per_minute=2)
    free = ("/health", "/metrics", "/v1/models", "/version", "/docs", "/openapi.json", "/", "/playground/main.js")
    for path in free:
        answer = door.request("GET", path, headers=bearer(KEY))
        assert answer.status_code == 200, path
        assert not {*NAMES} & answer.headers.keys()
    body = {"json": {"prompt": "ab"}, "headers": bearer(KEY)}
    assert door.request("POST", "/tokenize", **body).headers[NAMES[1]] == "1"
    assert door.request("POST", "/v1/embeddings", **body).headers[NAMES[1]] == "0"
    assert door.complete(headers=bearer(KEY)).status_code == 429
    assert door.complete(headers=bearer("wrong")).status_code == 401
    assert door.request("GET", "/v1/models", headers=bearer(KEY)).status_code == 200


def test_what_is_refused_is_not_read_and_not_counted(minute: Callable[[float], None]) -> None:
    app = Door(api_key=KEY, key_requests_per_minute=1).app
    given = {"method": "POST", "body": [b"{}"], "headers": bearer(KEY)}
    assert call(app, "/v1/completions", **given).status == 400
    for _ in range(5):
        answer = call(app, "/v1/completions", **given)
        assert (answer.status, answer.num_received, answer.error["param"]) == (429, 0, None)
    minute(61)  # the one that counted weighs less than a whole one
    assert call(app, "/v1/completions", **given).status == 400


def test_a_key_may_have_limits_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo rpm=3\nthree rpm=none\n")
    door = Door(api_key_file=str(tmp_path / "keys"), key_requests_per_minute=1)

    def tries(key: str) -> list[int]:
        return [door.complete(headers=bearer(key)).status_code for _ in range(4)]

    assert tries("one") == [200, 429, 429, 429]
    assert tries("two") == [200, 200, 200, 429]
    assert tries("three") == [200] * 4
    assert NAMES[0] not in door.complete(headers=bearer("three")).headers


def test_a_refusal_is_logged_without_the_key(tmp_path: Path, logged: Any) -> None:
    (tmp_path / "keys").write_text(f"{KEY} name=team-a rpm=1\n")
    door = Door(api_key_file=str(tmp_path / "keys"))
    stream = logged(level="debug")
    for _ in range(2):
        door.complete(headers=bearer(KEY))
    (line,) = [item for item in lines(stream) if item.get("status") == 429]
    assert (line["level"], line["code"], line["api_key_name"]) == ("info", "rate_limit_exceeded", "team-a")
    assert KEY not in stream.getvalue()


# ---------------------------------------------------------------- requests at the same time

# How a request that runs may end: given what runs it and the event that lets the engine answer.
ENDS: dict[str, Callable[[Call, asyncio.Event, FakeClient], None]] = {
    "answered": lambda running, go, client: go.set(),
    "left": lambda running, go, client: running.leave(),
    "cancelled": lambda running, go, client: running.task.cancel() and None,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ENDS)
async def test_a_slot_is_free_again_however_a_request_ends(end: str, stream: bool) -> None:
    go = asyncio.Event()
    client = FakeClient(lambda *given: [go, *echo(*given)])
    settings = ServerSettings(api_key=(KEY, "other"), key_max_concurrency=2)
    app = create_app(client, byte_tokenizer(), "m", settings=settings)

    def ask(key: str) -> Call:
        return Call(app, "/v1/completions", {"prompt": "ab", "stream": stream}, headers=bearer(key))

    running = [ask(KEY), ask(KEY)]
    while len(client.asked) < 2:
        await asyncio.sleep(0)
    for _ in range(3):
        refused = ask(KEY)
        await refused.wait_end()
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        assert "has 2 requests running, but may have only 2 at the same time" in refused.text
    other = ask("other")
    while len(client.asked) < 3:
        await asyncio.sleep(0)
    for one in running:
        ENDS[end](one, go, client)
    for one in running:
        await asyncio.wait([one.task], timeout=PATIENCE)
        assert one.task.done()
    go.set()
    await other.wait_end()
    assert other.status == 200
    again = [ask(KEY), ask(KEY)]
    for one in again:
        await one.wait_end()
        assert one.status == 200


def test_a_slot_is_free_again_after_an_exception() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise LookupError

    refused: list[str] = []
    counts = KeyCounts(RequestRates())
    app = KeyLimitsMiddleware(broken, counts=counts, rejected=refused.append)
    key = ApiKey.of(KEY, max_concurrency=1, requests_per_minute=100)
    for _ in range(3):
        with pytest.raises(LookupError):
            call(app, "/v1/completions", state={"api_key": key})
    assert not refused
    assert not counts.running  # nothing is kept of a key that runs nothing


async def test_one_too_many_at_a_time_does_not_count_in_the_minute() -> None:
    go = asyncio.Event()
    client = FakeClient(lambda *given: [go, *echo(*given)])
    settings = ServerSettings(api_key=KEY, key_max_concurrency=1, key_requests_per_minute=2)
    app = create_app(client, byte_tokenizer(), "m", settings=settings)

    def ask() -> Call:
        return Call(app, "/v1/completions", {"prompt": "ab"}, headers=bearer(KEY))

    first = ask()
    while not client.asked:
        await asyncio.sleep(0)
    for _ in range(3):
        refused = ask()
        await refused.wait_end()
        assert (refused.status, "at the same time" in refused.text) == (429, True)
    go.set()
    await first.wait_end()
    second = ask()
    await second.wait_end()
    assert (second.status, second.headers[NAMES[1]]) == (200, "0")


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("name", ["key_requests_per_minute", "key_max_concurrency", "rate_limit_storage"])
def test_limits_of_keys_need_keys(name: str) -> None:
    value: Any = "redis://localhost" if name == "rate_limit_storage" else 3
    with pytest.raises(ConfigError, match=f"^{name} is set, but there are no API keys"):
        ServerSettings(**{name: value})
    ServerSettings(api_key="a", **{name: value})
    ServerSettings(api_key_file="a", **{name: value})


@pytest.mark.parametrize("url", ["memcached://secret", "secret", "redis:secret", "http://secret"])
def test_a_storage_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^rate_limit_storage must begin with redis:") as refused:
        ServerSettings(api_key="a", rate_limit_storage=url)
    assert "secret" not in str(refused.value)


def test_a_url_with_a_password_is_never_shown() -> None:
    settings = ServerSettings(api_key="a", rate_limit_storage="redis://:secret@host/0")
    assert "secret" not in repr(settings)
    with pytest.raises(ConfigError, match="rate_limit_storage is not a valid Redis URL") as refused:
        check_storage("redis://:secret@host:port/0")
    assert "secret" not in str(refused.value)


def test_without_its_package_redis_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis.asyncio", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[redis\]'"):
        Door(api_key=KEY, rate_limit_storage="redis://localhost")
    check_storage(None)


# ---------------------------------------------------------------- Redis


class Redis:
    """A server of Debian's package on a Unix socket, which can be stopped and started again."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "redis.sock"
        self.url = f"unix://{self.path}"

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self.path), "--save", "", "--dir", str(self.folder)]
        self.process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)

        def answers() -> bool:
            with socket.socket(socket.AF_UNIX) as line:
                try:
                    line.connect(str(self.path))
                    line.sendall(b"PING\r\n")
                    return line.recv(5) == b"+PONG"
                except OSError:
                    assert self.process.poll() is None, "redis-server has ended"
                    return False

        wait_for(answers, "redis-server does not answer")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server")
    server = Redis(tmp_path)
    server.start()
    yield server
    server.stop()


def run(steps: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(steps(), PATIENCE))


async def test_services_share_what_redis_counts(redis: Redis) -> None:
    services = [RequestRates(redis.url), RequestRates(redis.url)]
    taken = [await services[turn % 2].take("tenant", 4) for turn in range(6)]
    assert [window.allowed for window in taken] == [True] * 4 + [False] * 2
    assert [window.remaining for window in taken] == [3, 2, 1, 0, 0, 0]
    assert all(1 <= window.reset <= 61 for window in taken)
    assert (await services[0].take("another", 4)).remaining == 3
    many = await asyncio.gather(*(services[turn % 2].take("crowd", 50) for turn in range(100)))
    assert sum(window.allowed for window in many) == 50  # and no more connections than a few
    for service in services:
        await service.close()


def test_without_redis_each_service_counts_its_own(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until it is back: said once each."""
    now = [1000.0]
    monkeypatch.setattr(rates.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO)

    async def steps() -> None:
        service = RequestRates(redis.url)
        assert (await service.take("tenant", 3)).remaining == 2
        redis.stop()
        assert [(await service.take("tenant", 3)).remaining for _ in range(2)] == [2, 1]
        now[0] += rates._AGAIN  # asked again, still in vain
        assert [(await service.take("tenant", 3)).allowed for _ in range(2)] == [True, False]
        assert [record.message for record in caplog.records if "in this process" in record.message] == [
            "Redis (rate_limit_storage) does not answer: ConnectionError. Requests of API keys are counted in this "
            "process "
            "until it does."
        ]
        redis.start()
        assert not (await service.take("tenant", 3)).allowed  # not asked again yet
        now[0] += rates._AGAIN
        assert [(await service.take("tenant", 3)).remaining for _ in range(2)] == [2, 1]
        assert [record.levelname for record in caplog.records if "again." in record.message] == ["INFO"]
        await service.close()

    run(steps)


async def test_a_redis_that_does_not_answer_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connections are accepted and nothing comes: the event loop is free meanwhile."""
    pytest.importorskip("redis")
    monkeypatch.setattr(rates, "PATIENCE", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        service = RequestRates(f"unix://{tmp_path / 'silent'}")
        asked = asyncio.create_task(service.take("tenant", 2))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not asked.done()
        assert (await asked).remaining == 1
        assert "TimeoutError" in caplog.text
        assert (await service.take("tenant", 2)).remaining == 0
        await service.close()


async def test_an_app_asks_redis(redis: Redis) -> None:
    settings = ServerSettings(api_key=KEY, key_requests_per_minute=2, rate_limit_storage=redis.url)
    app = create_app(FakeClient(echo), byte_tokenizer(), "m", settings=settings)
    async with app.router.lifespan_context(app):
        found = []
        for _ in range(3):
            asked = Call(app, "/v1/completions", {"prompt": "ab"}, headers=bearer(KEY))
            await asked.wait_end()
            found.append(asked.status)
        assert found == [200, 200, 429]
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(redis.path))
        line.sendall(b"KEYS *\r\n")
        said = line.recv(10_000).decode()
    assert ApiKey.of(KEY).tenant in said
    assert KEY not in said
