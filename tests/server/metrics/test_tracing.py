"""Traces, as a real collector gets them: whose children they are, what they say, and what they cost."""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_client import FEATURES, FakeClient, Step, hf_byte_tokenizer, pool, say
from fastapi import APIRouter
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs
from support.asgi import Call, request
from support.collector import Collector, Span, collecting
from support.service import PATIENCE, Service
from test_http_api import endless

from cli.doctor import check_traces
from engine import ConfigError, EngineDeadError, PoolingParams, RequestDelta, TokenInput
from engine.text.processor import Tokenizer
from server import routes
from server.app import create_app
from server.config.settings import ServerSettings
from server.routes.tasks import PATHS
from server.tracing.start import start_tracing

ROOT = Path(__file__).resolve().parents[3]
MODEL = "org/fake"
SECRET = "the secret"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1,other=2"}
OK, ERROR = 0, 2
# POST, and nothing to trace.
WITHOUT_THE_MODEL = {
    "/tokenize", "/detokenize", "/ping", "/apply-template", "/v1/completions/render", "/v1/chat/completions/render",
    "/v1/messages/count_tokens", "/v1/messages/render", "/v1/responses/{response_id}/cancel",
    "/v1/responses/input_tokens", "/v1/responses/compact", "/v1/responses/render", "/v1/conversations",
    "/v1/conversations/{conversation_id}",
    "/v1/conversations/{conversation_id}/items", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models/load",
    "/v1/models/unload", "/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel",
    "/api/show", "/api/pull", "/api/create", "/api/push", "/api/copy", "/api/blobs/{digest}",
}  # fmt: skip


def timed(request_id: str, source: TokenInput, params: Any) -> Iterable[Step]:
    """An answer, or a vector; the engine says that it queued until now, and knew its first token in the same moment."""
    if isinstance(params, PoolingParams):
        first, last = pool(request_id, source, params)
        now = time.monotonic()
        return [first, replace(last, scheduled_time=now, first_token_time=now)]
    deltas: list[RequestDelta] = say(request_id, ["an answer"] * params.n, params)
    now = time.monotonic()
    return [replace(deltas[0], scheduled_time=now, first_token_time=now, num_cached_tokens=1), *deltas[1:]]


class Traced:
    """An app over a scripted engine, which tells a collector."""

    def __init__(self, collector: Collector, script: Callable[..., Iterable[Step]] = timed, **settings: Any):
        self.collector = collector
        self.client = FakeClient(script)
        embeds: dict[str, Any] = {"tasks": ("generate", "embed"), "embedding_size": FEATURES}
        self.client.info = replace(self.client.info, **embeds)
        tokenizer = hf_byte_tokenizer()
        tokenizer.chat_template = "{{ messages[0].content }}"
        given = ServerSettings(otlp_traces_endpoint=collector.url, **settings)
        tracing = start_tracing(given, "1.2.3")
        assert tracing is not None
        self.tracing = tracing
        self.app = create_app(
            self.client, Tokenizer(tokenizer), MODEL, version="1.2.3", settings=given, tracing=tracing
        )

    def post(self, path: str, body: Any, headers: Any = None) -> httpx.Response:
        return request(self.app, "POST", path, json=body, headers=headers)

    def tree(self) -> tuple[Span, dict[str, Span]]:
        """The spans of the one request that there was, once all are sent."""
        self.tracing.close(PATIENCE)
        return self.collector.tree()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_a_request_for_text(collector: Collector, stream: bool, chat: bool) -> None:
    api = Traced(collector)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": SECRET}]} if chat else {"prompt": SECRET}
    before = time.time_ns()
    answer = api.post(path, {**asked, "n": 2, "stream": stream}, CONTEXT)
    assert answer.status_code == 200
    server, children = api.tree()
    assert before <= server.start <= server.end <= time.time_ns()
    assert (server.trace_id, server.parent_id, server.state) == (TRACE, PARENT, CONTEXT["tracestate"])
    assert (server.name, server.status) == (f"POST {path}", OK)
    assert list(children) == ["queue", "prefill", "decode"]
    queue, prefill, decode = children.values()
    assert server.start <= queue.start <= queue.end == prefill.start <= prefill.end == decode.start <= decode.end
    said = dict(server.attributes)
    first_token = said.pop("gen_ai.latency.time_to_first_token")
    assert 0 < first_token <= (server.end - server.start) / 1e9
    assert said == {
        "http.request.method": "POST", "http.route": path, "url.path": path, "url.scheme": "http",
        "http.response.status_code": 200, "octavo.outcome": "ok",
        "gen_ai.operation.name": "chat" if chat else "text_completion", "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": MODEL, "gen_ai.response.model": MODEL,
        "gen_ai.response.id": json.loads(answer.text.partition("\n")[0].removeprefix("data: "))["id"],
        "gen_ai.request.stream": stream, "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": len(SECRET), "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.output_tokens": 2 * len("an answer"), "gen_ai.response.finish_reasons": ["length", "length"],
    }  # fmt: skip
    assert server.resource["service.name"] == "octavo"
    assert server.resource["service.version"] == "1.2.3"


