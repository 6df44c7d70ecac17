"""Flags, variables and the YAML file, which of them wins, and what the commands say when they are wrong."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.main import main
from cli.settings import LoadedSettings, SettingsParser
from engine import ConfigError, EngineConfig, SamplingParams
from engine.interface.kv_events import parse_kv_events
from octavo.checkout import shadowed
from server.config.groups import GROUPS, OTHER
from server.config.settings import DEMO_MODEL, DEMOS, SECRETS, ServerSettings, Settings, flag, variable
from server.config.wording import did_you_mean, field_docs
from server.facts import served_model_id

ROOT = Path(__file__).resolve().parents[3]
# A valid value for every setting, unlike its default.
ENGINE = {
    "model": "some/model", "mmproj": "m.gguf", "tokenizer": "tok", "skip_tokenizer_init": True,
    "revision": "main", "hf_token": "t",
    "dtype": "float16", "quantization": "int8", "quantization_cache": "kept", "share_weights": True,
    "device": "cuda:1", "threads": 2, "max_model_len": 128, "max_num_seqs": 3,
    "max_num_batched_tokens": 99, "max_step_time": 1.25, "async_scheduling": True, "block_size": 8,
    "distributed_executor_backend": "mp", "tensor_parallel_size": 2,
    "kv_cache_memory": "64MiB", "kv_cache_dtype": "fp8", "kv_disk": "pages", "kv_disk_size": "3GiB",
    "enforce_eager": True, "flash_prefill": True, "gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 77,
    "enable_prefix_caching": False, "generation_config": "none", "max_num_beams": 4, "seed": 5, "show_progress": False,
    "lora_modules": ("a=x", '{"name": "b", "path": "y, z"}'), "max_loras": 3, "max_lora_rank": 8,
    "lora_dtype": "float32",
    "catalogue": ("a=one.jsonl", "b=two=2.jsonl"), "chat_template": "chatml",
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    "kv_events_config": '{"enable_kv_cache_events": true, "publisher": "null"}',
}  # fmt: skip
SERVICE = {
    "host": "::1", "port": 81, "uds": "/run/o.sock", "root_path": "/llm", "api_server_count": 3,
    "forwarded_allow_ips": "10.0.0.0/8,127.0.0.1",
    "ssl_keyfile": "key.pem", "ssl_certfile": "cert.pem", "ssl_keyfile_password": "pass", "served_model_name": "mine",
    "strict_model_name": True,
    "log_level": "debug", "log_format": "json", "log_prompts": True, "shutdown_timeout": 7, "max_engine_failures": 9,
    "loop_timeout": 4.5, "max_api_memory": "3GiB", "max_connections": 14, "models": "models.yaml", "max_memory": "6GiB",
    "model_idle_time": 1.5, "model_load_timeout": 2.5,
    "liveness_timeout": 1.5, "api_key": ("one", "two"), "api_key_file": "keys", "public_metrics": True,
    "key_requests_per_minute": 60, "key_max_concurrency": 4, "rate_limit_storage": "redis://:pass@host/0",
    "allowed_hosts": ("a.example", "*.b"), "allowed_origins": ("https://c", "null"),
    "max_body_size": "1MiB", "max_answer_size": "2MiB", "max_header_size": "8KiB", "max_num_queued_reqs": 11,
    "max_image_bytes": "3MiB", "max_image_pixels": 14, "limit_mm_per_prompt": "image=3",
    "max_num_queued_tokens": 12, "stream_keepalive": 2.5, "stream_stall_timeout": 3.5, "max_n": 13,
    "max_queue_time": 4.5, "grammar_timeout": 6.5, "max_audio_seconds": 900.5, "prefix_cache_scope": "global",
    "enable_playground": False, "enable_cache_map": False, "tool_call_parser": "hermes", "reasoning_parser": "none",
    "tool_prompt": "off", "reasoning_budget": 7,
    "response_store": "responses.db", "response_store_max_age": 60.5, "response_store_max_size": "3MiB",
    "batch_store": "batches", "batch_store_max_size": "4MiB", "batch_max_unfinished": 15, "batch_max_running": 16,
    "otlp_traces_endpoint": "http://localhost:4318/v1/traces", "enable_lora_loading": ".",
}  # fmt: skip
VALUES: dict[str, Any] = ENGINE | SERVICE


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedSettings]:
    """Settings from arguments and variables, nothing else being set."""

    def load(arguments: list[str] | None = None, environ: dict[str, str] | None = None) -> LoadedSettings:
        for name in Settings.model_fields:
            monkeypatch.delenv(variable(name), raising=False)
        for name, value in (environ or {}).items():
            monkeypatch.setenv(name, value)
        parser = SettingsParser("octavo serve", "Serve.")
        return parser.load(parser.parse_args(arguments or []))

    return load


def as_text(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def as_flags(name: str) -> list[str]:
    value = VALUES[name]
    if name == "model":
        return [value]
    if isinstance(value, bool):
        return [flag(name if value else f"no_{name}")]
    return [part for item in (value if isinstance(value, tuple) else (value,)) for part in (flag(name), str(item))]


def as_file(folder: Path, values: dict[str, Any]) -> str:
    path = folder / "octavo.yaml"
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    path.write_text(yaml.safe_dump(plain))
    return str(path)


def values_of(loaded: LoadedSettings) -> dict[str, Any]:
    return {name: getattr(loaded.settings, name) for name in VALUES}


def test_the_values_cover_every_setting() -> None:
    assert {*VALUES, "config", "demo"} == set(Settings.model_fields)
    assert set(ENGINE) == {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(SERVICE) == set(ServerSettings.model_fields)
    defaults = Settings()
    assert not [name for name, value in VALUES.items() if getattr(defaults, name) == value]


def test_every_setting_is_a_flag(load: Callable[..., LoadedSettings]) -> None:
    loaded = load([part for name in VALUES for part in as_flags(name)])
    assert values_of(loaded) == VALUES
    assert loaded.engine == EngineConfig(**ENGINE)
    assert {loaded.origins[name].kind for name in VALUES} == {"flag"}
    assert loaded.origins["enable_prefix_caching"].name == "--no-enable-prefix-caching"
    assert loaded.origins["model"].name == "MODEL"


def test_a_switch_without_a_default(load: Callable[..., LoadedSettings]) -> None:
    """On, off, or left to the engine."""
    given = (["--async-scheduling"], ["--no-async-scheduling"], [])
    assert [load(arguments).engine.async_scheduling for arguments in given] == [True, False, None]
    assert load(["--no-async-scheduling"]).origins["async_scheduling"].name == "--no-async-scheduling"
    assert load([], {"OCTAVO_ASYNC_SCHEDULING": "false"}).engine.async_scheduling is False
    with pytest.raises(ConfigError, match="OCTAVO_ASYNC_SCHEDULING must be true or false, got '7'"):
        load([], {"OCTAVO_ASYNC_SCHEDULING": "7"})
    with pytest.raises(ConfigError, match="async_scheduling must be true, false or None, got 'off'"):
        EngineConfig(model="m", async_scheduling="off")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["quantization_cache", "speculative_config", "tool_prompt"])
def test_off_needs_no_quotation_marks_in_a_file(name: str, load: Callable[..., LoadedSettings], tmp_path: Path) -> None:
    """YAML reads it as false."""
    path = tmp_path / "octavo.yaml"
    path.write_text(f"{name}: off\n")
    assert getattr(load(["--config", str(path)]).settings, name) == "off"
    path.write_text("speculative_config: {method: off}\n")
    assert load(["--config", str(path)]).engine.speculative_config == '{"method": "off"}'


def test_where_events_go_is_a_mapping_in_a_file(load: Callable[..., LoadedSettings], tmp_path: Path) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:1234", "hwm": 5}
    loaded = load(["--config", as_file(tmp_path, {"kv_events_config": events})])
    assert loaded.engine.kv_events == parse_kv_events(events)
    with pytest.raises(ConfigError, match=r"octavo\.yaml has no field 'to'"):
        load(["--config", as_file(tmp_path, {"kv_events_config": {"to": "tcp://*:1234"}})])


def test_every_setting_is_a_variable(load: Callable[..., LoadedSettings]) -> None:
    loaded = load([], {variable(name): as_text(value) for name, value in VALUES.items()})
    assert values_of(loaded) == VALUES
    assert loaded.engine == EngineConfig(**ENGINE)
    assert all(loaded.origins[name].name == variable(name) for name in VALUES)


@pytest.mark.parametrize("spell", [str, lambda name: name.replace("_", "-")])
def test_every_setting_is_a_key_of_the_file(
    spell: Callable[[str], str], load: Callable[..., LoadedSettings], tmp_path: Path
) -> None:
    path = as_file(tmp_path, {spell(name): value for name, value in VALUES.items()})
    for loaded in (load(["--config", path]), load([], {"OCTAVO_CONFIG": path})):
        assert values_of(loaded) == VALUES
        assert loaded.engine == EngineConfig(**ENGINE)
        assert all(loaded.origins[name].name == path for name in VALUES)


def test_the_file_is_weaker_than_variables_and_they_than_flags(
    load: Callable[..., LoadedSettings], tmp_path: Path
) -> None:
    path = as_file(tmp_path, {"port": 1, "max_num_seqs": 1, "model": "a", "log_prompts": True, "block_size": 4})
    environ = {"OCTAVO_CONFIG": path, "OCTAVO_PORT": "2", "OCTAVO_MAX_NUM_SEQS": "2", "OCTAVO_MODEL": "b"}
    loaded = load(["c", "--port", "3", "--no-log-prompts"], environ)
    settings = loaded.settings
    assert (settings.port, settings.log_prompts, loaded.engine.model) == (3, False, "c")
    assert (loaded.engine.max_num_seqs, loaded.engine.block_size, loaded.engine.seed) == (2, 4, None)
    kinds = {name: loaded.origins[name].kind for name in ("port", "max_num_seqs", "block_size", "seed", "config")}
    expected = {"port": "flag", "max_num_seqs": "variable", "block_size": "file", "seed": "default"}
    assert kinds == {**expected, "config": "variable"}
    assert load(["--config", as_file(tmp_path, {"port": 5})], environ).settings.port == 2


def test_without_settings_the_demo_model_and_the_defaults(load: Callable[..., LoadedSettings], tmp_path: Path) -> None:
    loaded = load([], {"OCTAVO_SEED": "", "OCTAVO_API_KEY": "", "OCTAVO_CONFIG": ""})
    assert loaded.engine == EngineConfig(model=str(DEMO_MODEL))
    defaults = ServerSettings()
    assert all(getattr(loaded.settings, name) == getattr(defaults, name) for name in SERVICE)
    assert {origin.kind for origin in loaded.origins.values()} == {"default"}
    assert not loaded.notes
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\nport:\n")
    assert load(["--config", str(empty)]).origins["port"].kind == "default"


@pytest.mark.parametrize("demo", DEMOS)
def test_a_demo_is_a_bundled_model(demo: str, load: Callable[..., LoadedSettings], tmp_path: Path) -> None:
    path = as_file(tmp_path, {"demo": demo})
    for loaded, kind in (
        (load(["--demo", demo]), "flag"),
        (load([], {"OCTAVO_DEMO": demo}), "variable"),
        (load(["--config", path]), "file"),
    ):
        assert loaded.engine == EngineConfig(model=str(DEMOS[demo]))
        assert loaded.origins["model"] == loaded.origins["demo"]
        assert loaded.origins["demo"].kind == kind


@pytest.mark.parametrize(
    ("arguments", "environ", "begins"),
    [
        (["some/model", "--demo", "seq2seq"], {}, "--demo seq2seq"),
        (["--demo", "chat"], {"OCTAVO_MODEL": "some/model"}, "--demo chat"),
        (["some/model"], {"OCTAVO_DEMO": "chat"}, "OCTAVO_DEMO chat"),
    ],
)
def test_a_demo_and_a_model_are_one_too_many(
    arguments: list[str], environ: dict[str, str], begins: str, load: Callable[..., LoadedSettings]
) -> None:
    with pytest.raises(ConfigError, match="some/model") as problem:
        load(arguments, environ)
    assert str(problem.value) == (
        f"{begins} selects a bundled model, but MODEL is also set, to 'some/model'. Remove one of them."
    )


def test_an_unknown_demo_is_refused_with_the_known_ones(load: Callable[..., LoadedSettings]) -> None:
    with pytest.raises(ConfigError, match=r"^OCTAVO_DEMO must be one of chat, seq2seq, got 'poem'\.$"):
        load([], {"OCTAVO_DEMO": "poem"})


def test_the_file_may_be_a_pipe(load: Callable[..., LoadedSettings]) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"port: 5")
    os.close(writer)
    assert load(["--config", f"/dev/fd/{reader}"]).settings.port == 5
    os.close(reader)


def test_null_takes_a_weaker_value_back(load: Callable[..., LoadedSettings], tmp_path: Path) -> None:
    path = as_file(tmp_path, {"max_model_len": 9, "revision": "x"})
    loaded = load(["--config", path, "--max-model-len", "null"], {"OCTAVO_REVISION": "null"})
    assert (loaded.engine.max_model_len, loaded.engine.revision) == (None, None)


def test_keys_come_one_by_one_or_separated_by_commas(load: Callable[..., LoadedSettings], tmp_path: Path) -> None:
    assert load(["--api-key", "a", "--api-key", "b, c"]).settings.api_key == ("a", "b", "c")
    assert load([], {"OCTAVO_API_KEY": "a,b,"}).settings.api_key == ("a", "b")
    assert load(["--config", as_file(tmp_path, {"api-key": "a"})]).settings.api_key == ("a",)
    assert ServerSettings(api_key=("a", "b")).api_key == ("a", "b")
    assert "secret" not in repr(ServerSettings(api_key=("secret",), ssl_certfile="c", ssl_keyfile_password="secret"))
    assert "secret" not in repr(load(["--hf-token", "secret"]).settings)


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["--max-num-seqs", "many"], {}, "--max-num-seqs must be an integer, got 'many'"),
        (["--max-num-seqs", "0"], {}, "--max-num-seqs must be an integer of at least 1, got 0"),
        (["--max-num-seqs=3", "--max-num-batched-tokens=2"], {}, "tokens (2) must be at least --max-num-seqs (3)"),
        (["--dtype", "int3"], {}, "--dtype must be one of auto, float32, bfloat16, float16, got 'int3'"),
        (["--gpu-memory-utilization", "x"], {}, "--gpu-memory-utilization must be a number, got 'x'"),
        (["--gpu-memory-utilization", "2"], {}, "--gpu-memory-utilization must be in (0, 1], got 2.0"),
        (["--port", "70000"], {}, "--port must be an integer from 0 to 65535, got '70000'"),
        (["--port"], {}, "argument --port: expected one argument"),
        (["--device", "tpu"], {}, "--device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["--max-body-size", "big"], {}, "--max-body-size must be a size such as 4GiB"),
        (["--api-key", ""], {}, "--api-key must not be empty"),
        (["--api-key", "two words"], {}, "--api-key must consist of printable ASCII characters without spaces ("),
        (["--served-model-name", ""], {}, "--served-model-name must be a text that is not empty, got ''"),
        (["--root-path", "llm"], {}, "--root-path must be a path such as /llm"),
        (["--forwarded-allow-ips", "10.0.0.1/8"], {}, "got '10.0.0.1/8': 10.0.0.1/8 has host bits set"),
        (["--ssl-keyfile", "k"], {}, "--ssl-keyfile is set, but ssl_certfile is not"),
        (["--enable-prefix-caching=false"], {}, "takes no value; use --no-enable-prefix-caching to switch it off"),
        (["--seed", "9" * 30], {}, "--seed must be at most 9223372036854775807, got 999"),
        (["--max-num-beams", "9" * 30], {}, "--max-num-beams must be at most 9223372036854775807, got 999"),
        (["--max-num-seq", "3"], {}, "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["--max-model-length=3"], {}, "unknown flag --max-model-length; did you mean --max-model-len?"),
        (["--max_model_len", "3"], {}, "unknown flag --max_model_len; did you mean --max-model-len?"),
        (["--warp-drive"], {}, "unknown flag --warp-drive ("),
        (["--model", "m"], {}, "unknown flag --model: give the model without a flag"),
        (["a", "b"], {}, "unexpected argument 'b'"),
        ([], {"OCTAVO_PORT": "http"}, "OCTAVO_PORT must be an integer from 0 to 65535, got 'http'"),
        ([], {"OCTAVO_ENABLE_PREFIX_CACHING": "perhaps"}, "OCTAVO_ENABLE_PREFIX_CACHING must be true or false"),
        ([], {"OCTAVO_LOG_LEVEL": "loud"}, "OCTAVO_LOG_LEVEL must be one of debug, info, warning, error, got 'loud'"),
        ([], {"OCTAVO_LIVENESS_TIMEOUT": "nan"}, "OCTAVO_LIVENESS_TIMEOUT must be a number above 0, got 'nan'"),
        ([], {"OCTAVO_MAX_NUM_SEQS": "4000"}, "must be at least OCTAVO_MAX_NUM_SEQS (4000)"),
        ([], {"OCTAVO_CONFIG": "/no/such.yaml"}, "OCTAVO_CONFIG names /no/such.yaml, which cannot be read: No"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["serve", "config", "doctor"])
def test_a_wrong_value_is_one_line_and_status_2(
    command: str,
    arguments: list[str],
    environ: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        main([command, *arguments])
    assert stopped.value.code == 2
    output = capsys.readouterr().err
    assert output.startswith(f"octavo {command}: ")
    assert said in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_model_length: 3", "unknown setting max_model_length; did you mean max_model_len?"),
        ("max-num-seqs: 3\nmax_num_seqs: 4", "max_num_seqs is set twice"),
        ("port: 3\nport: 4", "line 2, column 1: port is set twice"),
        ("config: other.yaml", "cannot include another one (config)"),
        ("port: [3", "line 1, column 9: expected ',' or ']'"),
        ("- port", "must contain lines such as max_num_seqs: 32, got a list"),
        ("port: true", "port in {path} must be an integer from 0 to 65535, got True"),
        (
            "speculative_config: {method: 2024-01-01}",
            "must be one of ngram, suffix, draft_model, mtp, eagle3, off, got '2024-01-01'",
        ),
        ("revision: 2024", "revision in {path} must be a text, got 2024"),
        ("block-size: 0", "block_size in {path} must be an integer of at least 1, got 0"),
        ("max_num_seqs: 4000", "must be at least max_num_seqs in {path} (4000)"),
        ("hf_token: 12345", "hf_token in {path} must be a text, got '(hidden)'"),
        ("api_key: [12345]", "api_key in {path} must be a text or a list of texts, got '(hidden)'"),
        ("api_key: *key-12345", "line 1, column 10: found undefined alias ("),
        ("api_key: !12345 key", "line 1, column 10: could not determine a constructor for the tag ("),
        ("model: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("port: 2024-99-99", "is not valid YAML"),
        ("\0", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.yaml"  # begins like a setting
    path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        main(["config", "some/model", "--config", str(path)])
    assert stopped.value.code == 2
    output = capsys.readouterr().err
    assert str(path) in output
    assert said.format(path=path) in output
    assert "12345" not in output
    assert output.count("\n") == 1


def test_a_flag_helps_a_wrong_weaker_value_out(load: Callable[..., LoadedSettings], tmp_path: Path) -> None:
    path = as_file(tmp_path, {"port": "wrong"})
    assert load(["--port", "3", "--config", path]).settings.port == 3


def test_variables_that_set_nothing_are_named_once(load: Callable[..., LoadedSettings]) -> None:
    environ = {
        "OCTAVO_MAX_MODEL_LENGTH": "3",
        "OCTAVO_ELSEWHERE_FLAG": "x",
        "OCTAVO_EMPTY": "",
        "OCTAVO_NATIVE": "off",  # the engine reads it
        # what Kubernetes sets for a Service "octavo" and one "octavo-web"
        "OCTAVO_SERVICE_HOST": "10.1.1.1",
        "OCTAVO_SERVICE_PORT_HTTP": "80",
        "OCTAVO_PORT": "tcp://10.1.1.1:80",
        "OCTAVO_PORT_80_TCP_ADDR": "10.1.1.1",
        "OCTAVO_WEB_PORT": "tcp://10.1.1.2:80",
    }
    loaded = load([], environ)
    assert loaded.settings.port == 8000
    nothing, length, port = loaded.notes
    assert nothing == "OCTAVO_ELSEWHERE_FLAG is an unknown setting and is ignored."
    assert length == "OCTAVO_MAX_MODEL_LENGTH is an unknown setting and is ignored; did you mean OCTAVO_MAX_MODEL_LEN?"
    assert "Kubernetes" in port
    assert "tcp://10.1.1.1:80" in port
    assert load(["--port", "80"], environ).settings.port == 80


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max-length", "max-model-len"), ("batched-tokens", "max-num-batched-tokens"), ("prot", "port"),
        ("ssl-key-file", "ssl-keyfile"), ("cpu-offload-gb", None),
    ],
)  # fmt: skip
def test_the_near_name(name: str, near: str | None) -> None:
    known = [flag(name) for name in Settings.model_fields]
    assert did_you_mean(f"--{name}", known) == (f"; did you mean --{near}?" if near else "")


def test_help_texts_come_from_docstrings_of_every_python() -> None:
    """Python 3.13 takes the indentation of docstrings away."""
    docs = field_docs(SamplingParams)
    assert {"temperature", "top_k", "presence_penalty", "frequency_penalty"} <= docs.keys()
    assert "\n" not in docs["temperature"]
    assert field_docs(type("Cleaned", (), {"__doc__": inspect.cleandoc(str(SamplingParams.__doc__))})) == docs


def test_config_shows_values_and_where_they_come_from(
    load: Callable[..., LoadedSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load()  # clears the environment
    path = as_file(tmp_path, {"block_size": 8, "hf_token": "secret-1"})
    monkeypatch.setenv("OCTAVO_API_KEY", "secret-2,secret-3")
    monkeypatch.setenv("OCTAVO_MAX_LENGTH", "3")
    arguments = ["config", "some/model", "--config", path, "--port", "81", "--no-show-progress"]
    arguments += ["--allowed-hosts", "a.example", "--allowed-hosts", "*.b", "--ssl-certfile", "c"]
    arguments += ["--ssl-keyfile-password", "secret-4"]
    arguments += ["--rate-limit-storage", "redis://:secret-5@host/0"]

    assert main(arguments) == 0
    table = capsys.readouterr()
    assert "did you mean OCTAVO_MAX_MODEL_LEN?" in table.err
    rows = {line.split()[0]: line.split()[1:] for line in table.out.splitlines()}
    assert rows.pop("setting") == ["value", "from"]
    assert set(rows) == set(Settings.model_fields)
    assert rows["port"] == ["81", "flag", "--port"]
    assert rows["model"] == ["some/model", "flag", "MODEL"]
    assert rows["show_progress"] == ["false", "flag", "--no-show-progress"]
    assert rows["api_key"] == ["(hidden)", "variable", "OCTAVO_API_KEY"]
    assert rows["block_size"] == ["8", "file", path]
    for empty in ("seed", "catalogue", "root_path"):  # of all types
        assert rows[empty] == ["-", "default"]
    assert rows["allowed_hosts"] == ["a.example,*.b", "flag", "--allowed-hosts"]

    assert main([*arguments, "--json"]) == 0
    shown = capsys.readouterr()
    settings = json.loads(shown.out)
    assert settings["port"] == {"value": 81, "source": "flag", "name": "--port"}
    assert settings["hf_token"] == {"value": "(hidden)", "source": "file", "name": path}
    assert settings["seed"] == {"value": None, "source": "default", "name": None}
    assert {name for name in SECRETS if settings[name]["value"] == "(hidden)"} == SECRETS
    assert "secret" not in table.out + table.err + shown.out + shown.err


def test_wrong_values_are_config_errors() -> None:
    for values in (
        {"shutdown_timeout": -1}, {"served_model_name": ""}, {"max_engine_failures": 0}, {"liveness_timeout": 0},
        {"port": True}, {"host": None}, {"stream_keepalive": float("inf")}, {"max_n": 0}, {"max_header_size": 0},
    ):  # fmt: skip
        (name,) = values
        with pytest.raises(ConfigError, match=f"^{name} must"):
            ServerSettings(**values)
    with pytest.raises(ConfigError, match="unknown setting colour"):
        ServerSettings(colour="red")
    assert ServerSettings(root_path="/").root_path == ""
    assert ServerSettings(root_path="/a/b/").root_path == "/a/b"


def test_keywords_alone_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "81")
    assert ServerSettings().port == 8000
    with pytest.raises(ValueError):
        ServerSettings().port = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "a command is missing: serve, run, chat, complete"),
        (["srve"], "unknown command 'srve'; did you mean serve?"),
        (["dance"], "unknown command 'dance'; the commands are serve"),
        (["--port", "3", "serve"], "--port must come after the command"),
    ],
)
def test_a_wrong_command_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    output = capsys.readouterr().err
    assert said in output
    assert output.count("\n") == 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("octavo ")
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(command in overview for command in ("serve", "config", "doctor"))
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name in Settings.model_fields:
        assert f"({variable(name)})" in " ".join(text.split())
    assert {flag(name) for name in (*SERVICE, *ENGINE) if name != "model"} <= set(text.replace(",", "").split())
    assert "tokens per page of the KV cache [16] (OCTAVO_BLOCK_SIZE)" in " ".join(text.split())


def test_the_help_groups_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped)), "a setting is in two groups"
    assert not set(Settings.model_fields) - set(grouped), "a setting is in no group of server.config.groups"
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    places = [text.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    assert OTHER not in text
    pages = text[places[list(GROUPS).index("KV cache")] : places[list(GROUPS).index("address")]]
    assert "--kv-cache-memory" in pages
    assert "--max-num-seqs" not in pages


def test_a_reader_that_leaves_is_no_error() -> None:
    """As in `octavo config | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "octavo", "config"]
        run = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=200)
    finally:
        os.close(writer)
    assert run.returncode == -signal.SIGPIPE
    assert run.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize(
    ("stdout", "status", "said"),
    [("/dev/full", 1, "octavo config: the output cannot be written: No space left on device.\n"), ("&-", 0, "")],
)
def test_stdout_that_takes_nothing(stdout: str, status: int, said: str) -> None:
    command = ["sh", "-c", f'"{sys.executable}" -m octavo config >{stdout}']
    run = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=200)
    assert (run.returncode, run.stderr) == (status, said)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_stdout_that_takes_no_overview() -> None:
    run = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m octavo >/dev/full'], cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (1, "octavo: the output cannot be written: No space left on device.\n")


def test_a_file_that_fails_is_not_the_output() -> None:
    code = (
        "import errno, sys\nfrom cli import main\n"
        "def fail(*_): raise OSError(errno.EIO, 'Input/output error', '/m/model.gguf')\n"
        "main._run, sys.argv[1:] = fail, ['models']\nsys.exit(main.main())"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (run.returncode, run.stderr) == (1, "octavo models: /m/model.gguf failed: Input/output error.\n")


def test_settings_come_without_what_serving_needs() -> None:
    """`octavo config` and a wrong flag answer at once."""
    code = "import sys, cli.settings; print([n for n in ('torch', 'fastapi', 'uvicorn') if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.stdout.strip() == "[]", run.stderr


def test_the_served_id(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert served_model_id(str(folder), None) == "my-model"
    assert served_model_id(f"{folder}/", None) == "my-model"
    assert served_model_id("org/name", None) == "org/name"
    (tmp_path / "tiny-Q4_K_M.gguf").touch()
    assert served_model_id(str(tmp_path / "tiny-Q4_K_M.gguf"), None) == "tiny-Q4_K_M"
    assert served_model_id("org/name", "mine") == "mine"
    assert served_model_id(str(DEMO_MODEL), None) == "octavo-demo"
    assert served_model_id(str(DEMOS["seq2seq"]), None) == "octavo-demo-seq2seq"


def test_the_packages_are_ours() -> None:
    assert shadowed() is None
