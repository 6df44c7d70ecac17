"""PEFT's folders against models of transformers in which the adapter is merged: our matrix plus our product equals the
matrix of the merged checkpoint, whatever form the family stores it in."""

from __future__ import annotations

import json
import logging
import os
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import encoder_shape, family_shape, seq2seq
from support.encoders import ENCODER_SHAPES
from support.families import FAMILY_SHAPES
from support.gguf_bytes import F32, TEXT, entry, file_of, tensor, text
from support.gguf_files import KINDS, changed, interleaved
from support.pages import load
from support.peft_folders import adapter_tensors, matrices, merged, root_scale, write_adapter
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES
from torch import Tensor

from engine.errors import AdapterError
from engine.model.adapter_targets import adaptable as slots_of
from engine.model.lora.gguf import gguf_parts
from engine.model.lora.reading import _folder, _peft_parts, largest_rank, read_adapter
from engine.model.lora.targets import Targets
from engine.model.sharding import Share, shard
from engine.model.transformer import Transformer

# Together they store their matrices in each form that a weight table knows.
SHAPES: dict[str, tuple[Any, Callable[[Any, Path], Any]]] = {
    **{
        name: (FAMILY_SHAPES[name], family_shape.make_family_checkpoint)
        for name in (
            "llama", "qwen2", "gpt2", "phi3", "falcon-alibi", "gptj", "codegen", "bloom", "gemma3", "granite", "cohere",
            "deepseek-v3", "stablelm-parallel-biases-tied", "mpt", "gpt", "gpt-neox", "gpt-bigcode", "mixtral", "opt",
            "qwen3-next", "olmo-hybrid", "gemma3n", "gemma4-experts-keys-as-values", "recurrent-gemma", "kimi-linear",
        )
    },
    **{
        name: (ENCODER_SHAPES[name], encoder_shape.make_encoder_checkpoint)
        for name in (
            "bert-classes", "roberta-classes", "deberta-1", "deberta-v3", "albert", "distilbert", "modernbert",
            "mobilebert", "esm", "xlm",
        )
    },
    **{
        name: (SEQ2SEQ_SHAPES[name], seq2seq.make_seq2seq_checkpoint)
        for name in ("t5", "bart", "m2m100", "pegasus-x", "prophetnet", "t5gemma2")
    },
}  # fmt: skip


def adaptable(model: Transformer, reference: Any) -> dict[str, tuple[int, int]]:
    """The matrices of a reference that adapters may change."""
    targets, found = Targets(model), {}
    for name, size in matrices(reference).items():
        try:
            if targets.find(name):
                found[name] = size
        except AdapterError:
            pass
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_products_are_the_merged_model(name: str, tmp_path: Path) -> None:
    """With patterns of ranks and alphas; the layers' own matrices all take adapters."""
    shape, make = SHAPES[name]
    reference = make(shape, tmp_path / "base").model
    model = load(tmp_path / "base")
    sizes = adaptable(model, reference)
    first, last = next(iter(sizes)), next(reversed(sizes))

    def scale(module: str) -> float:
        return root_scale(5 if module == last else 6, 3 if module == first else 4)

    tensors = adapter_tensors(sizes, lambda module: 3 if module == first else 4)
    settings = {"rank_pattern": {first: 3}, "alpha_pattern": {last: 5}, "use_rslora": True}
    write_adapter(tmp_path / "adapter", tensors, **settings)
    adapter = read_adapter("a", tmp_path / "adapter", model, 4)
    changed = merged(reference, tensors, scale)
    changed.save_pretrained(tmp_path / "merged")
    if shape.finish is not None:
        shape.finish(tmp_path / "merged")
    expected = dict(load(tmp_path / "merged").named_parameters())
    assert len(adapter.products) > 1
    slots = slots_of(model.encoder, model.decoder)
    assert all(len(part.down) <= 4 * slots[model.get_submodule(path)] for path, part in adapter.products.items())
    for path, parameter in model.named_parameters():
        product = adapter.products.get(path.removesuffix(".weight"))
        own = parameter if product is None else parameter + product.up @ product.down
        assert torch.allclose(own, expected[path], atol=1e-5), path
        assert product is None or not torch.allclose(parameter, expected[path], atol=1e-2)


