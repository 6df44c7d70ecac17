"""Which web pages may use the service: names pointed at it from outside, other sites, and those that are allowed."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from fake_client import FakeClient, Step, byte_tokenizer, say
from support.service import serving

from engine import ConfigError, SamplingParams, TokenInput
from server.app import create_app
from server.config.settings import ServerSettings

KEY = "sk-hosts"
APP = "https://app.example.org"


def echo(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
    return say(request_id, ["hi"], params)


class Site:
    """An app behind its front door."""

    def __init__(self, **chosen: Any):
        self.client = FakeClient(echo)
        self.app = create_app(self.client, byte_tokenizer(), "m", settings=ServerSettings(**chosen))

    def ask(self, method: str, path: str, host: str | None, *, body: bytes = b"", **headers: str) -> httpx.Response:
        """A request with these headers and no others."""
        given = [(b"host", host.encode("latin-1"))] if host is not None else []
        given += [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
        sent: list[Any] = []

        async def call() -> None:
            waiting = [{"type": "http.request", "body": body}]

            async def receive() -> Any:
                if waiting:
                    return waiting.pop()
                await asyncio.sleep(20)

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {
                "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
                "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": given,
                "client": ("192.0.2.7", 1234), "server": ("127.0.0.1", 8000),
            }  # fmt: skip
            await asyncio.wait_for(self.app(scope, receive, send), 20)

        asyncio.run(call())
        content = b"".join(message.get("body", b"") for message in sent[1:])
        return httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=content)

    def complete(self, host: str | None = "localhost:8000", **headers: str) -> httpx.Response:
        body = json.dumps({"prompt": "ab"}).encode()
        return self.ask("POST", "/v1/completions", host, body=body, **{"content_type": "application/json"} | headers)


def refused(answer: httpx.Response, code: str) -> str:
    assert answer.status_code == 403, answer.text
    assert answer.json()["error"]["code"] == code
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])
    assert "access-control-allow-origin" not in answer.headers
    return str(answer.json()["error"]["message"])


# ---------------------------------------------------------------- names (Host)

OURS = [
    "localhost", "localhost:8000", "LOCALHOST", "localhost.", "localhost.:80", "a.localhost", "b.a.localhost:1",
    "127.0.0.1", "127.9.9.9:8000", "[::1]:8000", "[::1]", "10.0.0.7:8000", "192.0.2.1", "[2001:db8::1]",
    socket.gethostname(), f"{socket.gethostname().upper()}:8000", None,
]  # fmt: skip
FOREIGN = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "127-0-0-1.evil.example",
    "evillocalhost", "octavo", "[::1].evil.example", "[::1]evil", "[::1", "::1", "localhost@evil.example",
    "localhost:80@evil.example", "localhost:x", "evil.example#localhost", "", ":8000", "0x7f.1", "2130706433", "[]",
    "127.1", "localhost,evil.example", "\xff.localhost.de", "localhost\tevil",
]  # fmt: skip


@pytest.mark.parametrize("host", OURS)
def test_addresses_and_names_of_this_machine_are_answered(host: str | None) -> None:
    assert Site().complete(host).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_that_was_pointed_at_this_machine_is_refused(host: str) -> None:
    """What a page of that name sends after DNS rebinding: to its own origin, as the browser takes it."""
    site = Site()
    message = refused(site.complete(host, origin=f"http://{host}", sec_fetch_site="same-origin"), "host_not_allowed")
    assert "--allowed-hosts" in message
    assert not site.client.asked


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
@pytest.mark.parametrize("path", ["/", "/v1/models", "/docs", "/metrics", "/playground/live", "/nowhere", "/healthy"])
def test_nothing_is_answered_under_a_foreign_name(method: str, path: str) -> None:
    assert Site().ask(method, path, "evil.example").status_code == 403


def test_the_refusal_names_the_host_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "octavo.server"):
        message = refused(Site().complete("evil.example:8000\r\n" * 50), "host_not_allowed")
    assert len(message) < 400
    assert "evil.example:8000" in message
    (record,) = caplog.records
    assert (record.status, record.client, record.path) == (403, "192.0.2.7", "/v1/completions")  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_probes_may_send_any_host(path: str) -> None:
    answer = Site().ask("GET", path, "evil.example", origin="http://other.example")
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        ("llm.example.org", "llm.example.org", 200), ("LLM.example.org", "llm.Example.org.:443", 200),
        ("llm.example.org", "a.llm.example.org", 403), ("llm.example.org", "example.org", 403),
        ("*.example.org", "a.example.org", 200), ("*.example.org", "b.a.example.org:80", 200),
        ("*.example.org", "example.org", 403), ("*.example.org", "evilexample.org", 403),
        ("octavo, two", "two:8000", 200), ("octavo", "localhost", 200), ("*", "evil.example", 200), ("*", "", 200),
    ],
)  # fmt: skip
def test_further_names_can_be_allowed(allowed: str, host: str, status: int) -> None:
    assert Site(allowed_hosts=allowed).complete(host).status_code == status


def test_the_name_that_it_listens_on_is_answered() -> None:
    assert Site(host="llm.internal").complete("LLM.internal:8000").status_code == 200


def test_behind_a_key_names_are_compared_only_if_some_are_allowed() -> None:
    """A page that has no key is refused whatever its name is, and a proxy's name need not be known."""
    site = Site(api_key=(KEY,))
    assert site.complete("llm.example.org", authorization=f"Bearer {KEY}").status_code == 200
    assert site.complete("evil.example", origin="http://evil.example").status_code == 401
    strict = Site(api_key=(KEY,), allowed_hosts="llm.example.org")
    assert strict.complete("llm.example.org", authorization=f"Bearer {KEY}").status_code == 200
    refused(strict.complete("evil.example", authorization=f"Bearer {KEY}"), "host_not_allowed")


