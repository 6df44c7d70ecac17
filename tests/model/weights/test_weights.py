"""Loading checkpoints: what is accepted, and that everything else is refused with what to do."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import errors as hub
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.backends.torch.attention import TorchReference
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model import checkpoint, families, weight_files, weights
from engine.model.transformer import Transformer

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def load(path: Path, dtype: torch.dtype = torch.float32, show_progress: bool | None = False) -> Transformer:
    config = checkpoint.read_config(checkpoint.locate(str(path)))
    return weights.load_model(
        path,
        config,
        families.build_spec(config),
        dtype=dtype,
        device=torch.device("cpu"),
        backend=TorchReference(),
        max_model_len=16,
        show_progress=show_progress,
    )


def save_llama(path: Path, **changes: Any) -> None:
    torch.manual_seed(0)
    values: dict[str, Any] = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**(values | changes))).save_pretrained(path)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    save_llama(root / "llama")
    save_llama(root / "tied", tie_word_embeddings=True)
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(root / "gpt2")
    return {name: root / name for name in ("llama", "tied", "gpt2")}


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(originals[name], tmp_path / name))


def tensors(path: Path) -> dict[str, Tensor]:
    held: dict[str, Tensor] = load_file(path / weight_files.SINGLE_FILE)
    return held


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    held = tensors(path)
    change(held)
    save_file(held, path / weight_files.SINGLE_FILE, metadata={"format": "pt"})


def configure(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def shard(path: Path) -> dict[str, str]:
    """Split the single file in two; returns the index's weight_map."""
    held = tensors(path)
    (path / weight_files.SINGLE_FILE).unlink()
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    placed = {name: files[i % 2] for i, name in enumerate(held)}
    for file in files:
        save_file({n: t for n, t in held.items() if placed[n] == file}, path / file)
    write_index(path, placed)
    return placed