def test_heads_of_classifiers(tmp_path: Path) -> None:
    """A saved head replaces the model's, in the parts that it consists of."""
    heads = {
        "roberta-classes": ("classifier.dense", "classifier.out_proj"),
        "bert-classes": ("classifier",),
        "bert-answers": ("qa_outputs",),
    }
    for name, modules in heads.items():
        reference = encoder_shape.make_encoder_checkpoint(ENCODER_SHAPES[name], tmp_path / name).model
        model = load(tmp_path / name)
        tensors = adapter_tensors({k: v for k, v in matrices(reference).items() if k.endswith((".query", ".value"))})
        for module in modules:
            linear, stem = reference.get_submodule(module), f"base_model.model.{module}"
            tensors[f"{stem}.weight"] = torch.randn(linear.weight.shape)
            tensors[f"{stem}.bias"] = torch.randn(linear.bias.shape)
        folder = write_adapter(tmp_path / "adapter" / name, tensors, modules_to_save=["classifier", "qa_outputs"])
        adapter = read_adapter("a", folder, model, 4)
        merged(reference, tensors).save_pretrained(tmp_path / "merged" / name)
        expected = dict(load(tmp_path / "merged" / name).named_parameters())
        assert len(adapter.replaced) == 2 * len(modules)
        for path, values in adapter.replaced.items():
            assert torch.equal(values, expected[path])
            assert not torch.equal(values, model.get_parameter(path))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, dict[str, tuple[int, int]]]:
    """A model, and the sizes of its matrices."""
    folder = tmp_path_factory.mktemp("llama")
    reference = family_shape.make_family_checkpoint(FAMILY_SHAPES["llama"], folder).model
    return load(folder), matrices(reference)


