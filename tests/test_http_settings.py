"""Flags, environment variables, and what the command says when they are wrong."""

from __future__ import annotations

import argparse
import dataclasses
import socket
from pathlib import Path

import pytest

from engine import ConfigError, EngineConfig
from octavo import shadowed
from server.cli import main, make_parser
from server.run import DEMO_MODEL, DEMO_MODEL_ID, StartupError, bind, served_model_id, url
from server.settings import ServerSettings, build, flag, variable

# A valid value for every setting, unlike its default.
VALUES = {
    "model": "some/model", "tokenizer": "tok", "skip_tokenizer_init": True, "revision": "main", "hf_token": "t",
    "dtype": "float16", "device": "cuda:1", "max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 99,
    "block_size": 8, "kv_cache_memory": "64MiB", "gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 77,
    "enable_prefix_caching": False, "generation_config": "none", "max_num_beams": 4, "seed": 5, "show_progress": False,
}  # fmt: skip


def engine_config(arguments: list[str], environ: dict[str, str]) -> EngineConfig:
    given = make_parser().parse_args(["serve", *arguments])
    return build(EngineConfig, given, environ, model=str(DEMO_MODEL))


def test_every_setting_is_a_flag() -> None:
    assert set(VALUES) == {field.name for field in dataclasses.fields(EngineConfig)}
    arguments = [VALUES["model"]]
    for name, value in VALUES.items():
        if isinstance(value, bool):
            arguments.append(flag(name) if value else flag(f"no_{name}"))
        elif name != "model":
            arguments += [flag(name), str(value)]
    assert engine_config(arguments, {}) == EngineConfig(**VALUES)


def test_every_setting_is_a_variable_and_the_flag_is_stronger() -> None:
    environ = {variable(name): str(value) for name, value in VALUES.items()}
    assert engine_config([], environ) == EngineConfig(**VALUES)
    stronger = engine_config(["other", "--max-num-seqs", "7", "--enable-prefix-caching"], environ)
    assert stronger == EngineConfig(**(VALUES | {"model": "other", "max_num_seqs": 7, "enable_prefix_caching": True}))


def test_without_settings_the_demo_model_and_the_defaults() -> None:
    assert engine_config([], {"OCTAVO_SEED": ""}) == EngineConfig(model=str(DEMO_MODEL))
    assert build(ServerSettings, argparse.Namespace(), {}) == ServerSettings()
    assert build(ServerSettings, argparse.Namespace(), {"OCTAVO_PORT": "81"}).port == 81


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["--max-num-seqs", "many"], {}, "--max-num-seqs must be an integer, got 'many'"),
        (["--max-num-seqs", "0"], {}, "max_num_seqs must be an integer of at least 1, got 0"),
        (["--dtype", "int3"], {}, "--dtype must be one of auto, float32, bfloat16, float16, got 'int3'"),
        (["--gpu-memory-utilization", "x"], {}, "--gpu-memory-utilization must be a number, got 'x'"),
        (["--port", "70000"], {}, "port must be from 0 to 65535, got 70000"),
        (["--max-num-seq", "3"], {}, "unrecognized arguments: --max-num-seq"),
        ([], {"OCTAVO_PORT": "http"}, "OCTAVO_PORT must be an integer, got 'http'"),
        ([], {"OCTAVO_ENABLE_PREFIX_CACHING": "perhaps"}, "OCTAVO_ENABLE_PREFIX_CACHING must be true or false"),
        ([], {"OCTAVO_LOG_LEVEL": "loud"}, "OCTAVO_LOG_LEVEL must be one of debug, info, warning, error, got 'loud'"),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(
    arguments: list[str],
    environ: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        main(["serve", *arguments])
    assert stopped.value.code == 2
    output = capsys.readouterr().err
    assert said in output
    assert output.count("\n") == 1


def test_wrong_values_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="shutdown_timeout"):
        ServerSettings(shutdown_timeout=-1)
    with pytest.raises(ConfigError, match="served_model_name"):
        ServerSettings(served_model_name="")
    with pytest.raises(ConfigError, match="max_engine_failures"):
        ServerSettings(max_engine_failures=0)
    with pytest.raises(ConfigError, match="liveness_timeout"):
        ServerSettings(liveness_timeout=0)


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("octavo ")
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name in VALUES:
        assert variable(name) in text.replace("\n", "")
    assert "keep" not in text.partition("--block-size")[0]
    assert "tokens a page holds. [16]" in text


def test_the_served_id(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert served_model_id(str(folder), None) == "my-model"
    assert served_model_id(f"{folder}/", None) == "my-model"
    assert served_model_id("org/name", None) == "org/name"
    assert served_model_id("org/name", "mine") == "mine"
    assert served_model_id(str(DEMO_MODEL), None) == DEMO_MODEL_ID


def test_a_taken_port_is_one_clear_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on 127\.0\.0\.1, port {port}: .*--port"):
            bind("127.0.0.1", port)
    with pytest.raises(StartupError, match="no-such-host"):
        bind("no-such-host.invalid", 0)


def test_the_address_is_shown_as_it_can_be_opened() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_the_packages_are_ours() -> None:
    assert shadowed() is None