def test_nothing_that_was_said_is_in_a_span(collector: Collector) -> None:
    api = Traced(collector, log_prompts=True)
    for body in ({"prompt": SECRET}, {"prompt": SECRET, "model": SECRET}, {"prompt": "a", "user": 7, SECRET: 1}):
        api.post("/v1/completions", body)
    api.tracing.close(PATIENCE)
    sent = b"".join(collector.raw)
    assert sent.count(b"POST /v1/completions") == 3
    assert SECRET.encode() not in sent
    assert b"answer" not in sent


def test_vectors(collector: Collector) -> None:
    api = Traced(collector)
    assert api.post("/v1/embeddings", {"input": ["abc", "defg"]}, CONTEXT).status_code == 200
    server, children = api.tree()
    assert (server.name, server.parent_id) == ("POST /v1/embeddings", PARENT)
    assert list(children) == ["queue", "compute"]
    said = server.attributes
    assert (said["gen_ai.operation.name"], said["gen_ai.usage.input_tokens"]) == ("embeddings", 7)
    assert "gen_ai.response.finish_reasons" not in said


def test_without_a_context_a_trace_begins_and_is_in_the_log(collector: Collector) -> None:
    api = Traced(collector)
    with capture_logs(processors=[merge_contextvars]) as logged:
        api.post("/v1/completions", {"prompt": "a"})
    server, _ = api.tree()
    assert server.parent_id == ""
    (line,) = [entry for entry in logged if entry["event"] == "request finished"]
    assert line["trace_id"] == server.trace_id


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"00-{'0' * 32}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        "x" * 9999,
    ],
)
def test_a_malformed_context_is_none(collector: Collector, header: str) -> None:
    api = Traced(collector)
    assert api.post("/v1/completions", {"prompt": "a"}, {"traceparent": header}).status_code == 200
    server, _ = api.tree()
    assert (server.parent_id, server.state) == ("", "")
    assert server.trace_id != TRACE


def test_a_context_that_is_there_twice_is_none(collector: Collector) -> None:
    api = Traced(collector)
    twice = [("traceparent", CONTEXT["traceparent"]), ("traceparent", CONTEXT["traceparent"])]
    api.post("/v1/completions", {"prompt": "a"}, twice)
    assert api.tree()[0].parent_id == ""