Q = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{Q}.lora_{half}.weight" for half in "AB")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "DoRA adapters are not supported"),
        ({"bias": "all"}, "biases in adapters are not supported"),
        ({"lora_bias": True}, "biases in adapters are not supported"),
        ({"init_lora_weights": "pissa"}, "changes the base model's weights"),
        ({"trainable_token_indices": [3]}, "trained tokens are not supported"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "adapters of expert matrices"),
        ({"layer_replication": [[0, 1]]}, "repeated layers are not supported"),
        ({"alora_invocation_tokens": [5]}, "activated LoRA is not supported"),
        ({"a_setting_of_the_future": 3}, "the setting a_setting_of_the_future is not supported"),
        ({"r": 257}, "up to rank 256"),
        ({"r": 0}, "r must be a whole number above 0, got 0"),
        ({"r": True}, "r must be a whole number above 0, got True"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
        ({"rank_pattern": {"(a+)+$": 4}}, "the pattern '(a+)+$' of rank_pattern"),
        ({"alpha_pattern": {"(": 4}}, "the pattern '(' of alpha_pattern"),
        ({"rank_pattern": {"(a|aa)?" * 60: 4}}, "the pattern '(a|aa)?"),
        ({"rank_pattern": {"a?" * 60: 4}}, "the pattern 'a?a?"),
        ({"rank_pattern": {"(a|a)" * 60: 4}}, "the pattern '(a|a)"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, "and no flags or references to groups"),
        ({"rank_pattern": {r"(q)_proj\1": 4}}, "and no flags or references to groups"),
        ({"layers_pattern": "(?P<layer>h)"}, "the pattern '(?P<layer>h)' of layers_pattern"),
        ({"r": 10**400}, "up to rank 256"),
        ({"use_rslora": "false"}, "use_rslora must be true or false, got 'false'"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
        ({"target_modules": [3]}, "target_modules must be a list of names"),
        ({"r": 8}, "has rank 4, but adapter_config.json says 8"),
        ({"target_modules": ["k_proj"]}, f"an adapter of {Q}, which target_modules"),
        ({"target_modules": r".*\.k_proj"}, f"an adapter of {Q}, which target_modules"),
        ({"layers_to_transform": [1]}, f"an adapter of {Q}, which target_modules"),
        ({"layers_to_transform": 0, "layers_pattern": "h"}, f"an adapter of {Q}, which target_modules"),
        ({"exclude_modules": ["q_proj"]}, f"an adapter of {Q}, which target_modules"),
    ],
)
def test_refused_settings(
    llama: tuple[Transformer, dict[str, tuple[int, int]]], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Each kind of adapter that is not applied, and each value that PEFT does not write, is named."""
    model, sizes = llama
    folder = write_adapter(tmp_path, adapter_tensors({Q: sizes[Q]}), **settings)
    with pytest.raises(AdapterError, match=re.escape(message)):
        read_adapter("a", folder, model, 256)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*layers\.[01]\.self_attn\.(q|k)_proj"},
        {"target_modules": r"((.*)*)*x"},  # not tried: it would take for ever
        {"target_modules": [Q]},
        {"layers_to_transform": [0, 5]},
        {"layers_to_transform": 0, "layers_pattern": ["h", "layers"]},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1, "base_model_name_or_path": "org/name"},
        {"lora_alpha": ..., "r": ..., "rank_pattern": {"q_proj": 4}, "use_rslora": False},
    ],
)
def test_accepted_settings(
    llama: tuple[Transformer, dict[str, tuple[int, int]]], settings: dict[str, Any], tmp_path: Path
) -> None:
    """The ways to say which modules an adapter changes."""
    model, sizes = llama
    tensors = adapter_tensors({Q: sizes[Q]})
    adapter = read_adapter("a", write_adapter(tmp_path, tensors, **settings), model, 256)
    (product,) = adapter.products.values()
    scale = 2.0 if settings.get("r") is ... else 1.5
    assert torch.allclose(product.up[: sizes[Q][1]], tensors[B] * scale)
    assert torch.equal(product.down, tensors[A])
    assert not product.up[sizes[Q][1] :].any()


@pytest.mark.parametrize(
    ("base", "name", "warns"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "models/SmolLM2-135M-Instruct.Q4_1.gguf", False),
        ("unsloth/llama-3.2-1b-unsloth-bnb-4bit", "meta-llama/Llama-3.2-1B/", False),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", True),
        ("org/one", "", False),
    ],
)
def test_an_adapter_of_another_base_gets_a_warning(
    llama: tuple[Transformer, dict[str, tuple[int, int]]],
    base: str,
    name: str,
    warns: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, sizes = llama
    folder = write_adapter(tmp_path, adapter_tensors({Q: sizes[Q]}), base_model_name_or_path=base)
    with caplog.at_level(logging.WARNING, "octavo.model"):
        read_adapter("sql", folder, model, 256, model_name=name)
    told = f"The adapter sql was trained on {base}, but this model is {name}."
    assert [told in record.getMessage() for record in caplog.records] == [True] * warns


def test_refused_tensors(llama: tuple[Transformer, dict[str, tuple[int, int]]], tmp_path: Path) -> None:
    """Shapes of another model, halves, numbers that are none, and tensors that belong to no product."""
    model, sizes = llama
    good = adapter_tensors({Q: sizes[Q]})
    embedding = {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)}
    head = adapter_tensors({"lm_head": sizes["lm_head"]})
    huge = adapter_tensors({Q: sizes[Q]}, lambda name: 12)
    cases: list[tuple[dict[str, Tensor], str, dict[str, Any]]] = [
        (good | {A: torch.ones(4, 7)}, "The adapter is for another model", {}),
        (good | {B: torch.ones(7, 4)}, "The adapter is for another model", {}),
        (good | {B: torch.ones(sizes[Q][1], 3)}, "The adapter is for another model", {}),
        (good | {A: torch.ones(4, 7, 2)}, "an adapter of 3 dimensions", {}),
        (good | {A: torch.full_like(good[A], torch.nan)}, "NaN or infinite numbers", {}),
        (good | {B: torch.full_like(good[B], torch.inf)}, "NaN or infinite numbers", {}),
        (good | {B: good[B].int()}, "is stored as I32", {}),
        ({A: good[A]}, f"lora_B of {Q} is missing", {}),
        (embedding, "adapters of embeddings are not supported", {}),
        (head, "is the output matrix", {}),
        (adapter_tensors({"model.layers.9.self_attn.q_proj": sizes[Q]}), "no matrix model.layers.9.self_attn", {}),
        (good | {"base_model.model.model.embed_tokens.weight": torch.ones(9, 9)}, "added tokens", {}),
        (good | {"base_model.model.model.norm.weight": torch.ones(9)}, "only classifier heads", {}),
        (good | {f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(9)}, "such tensors are not", {}),
        (good | {A.replace(".weight", ".default.weight"): good[A].clone()}, f"contains {Q} twice, under two names", {}),
        (
            good
            | {
                A.replace(".model.model.", ".model."): good[A].clone(),
                B.replace(".model.model.", ".model."): good[B].clone(),
            },
            "twice, under two names",
            {},
        ),
        (adapter_tensors({"a" * 300: sizes[Q]}), "a tensor whose name has 331 characters; at most 256", {}),
        (huge, "has rank 12, but max_lora_rank is 8. Raise --max-lora-rank", {"r": 12}),
        ({}, "holds no matrices", {}),
    ]
    for number, (tensors, message, settings) in enumerate(cases):
        folder = write_adapter(tmp_path / str(number), tensors, **settings)
        with pytest.raises(AdapterError, match=re.escape(message)):
            read_adapter("a", folder, model, 8)


def test_refused_files(llama: tuple[Transformer, dict[str, tuple[int, int]]], tmp_path: Path) -> None:
    """Folders without an adapter, damaged files, pickles, and files outside of the allowed folder."""
    model, sizes = llama
    good = write_adapter(tmp_path / "in" / "good", adapter_tensors({Q: sizes[Q]}))
    weights = (good / "adapter_model.safetensors").read_bytes()

    def altered(name: str, change: Callable[[Path], object]) -> Path:
        folder = write_adapter(tmp_path / "in" / name, adapter_tensors({Q: sizes[Q]}))
        change(folder)
        return folder

    def pickled(folder: Path) -> None:
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")

    config, file = "adapter_config.json", "adapter_model.safetensors"
    cases: list[tuple[str, Callable[[Path], object], str]] = [
        ("no-config", lambda folder: (folder / config).unlink(), "has no adapter_config.json"),
        ("no-weights", lambda folder: (folder / file).unlink(), "has no adapter_model.safetensors"),
        ("pickle", pickled, "is a pickle, which may run code"),
        ("half", lambda folder: (folder / file).write_bytes(weights[: len(weights) // 2]), "damaged or incomplete"),
        ("empty", lambda folder: (folder / file).write_bytes(b""), "damaged or incomplete"),
        ("long", lambda folder: (folder / config).write_bytes(b" " * (2 << 20)), "more than 1048576 bytes"),
        ("list", lambda folder: (folder / config).write_text("[]"), "contains a list, not an object"),
        ("deep", lambda folder: (folder / config).write_text("[" * 200_000), "not valid JSON"),
    ]
    assert read_adapter("a", good, model, 8).products
    for name, change, message in cases:
        folder = altered(name, change)
        with pytest.raises(AdapterError, match=re.escape(message)):
            read_adapter("a", folder, model, 8)
    with pytest.raises(AdapterError, match="is not a folder"):
        read_adapter("a", tmp_path / "nowhere", model, 8)
    os.mkfifo(tmp_path / "pipe.gguf")  # whoever opens it waits
    for path in (tmp_path / "pipe.gguf", tmp_path / "nowhere.gguf"):
        with pytest.raises(AdapterError, match="is not a file"):
            read_adapter("a", path, model, 8)
        with pytest.raises(AdapterError, match="is not a file"):
            largest_rank([str(path)])


def test_a_file_that_is_shortened_while_it_is_read(
    llama: tuple[Transformer, dict[str, tuple[int, int]]], tmp_path: Path
) -> None:
    """It is refused; a mapped file would end the process."""
    model, sizes = llama
    tensors = adapter_tensors({Q: sizes[Q]}, lambda name: 64)
    settings, file = _folder(write_adapter(tmp_path / "a", tensors, r=64))
    other = tmp_path / "a.gguf"
    halves = {f"blk.0.attn_q.weight.lora_{half}": tensors[name] for half, name in (("a", A), ("b", B))}
    other.write_bytes(gguf_of(halves, "llama"))
    for path, parts in ((file, _peft_parts(file, settings)), (other, gguf_parts(other, model.spec, "llama"))):
        part = next(parts)
        os.truncate(path, 600)
        with pytest.raises(ValueError, match="it ends before byte"):
            part.read()


def test_digests(llama: tuple[Transformer, dict[str, tuple[int, int]]], tmp_path: Path) -> None:
    """Adapters have one digest if they make the same answers, whatever their names are, and else another."""
    model, sizes = llama
    tensors = adapter_tensors({Q: sizes[Q]})
    scaled = tensors | {B: tensors[B] * 1.5}
    folders = [
        write_adapter(tmp_path / "a", tensors),
        write_adapter(tmp_path / "b", scaled, lora_alpha=4),
        write_adapter(tmp_path / "c", tensors, lora_alpha=4),
        write_adapter(tmp_path / "d", adapter_tensors({Q.replace("0", "1"): sizes[Q]})),
    ]
    digests = [read_adapter(folder.name, folder, model, 4).digest for folder in folders]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def gguf_of(tensors: dict[str, Tensor], architecture: str, alpha: float = 6.0, **metadata: str) -> bytes:
    """The file of an adapter, as llama.cpp's converter writes it."""
    texts = {"general__architecture": architecture, "general__type": "adapter", "adapter__type": "lora"} | metadata
    entries = [entry(name.replace("__", "."), TEXT, text(value)) for name, value in texts.items()]
    entries.append(entry("adapter.lora.alpha", F32, struct.pack("<f", alpha)))
    infos, data = [], b""
    for name, values in tensors.items():
        infos.append(tensor(name, tuple(values.shape), offset=len(data)))
        octets = values.contiguous().numpy().tobytes()
        data += octets + bytes(-len(octets) % 32)
    return file_of(entries, infos, data)


GGUF_NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "o_proj": "attn_output", "down_proj": "ffn_down"}


