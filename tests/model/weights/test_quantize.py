"""`octavo quantize`: what is served of the folder that it writes is what is served of the original made smaller at
load, to the bit; other readers find the same numbers in it; and what cannot be written leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint
from support.driving import make_engine, run
from support.families import FAMILY_SHAPES
from support.family_shape import make_family_checkpoint
from support.jobs import CHECKPOINT, MIXED
from test_quantization_cache import assert_same, cases, load
from test_quantization_cache import llama as llama  # a fixture
from test_stored_weights import ORACLE

from cli.main import main
from engine import EngineConfig, inspect_model, quantise_checkpoint
from engine.backends.native.gemm import Quantised
from engine.backends.torch.attention import TorchReference
from engine.errors import ConfigError, UnsupportedModelError
from engine.execution.loading import find_quantization
from engine.model import quantised_loading, quantised_writing
from engine.model.checkpoint import read_config
from engine.model.families import build_spec, stored_scheme, weight_table
from engine.model.quantisation import Quantization, quantise
from engine.model.quantised_loading import mark_stored
from engine.model.transformer import Transformer
from engine.model.weight_files import INDEX_FILE, SINGLE_FILE, Checkpoint

KINDS: tuple[Quantization, ...] = ("int8", "int8-fast", "int4")
each_kind = pytest.mark.parametrize("kind", KINDS)
LAYER = "model.layers.0.self_attn.q_proj"


def as_written(weight: torch.Tensor, kind: Quantization) -> Quantised:
    """As it stands in a file."""
    return quantise(weight, kind, "portable")


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made at load is the same as what was written."""
    monkeypatch.setattr(quantised_loading, "form_on", lambda _device, _kind: "portable")


def write(source: Path, folder: Path, kind: Quantization, **more: Any) -> Path:
    quantise_checkpoint(str(source), folder, kind, show_progress=False, **more)
    return folder


@pytest.mark.usefixtures("portable")
@each_kind
def test_it_is_served_as_the_original_is_with_that_quantization(
    kind: Quantization, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without being told; and plain where that is asked for, which is something else."""
    (llama / "tokenizer_config.json").write_text("{}")
    (llama / "consolidated.safetensors").write_text("weights of another layout")
    folder = write(llama, tmp_path / "new" / "small", kind)
    names = {"config.json", "generation_config.json", "tokenizer_config.json", SINGLE_FILE}
    assert {file.name for file in folder.iterdir()} == names
    assert (folder / SINGLE_FILE).stat().st_size < (llama / SINGLE_FILE).stat().st_size

    def answers(path: Path, **settings: Any) -> Any:
        engine = make_engine(path, **settings)
        assert engine.info.quantization == (None if settings.get("quantization") == "none" else kind)
        found = run(engine, MIXED)
        engine.close()
        return found

    expected = answers(llama, quantization=kind)
    with caplog.at_level("DEBUG", "octavo.model"):
        assert answers(folder) == expected
    assert f"Quantized weights ({kind}) of 8 matrices are used in their stored format" in caplog.text
    assert answers(folder, quantization=kind) == expected
    assert answers(folder, quantization="none") != expected
    assert inspect_model(EngineConfig(model=str(folder), device="cpu")).quantization == kind


# Each way in which a table puts stored matrices into those of the model; `gpt-oss` and `dbrx` have stacks.
WAYS = ("bart", "bert-masked", "clip", "convbert", "dbrx", "deepseek-v3", "deit-teacher", "falcon-alibi", "gpt-oss",
        "m2m100", "phi3-factors-by-request", "qwen2-moe", "switch-experts", "t5-own-head-scaled")  # fmt: skip


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize(("shape", "make"), [case for case in cases() if case.id in WAYS])
@pytest.mark.slow
def test_every_way_of_a_table(shape: Any, make: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    """To the bit."""
    source, folder = tmp_path / "model", tmp_path / "new"
    make(shape, source)
    write(source, folder, "int4")
    assert_same(load(source, None), load(folder, None))


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "granite"])
def test_what_has_no_place_stays_plain(name: str, tmp_path: Path) -> None:
    """A row that fills no group; and what a family multiplies by a number."""
    source, folder = tmp_path / "model", tmp_path / "new"
    make_family_checkpoint(FAMILY_SHAPES[name], source)
    written = quantise_checkpoint(str(source), folder, "int4", show_progress=False)
    stored = load_file(folder / SINGLE_FILE)
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert written.quantised == sum(key.endswith(".weight_packed") for key in stored) > 0
    assert set(written.plain) <= set(stored)
    matrices = {key for key, tensor in stored.items() if key.endswith(".weight") and tensor.dim() == 2}
    assert {f"{module}.weight" for module in ignored} == matrices | {"lm_head.weight"}
    assert_same(load(source, None), load(folder, None))


def test_files_have_the_size_that_is_asked_for(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an index, and without more than one tensor in memory at a time."""
    alive: list[weakref.ref[torch.Tensor]] = []
    read = Checkpoint.read

    def reading(self: Checkpoint, name: str, *others: Any) -> torch.Tensor:
        assert not [one for one in alive if one() is not None], "the one before is gone"
        tensor = read(self, name, *others)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Checkpoint, "read", reading)
    folder = write(llama, tmp_path / "parts", "int4", shard_bytes=20_000)
    monkeypatch.undo()
    assert len(alive) == len(load_file(llama / SINGLE_FILE))
    index = json.loads((folder / INDEX_FILE).read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))
    ]
    assert len(files) > 2
    held = {key: file.name for file in files for key in load_file(file)}
    assert index["weight_map"] == held
    whole = load_file(write(llama, tmp_path / "one", "int4") / SINGLE_FILE)
    assert sum(tensor.nbytes for tensor in whole.values()) == index["metadata"]["total_size"]
    for file in files:
        with safe_open(str(file), framework="pt") as handle:
            assert all(torch.equal(handle.get_tensor(key), whole[key]) for key in handle.keys())  # noqa: SIM118


