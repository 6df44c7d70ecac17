"""API keys: the file that lists them, what each role opens, and how they are changed while the service runs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.service import PATIENCE, serving, wait_for
from test_http_door import KEY, Door, bearer, call, error, lines
from test_http_door import logged as logged  # a fixture

from engine import ConfigError
from server.config.settings import ServerSettings
from server.door import reload as reload_module
from server.door.auth import roles_for
from server.door.keys import ApiKey, KeyRing, Role, read_api_keys
from server.door.reload import KeyReload

INFERENCE, METRICS, ADMIN = Role


def read(text: str | bytes, folder: Path, **chosen: Any) -> tuple[ApiKey, ...]:
    """The keys of a file with that text."""
    file = folder / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_api_keys(ServerSettings(api_key_file=str(file), **chosen))


# ---------------------------------------------------------------- the file


def test_a_file_holds_one_key_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# keys\n\n  {KEY}  \nsecond\r\n#third\nsecond\n", encoding="utf-8-sig")
    first, second = ApiKey.of(KEY), ApiKey.of("second")
    assert read_api_keys(ServerSettings(api_key_file=str(file))) == (first, second)
    assert read_api_keys(ServerSettings(api_key=("a",), api_key_file=str(file))) == (ApiKey.of("a"), first, second)
    assert first.roles == {INFERENCE, METRICS, ADMIN}
    door = Door(api_key_file=str(file))
    file.unlink()
    assert door.request("GET", "/v1/models", headers=bearer("second")).status_code == 200
    assert door.request("GET", "/v1/models", headers=bearer("#third")).status_code == 401


def test_words_after_a_key_say_more_of_it(tmp_path: Path) -> None:
    text = """
        one role=inference,metrics name=team-a
        two  name=b\trole=metrics
        three rpm=60 concurrency=4
        four rpm=none
        five=5
    """
    assert read(text, tmp_path, key_requests_per_minute=9) == (
        ApiKey.of("one", roles=frozenset({INFERENCE, METRICS}), name="team-a", requests_per_minute=9),
        ApiKey.of("two", roles=frozenset({METRICS}), name="b", requests_per_minute=9),
        ApiKey.of("three", requests_per_minute=60, max_concurrency=4),
        ApiKey.of("four"),
        ApiKey.of("five=5", requests_per_minute=9),
    )


def test_the_settings_keys_have_the_settings_limits() -> None:
    (key,) = read_api_keys(ServerSettings(api_key=("a",), key_requests_per_minute=3, key_max_concurrency=2))
    assert (key.requests_per_minute, key.max_concurrency) == (3, 2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "has no keys"),
        (b"\n # one\n", "has no keys"),
        (b"\xff\xfe\xfa", "is not UTF-8 text"),
        (b"good\n\nsk secret\n", "line 3: word 2 is unknown; after a key, only role, name, rpm, concurrency"),
        (b"good role=inference sk-secret", "line 1: word 3 is unknown"),
        (b"good secret=inference", "line 1: word 2 is unknown"),
        (b"good ROLE=inference", "line 1: word 2 is unknown"),
        (b"good # secret", "line 1: word 2 is unknown"),
        (b"good role=secret", "line 1: role= must be some of inference, metrics, admin, separated by commas."),
        (b"good role=", "line 1: role= must be some of"),
        (b"good role=metrics,", "line 1: role= must be some of"),
        (b"good role=metrics role=admin", "line 1: role= is given twice."),
        (b"good name=sec/ret", "line 1: name= must be 1 to 64 characters"),
        (b"good name=" + b"n" * 65, "line 1: name= must be 1 to 64 characters"),
        (b"good rpm=0", "line 1: rpm= must be an integer from 1 to 999999999, or none for no limit."),
        (b"good rpm=1.5", "line 1: rpm= must be an integer"),
        ("good rpm=٣".encode(), "line 1: rpm= must be an integer"),
        (b"good concurrency=-1", "line 1: concurrency= must be an integer"),
        (b"role=metrics name=secret", "line 1: it begins with role=, but the key must come first"),
        (
            b"secret\ngood\nsecret role=metrics",
            "line 3: the same key is on line 1 with other options. Remove one of them.",
        ),
        (b"shared role=metrics", "line 1: the same key is in api_key with other options"),
        ("schlüssel-secret".encode(), "line 1: the key must consist of printable ASCII"),
        (b"sk\x01secret\n", "line 1: the key must consist of printable ASCII characters without spaces"),
    ],
)
def test_a_file_without_good_keys_prevents_the_start(content: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        Door(api_key="shared", api_key_file=str(file))
    assert said in str(refused.value)
    assert "api_key_file" in str(refused.value)
    assert "secret" not in str(refused.value).replace(said, "")


def test_only_digests_are_kept(tmp_path: Path) -> None:
    (key,) = read(f"{KEY} name=team-a", tmp_path)
    assert KEY not in repr(key)
    assert key.digest.hex() not in repr(key)
    assert key.digest.hex().startswith(key.tenant)


# ---------------------------------------------------------------- roles

MODEL = [("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/rerank"), ("GET", "/nope"), ("GET", "/docs2")]
ABOUT = [
    ("GET", "/v1/models"), ("GET", "/v1/models/m"), ("GET", "/version"), ("GET", "/docs"), ("GET", "/openapi.json"),
    ("GET", "/docs/static/favicon.png"),
]  # fmt: skip
WATCH = [("GET", "/metrics"), ("HEAD", "/metrics")]
OPENS = [
    ("inference", MODEL + ABOUT), ("metrics", WATCH), ("admin", ABOUT + WATCH),
    ("inference,metrics", MODEL + ABOUT + WATCH), ("admin,inference", MODEL + ABOUT + WATCH),
]  # fmt: skip


@pytest.mark.parametrize(("roles", "opens"), OPENS)
def test_a_role_opens_what_it_is_for(roles: str, opens: list[tuple[str, str]], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY} role={roles}\nother\n")
    door = Door(api_key_file=str(file))
    for method, path in MODEL + ABOUT + WATCH:
        answer = door.request(method, path, headers=bearer(KEY))
        assert (answer.status_code == 403) == ((method, path) not in opens), path
        assert answer.status_code != 401
    assert door.request("GET", "/health", headers=bearer(KEY)).status_code == 200
    assert door.request("GET", "/", headers=bearer(KEY)).status_code == 200


def test_the_answer_names_the_role_that_is_missing(tmp_path: Path, logged: Any) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY} role=metrics name=scraper\nmodel role=inference\n")
    door = Door(api_key_file=str(file))
    stream = logged()
    said = error(door.complete(headers=bearer(KEY)), 403, "insufficient_permissions")
    assert said == "This API key may not do that: it needs the role inference, but has metrics."
    said = error(door.request("GET", "/version", headers=bearer(KEY)), 403, "insufficient_permissions")
    assert "needs the role admin or inference, but has metrics" in said
    said = error(door.request("GET", "/metrics", headers=bearer("model")), 403, "insufficient_permissions")
    assert "needs the role admin or metrics, but has inference" in said
    refused = [item for item in lines(stream) if item["event"].startswith("Refused: ")]
    facts = [(item["level"], item["status"], item["path"], item.get("api_key_name")) for item in refused]
    assert facts == [
        ("warning", 403, "/v1/completions", "scraper"), ("warning", 403, "/version", "scraper"),
        ("warning", 403, "/metrics", None),
    ]  # fmt: skip
    assert KEY not in stream.getvalue()


def test_without_the_role_nothing_is_read(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY} role=metrics")
    app = Door(api_key_file=str(tmp_path / "keys")).app
    answer = call(app, "/v1/completions", method="POST", body=[b"{}"], headers=bearer(KEY))
    assert (answer.status, answer.num_received) == (403, 0)


@pytest.mark.parametrize(
    "path", ["/metrics/", "/docs2", "/v1/models2", "/version/", "/", "", "/docs/../v1/completions/"]
)
def test_what_is_on_no_list_needs_inference(path: str) -> None:
    unlisted = path != "/docs/../v1/completions/"  # which no route answers
    assert (roles_for(path) == {INFERENCE}) == unlisted


def test_every_route_that_can_make_the_model_work_needs_inference() -> None:
    document = Door().app.openapi()
    posts = [path for path, operations in document["paths"].items() if "post" in operations]
    assert len(posts) > 8
    for path in posts:
        assert roles_for(path) == {INFERENCE}
        assert {"403", "429"} <= document["paths"][path]["post"]["responses"].keys()
    assert "429" not in document["paths"]["/metrics"]["get"]["responses"]
    assert "403" not in document["paths"]["/health"]["get"]["responses"]


def test_a_keys_name_is_in_the_log_of_its_requests(tmp_path: Path, logged: Any) -> None:
    (tmp_path / "keys").write_text(f"{KEY} name=team-a\nother\n")
    door = Door(api_key_file=str(tmp_path / "keys"))
    stream = logged()
    for key in (KEY, "other"):
        assert door.complete(headers=bearer(key)).status_code == 200
        assert door.complete(headers=bearer(key), stream=True).status_code == 200
    finished = [item for item in lines(stream) if item["event"] == "request finished"]
    assert [item.get("api_key_name") for item in finished] == ["team-a", "team-a", None, None]


# ---------------------------------------------------------------- the ring, and the file read again


def test_other_keys_count_from_the_next_request_on(tmp_path: Path) -> None:
    ring = KeyRing([ApiKey.of("one"), ApiKey.of("two")])
    assert ring.find(b"one") == ApiKey.of("one")
    ring.replace([ApiKey.of("two", roles=frozenset({METRICS}))])
    assert ring.find(b"one") is None
    found = ring.find(b"two")
    assert found is not None
    assert found.roles == {METRICS}


@pytest.fixture
def hangup() -> Iterator[None]:
    """The test may take SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def reloading(reload: KeyReload, steps: Callable[[], Awaitable[None]]) -> None:
    """Run the steps while signals are obeyed."""

    async def main() -> None:
        task = asyncio.create_task(reload.run())
        try:
            async with asyncio.timeout(PATIENCE):
                await steps()
        finally:
            task.cancel()

    asyncio.run(main())


