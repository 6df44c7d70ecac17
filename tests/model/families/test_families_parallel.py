"""GPT-J, GPT-NeoX, OPT and Phi: published configs to parts, settings that are refused, and checkpoints in the forms
in which they were published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.families import FAMILY_SHAPES, FamilyShape, make_family_checkpoint
from support.family_shape import run
from support.pages import Pages, close, load, scattered_tables
from support.published import GPT_J_6B, GPT_NEOX_20B, OPT_125M, OPT_350M, PHI_2, PYTHIA_410M, Read, decoder
from torch import Tensor

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model import checkpoint
from engine.model.normalisation import Norm
from engine.model.positions import Learned, LinearScaling, Rotary
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Parallel, PerHead, Pool, Post, Pre, Stack, Tokens

LAYER = Norm("layer", 1e-5, bias=True)


def block(model: ModelSpec) -> Block:
    """The one that all layers are alike."""
    blocks = decoder(model).blocks
    assert len(set(blocks)) == 1
    return blocks[0]


def test_gpt_j_6b(read: Read) -> None:
    attention = Attention(
        heads=16, kv_heads=16, head_dim=256, scale=1 / 16, position=Rotary(64, 10_000.0, interleaved=True)
    )
    layer = Block(placement=Parallel((LAYER,)), attention=attention, ffn=Dense(16384, "gelu_tanh", bias=True))
    assert read(GPT_J_6B) == ModelSpec(
        encoder=None,
        decoder=Stack(
            hidden_size=4096,
            embedding=Tokens(vocab_size=50400, width=4096),
            blocks=(layer,) * 28,
            final_norm=LAYER,
        ),
        head=Lm(tied=False, bias=True),
    )


def test_gpt_j_altered(read: Read) -> None:
    model = read(
        GPT_J_6B,
        n_inner=1000,
        activation_function="relu",
        layer_norm_epsilon=1e-6,
        rotary_dim=256,
        tie_word_embeddings=True,
    )
    assert block(model).ffn == Dense(1000, "relu", bias=True)
    assert block(model).placement == Parallel((Norm("layer", 1e-6, bias=True),))
    assert block(model).attention.position == Rotary(256, 10_000.0, interleaved=True)
    assert model.head == Lm(tied=True, bias=True)
    assert read(GPT_J_6B, architectures=["GPTJModel"], tie_word_embeddings=True).head == Lm(tied=True)


def test_gpt_neox_20b(read: Read) -> None:
    attention = Attention(
        heads=64,
        kv_heads=64,
        head_dim=96,
        scale=96**-0.5,
        position=Rotary(24, 10_000.0),
        qkv_bias=True,
        out_bias=True,
    )
    layer = Block(placement=Parallel((LAYER, LAYER)), attention=attention, ffn=Dense(24576, "gelu_tanh", bias=True))
    assert read(GPT_NEOX_20B) == ModelSpec(
        encoder=None,
        decoder=Stack(
            hidden_size=6144,
            embedding=Tokens(vocab_size=50432, width=6144),
            blocks=(layer,) * 44,
            final_norm=LAYER,
        ),
        head=Lm(tied=False),
    )


def test_gpt_neox_altered(read: Read) -> None:
    pythia = read(PYTHIA_410M)
    assert block(pythia).ffn == Dense(4096, "gelu", bias=True)
    assert block(pythia).attention.position == Rotary(16, 10_000.0)
    model = read(
        PYTHIA_410M,
        use_parallel_residual=False,
        attention_bias=False,
        rotary_pct=1.0,
        rotary_emb_base=500,
        rope_scaling={"type": "linear", "factor": 4.0},
        layer_norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    norm = Norm("layer", 1e-6, bias=True)
    assert block(model).placement == Pre(norm, norm)
    assert not block(model).attention.qkv_bias
    assert not block(model).attention.out_bias
    assert block(model).attention.position == Rotary(64, 500.0, scaling=LinearScaling(4.0))
    assert model.head == Lm(tied=True)


def test_opt_125m(read: Read) -> None:
    attention = Attention(heads=12, kv_heads=12, head_dim=64, scale=1 / 8, qkv_bias=True, out_bias=True)
    layer = Block(placement=Pre(LAYER, LAYER), attention=attention, ffn=Dense(3072, "relu", bias=True))
    model = read(OPT_125M)
    assert model == ModelSpec(
        encoder=None,
        decoder=Stack(
            hidden_size=768,
            embedding=Tokens(vocab_size=50272, width=768, positions=Learned(2050, 2)),
            blocks=(layer,) * 12,
            final_norm=LAYER,
        ),
        head=Lm(tied=True),
    )
    assert model.max_positions == 2048


def test_opt_350m(read: Read) -> None:
    """Norms after the sums, none at last, and tokens of fewer features than the stack."""
    model = read(OPT_350M)
    assert block(model).placement == Post(LAYER, LAYER)
    assert decoder(model).final_norm is None
    assert decoder(model).embedding == Tokens(vocab_size=50272, width=512, positions=Learned(2050, 2), projection=1024)
    assert decoder(model).projection == 512


def test_opt_altered(read: Read) -> None:
    model = read(
        OPT_125M,
        activation_function="gelu",
        enable_bias=False,
        layer_norm_elementwise_affine=False,
        tie_word_embeddings=False,
    )
    norm = Norm("layer", 1e-5, weight=False)
    assert block(model).placement == Pre(norm, norm)
    assert decoder(model).final_norm == norm
    assert block(model).ffn == Dense(3072, "gelu")
    assert not block(model).attention.qkv_bias
    assert not block(model).attention.out_bias
    assert model.head == Lm(tied=False)
    assert decoder(read(OPT_125M, _remove_final_layer_norm=True)).final_norm is None
    unsaid = {name: value for name, value in OPT_125M.items() if name != "word_embed_proj_dim"}
    assert decoder(read(unsaid)).projection is None


def test_phi_2(read: Read) -> None:
    attention = Attention(
        heads=32,
        kv_heads=32,
        head_dim=80,
        scale=80**-0.5,
        position=Rotary(32, 10_000.0),
        qkv_bias=True,
        out_bias=True,
    )
    layer = Block(placement=Parallel((LAYER,)), attention=attention, ffn=Dense(10240, "gelu_tanh", bias=True))
    assert read(PHI_2) == ModelSpec(
        encoder=None,
        decoder=Stack(
            hidden_size=2560,
            embedding=Tokens(vocab_size=51200, width=2560),
            blocks=(layer,) * 32,
            final_norm=LAYER,
        ),
        head=Lm(tied=False, bias=True),
    )


def test_phi_altered(read: Read) -> None:
    model = read(
        PHI_2,
        num_key_value_heads=8,
        head_dim=40,
        qk_layernorm=True,
        rope_scaling={"type": "linear", "factor": 2.0},
        tie_word_embeddings=True,
    )
    attention = block(model).attention
    assert (attention.kv_heads, attention.head_dim) == (8, 40)
    assert attention.qk_norm == PerHead(LAYER)
    assert attention.position == Rotary(16, 10_000.0, scaling=LinearScaling(2.0))
    assert model.head == Lm(tied=True, bias=True)
    unsaid = {name: value for name, value in PHI_2.items() if "rotary" not in name and "rope" not in name}
    assert block(read(unsaid)).attention.position == Rotary(40, 10_000.0)
    assert read(PHI_2, architectures=["PhiModel"], tie_word_embeddings=True).head == Lm(tied=True)
    assert read(PHI_2, architectures=["PhiModel"]).head == Pool()


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GPT_J_6B, {"rotary_dim": 0}, "rotary_dim must be .* from 2 to the 256 features of a head, got 0"),
        (GPT_J_6B, {"rotary_dim": 63}, "rotary_dim .* even .* got 63"),
        (GPT_J_6B, {"rotary_dim": 258}, "rotary_dim .* got 258"),
        (GPT_J_6B, {"activation_function": "mish"}, "activation 'mish'"),
        (GPT_J_6B, {"is_causal": False}, "is_causal"),
        (
            GPT_NEOX_20B,
            {"rotary_pct": 0.33},
            "even number of features, from 2 to the 96 .*partial_rotary_factor 0.33 gives 31",
        ),
        (GPT_NEOX_20B, {"rotary_pct": 0.0}, "even number of features.*gives 0"),
        (GPT_NEOX_20B, {"head_dim": 64}, "head_dim must be .* 96 .* got 64"),
        (GPT_NEOX_20B, {"rope_scaling": {"type": "proportional", "factor": 2.0}}, "rope_type 'proportional'"),
        (GPT_NEOX_20B, {"is_causal": False}, "is_causal"),
        (GPT_NEOX_20B, {"per_layer_config": {"0": {"intermediate_size": 64}}}, "per_layer_config"),
        (OPT_125M, {"activation_function": "mish"}, "activation 'mish'"),
        (OPT_125M, {"is_causal": False}, "is_causal"),
        (PHI_2, {"partial_rotary_factor": 0.39}, "even number of features.* 80 .*gives 31"),
        (PHI_2, {"hidden_act": "mish"}, "activation 'mish'"),
        (PHI_2, {"is_causal": False}, "is_causal"),
    ],
)
def test_what_no_part_expresses_is_refused(
    read: Read, config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(config, **changes)


Tensors = dict[str, Tensor]


def rewrite(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    held = load_file(path / "model.safetensors")
    save_file(change(held), path / "model.safetensors", metadata={"format": "pt"})


def without(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {name.removeprefix(prefix): tensor for name, tensor in held.items()}


def buffers(layers: str, **shapes: tuple[int, ...]) -> Callable[[Tensors], Tensors]:
    """Adds buffers of two layers; dots stand as double underscores."""

    def change(held: Tensors) -> Tensors:
        named = {name.replace("__", "."): shape for name, shape in shapes.items()}
        return held | {f"{layers}.{i}.{name}": torch.ones(shape) for i in range(2) for name, shape in named.items()}

    return change


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    def change(held: Tensors) -> Tensors:
        assert any(old in name for name in held)
        return {name.replace(old, new): tensor for name, tensor in held.items()}

    return change


def with_head_copied(embedding: str) -> Callable[[Tensors], Tensors]:
    return lambda held: held | {"lm_head.weight": held[embedding].clone()}


PUBLISHED: list[tuple[str, str, list[Callable[[Tensors], Tensors]]]] = [
    ("gptj masks", "gptj", [buffers("transformer.h", attn__bias=(1, 1, 8, 8), attn__masked_bias=())]),
    (
        "gpt-neox buffers",
        "gpt-neox",
        [
            buffers(
                "gpt_neox.layers",
                attention__bias=(1, 1, 8, 8),
                attention__masked_bias=(),
                attention__rotary_emb__inv_freq=(2,),
            ),
        ],
    ),
    # It is saved as embed_out.weight, the published name, although the model calls it lm_head.weight.
    ("gpt-neox new name of the head", "gpt-neox", [renamed("embed_out.", "lm_head.")]),
    (
        "opt without a head",
        "opt-norms-after-projected",
        [without("model."), lambda held: held | {"decoder.version": torch.tensor([3.0])}],
    ),
    ("opt with its tied head", "opt", [with_head_copied("model.decoder.embed_tokens.weight")]),
    ("phi frequencies", "phi", [buffers("model.layers", self_attn__rotary_emb__inv_freq=(2,))]),
]


@pytest.mark.parametrize(("shape", "changes"), [case[1:] for case in PUBLISHED], ids=[case[0] for case in PUBLISHED])
def test_published_forms_load(shape: str, changes: list[Callable[[Tensors], Tensors]], tmp_path: Path) -> None:
    """Names without prefix, older names, buffers of old checkpoints: all the same weights."""
    made = make_family_checkpoint(FAMILY_SHAPES[shape], tmp_path)
    expected = load(made.path).state_dict()
    for change in changes:
        rewrite(made.path, change)
    found = load(made.path).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_head_under_both_names_is_refused(tmp_path: Path) -> None:
    path = make_family_checkpoint(FAMILY_SHAPES["gpt-neox"], tmp_path).path
    rewrite(path, lambda held: held | {"lm_head.weight": held["embed_out.weight"].clone()})
    with pytest.raises(
        ModelLoadError,
        match=r"lm_head\.weight twice: as (lm_head|embed_out)\.weight and as (lm_head|embed_out)\.weight",
    ):
        load(path)


@pytest.mark.parametrize("name", ["gptj-all-rotated-tied", "gpt-neox-sequential-no-attention-bias-tied", "opt", "phi"])
def test_headless_checkpoints_answer_as_the_reference_does(name: str, tmp_path: Path) -> None:
    """Logits by the embedding's table alone: a head's bias is not stored, and is zero in the reference, too."""
    shape: FamilyShape = FAMILY_SHAPES[name]
    made = make_family_checkpoint(shape, tmp_path / "whole")
    base = made.model.base_model
    base.config.tie_word_embeddings = True
    path = tmp_path / "headless"
    base.save_pretrained(path)
    assert checkpoint.read_config(path).architectures == [type(base).__name__]
    reference = getattr(transformers, shape.architecture).from_pretrained(path, attn_implementation="eager").eval()
    prompt = made.ragged()[0]
    model = load(path)
    (hidden,) = Pages(model, scattered_tables([len(prompt)])).step([prompt])
    close(model.logits(hidden), run(reference, prompt).logits[0])


def test_opt_without_a_final_norm_equals_the_reference(tmp_path: Path) -> None:
    """Fine-tuned from the first release, which had none."""
    shape = FAMILY_SHAPES["opt"]
    made = make_family_checkpoint(
        replace(shape, settings={**shape.settings, "_remove_final_layer_norm": True}), tmp_path
    )
    assert made.model.model.decoder.final_layer_norm is None
    prompt = made.ragged()[0]
    model = load(made.path)
    (hidden,) = Pages(model, scattered_tables([len(prompt)])).step([prompt])
    close(hidden, made.hidden(prompt)[0])
    close(model.logits(hidden), run(made.model, prompt).logits[0])