def as_gguf(tensors: dict[str, Tensor], config: Any, *, turned: bool) -> dict[str, Tensor]:
    """Tensors under llama.cpp's names; rows of queries and keys in its order, if `turned`."""
    found: dict[str, Tensor] = {}
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, values in tensors.items():
        match = re.search(r"layers\.(\d+)\.\w+\.(\w+)\.lora_([AB])", name)
        assert match is not None
        if turned and match[3] == "B" and match[2] in heads:
            values = interleaved(heads[match[2]])(config, values)
        found[f"blk.{match[1]}.{GGUF_NAMES[match[2]]}.weight.lora_{match[3].lower()}"] = values
    return found


@pytest.mark.parametrize(("name", "architecture"), [("llama", "llama"), ("qwen2", "qwen2")])
def test_gguf_adapters_are_the_folders(name: str, architecture: str, tmp_path: Path) -> None:
    """The same matrices as of the folder that the file was made of: llama.cpp turns neighbours in LLaMA's heads."""
    reference = family_shape.make_family_checkpoint(FAMILY_SHAPES[name], tmp_path / "base").model
    model = load(tmp_path / "base")
    tensors = adapter_tensors({k: v for k, v in matrices(reference).items() if k.endswith(tuple(GGUF_NAMES))})
    file = tmp_path / "a.gguf"
    written = as_gguf(tensors, reference.config, turned=architecture == "llama")
    file.write_bytes(gguf_of(written, architecture))
    expected = read_adapter("a", write_adapter(tmp_path / "a", tensors), model, 4)
    assert read_adapter("a", file, model, 4, reference.config.model_type).digest == expected.digest
    if architecture == "llama":
        part = shard(model.spec, Share(0, 2))
        whole, own = ([each.read()[1] for each in gguf_parts(file, one, "llama")] for one in (model.spec, part))
        assert all(map(torch.equal, whole, own)), "ranks read whole matrices"
        assert read_adapter("a", file, model, 4, "mistral3").digest == expected.digest
        file.write_bytes(gguf_of(written, "qwen2"))
        with pytest.raises(AdapterError, match="architecture is 'qwen2', but the model's type is 'llama', whose"):
            read_adapter("a", file, model, 4, "llama")
        assert read_adapter("a", file, model, 4, "another").digest != expected.digest