def test_over_a_unix_socket_any_name_will_do() -> None:
    assert Site(uds="/run/octavo.sock").complete("whatever").status_code == 200


# ---------------------------------------------------------------- sites (Origin)


@pytest.mark.parametrize(
    ("host", "headers"),
    [
        ("localhost:8000", {}),
        ("localhost:8000", {"origin": "http://localhost:8000"}),
        ("LOCALHOST:8000", {"origin": "http://localhost:8000", "sec_fetch_site": "same-origin"}),
        ("localhost", {"origin": "http://localhost"}),
        ("localhost:80", {"origin": "http://localhost"}),
        ("[::1]:8000", {"origin": "http://[::1]:8000"}),
        # Behind a proxy that ends TLS, and behind one that also sends its own idea of the host.
        ("localhost", {"origin": "https://localhost"}),
        ("127.0.0.1:8000", {"origin": "https://llm.example.org", "sec_fetch_site": "same-origin"}),
    ],
)
def test_the_server_s_own_pages_may_ask(host: str, headers: dict[str, str]) -> None:
    answer = Site().complete(host, **headers)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://localhost:3000", "sec_fetch_site": "same-site"},
        {"origin": "https://localhost"},
        {"origin": "http://127.0.0.1:8000"},
        {"origin": "http://localhost:8000.evil.example"},
        {"origin": "http://localhost:8000", "sec_fetch_site": "cross-site"},
        {"origin": "file://localhost:8000"},
        {"origin": "localhost:8000"},
        {"origin": ""},
        {"origin": "http://localhost:8000", "Origin": "https://evil.example"},
        {"origin": "https://evil.example", "sec_fetch_site": "none"},
    ],
)
def test_pages_of_other_sites_may_not(headers: dict[str, str]) -> None:
    for site in (Site(), Site(allowed_origins=APP), Site(uds="/run/octavo.sock"), Site(api_key=(KEY,))):
        message = refused(site.complete(**headers, authorization=f"Bearer {KEY}"), "origin_not_allowed")
        assert "--allowed-origins" in message
        assert not site.client.asked


def test_a_preflight_of_another_site_is_refused() -> None:
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "content-type"}
    refused(Site().ask("OPTIONS", "/v1/completions", "localhost", origin=APP, **asked), "origin_not_allowed")


def test_an_allowed_site_is_answered_and_may_read_the_answer() -> None:
    answer = Site(allowed_origins=f"{APP}, http://localhost:3000").complete(origin=APP)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == APP
    assert answer.headers["vary"] == "Origin"
    assert {"X-Request-ID", "Retry-After"} <= set(answer.headers["access-control-expose-headers"].split(", "))
    assert "access-control-allow-credentials" not in answer.headers
    assert Site(allowed_origins="null").complete(origin="null").headers["access-control-allow-origin"] == "null"
    assert Site(allowed_origins="*").complete(origin=APP).headers["access-control-allow-origin"] == "*"
    refused(Site(allowed_origins="*").complete("evil.example", origin=APP), "host_not_allowed")