@each_kind
def test_the_library_reads_what_is_meant(
    kind: Quantization, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """compressed-tensors takes the config, and makes of each matrix what ours stands for, in the scales' format."""
    if not ORACLE.is_dir():
        pytest.skip(f"there is no {ORACLE}: make test installs it")
    monkeypatch.syspath_prepend(str(ORACLE))
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig

    folder = write(llama, tmp_path / "new", kind)
    said = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    scheme = said.config_groups["group_0"]
    packs = kind != "int8-fast"
    compressor = getattr(compressors, "PackedQuantizationCompressor" if packs else "IntQuantizationCompressor")
    stored, original = load_file(folder / SINGLE_FILE), load_file(llama / SINGLE_FILE)
    modules = [key.removesuffix(".weight_scale") for key in stored if key.endswith(".weight_scale")]
    assert LAYER in modules
    for module in modules:
        parts = {key.rpartition(".")[2]: tensor for key, tensor in stored.items() if key.startswith(f"{module}.")}
        ours = as_written(original[f"{module}.weight"], kind)
        theirs = compressor.decompress(dict(parts), scheme)["weight"]
        assert torch.equal(theirs, ours.dense().to(theirs.dtype))
        wider = compressor.decompress(parts | {"weight_scale": parts["weight_scale"].float()}, scheme)["weight"]
        assert torch.equal(wider, ours.dense())


READER = """
import sys, torch
from transformers import AutoModelForCausalLM
ids = torch.arange(24)[None] % 97
for folder, plain, numbers in zip(*[iter(sys.argv[1:])] * 3):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    held = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    assert not held.load_state_dict(torch.load(numbers), strict=False).unexpected_keys
    with torch.no_grad():
        ours, theirs = held(ids).logits, model(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-3), (ours - theirs).abs().max()
    print("read")
"""


@pytest.mark.slow
def test_transformers_reads_it(llama: Path, tmp_path: Path) -> None:
    """And computes what it computes with the numbers that the matrices stand for."""
    if not ORACLE.is_dir():
        pytest.skip(f"there is no {ORACLE}: make test installs it")
    original, arguments = load_file(llama / SINGLE_FILE), []
    for kind in ("int8", "int4"):
        folder, numbers = write(llama, tmp_path / kind, kind), tmp_path / f"{kind}.pt"
        stored = load_file(folder / SINGLE_FILE)
        modules = [key.removesuffix(".weight_packed") for key in stored if key.endswith(".weight_packed")]
        torch.save({f"{m}.weight": as_written(original[f"{m}.weight"], kind).dense() for m in modules}, numbers)
        arguments += [str(folder), str(llama), str(numbers)]
    found = subprocess.run(
        [sys.executable, "-c", READER, *arguments],
        env=os.environ | {"PYTHONPATH": str(ORACLE)}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (0, "read\nread\n"), found.stderr


@pytest.mark.usefixtures("portable")
def test_other_checkpoints_of_the_format_are_taken_as_they_are(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A CPU serves them as they are stored unless told otherwise, a GPU widens them."""
    folder = write(llama, tmp_path / "new", "int4")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["octavo_quantization"]
    (folder / "config.json").write_text(json.dumps(config))
    scheme = stored_scheme(read_config(folder))
    defaults = {
        device: find_quantization(EngineConfig(model="m"), folder, torch.device(device), scheme)
        for device in ("cpu", "cuda")
    }
    assert defaults == {"cpu": "stored", "cuda": None}
    with caplog.at_level("DEBUG", "octavo.model"):
        taken = load(folder, None, "int4")
    assert "are used in their stored format" in caplog.text
    assert_same(load(llama, None, "int4"), taken)


@pytest.mark.parametrize(("device", "kind"), [("cpu", "int8-fast"), ("cuda", "int8")])
def test_int8_by_outputs_stays_so_where_a_device_has_it(device: str, kind: str, llama: Path, tmp_path: Path) -> None:
    """With the quantization `stored`, which takes what is nearest elsewhere."""
    folder = write(llama, tmp_path / "new", "int8-fast")
    config = read_config(folder)
    spec = build_spec(config)
    model = Transformer(spec, TorchReference(), 64, device="meta", dtype=torch.float32)
    table = weight_table(config, spec)
    with Checkpoint(folder, stored_scheme(config)) as stored:
        stored.rename(table)
        mark_stored(model, stored, table, torch.device(device))
    assert {module.stored for module, _ in model.matrices(None)} == {kind, None}


def test_a_mark_that_is_not_known(llama: Path, tmp_path: Path) -> None:
    folder = write(llama, tmp_path / "new", "int4")
    marked = stored_scheme(read_config(folder))
    for device in map(torch.device, ("cpu", "cuda")):
        assert find_quantization(EngineConfig(model="m"), folder, device, marked) == "int4"
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"octavo_quantization": "int4"', '"octavo_quantization": "int3"'))
    with pytest.raises(UnsupportedModelError, match=r"octavo_quantization .* one of int8, int8-fast, int4; got 'int3'"):
        read_config(folder)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_is_broken_off_leaves_nothing(
    error: type[BaseException], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    calls: list[int] = []

    def failing(tensor: torch.Tensor) -> Any:
        calls.append(1)
        if len(calls) > 5:
            assert list(place.glob(".octavo-writing-*")), "it is written beside its place"
            raise error("no more")
        return raw_bytes(tensor)

    raw_bytes = quantised_writing.raw_bytes
    monkeypatch.setattr(quantised_writing, "raw_bytes", failing)
    with pytest.raises(ConfigError if error is OSError else error, match="no more"):
        write(llama, place / "new", "int8")
    assert not list(place.iterdir())


def gpt2(folder: Path) -> str:
    make_checkpoint("gpt2-tied", folder)
    return str(folder)


def unknown(folder: Path) -> str:
    make_checkpoint(CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForEverything"]}))
    return str(folder)


def small(folder: Path) -> str:
    make_checkpoint(CHECKPOINT, folder)
    return str(write(folder, folder.parent / "small", "int8"))


def not_finite(folder: Path) -> str:
    made = make_checkpoint(CHECKPOINT, folder)
    made.model.get_submodule(LAYER).weight.data[3, 3] = float("inf")
    made.model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (gpt2, r"needs matrices .* inputs are a multiple of 32, .*transformer\.h\.0.*--quantization"),
        (unknown, "'LlamaForEverything' is not supported"),
        (small, r"already quantized \(compressed-tensors \(pack-quantized\)\)\. Serve it unchanged"),
        (not_finite, rf"{LAYER}\.weight contains infinite numbers or NaN"),
        (lambda folder: str(folder), "does not exist"),
    ],
    ids=["gpt2", "unknown", "small", "not-finite", "nothing"],
)
def test_what_cannot_be_written_is_refused(
    make: Callable[[Path], str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make(tmp_path / "model")
    assert main(["quantize", model, str(tmp_path / "new")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(words, said.err)
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".octavo-*"))


def test_a_file_in_the_place_of_the_folder(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("", "something"):
        (tmp_path / "new").write_text(content)
        assert main(["quantize", str(llama), str(tmp_path / "new")]) == 1
        assert f"{tmp_path / 'new'} is a file. Choose a folder that does not exist yet" in capsys.readouterr().err
        assert (tmp_path / "new").read_text() == content


def test_the_command(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    assert main(["quantize", str(llama), "--to", "int4", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(folder)
    assert (found["quantization"], found["files"], found["matrices"]) == ("int4", 1, 14)
    assert found["bytes"] < found["bytes_before"]
    assert main(["quantize", str(llama), str(folder)]) == 1
    assert "exists and is not empty" in capsys.readouterr().err
    assert main(["quantize", str(llama), str(tmp_path / "other")]) == 0
    assert "Serve them: octavo serve" in capsys.readouterr().out
    assert main(["models", str(folder)]) == 0
    assert " MiB in int4, on cpu" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["quantize", str(llama), str(tmp_path / "more"), "--max-shard-size", "huge"])
    assert caught.value.code == 2
    assert "--max-shard-size must be a size" in capsys.readouterr().err