async def until(stream: Any, count: int) -> list[dict[str, Any]]:
    """The log's lines, once there are so many."""
    while len(lines(stream)) < count:
        await asyncio.sleep(0.01)
    return lines(stream)


def test_a_hangup_reads_the_file_again(hangup: None, tmp_path: Path, logged: Any) -> None:
    file, stream = tmp_path / "keys", logged()
    file.write_text("one")
    settings = ServerSettings(api_key="fixed", api_key_file=str(file))
    ring = KeyRing(read_api_keys(settings))
    reload = KeyReload(settings, ring)
    reload.listen()

    async def steps() -> None:
        file.write_text("two role=metrics\nthree\n")
        os.kill(os.getpid(), signal.SIGHUP)
        (said,) = await until(stream, 1)
        assert (said["level"], said["event"]) == ("info", "SIGHUP: reloaded the API keys; there are 3.")
        assert [ring.find(key) is not None for key in (b"fixed", b"one", b"two", b"three")] == [True, False, True, True]
        for broken in ("", "two secret", "two role=metrics\nthree role=secret"):
            file.write_text(broken)
            os.kill(os.getpid(), signal.SIGHUP)
            said = (await until(stream, len(lines(stream)) + 1))[-1]
            assert said["level"] == "error"
            assert said["event"].startswith(f"SIGHUP: the API keys were not reloaded: api_key_file ({file})")
            assert len(ring) == 3
        file.unlink()
        os.kill(os.getpid(), signal.SIGHUP)
        assert "No such file" in (await until(stream, 5))[-1]["event"]
        assert len(ring) == 3
        file.write_text("four")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(stream, 6)
        assert [ring.find(key) is not None for key in (b"fixed", b"two", b"four")] == [True, False, True]

    reloading(reload, steps)
    assert "secret" not in stream.getvalue()
    assert "two" not in stream.getvalue()


