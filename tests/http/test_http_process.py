"""The service as a process of its own: real engine, real sockets, real signals."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.service import PATIENCE, ROOT, Service, environment, serving, stopped

pytestmark = pytest.mark.slow

# Minutes of work, of which no test waits for the end.
LONG = {"max_tokens": 60_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def service(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("log") / "service.log"
    with serving(
        str(tiny), "--max-num-seqs", "16", "--kv-cache-memory", "64MiB", log=log, signum=signal.SIGINT
    ) as service:
        yield service


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    ended = False
    for line in answer.iter_lines():
        if line:
            assert not ended, f"{line} after the end"
            assert line.startswith("data: ")
            ended = line == "data: [DONE]"
            if not ended:
                yield json.loads(line.removeprefix("data: "))
    assert ended, "no [DONE]"


def streamed_text(http: httpx.Client, **body: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for event in events(answer):
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


# ---------------------------------------------------------------- one answer


def test_openai_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    whole = client.completions.create(model="tiny", prompt="Hello", max_tokens=24, temperature=0, logprobs=2)
    choice = whole.choices[0]
    assert choice.text
    assert choice.finish_reason in ("length", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == whole.usage.completion_tokens  # type: ignore[union-attr]

    stream = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == choice.text
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [choice.finish_reason]
    assert chunks[-1].usage == whole.usage

    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="Hello")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny", prompt="Hello", max_tokens=70_000)
    assert "65536" in str(wrong.value)


def test_a_stream_really_streams(service: Service, http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json={"prompt": "Go", "stream": True, **LONG}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        received = events(answer)  # kept: giving it up closes the connection
        assert next(received)["choices"][0]["finish_reason"] is None
        assert service.metric("octavo_num_requests_running") == 1
    service.wait_metric("octavo_num_requests_running", 0)


def test_default_is_sixteen_tokens(http: httpx.Client) -> None:
    assert complete(http, prompt="Hello", ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_a_repeated_prompt_hits_the_prefix_cache(service: Service, http: httpx.Client) -> None:
    prompt = "The same long beginning, again and again, page after page. " * 3
    first = complete(http, prompt=prompt, max_tokens=4, temperature=0)
    again = complete(http, prompt=prompt, max_tokens=4, temperature=0)
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    assert service.metric("octavo_prefix_cache_hits_total") >= 128


def test_stop_string_ends_the_work(service: Service, http: httpx.Client) -> None:
    free = complete(http, prompt="Stop", temperature=0, max_tokens=64, ignore_eos=True)["choices"][0]["text"]
    stop = free[8:11]
    body = complete(http, prompt="Stop", temperature=0, stop=stop, **LONG)
    assert body["choices"][0]["text"] == free[: free.index(stop)]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == stop
    assert body["usage"]["completion_tokens"] < 100
    service.wait_metric('octavo_kv_pages{state="held"}', 0)


def test_filters_and_dry(http: httpx.Client) -> None:
    """Breakers are looked up in the engine's process; streamed and whole answers are the same."""
    plain = {"prompt": "again and again and again", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    texts = [complete(http, **plain, **more)["choices"][0]["text"] for more in ({}, {"dry_multiplier": 0})]
    assert texts[0] == texts[1]
    dry = {"dry_multiplier": 4, "dry_allowed_length": 0, "dry_sequence_breakers": ["#"]}
    assert complete(http, **plain, **dry)["choices"][0]["text"] != texts[0]
    drawn = {
        "prompt": "draw", "seed": 3, "n": 2, "max_tokens": 40, "ignore_eos": True, "typical_p": 0.9,
        "top_n_sigma": 2.5, "xtc_probability": 0.5, "xtc_threshold": 0.01, "dry_multiplier": 0.8,
    }  # fmt: skip
    whole = [choice["text"] for choice in complete(http, **drawn)["choices"]]
    assert streamed_text(http, **drawn) == dict(enumerate(whole))
    assert whole != [choice["text"] for choice in complete(http, **drawn | {"xtc_probability": 0})["choices"]]
    refused = http.post("/v1/completions", json={"prompt": "a", "mirostat": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mirostat")


# ---------------------------------------------------------------- many at once

MIXED: list[dict[str, Any]] = [
    {"prompt": "one", "temperature": 0},
    {"prompt": "two", "seed": 7},
    {"prompt": "three", "seed": 8, "n": 3, "top_p": 0.9},
    {"prompt": "four", "use_beam_search": True, "n": 2},
    {"prompt": ["five", "six"], "seed": 9, "top_k": 20},
    {"prompt": "seven", "seed": 10, "presence_penalty": 1.0},
]


def test_concurrent_answers_equal_lonely_ones(service: Service, http: httpx.Client) -> None:
    bodies = [{**body, "max_tokens": 40} for body in MIXED]
    alone = [[choice["text"] for choice in complete(http, **body)["choices"]] for body in bodies]

    def ask(number: int) -> list[str]:
        body = bodies[number % len(bodies)]
        if number % 2:
            texts = streamed_text(http, **body)
            return [texts.get(index, "") for index in range(len(alone[number % len(bodies)]))]
        return [choice["text"] for choice in complete(http, **body)["choices"]]

    before = service.metric("octavo_steps_total"), service.metric("octavo_generation_tokens_total")
    num_prompts = sum(len(body["prompt"]) if isinstance(body["prompt"], list) else 1 for body in bodies) * 3
    with ThreadPoolExecutor(18) as pool:
        with stopped(service.engine()):
            answers = [pool.submit(ask, number) for number in range(18)]
            service.wait_metric("octavo_num_requests_in_service", num_prompts)
        together = [answer.result() for answer in answers]
    steps = service.metric("octavo_steps_total") - before[0]
    tokens = service.metric("octavo_generation_tokens_total") - before[1]
    assert together == [alone[number % len(bodies)] for number in range(18)]
    assert tokens > 2 * steps, "the requests did not share steps"
    service.wait_metric('octavo_kv_pages{state="held"}', 0)


# ---------------------------------------------------------------- clients that leave


# ---------------------------------------------------------------- start and stop


def test_metrics_after_all_that(service: Service, http: httpx.Client) -> None:
    complete(http, prompt="count me", max_tokens=2)
    assert service.metric("octavo_engine_up") == 1
    assert service.metric("octavo_num_requests_waiting") == 0
    assert service.metric("octavo_prompt_tokens_total") > 0
    assert service.metric("octavo_step_seconds_sum") > 0
    assert service.metric("octavo_time_to_first_token_seconds_count") > 0
    assert service.metric('octavo_request_success_total{finished_reason="error"}') == 0
    pages = sum(service.metric(f'octavo_kv_pages{{state="{state}"}}') for state in ("held", "cached", "free"))
    assert re.search(rf"KV cache: .*\({pages:.0f} pages of 16 tokens\)", service.log.read_text())


def run(*arguments: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    code = ["-c", script] if script else ["-m", "octavo"]
    command = [sys.executable, *code, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_what_prevents_the_start_is_one_clear_paragraph(tiny: Path, tmp_path: Path) -> None:
    with socket.socket() as taken, ThreadPoolExecutor(2) as pool:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        calls = [("serve", str(tiny), "--port", port), ("serve", str(tmp_path / "absent"), "--port", "0")]
        refused, absent = pool.map(lambda arguments: run(*arguments), calls)
    assert refused.returncode == absent.returncode == 1
    assert "cannot listen on 127.0.0.1" in refused.stderr
    assert str(tmp_path / "absent") in absent.stderr.splitlines()[-1]
    assert "Traceback" not in refused.stderr + absent.stderr


def test_a_log_that_goes_into_a_file_says_how_to_get_lines_for_people() -> None:
    with socket.socket() as taken, ThreadPoolExecutor(2) as pool:
        taken.bind(("127.0.0.1", 0))
        call = ["serve", "--port", str(taken.getsockname()[1])]
        unasked, asked = pool.map(lambda more: run(*call, *more), [[], ["--log-format", "json"]])
    first = json.loads(unasked.stderr.splitlines()[0])
    assert (first["level"], first["logger"]) == ("info", "octavo.server")
    assert "--log-format console (OCTAVO_LOG_FORMAT)" in first["event"]
    assert "--log-format" not in asked.stderr


@pytest.mark.parametrize("name", ["engine", "server", "cli"])
def test_a_package_that_shadows_ours_is_named(name: str, tmp_path: Path) -> None:
    foreign = tmp_path / name
    foreign.mkdir()
    (foreign / "__init__.py").write_text("")
    script = (
        f"import sys; from octavo.__main__ import main; sys.path.insert(0, {str(tmp_path)!r}); "
        "sys.argv = ['octavo', 'serve']; sys.exit(main())"
    )
    refused = run(script=script)
    assert refused.returncode == 1
    assert str(foreign / "__init__.py") in refused.stderr
    assert "Traceback" not in refused.stderr
    imported = run(script=f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import octavo.{name}")
    assert f"ImportError: Octavo's package '{name}'" in imported.stderr


@pytest.mark.parametrize(
    ("flags", "model", "path", "body", "said"),
    [
        ((), "octavo-demo", "chat/completions", {"messages": [{"role": "user", "content": "Who are you?"}]}, "Octavo"),
        (
            ("--demo", "seq2seq"), "octavo-demo-seq2seq", "completions",
            {"prompt": "luma li vulpa lantan trovet.", "num_beams": 4}, "Later the fox found a lantern.",
        ),
    ],
)  # fmt: skip
def test_the_bundled_models_speak(
    flags: tuple[str, ...], model: str, path: str, body: dict[str, Any], said: str, bundled: Callable[..., Service]
) -> None:
    service = bundled(*flags)
    (card,) = service.get("/v1/models").json()["data"]
    assert card["id"] == model
    greedy = {} if "num_beams" in body else {"temperature": 0}
    body = {**body, **greedy, "max_tokens": 60}
    (choice,) = httpx.post(f"{service.url}/v1/{path}", json=body, timeout=PATIENCE).json()["choices"]
    assert said in (choice["text"] if "text" in choice else choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert "This is the bundled demo" in service.log.read_text()


STORIES = ROOT.parent / "shared" / "data" / "stories260k"


@pytest.mark.skipif(not STORIES.is_dir(), reason="the trained test model is not here")
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_published_text_through_curl(tmp_path: Path) -> None:
    """A trained model's published greedy output, through the real command, whole and streamed."""
    with serving(str(STORIES / "hf"), log=tmp_path / "log", ready=False) as service:
        command = ["curl", "-sSN", "--max-time", str(PATIENCE), f"{service.wait_ready()}/v1/completions", "-H"]
        command += ["Content-Type: application/json", "-d"]
        body = {"prompt": [1], "max_tokens": 200, "temperature": 0}
        expected = (STORIES / "expected_greedy_199.txt").read_text(encoding="utf-8")
        whole = subprocess.run([*command, json.dumps(body)], capture_output=True, text=True, check=True)
        assert json.loads(whole.stdout)["choices"][0]["text"] == expected
        body["stream"] = True
        streamed = subprocess.run([*command, json.dumps(body)], capture_output=True, text=True, check=True)
        lines = [line for line in streamed.stdout.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1]]
        assert len(pieces) > 1  # how many depends on the machine: what waits to be sent is sent together
        assert "".join(pieces) == expected