def write_index(path: Path, placed: dict[str, Any]) -> None:
    (path / weight_files.INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def state(model: Transformer) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def test_fused_parameters_hold_the_stored_tensors(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    held, ours = tensors(path), state(load(path))
    layer = "model.layers.1"
    joined = torch.cat([held[f"{layer}.self_attn.{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(ours["decoder.blocks.1.attention.inner.qkv.weight"], joined)
    joined = torch.cat([held[f"{layer}.mlp.{n}_proj.weight"] for n in ("gate", "up")])
    assert torch.equal(ours["decoder.blocks.1.ffn.inner.gate_up.weight"], joined)
    assert torch.equal(ours["head.weight"], held[HEAD])
    held, ours = tensors(folder("gpt2")), state(load(path.parent / "gpt2"))
    assert torch.equal(ours["decoder.blocks.0.ffn.inner.up.weight"], held["transformer.h.0.mlp.c_fc.weight"].t())


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2"])
def test_a_table_names_all_parameters(name: str, folder: Callable[[str], Path]) -> None:
    config = checkpoint.read_config(folder(name))
    family, model_spec = families.find(config), families.build_spec(config)
    assert family.weights is not None
    parameters = state(Transformer(model_spec, TorchReference(), 16))
    assert {entry.target for entry in family.weights(model_spec).entries} == set(parameters)


def test_shards_load_like_one_file(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    whole = state(load(path))
    shard(path)
    pieces = state(load(path))
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "..", "a\\b", "", 3])
def test_shards_outside_the_folder_are_refused(name: Any, folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    placed = shard(path)
    shutil.copy(path / "model-00001-of-00002.safetensors", path.parent / "x.safetensors")
    write_index(path, dict.fromkeys(placed, name))
    with pytest.raises(ModelLoadError, match="shards must be in the same folder"):
        load(path)


def test_missing_shard_and_damaged_index(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    shard(path)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks model-00002-of-00002.safetensors"):
        load(path)
    for damaged in ("{", "[]", '{"weight_map": 3}', "{}"):
        (path / weight_files.INDEX_FILE).write_text(damaged)
        with pytest.raises(ModelLoadError, match=rf"{weight_files.INDEX_FILE} is damaged"):
            load(path)
    write_index(path, {})
    with pytest.raises(ModelLoadError, match="names no files"):
        load(path)


def test_a_tensor_in_two_shards_is_refused(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    held = tensors(path)
    shard(path)
    for file in path.glob("model-*.safetensors"):
        save_file({NORM: held[NORM]}, file)
    with pytest.raises(ModelLoadError, match=rf"{NORM} twice, in model-00001.*model-00002"):
        load(path)


def test_missing_tensors_are_named(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    rewrite(path, lambda held: (held.pop(NORM), held.pop("model.layers.1.self_attn.k_proj.weight")))
    with pytest.raises(ModelLoadError, match=r"lacks tensors.*model\.norm\.weight.*layers\.1\.self_attn\.k_proj"):
        load(path)


def test_unexpected_tensors_are_named_and_counted(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    rewrite(path, lambda held: held.update({f"model.extra.{i}": torch.zeros(1) for i in range(8)}))
    with pytest.raises(ModelLoadError, match=r"not match its config: model\.extra\.0, .*and 3 more"):
        load(path)


def test_shapes_are_checked_with_expected_and_found(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    rewrite(path, lambda held: held.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(7, 16)}))
    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.k_proj\.weight should .*\[8, 16\].*\[7, 16\]"):
        load(path)


def test_a_truncated_or_foreign_file_is_named(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    file = path / weight_files.SINGLE_FILE
    whole = file.read_bytes()
    for damaged in (whole[:-100], whole[:20], b"", b"not safetensors at all"):
        file.write_bytes(damaged)
        with pytest.raises(ModelLoadError, match=r"llama/model\.safetensors cannot be read.*download it again"):
            load(path)


@pytest.mark.parametrize("change", ["written", "replaced"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    change: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder("llama")
    file = path / weight_files.SINGLE_FILE
    read = weight_files.Checkpoint.read

    def read_and_change(self: weight_files.Checkpoint, *arguments: Any) -> Tensor:
        found = read(self, *arguments).clone()
        if change == "written":
            os.utime(file, ns=(1, 1))
        else:
            status = file.stat()
            shutil.copy(file, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        return found

    monkeypatch.setattr(weight_files.Checkpoint, "read", read_and_change)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors changed while it was read"):
        load(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.h5", "consolidated.00.pth", "model.pt"])
def test_other_formats_are_refused_with_what_to_do(name: str, folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    (path / weight_files.SINGLE_FILE).rename(path / name)
    with pytest.raises(ModelLoadError, match=rf"{name}.*save_pretrained\(folder\)"):
        load(path)


def test_no_weights_or_weights_of_another_name(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    (path / weight_files.SINGLE_FILE).rename(path / "weights.safetensors")
    with pytest.raises(ModelLoadError, match=r"holds weights\.safetensors, but neither model\.safetensors"):
        load(path)
    (path / "weights.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no weights; expected model\.safetensors"):
        load(path)


def test_a_stored_head_that_equals_the_embedding_is_accepted(folder: Callable[[str], Path]) -> None:
    path = folder("tied")
    assert HEAD not in tensors(path)
    rewrite(path, lambda held: held.update({HEAD: held[EMBED].clone()}))
    assert "head.weight" not in state(load(path))


def test_a_stored_head_of_its_own_is_used_as_in_transformers(
    folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = folder("tied")
    rewrite(path, lambda held: held.update({HEAD: held[EMBED] + 1}))
    with caplog.at_level(logging.WARNING, logger="octavo.model"):
        model = load(path)
    assert "tie_word_embeddings is true, but lm_head.weight" in caplog.text
    reference = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(state(model)["head.weight"], reference.lm_head.weight)
    assert torch.equal(state(model)["head.weight"], tensors(path)[HEAD])


def test_names_without_prefix_and_stored_masks_load(folder: Callable[[str], Path]) -> None:
    path = folder("gpt2")
    expected = state(load(path))

    def publish(held: dict[str, Tensor]) -> None:
        for name in list(held):
            held[name.removeprefix("transformer.")] = held.pop(name)
        for layer in range(2):
            held[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.uint8).tril()
            held[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    rewrite(path, publish)
    found = state(load(path))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    rewrite(path, lambda held: held.update({"transformer.wte.weight": held["wte.weight"].clone()}))
    with pytest.raises(ModelLoadError, match=r"transformer\.wte\.weight twice: as .*wte\.weight and as .*wte\.weight"):
        load(path)


def test_a_headless_tied_checkpoint_loads(folder: Callable[[str], Path]) -> None:
    path = folder("tied")
    expected = state(load(path))
    transformers.AutoModel.from_pretrained(path).save_pretrained(path)
    assert EMBED not in tensors(path)
    assert families.architecture(checkpoint.read_config(path)) == "LlamaModel"
    found = state(load(path))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_formats_convert_and_the_stored_one_is_found(stored: torch.dtype, folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    rewrite(path, lambda held: held.update({name: tensor.to(stored) for name, tensor in held.items()}))
    held = tensors(path)
    assert torch.equal(state(load(path))["head.weight"], held[HEAD].float())
    configure(path, dtype=str(stored).removeprefix("torch."))
    assert weights.stored_dtype(path, checkpoint.read_config(path)) == stored
    configure(path, dtype=None)
    assert weights.stored_dtype(path, checkpoint.read_config(path)) == stored


def test_values_beyond_float16_are_refused(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    rewrite(path, lambda held: held[NORM].fill_(1e6))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight exceed.*--dtype bfloat16 or float32"):
        load(path, torch.float16)
    assert load(path, torch.bfloat16).dtype == torch.bfloat16


def test_numbers_of_few_bits_that_no_config_explains_are_refused(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    rewrite(path, lambda held: held.update({NORM: held[NORM].to(torch.int8)}))
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is stored as I8"):
        load(path)
    configure(path, quantization_config={"quant_method": "quip"})
    with pytest.raises(UnsupportedModelError, match=r"quantized with quip, which is not supported"):
        load(path)


def test_memory_that_does_not_suffice_is_one_clear_error(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(weights, "Transformer", full)
    with pytest.raises(ModelLoadError, match=r"do not fit into the free memory of cpu.*tried to allocate 2 GiB"):
        load(folder("llama"))


def test_progress_is_shown_on_request(folder: Callable[[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    path = folder("llama")
    load(path)
    load(path, show_progress=None)  # stderr is not a terminal
    assert "Loading weights" not in capfd.readouterr().err
    load(path, show_progress=True)
    assert "100%" in capfd.readouterr().err


def test_local_folders_are_found_or_explained(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = folder("llama")
    assert checkpoint.locate(str(path)) == path
    with pytest.raises(ModelLoadError, match=r"nowhere/model does not exist\. Give a folder"):
        checkpoint.locate(str(tmp_path / "nowhere" / "model"))
    for name in ("./nowhere", "../nowhere", "~/nowhere/at/all", "nowhere/", "a/b/c"):
        with pytest.raises(ModelLoadError, match="does not exist"):
            checkpoint.locate(name)
    with pytest.raises(ModelLoadError, match=r"is a file, but not a \.gguf file"):
        checkpoint.locate(str(path / "config.json"))
    (path / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        checkpoint.locate(str(path))


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "from the hub")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            hub_error(hub.RepositoryNotFoundError),
            "neither a local folder nor a public model on the hub.*HF_TOKEN",
        ),
        (hub_error(hub.GatedRepoError), "restricted.*huggingface.co/org/name.*HF_TOKEN"),
        (hub_error(hub.RevisionNotFoundError), "no revision 'v9'"),
        (hub.LocalEntryNotFoundError("no network"), "not all in the local cache"),
        (hub.OfflineModeIsEnabled("off"), "not all in the local cache.*local model"),
        (hub.HFValidationError("bad id"), "valid hub id"),
        (OSError("disk full"), "OSError: disk full"),
    ],
)
def test_hub_failures_are_explained(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr("engine.model.hub.snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=message):
        checkpoint.locate("org/name", revision="v9")


def test_offline_without_a_cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"offline mode is on \(HF_HUB_OFFLINE\)"):
        checkpoint.locate("octavo-tests/nothing")


def test_the_hub_is_asked_for_needed_files_only(monkeypatch: pytest.MonkeyPatch, folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    asked: dict[str, Any] = {}

    def download(model: str, **kwargs: Any) -> str:
        asked.update(kwargs, model=model)
        return str(path)

    monkeypatch.setattr("engine.model.hub.snapshot_download", download)
    assert checkpoint.locate("org/name", revision="main", hf_token="secret") == path
    assert (asked["model"], asked["revision"], asked["token"]) == ("org/name", "main", "secret")
    patterns = asked["allow_patterns"]
    assert {"*.safetensors", "config.json", "generation_config.json"} <= set(patterns)
    assert not any(".bin" in p or ".gguf" in p or p == "*" for p in patterns)
    (path / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"org/name on the hub has no config\.json"):
        checkpoint.locate("org/name")


def test_configs_that_cannot_be_read(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = folder("llama")
    whole = (path / "config.json").read_text()
    ran = tmp_path / "ran"
    (path / "configuration_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    configure(path, model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    with pytest.raises(UnsupportedModelError, match=r"contains its own model code.*never run"):
        checkpoint.read_config(path)
    assert not ran.exists()
    for damaged in ("{", '{"model_type": "unheard-of"}', whole.replace('"hidden_size": 16', '"hidden_size": "wide"')):
        (path / "config.json").write_text(damaged)
        with pytest.raises(
            ModelLoadError, match=r"llama/config\.json(?: cannot be read: \S|: hidden_size must be an integer)"
        ):
            checkpoint.read_config(path)