def test_what_the_client_does_not_sample_is_not_sent(collector: Collector) -> None:
    api = Traced(collector)
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    with capture_logs(processors=[merge_contextvars]) as logged:
        assert api.post("/v1/completions", {"prompt": "a"}, unsampled).status_code == 200
        assert api.post("/v1/completions", {"prompt": "a"}, CONTEXT).status_code == 200
    server, children = api.tree()  # the second one's
    assert (server.parent_id, len(children)) == (PARENT, 3)
    assert [entry["trace_id"] for entry in logged] == [TRACE, TRACE]


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        ({"prompt": "a", "model": "other"}, 404, "404"),  # before it has a record
        ({"prompt": [1, 2, 100_000]}, 400, "invalid_value"),
        ({"prompt": "a"}, 503, "503"),  # at the door, which knows no code
    ],
)
def test_refused(collector: Collector, body: dict[str, Any], status: int, problem: str) -> None:
    """Only what the server is to blame for is an error of its span."""
    api = Traced(collector, max_num_queued_reqs=0)
    with api.app.state.service.admission.reserve(8 if status == 503 else 0, 0):
        assert api.post("/v1/completions", body, CONTEXT).status_code == status
    server, children = api.tree()
    said = server.attributes
    assert (said["http.response.status_code"], said["error.type"], server.parent_id) == (status, problem, PARENT)
    assert server.status == (ERROR if status >= 500 else OK)
    assert children == {}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("problem", "status"), [(EngineDeadError("gone"), 503), (ZeroDivisionError("made by the test"), 500)]
)
def test_failed(collector: Collector, problem: Exception, status: int, stream: bool) -> None:
    """At once, or in the middle of a stream."""

    def script(request_id: str, source: TokenInput, params: Any) -> Iterable[Step]:
        return [*list(timed(request_id, source, params))[:1], problem] if stream else [problem]

    api = Traced(collector, script)
    assert api.post("/v1/completions", {"prompt": "a", "stream": stream}).status_code == (200 if stream else status)
    server, children = api.tree()
    assert server.status == ERROR
    assert server.attributes["error.type"] == type(problem).__name__
    assert server.attributes["http.response.status_code"] == (200 if stream else status)
    assert list(children) == (["queue", "prefill", "decode"] if stream else ["queue"])


def scheduled_only(request_id: str, source: TokenInput, params: Any) -> Iterable[Step]:
    """A first token, and then none for ever."""
    return [*list(timed(request_id, source, params))[:1], asyncio.Event()]


@pytest.mark.parametrize(
    ("script", "stream", "phases"),
    [(endless, False, ["queue"]), (scheduled_only, True, ["queue", "prefill", "decode"])],
)
def test_a_client_that_leaves(
    collector: Collector, script: Callable[..., Iterable[Step]], stream: bool, phases: list[str]
) -> None:
    """The phase that it left in ends with the request."""
    api = Traced(collector, script)

    async def leave() -> None:
        call = Call(api.app, "/v1/completions", {"prompt": "a", "stream": stream})
        while not api.client.asked:
            await asyncio.sleep(0)
        if stream:
            await call.wait_sent(2)
        call.leave()
        await call.wait_end()

    asyncio.run(leave())
    server, children = api.tree()
    assert (server.attributes["octavo.outcome"], server.attributes["error.type"]) == (
        "aborted:disconnect",
        "disconnect",
    )
    assert server.status == OK
    assert set(phases) <= set(children) <= {"queue", "prefill", "decode"}


def test_other_requests_are_not_traced(collector: Collector) -> None:
    api = Traced(collector, api_key="key")
    assert api.post("/v1/completions", {"prompt": "a"}, CONTEXT).status_code == 401
    with_key = {"Authorization": "Bearer key", **CONTEXT}
    assert api.post("/x/v1/completions", {}, with_key).status_code == 404
    assert api.post("/tokenize", {"prompt": "a"}, with_key).status_code == 200
    assert api.post("/v1/completions", {"prompt": "a"}, with_key).status_code == 200
    assert api.tree()[0].attributes["http.response.status_code"] == 200


def test_every_endpoint_of_the_model_is_traced() -> None:
    modules = [
        importlib.import_module(f"server.routes.{found.name}") for found in pkgutil.iter_modules(routes.__path__)
    ]
    routers = [one for module in modules for one in vars(module).values() if isinstance(one, APIRouter)]
    found = {route.path for router in routers for route in router.routes if "POST" in getattr(route, "methods", ())}
    assert found - WITHOUT_THE_MODEL == PATHS
    assert found >= WITHOUT_THE_MODEL


