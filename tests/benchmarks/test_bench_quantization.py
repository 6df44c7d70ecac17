"""`benchmarks/quantization.py`: divergences and perplexities, files for llama.cpp, a tiny run with and without it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.gguf_files import library
from test_gguf_models import ORACLE

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import offline  # noqa: E402
import quantization  # noqa: E402
from peers import process  # noqa: E402

pytestmark = pytest.mark.slow

TINY = ("--models", "chat", "--stories", "1", "--length", "12", "--cases", "float32", "int4")


def test_divergence_and_perplexity_of_known_distributions() -> None:
    exact = [torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()]
    ours = [torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]).log()]
    texts = [[2, 0, 1]]
    found = quantization.compare(ours, exact, texts)
    assert found["positions"] == 2
    assert found["top1_agreement"] == 0.5
    assert found["kl_divergence"] == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2, rel=1e-2)
    assert found["perplexity"] == pytest.approx((0.25 * 0.5) ** -0.5, abs=1e-4)
    assert found["max_logit_error"] == pytest.approx(math.log(2), abs=1e-4)
    assert quantization.compare(exact, exact, texts)["kl_divergence"] == 0


def test_without_llama_cpp_its_rows_are_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result" / "tiny.json"
    result = quantization.main([*TINY, "--peers-dir", str(tmp_path), "--output", str(output)])
    assert result == json.loads(output.read_text())
    assert (result["files"], result["not_installed"]) == ([], ["llama.cpp"])
    assert "llama.cpp is left out: it is not installed" in capsys.readouterr().out
    assert [row["weights"] for row in result["results"]] == ["float32", "int4"] * 2
    assert {row["text"] for row in result["results"]} == {"greedy", "temperature 1"}
    plain, small = result["results"][:2]
    assert (plain["kl_divergence"], plain["top1_agreement"]) == (0, 1)
    assert small["kl_divergence"] > 0
    assert small["positions"] == plain["positions"] >= 12


def test_speed_is_told_as_a_ratio_to_int8_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"vocab_size": 512, "hidden_size": 72, "intermediate_size": 64, "num_hidden_layers": 2}
    for name, size in small.items():
        monkeypatch.setitem(offline.SHAPE, name, size)
    output = tmp_path / "speed.json"
    arguments = ("--speed", "--requests", "1", "3", "--steps", "2", "--rounds", "2", "--output", str(output))
    result = quantization.main(arguments)
    assert result == json.loads(output.read_text())
    assert [found["requests"] for found in result["speed"]] == [1, 3]
    for found in result["speed"]:
        by_kind = {row["format"]: row for row in found["results"]}
        assert set(by_kind) == {"none", "int8", "int8-fast", "int4"}
        assert by_kind["int8-fast"]["ratio"] == 1.0
        assert all(len(row["rounds"]) == 2 and row["tokens_per_second"] > 0 for row in by_kind.values())


def test_a_plain_file_holds_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat model's bfloat16 weights in a file of float32: Octavo's logits are the same to the last bit."""
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    texts = [[0, 17, 300, 5, 1200], [0, 3]]
    with library(ORACLE):
        import llama_cpp_worker as worker  # type: ignore[import-not-found]

        file = tmp_path / "f32.gguf"
        made = worker.convert(str(quantization.CHAT), str(file), "f32", plain="f32")
    assert made == {"bytes": file.stat().st_size}
    expected = quantization.logits_of(quantization.CHAT, "float32", texts)
    found = quantization.logits_of(file, "widened", texts)
    assert [len(one) for one in found] == [4, 1]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_llama_cpp_and_octavo_read_the_same_files(tmp_path: Path) -> None:
    peers = BENCHMARKS.parent / ".peers"
    if process.find("llama.cpp", peers) is None:
        pytest.skip(f"there is no llama.cpp in {peers} (benchmarks/README.md says how it is installed)")
    result = quantization.main([*TINY, "--peers-dir", str(peers), "--output", str(tmp_path / "tiny.json")])
    rows: dict[tuple[str, str], Any] = {
        (row["file"], row["reader"]): row for row in result["files"] if row["text"] == "temperature 1"
    }
    assert {file for file, _ in rows} == set(quantization.FILES)
    readers = ["llama.cpp", "octavo, widened", "octavo, stored"]
    assert [reader for file, reader in rows if file == "q8_0"] == readers
    assert rows["f32", "llama.cpp"]["kl_divergence"] < 1e-9, "a wrong conversion or another position"
    assert rows["f32", "octavo, widened"]["kl_divergence"] == 0
    for reader in readers:
        assert 0 < rows["q8_0", reader]["kl_divergence"] < 0.01
    assert result["tensors_of_files"]["chat"]["q8_0"] == {"F32": 11, "Q8_0": 36}
    assert result["llama.cpp"]["version"]