def test_value_heads_are_in_the_models_order(tmp_path: Path) -> None:
    """In llama.cpp's files of Qwen3.5, the value heads of a key head are not neighbours."""
    names = {"in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_a": "ssm_alpha", "in_proj_b": "ssm_beta"}
    shape = FAMILY_SHAPES["qwen3.5"]
    shape = replace(shape, settings=shape.settings | {"linear_num_value_heads": 6})
    reference = family_shape.make_family_checkpoint(shape, tmp_path / "base").model
    sizes = {k: v for k, v in matrices(reference).items() if "layers.0.linear_attn" in k}
    tensors, written = adapter_tensors(sizes), {}
    for module in sizes:
        down, up = (tensors[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")
        stem = f"blk.0.{names.get(module.rpartition('.')[2], 'ssm_out')}.weight.lora_"
        change = KINDS["qwen35"].there, reference.config, f"{module}.weight"
        turned = module.endswith("out_proj")
        written |= {f"{stem}a": changed(*change, down) if turned else down}
        written |= {f"{stem}b": up if turned else changed(*change, up)}
    file, folder = tmp_path / "a.gguf", write_adapter(tmp_path / "a", tensors)
    file.write_bytes(gguf_of({name: values.contiguous() for name, values in written.items()}, "qwen35"))
    digests = []
    for alternate in (False, True):
        config = json.loads((tmp_path / "base/config.json").read_text())
        (tmp_path / "base/config.json").write_text(json.dumps(config | {"linear_value_heads_alternate": alternate}))
        model = load(tmp_path / "base")
        digests += [read_adapter("a", path, model, 4).digest for path in (folder, file)]
    assert digests[0] == digests[1] != digests[2] == digests[3]


def test_matrices_that_gguf_files_multiply(
    llama: tuple[Transformer, dict[str, tuple[int, int]]], tmp_path: Path
) -> None:
    """An adapter for Falcon-H1 has the format of its base model."""
    model, sizes = llama
    folder, file = write_adapter(tmp_path / "a", adapter_tensors({Q: sizes[Q]})), tmp_path / "a.gguf"
    for path, of_gguf, message in ((folder, True, "a is a PEFT folder"), (file, False, "a.gguf is a GGUF file")):
        with pytest.raises(AdapterError, match=f"{message}, but the model was read from"):
            read_adapter("a", path, model, 4, "falcon_h1", of_gguf=of_gguf)
    assert read_adapter("a", folder, model, 4, "falcon_h1").products


def test_refused_gguf_adapters(llama: tuple[Transformer, dict[str, tuple[int, int]]], tmp_path: Path) -> None:
    """Models, other adapters, and tensors of other models."""
    model, sizes = llama
    inputs, outputs = sizes[Q]
    down, up = torch.ones(4, inputs), torch.ones(outputs, 4)
    a, b = (f"blk.0.attn_q.weight.lora_{half}" for half in "ab")
    good = {a: down, b: up}
    cases = [
        (gguf_of(good, "llama", general__type="model"), "general.type is 'model'"),
        (gguf_of(good, "llama", adapter__type="control_vector"), "adapter.type is 'control_vector'"),
        (gguf_of(good, "mamba"), "the architecture 'mamba' is not supported as a GGUF file"),
        (gguf_of(good, "llama", alpha=float("nan")), "adapter.lora.alpha must be a number"),
        (gguf_of({a: down}, "llama"), "half of the adapter of blk.0.attn_q.weight is missing"),
        (gguf_of({a: down, b: torch.ones(outputs + 2, 4)}, "llama"), "The adapter is for another model"),
        (gguf_of(good | {"blk.0.attn_norm.weight": torch.ones(9)}, "llama"), "not part of a LoRA adapter"),
        (gguf_of({"token_embd.weight.lora_a": down, "token_embd.weight.lora_b": up}, "llama"), "embeddings are not"),
        (gguf_of({"blk.7.odd.weight.lora_a": down, "blk.7.odd.weight.lora_b": up}, "llama"), "no matrix blk.7.odd"),
        (gguf_of({a: torch.ones(300, inputs), b: torch.ones(outputs, 300)}, "llama"), "has rank 300. Octavo serves"),
        (gguf_of(good, "llama")[:-200], "is damaged or incomplete"),
        (b"", "is not a GGUF file"),
    ]
    for number, (content, message) in enumerate(cases):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(content)
        with pytest.raises(AdapterError, match=re.escape(message)):
            read_adapter("a", file, model, 8)
