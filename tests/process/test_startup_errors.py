"""What keeps a model from being loaded is said in a sentence or two, each with what to do; never as a trace."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import Checkpoint
from support.driving import make_engine
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine import LLM, ConfigError, InvalidRequestError, ModelLoadError, SamplingParams
from engine.execution import kv_cache, loading
from engine.model import weight_files

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(checkpoint("llama-grouped").path, tmp_path / "model"))


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises((ModelLoadError, ConfigError)) as error:
        make_engine(folder, **settings)
    return str(error.value)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def shard(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut weights": (lambda folder: truncate(folder / "model.safetensors"), "damaged or incomplete: download it again"),
    "empty weights": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "damaged or incomplete"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
    "missing shard": (lambda folder: shard(folder, "model-1.safetensors"), "lacks model-1.safetensors"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{no"), "config.json cannot be read"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[1]"), "config.json cannot be read"),
    "strange EOS": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": "x"}'),
        "contains 'x' instead of token ids",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_checkpoint(name: str, folder: Path) -> None:
    spoil, expected = SPOILED[name]
    spoil(folder)
    message = refusal(folder)
    assert expected in message
    assert str(folder) in message or name == "strange EOS"


def test_files_that_may_not_be_read(folder: Path) -> None:
    """As another user than root, to whom all files are open; a first load brings in all modules before that."""
    code = (
        "import os, sys; from engine import Engine, EngineConfig, OctavoError\n"
        "Engine(EngineConfig(model=sys.argv[1], device='cpu'))\n"
        "if os.getuid() == 0: os.setegid(65534); os.seteuid(65534)\n"
        "for path in sys.argv[2:]:\n"
        "    try: Engine(EngineConfig(model=path, device='cpu'))\n"
        "    except OctavoError as error: print(error)\n"
    )
    names = ["", "config.json", "model.safetensors", "generation_config.json"]
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        models = [Path(shutil.copytree(folder, Path(top) / str(number))) for number in range(len(names))]
        for model, name in zip(models, names, strict=True):
            for path in (model, *model.iterdir()):
                path.chmod(0o755)
            (model / name).chmod(0)
        command = [sys.executable, "-c", code, str(folder), *map(str, models)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        models[0].chmod(0o755)
        lines = run.stdout.splitlines()
        assert len(lines) == len(names)
        for line, model, name in zip(lines, models, names, strict=True):
            assert "ermission denied" in line
            assert str(model / name) in line


def test_a_tokenizer_of_another_model(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One with more tokens than the vocabulary is refused; added tokens beyond it are named, and refused in texts."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    for plain in (size + 1, size):
        words = Fast(models.WordLevel({f"w{i}": i for i in range(plain)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.add_special_tokens(["<image>"])
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / str(plain))
    settings = {"device": "cpu", "num_gpu_blocks_override": 8, "show_progress": False}
    with pytest.raises(
        ModelLoadError, match=rf"has {size + 1} tokens, but the model's vocabulary has {size}.* tokenizer "
    ):
        LLM(str(folder), tokenizer=str(tmp_path / str(size + 1)), **settings)
    llm = LLM(str(folder), tokenizer=str(tmp_path / str(size)), **settings)
    assert f"1 added tokens outside the model's vocabulary (ids 0 to {size - 1}): '<image>' ({size})" in caplog.text
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    assert llm.generate("w1 w2", greedy)[0].prompt_token_ids == [1, 2]
    with pytest.raises(InvalidRequestError, match=f"token id {size}, but the vocabulary has ids 0 to {size - 1}"):
        llm.generate("w1 <image>", greedy)
    llm.close()


def test_weights_that_exceed_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    monkeypatch.setattr(loading, "available_memory", lambda: size + loading.LOADING - 1)
    message = refusal(folder)
    assert f"take {loading.gib(size)} as float32, and the processes 128.0 MiB more while they load" in message
    assert "are free. Use a smaller model, a 16-bit --dtype, --quantization int8 or int4, or a machine" in message


@pytest.mark.parametrize("settings", [{"num_gpu_blocks_override": 64}, {"kv_cache_memory": "1MiB"}], ids=str)
def test_pages_that_exceed_the_memory(settings: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 100_000)
    message = refusal(folder, **({"num_gpu_blocks_override": None} | settings))
    assert "but only 100000 bytes of memory are free" in message
    assert "--" + next(iter(settings)).replace("_", "-") in message


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("mmap: Cannot allocate memory (12)"), torch.OutOfMemoryError("CUDA out of memory.")],
    ids=repr,
)  # fmt: skip
def test_memory_that_runs_out_anywhere(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr(weight_files, "safe_open", fail)
    message = refusal(folder)
    assert "There is not enough memory" in message
    assert "--dtype" in message


def test_other_faults_are_not_explained_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(weight_files, "safe_open", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        make_engine(folder)