def test_a_hangup_before_the_service_runs_is_not_forgotten(hangup: None, tmp_path: Path, logged: Any) -> None:
    file, stream = tmp_path / "keys", logged()
    file.write_text("one")
    settings = ServerSettings(api_key_file=str(file))
    ring = KeyRing(read_api_keys(settings))
    reload = KeyReload(settings, ring)
    reload.listen()
    file.write_text("two")
    os.kill(os.getpid(), signal.SIGHUP)

    async def steps() -> None:
        await until(stream, 1)
        assert ring.find(b"one") is None
        assert ring.find(b"two") is not None

    reloading(reload, steps)
    os.kill(os.getpid(), signal.SIGHUP)  # and one after it has run ends nothing


def test_hangups_while_the_file_is_read_lead_to_one_more_reading(
    hangup: None, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes its time, for which the event loop does not wait."""
    stream, go = logged(), threading.Event()
    began: list[str] = []

    def slow(settings: ServerSettings) -> tuple[ApiKey, ...]:
        began.append(f"key-{len(began)}")
        key = ApiKey.of(began[-1])
        assert go.wait(PATIENCE)
        return (key,)

    monkeypatch.setattr(reload_module, "read_api_keys", slow)
    ring = KeyRing()
    reload = KeyReload(ServerSettings(api_key_file="keys"), ring)
    reload.listen()

    async def steps() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        while not began:
            await asyncio.sleep(0.01)
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
        assert len(began) == 1
        go.set()
        await until(stream, 2)
        assert ring.find(b"key-1") is not None
        assert len(began) == 2

    try:
        reloading(reload, steps)
    finally:
        go.set()


def test_without_a_file_a_hangup_changes_nothing(hangup: None, logged: Any) -> None:
    stream = logged()
    settings = ServerSettings(api_key="one")
    ring = KeyRing(read_api_keys(settings))
    reload = KeyReload(settings, ring)
    reload.listen()

    async def steps() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        (said,) = await until(stream, 1)
        assert (said["level"], "api_key_file" in said["event"]) == ("warning", True)
        assert ring.find(b"one") is not None

    reloading(reload, steps)


# ---------------------------------------------------------------- the service as a process


@pytest.mark.slow
def test_a_service_takes_new_keys_while_it_serves(tmp_path: Path) -> None:
    """A stream that an old key began goes on; before, a hangup ended the service."""
    file = tmp_path / "keys"
    file.write_text("old\n")
    with serving("--kv-cache-memory", "64MiB", "--api-key-file", str(file), log=tmp_path / "log") as service:
        engine = service.engine()
        with httpx.Client(base_url=service.url, timeout=PATIENCE) as http:

            def status(key: str, path: str = "/v1/models") -> int:
                return http.get(path, headers={"Authorization": f"Bearer {key}"}).status_code

            body = {"prompt": "a", "stream": True, "max_tokens": 400, "ignore_eos": True}
            headers = {"Authorization": "Bearer old"}
            with httpx.stream(
                "POST", f"{service.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE
            ) as answer:
                pieces = answer.iter_lines()
                next(pieces)
                file.write_text("new role=metrics\n")
                service.process.send_signal(signal.SIGHUP)
                os.kill(engine, signal.SIGHUP)
                wait_for(lambda: status("old") == 401, "the old key still opens")
                assert [status("new"), status("new", "/metrics")] == [403, 200]
                *_, last, _ = pieces
            assert last == "data: [DONE]"
            file.write_text("new secret\n")
            service.process.send_signal(signal.SIGHUP)
            wait_for(lambda: "were not reloaded" in service.log.read_text(), "the broken file was not noticed")
            assert status("new", "/metrics") == 200
        assert service.engine() == engine
    assert "secret" not in service.log.read_text()


@pytest.mark.slow
def test_a_hangup_without_a_file_never_ends_the_service(tmp_path: Path) -> None:
    """Nor while the model loads, when it is remembered."""
    with serving("--kv-cache-memory", "64MiB", log=tmp_path / "log", ready=False) as service:
        engine = service.engine()
        service.process.send_signal(signal.SIGHUP)
        os.kill(engine, signal.SIGHUP)
        service.wait_ready()
        wait_for(
            lambda: service.log.read_text().count("there is no file of API keys to reload") == 1, "it was not said"
        )
        service.process.send_signal(signal.SIGHUP)
        wait_for(
            lambda: service.log.read_text().count("there is no file of API keys to reload") == 2, "it was not said"
        )
        assert service.get("/health").status_code == 200
        assert service.engine() == engine