def test_a_preflight_of_an_allowed_site_needs_no_key() -> None:
    """Whatever headers a client library has: OpenAI's has many."""
    wanted = "authorization,content-type,x-request-id,x-request-timeout,x-stainless-lang"
    asked = {"access_control_request_method": "POST", "access_control_request_headers": wanted}
    site = Site(allowed_origins=APP, api_key=(KEY,))
    answer = site.ask("OPTIONS", "/v1/chat/completions", "localhost", origin=APP, **asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == APP
    assert answer.headers["access-control-allow-headers"] == wanted
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-max-age"] == "600"
    assert "Origin" in answer.headers["vary"]
    private = site.ask("OPTIONS", "/", "localhost", origin=APP, access_control_request_private_network="true", **asked)
    assert private.headers["access-control-allow-private-network"] == "true"


def test_an_allowed_site_can_read_errors_too() -> None:
    site = Site(allowed_origins=APP, api_key=(KEY,), max_body_size=5)
    key = f"Bearer {KEY}"
    answers = {
        401: site.complete(origin=APP),
        413: site.complete(origin=APP, authorization=key),
        404: site.ask("GET", "/nowhere", "localhost", origin=APP, authorization=key),
    }
    broken = Site(allowed_origins=APP)
    broken.client.dead = True
    answers[503] = broken.complete(origin=APP)
    failing = Site(allowed_origins=APP)
    failing.client.script = lambda *_: [ZeroDivisionError("x")]
    answers[500] = failing.complete(origin=APP)
    for status, answer in answers.items():
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == APP


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_json_is_not_read_from_what_a_page_may_send_unasked(kind: str | None) -> None:
    """Requests that a browser sends to any site without a preflight."""
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"):
        site = Site()
        given = {} if kind is None else {"content_type": kind}
        body = b'{"prompt": "ab", "input": "ab", "messages": [{"role": "user", "content": "a"}]}'
        assert site.ask("POST", path, "localhost", body=body, **given).status_code == 400
        assert not site.client.asked


# ---------------------------------------------------------------- the settings


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"allowed_hosts": "http://a.example"}, "without scheme and port, got 'http://a.example'"),
        ({"allowed_hosts": "a.example:80"}, "allowed_hosts must be names"),
        ({"allowed_hosts": "a.*.example"}, "allowed_hosts must be names"),
        ({"allowed_hosts": ("a b",)}, "allowed_hosts must be names"),
        ({"allowed_hosts": 7}, "allowed_hosts must be a text or a list of texts, got 7"),
        ({"allowed_origins": "app.example.org"}, "allowed_origins must be sites such as https://app.example.org"),
        ({"allowed_origins": "https://a/b"}, "got 'https://a/b'"),
        ({"allowed_origins": "https://*.example.org"}, "allowed_origins must be sites"),
    ],
)
def test_what_is_no_name_and_no_site_is_refused(chosen: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        ServerSettings(**chosen)


def test_lists_are_split_and_written_as_browsers_do() -> None:
    chosen = ServerSettings(
        allowed_hosts=("A.example,b", "[::1]"), allowed_origins="HTTPS://App.Example:443/,http://x:80"
    )
    assert chosen.allowed_hosts == ("a.example", "b", "[::1]")
    assert chosen.allowed_origins == ("https://app.example", "http://x")
    assert ServerSettings(allowed_hosts="", allowed_origins=",").allowed_origins == ()


# ---------------------------------------------------------------- pages, and what is guessed of answers


def test_no_answer_s_type_is_guessed() -> None:
    site = Site()
    answers = [site.complete(), site.ask("GET", "/nowhere", "localhost"), site.ask("GET", "/", "evil.example")]
    answers += [site.ask("GET", path, "localhost") for path in ("/health", "/docs", "/openapi.json", "/metrics")]
    assert [answer.headers.get_list("x-content-type-options") for answer in answers] == [["nosniff"]] * len(answers)


@pytest.mark.parametrize("root", ["", "/llm"])
def test_the_documentation_is_closed_against_others_as_the_playground_is(root: str) -> None:
    from server.api.documentation import policy
    from server.serving import uvicorn_config

    site = Site(root_path=root)
    site.app = uvicorn_config(site.app, ServerSettings(root_path=root)).app  # type: ignore[assignment]
    page = site.ask("GET", f"{root}/docs", "localhost")
    said = dict(part.strip().partition(" ")[::2] for part in page.headers["content-security-policy"].split(";"))
    assert (said["default-src"], said["frame-ancestors"], said["base-uri"]) == ("'self'", "'none'", "'none'")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert re.fullmatch(r"'self' 'sha256-[\w+/]{43}='", said["script-src"])
    assert f"url: '{root}/openapi.json'" in page.text
    assert policy(page.content) != policy(page.content.replace(b"openapi", b"evil"))
    static = site.ask("GET", f"{root}/docs/static/swagger-ui.css", "localhost")
    assert static.status_code == 200
    for answer in (page, static):
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.slow
def test_a_service_refuses_a_rebound_page(tmp_path: Any) -> None:
    """The whole way, over TCP."""
    allowed = ("--allowed-hosts", "llm.example.org", "--allowed-origins", APP)
    with (
        serving(*allowed, log=tmp_path / "log") as service,
        httpx.Client(base_url=service.url, timeout=60) as http,
    ):

        def status(**headers: str) -> int:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=given)
            return answer.status_code

        assert status(host="evil.example", origin="http://evil.example") == 403
        assert status(origin="https://evil.example") == 403
        assert status(host="llm.example.org", origin="https://llm.example.org") == 200
        assert status(origin=APP) == status() == 200