def test_a_collector_that_does_not_answer_costs_nothing(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither requests nor the end wait for it, and what is too much is dropped."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    collector.answering.clear()
    api = Traced(collector)
    for _ in range(5):
        assert api.post("/v1/completions", {"prompt": "a"}).status_code == 200
    assert collector.asked.wait(PATIENCE)
    api.tracing.close(0.01)
    assert not collector.answering.is_set()
    assert collector.spans == []
    assert api.post("/v1/completions", {"prompt": "a"}).status_code == 200


def test_a_collector_that_is_not_there_costs_nothing() -> None:
    with collecting() as collector:
        pass
    api = Traced(collector)
    assert api.post("/v1/completions", {"prompt": "a"}).status_code == 200
    api.tracing.close(0.01)


def test_opentelemetrys_own_variables_count(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=Bearer%20abc")
    api = Traced(collector)
    api.post("/v1/completions", {"prompt": "a"})
    server, _ = api.tree()
    assert server.resource.items() >= {"service.name": "mine", "deployment.environment.name": "test"}.items()
    assert collector.headers[0]["authorization"] == "Bearer abc"


def test_a_sampler_may_be_chosen(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    api = Traced(collector)
    api.post("/v1/completions", {"prompt": "a"})
    api.post("/v1/completions", {"prompt": "a"}, CONTEXT)
    assert api.tree()[0].parent_id == PARENT


def test_a_variable_that_is_wrong_is_said(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "0")
    with pytest.raises(ConfigError, match=r"OTEL_.*schedule_delay"):
        Traced(collector)


@pytest.mark.parametrize(
    "wrong", ["localhost:4318", "http://localhost:4318", "grpc://localhost:4317/", "http:///v1/traces", "http://[::1/x"]
)
def test_an_endpoint_is_a_whole_url(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint must be a URL with its path.*4318/v1/traces, got"):
        ServerSettings(otlp_traces_endpoint=wrong)


def test_an_endpoint_holds_no_secret() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_HEADERS") as problem:
        ServerSettings(otlp_traces_endpoint="https://me:hush@localhost/v1/traces")
    assert "hush" not in str(problem.value)


def run(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_without_the_setting_nothing_of_it_is_imported() -> None:
    code = """
import sys, server.run
from server.config.settings import ServerSettings
from server.tracing.start import start_tracing
assert start_tracing(ServerSettings(), "0") is None
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "requests"))])
"""
    assert run(code) == "[]"


def test_missing_packages_are_named_before_the_model_loads(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["opentelemetry.exporter"] = None
from octavo.__main__ import main
sys.argv = ["octavo", "serve", "server/demo/chat", "--port", "0", "--otlp-traces-endpoint", "http://localhost:1/v1/traces"]
print(main())
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert ran.stdout.strip() == "1"
    assert "otlp_traces_endpoint (http://localhost:1/v1/traces) needs packages" in ran.stderr
    assert "pip install 'octavo[otel]'" in ran.stderr


def test_doctor_looks_at_it_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(check_traces(ServerSettings())) == []
    settings = ServerSettings(otlp_traces_endpoint="http://localhost:1/v1/traces")
    (finding,) = check_traces(settings)
    assert (finding.verdict, finding.found) == ("ok", "to http://localhost:1/v1/traces")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "0")
    (finding,) = check_traces(settings)
    assert finding.verdict == "FAIL"
    assert "schedule_delay" in finding.found


@pytest.mark.slow
def test_a_service_sends_its_last_spans_when_it_stops(collector: Collector, tmp_path: Path) -> None:
    """With a real engine's times."""
    service = Service("--otlp-traces-endpoint", collector.url, log=tmp_path / "log")
    try:
        url = service.wait_ready()
        body = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=CONTEXT, timeout=PATIENCE)
        assert answer.status_code == 200
    finally:
        assert service.stop() == 0
    server, children = collector.tree()
    assert server.parent_id == PARENT
    assert list(children) == ["queue", "prefill", "decode"]
    assert children["prefill"].end > children["prefill"].start
    assert TRACE in service.log.read_text()
