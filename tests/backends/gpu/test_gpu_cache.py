"""`benchmarks/gpu_cache.py`: kernels compiled without a GPU into a cache, by the engine's own launches."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from gpu_parts import shapes  # noqa: E402

from engine.host.folders import cache_folder  # noqa: E402

pytestmark = pytest.mark.slow


def filled(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu_cache.py"), "--cache", str(cache), *arguments]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)


def test_a_cache_has_what_another_process_launches(tmp_path: Path) -> None:
    """The kernels of a start, of one row in all its ways, of prompts, samplers and beams; a second process, in which a
    driver of the same target is asked, compiles none of them, in the folder's new place."""
    config, cache, moved = tmp_path / "config.json", tmp_path / "cache", tmp_path / "moved"
    config.write_text(json.dumps(shapes.config_of("Llama-3.1-8B", tiny=True) | {"dtype": "bfloat16"}))
    arguments = ["--config", str(config), "--capabilities", "90", "--kv-cache-dtypes", "auto", "int8"]
    done = filled(cache, *arguments, "--home", str(moved))
    assert done.returncode == 0, done.stderr[-4000:]
    metadata = [json.loads(file.read_text()) for file in cache.glob("*/*.json") if not file.name.startswith("__grp__")]
    assert {str(one["target"]) for one in metadata} == {str({"backend": "cuda", "arch": 90, "warp_size": 32})}, (
        "as Triton's driver for CUDA names such a GPU"
    )
    names = {one["name"] for one in metadata}
    assert {"decode", "prefill", "plan_decode", "plan_prefill", "norm_kernel", "held_kernel", "copy_kernel"} <= names
    read = ["i8" in file.read_text() for file in cache.glob("*/decode.ttir")]
    assert set(read) == {False, True}, "pages of 16 bits, and of 8"
    assert {one["launch_pdl"] for one in metadata if one["name"] == "held_kernel"} == {False, True}
    assert f"sm_90: {len(metadata)} compiled, " in done.stdout

    cache.rename(moved)
    before = {file: file.stat().st_mtime_ns for file in moved.glob("*/*.cubin")}
    done = filled(moved, *arguments, "--child", "kernels")  # as a server: it leaves the folder's paths alone
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"sm_90: 0 compiled, {len(metadata)} found" in done.stdout, done.stdout
    assert {file: file.stat().st_mtime_ns for file in moved.glob("*/*.cubin")} == before


KEYS = """
import sys

from engine.backends.triton import attention_decode, attention_prefill
from engine.backends.triton.attention import TritonAttention

TritonAttention()
kernels = {"decode": attention_decode.decode, "prefill": attention_prefill.prefill}
known = {name: kernels[name].cache_key for name in sys.argv[1:]}
print(sorted(known.items()))
"""


def test_kernels_have_the_same_keys_whichever_starts_first() -> None:
    """Else what one process has compiled is not found by another, which begins with another step."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = [
        subprocess.run(
            [sys.executable, "-c", KEYS, *order],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for order in (("decode", "prefill"), ("prefill", "decode"))
    ]
    assert told[0] == told[1]


START = """
import sys
from unittest import mock

sys.path.append(sys.argv[1])
from gpu_parts.starter import compile_starter

with mock.patch("triton.runtime.build._build", side_effect=RuntimeError("it was compiled")):
    print(compile_starter())
"""


def test_what_starts_kernels_is_compiled_once(tmp_path: Path) -> None:
    """A process that may compile nothing finds it, and loads it beside a library of the driver's name."""
    if shutil.which("gcc") is None or not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("there is no gcc, or there are no headers of Python's")

    def started() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", START, str(BENCHMARKS)]
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    assert "it was compiled" in started().stderr
    done = filled(tmp_path, "--child", "starter")
    assert done.stdout == "starter: compiled\n", done.stderr
    assert [file.name.partition(".")[0] for file in tmp_path.glob("*/*")] == ["cuda_utils"]
    done = started()
    assert done.stdout == "None\n", done.stderr


def test_without_a_compiler_the_first_start_compiles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    done = filled(tmp_path / "cache", "--child", "starter")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "starter: a C compiler is missing, the first start compiles it\n"


def test_unknown_gpus_are_refused(tmp_path: Path) -> None:
    done = filled(tmp_path, "--models", "Qwen3-0.6B", "--capabilities", "75")
    assert done.returncode == 1
    assert "kernels are compiled for 80, 86, 89, 90, 100, 120, not for 75" in done.stderr


def test_what_a_step_takes_the_host_is_timed_without_a_gpu(tmp_path: Path) -> None:
    """Steps with a prompt and without are graphs, which start nothing; too slow a step is told by the status."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(shapes.config_of("Llama-3.1-8B", tiny=True) | {"dtype": "bfloat16"}))
    few = ["--config", str(config), "--rows", "3", "--chunk", "16", "--steps", "6"]
    command = [sys.executable, str(BENCHMARKS / "gpu_host.py"), *few]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache_folder("test-triton"))}
    output = tmp_path / "host.json"
    generous = [*command, "--most", "1000", "--output", str(output)]
    done = subprocess.run(generous, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"(\S+) ms for a step of 3 rows and 16 tokens of a prompt, (\S+) ms for one", done.stdout)
    assert found is not None, done.stdout
    assert min(map(float, found.groups())) > 0
    (row,) = json.loads(output.read_text())["results"]
    assert [f"{row[name]:.2f}" for name in ("mixed_ms", "decode_ms")] == list(found.groups())
    done = subprocess.run([*command, "--most", "0.001"], env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 1
    assert "more than 0.001 ms" in done.stderr
