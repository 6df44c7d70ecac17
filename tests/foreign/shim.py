"""A pytest plugin: other servers' test suites meet an Octavo that runs already. `run.py` sets what it reads."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NoReturn, Self
from urllib.parse import urlsplit

import pytest

URL, MODEL, SUITE = (os.environ[f"FOREIGN_{name}"] for name in ("URL", "MODEL", "SUITE"))

# Options of vLLM's server that change no answer of a test.
_HARMLESS = {
    "--dtype", "--max-model-len", "--max-num-seqs", "--enforce-eager", "--gpu-memory-utilization", "--seed",
    "--max-num-batched-tokens", "--load-format", "--disable-log-requests", "--enable-prefix-caching",
    "--trust-remote-code", "--enable-server-load-tracking", "--disable-uvicorn-access-log",
    "--attention-backend", "--runner", "--enable-tokenizer-info-endpoint", "--enable-prompt-tokens-details",
    "--served-model-name", "--enable-chunked-prefill", "--no-enable-prefix-caching",
    "--enable-per-request-metrics", "--enable-auto-tool-choice", "--tool-call-parser", "--enable-lora",
    "--lora-modules", "--max-lora-rank", "--max-cpu-loras", "--max-loras",
}  # fmt: skip
# The same of llama.cpp's, by the names of its tests.
_LLAMA_HARMLESS = {
    "server_port", "server_host", "debug", "external_server", "offline", "model_hf_repo", "model_hf_file",
    "model_alias", "seed", "n_batch", "n_ubatch", "n_ctx", "n_slots", "n_threads", "server_metrics",
    "server_continuous_batching", "fa", "cache_prompt", "kv_unified", "jinja", "n_gpu_layer", "log_path",
    "temperature", "no_cache_idle_slots", "cache_ram", "server_embeddings", "n_prompts", "swa_full",
    "n_predict",
}  # fmt: skip
# Whose texts no test compares, beside those that are about texts; and one for vectors.
_LLAMA_MODELS = ("ggml-org/test-model-stories260K", "ggml-org/models")


def _not_ours(reason: str) -> NoReturn:
    pytest.skip(reason, allow_module_level=True)


class Absent:
    """A part of vLLM, or of what goes with it, that is not there: whatever is done with it skips the test."""

    def __init__(self, name: str):
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        _not_ours(f"uses {self._name} in its own process")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _not_ours(f"uses {self._name} in its own process")


class _Platform:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: False


class RemoteOpenAIServer:
    """vLLM's name for the server of a test: the one that runs."""

    def __init__(self, model: str, vllm_serve_args: Sequence[str] = (), **_: Any):
        for option in map(str, vllm_serve_args):
            if option.startswith("--") and option.split("=")[0] not in _HARMLESS:
                pytest.skip(f"wants a server with {option.split('=')[0]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    host, port = urlsplit(URL).hostname, urlsplit(URL).port

    @property
    def url_root(self) -> str:
        """The server's address."""
        return URL

    def url_for(self, *parts: str) -> str:
        """A route's."""
        return "/".join([URL, *(part.lstrip("/") for part in parts)])

    def get_client(self, **settings: Any) -> Any:
        """OpenAI's client."""
        import openai

        return openai.OpenAI(**{"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0} | settings)

    def get_async_client(self, **settings: Any) -> Any:
        """The same for coroutines."""
        import openai

        return openai.AsyncOpenAI(**{"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0} | settings)

    def get_client_anthropic(self, **settings: Any) -> Any:
        """Anthropic's client."""
        import anthropic

        return anthropic.Anthropic(**{"base_url": URL, "api_key": "none", "max_retries": 0} | settings)

    def get_async_client_anthropic(self, **settings: Any) -> Any:
        """The same for coroutines."""
        import anthropic

        return anthropic.AsyncAnthropic(**{"base_url": URL, "api_key": "none", "max_retries": 0} | settings)


class _Hub:
    """Adapters are fetched from nowhere; a test that asks for one's answer fails with its name."""

    def snapshot_download(self, **_: Any) -> str:
        return "adapter"


def _get_tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["FOREIGN_TOKENIZER"])


_KNOWN: dict[str, dict[str, Any]] = {
    "tests.utils": {"RemoteOpenAIServer": RemoteOpenAIServer, "ROCM_EXTRA_ARGS": [], "ROCM_ENV_OVERRIDES": {}},
    "vllm.tokenizers": {"get_tokenizer": _get_tokenizer},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
}


class _Module(types.ModuleType):
    """A module whose every name is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = _KNOWN.get(self.__name__, {})
        if name not in known and name.endswith("Error"):
            return type(name, (Exception,), {})  # for pytest.raises
        return known[name] if name in known else Absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        ours = name in ("tests.utils", "tests.conftest") or name.split(".")[0] in ("vllm", "torch", "lm_eval")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return


if SUITE == "vllm":
    sys.meta_path.insert(0, _Finder())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """llama.cpp's helpers are imported by now: its servers are the one that runs."""
    if SUITE != "llama.cpp":
        return
    import utils

    def start(server: Any, *_: Any, **__: Any) -> None:
        if server.model_hf_repo not in _LLAMA_MODELS:
            pytest.skip("wants a model of its own")
        plain = utils.ServerProcess()
        for name, value in vars(server).items():
            if name not in _LLAMA_HARMLESS and not name.startswith("_") and value != getattr(plain, name, None):
                pytest.skip(f"wants a server with {name}")

    def request(server: Any, method: str, path: str, *rest: Any, **settings: Any) -> Any:
        answer = ask(server, method, path, *rest, **settings)
        if answer.status_code == 404 and "unknown_route" in str(answer.body):
            pytest.skip(f"asks {path}, which Octavo has not")
        return answer

    def stream(server: Any, method: str, path: str, *rest: Any, **settings: Any) -> Any:
        try:
            yield from ask_streaming(server, method, path, *rest, **settings)
        except utils.ServerError as problem:
            if "unknown_route" in str(problem.body):
                pytest.skip(f"asks {path}, which Octavo has not")
            raise

    ask, ask_streaming = utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request
    utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request = request, stream
    utils.wget.download = lambda *_, **__: pytest.skip("wants a file from the network")
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.ServerProcess.start = start
    utils.ServerProcess.stop = lambda *_: None


_OF_GPT_OSS = ("test_harmony.py", "test_parsable_context.py", "test_mcp_tools.py")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that are about one model, which is on the hub."""
    if "GGUF" in item.nodeid or item.path.name in _OF_GPT_OSS:
        pytest.skip("wants a model of its own")


_counts: dict[str, Counter[str]] = defaultdict(Counter)
_reasons: dict[str, Counter[str]] = defaultdict(Counter)


def _count(file: str, outcome: str, report: Any) -> None:
    _counts[file][outcome] += 1
    if outcome == "skipped" and isinstance(report.longrepr, tuple):
        _reasons[file][str(report.longrepr[2]).removeprefix("Skipped: ")] += 1


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test ended, or was not begun."""
    if report.when == "call" or report.outcome != "passed":
        _count(report.nodeid.split("::")[0], report.outcome, report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file was skipped as a whole, or could not be read."""
    if report.outcome != "passed" and report.nodeid.endswith(".py"):
        _count(report.nodeid, report.outcome, report)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table."""
    terminalreporter.write_line("\n| file | passed | failed | skipped |\n|---|---|---|---|")
    for file, counts in sorted(_counts.items()):
        reasons = "; ".join(f"{reason} ({count})" for reason, count in _reasons[file].most_common())
        line = f"| {file} | {counts['passed']} | {counts['failed']} | {counts['skipped']} {reasons} |"
        terminalreporter.write_line(line)
