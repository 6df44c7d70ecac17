"""Configs to parts: what each family is made of, and what is refused before any weight is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.published import MODERNBERT_BASE, decoder

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.interface.outputs import SignalInfo
from engine.model import checkpoint, families
from engine.model.missing import unsupported
from engine.model.normalisation import Norm
from engine.model.positions import BandScaling, Learned, LinearScaling, RelativeBuckets, Rotary, Slopes
from engine.model.spec import (
    AfterSublayer,
    Classifier,
    Dense,
    Experts,
    Gated,
    Lm,
    MaskedLm,
    ModelSpec,
    PerHead,
    Pool,
    Post,
    Pre,
    Sandwich,
    Spectrum,
)

CLASSES = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "LlamaModel": transformers.LlamaConfig,
    "GPT2LMHeadModel": transformers.GPT2Config,
    "Gemma2ForCausalLM": transformers.Gemma2Config,
    "T5ForConditionalGeneration": transformers.T5Config,
    "ModernBertModel": transformers.ModernBertConfig,
    "ModernBertForMaskedLM": transformers.ModernBertConfig,
    "ModernBertForSequenceClassification": transformers.ModernBertConfig,
    "ModernBertForTokenClassification": transformers.ModernBertConfig,
}


def make(architecture: str, **values: Any) -> ModelSpec:
    return families.describe(CLASSES[architecture](architectures=[architecture], **values))


def test_llama_by_default() -> None:
    model = make("LlamaForCausalLM")
    stack = decoder(model)
    norm = Norm("rms", 1e-6)
    assert model.encoder is None
    assert model.head == Lm(tied=False)
    assert len(stack.blocks) == 32
    assert len(set(stack.blocks)) == 1
    assert stack.final_norm == norm
    block = stack.blocks[0]
    assert block.placement == Pre(norm, norm)
    assert block.cross is None
    assert block.ffn == Gated(11008, "silu")
    attention = block.attention
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (32, 32, 128)
    assert attention.position == Rotary(128, 10_000.0)
    assert attention.causal
    assert attention.window is None
    assert attention.scale == 128**-0.5
    assert not attention.qkv_bias
    assert not attention.out_bias
    assert model.vocab_size == 32000
    assert model.max_positions is None


def test_llama_altered() -> None:
    model = make(
        "LlamaForCausalLM",
        num_key_value_heads=8,
        head_dim=96,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
        num_hidden_layers=2,
    )
    block = decoder(model).blocks[1]
    assert model.head == Lm(tied=True)
    assert (block.attention.kv_heads, block.attention.head_dim) == (8, 96)
    assert block.attention.qkv_bias
    assert block.attention.out_bias
    assert isinstance(block.ffn, Gated)
    assert block.ffn.bias
    assert block.attention.position == Rotary(96, 5e5, scaling=LinearScaling(4.0))


def test_rotary_settings_of_older_configs() -> None:
    """config.json with rope_theta and rope_scaling of their own, as most published checkpoints have it."""
    model = make(
        "LlamaForCausalLM",
        rope_theta=500_000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected = Rotary(128, 500_000.0, scaling=BandScaling(8.0, 1.0, 4.0, 8192))
    assert decoder(model).blocks[0].attention.position == expected
    model = make("LlamaForCausalLM", rope_theta=20_000.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert decoder(model).blocks[0].attention.position == Rotary(128, 20_000.0, scaling=LinearScaling(2.0))


def test_other_rotary_scalings_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_type 'proportional'.*Implemented: default, linear, dynamic"):
        make("LlamaForCausalLM", rope_parameters={"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0})


def test_partial_rotation_is_refused_where_the_family_has_none() -> None:
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor must be 1.*0.5"):
        make("LlamaForCausalLM", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})


def test_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'laplace'.*Implemented: .*silu"):
        make("LlamaForCausalLM", hidden_act="laplace")


def test_gpt2_by_default() -> None:
    model = make("GPT2LMHeadModel")
    stack = decoder(model)
    norm = Norm("layer", 1e-5, bias=True)
    assert model.head == Lm(tied=True)
    assert model.max_positions == 1024
    assert stack.embedding.positions == Learned(1024)
    assert len(stack.blocks) == 12
    assert len(set(stack.blocks)) == 1
    assert stack.final_norm == norm
    block = stack.blocks[0]
    assert block.placement == Pre(norm, norm)
    assert block.ffn == Dense(3072, "gelu_tanh", bias=True)
    assert block.attention.position is None
    assert block.attention.qkv_bias
    assert block.attention.out_bias
    assert (block.attention.heads, block.attention.kv_heads, block.attention.scale) == (12, 12, 0.125)


def test_gpt2_altered() -> None:
    stack = decoder(make("GPT2LMHeadModel", scale_attn_by_inverse_layer_idx=True, n_inner=100))
    assert [b.attention.scale for b in stack.blocks[:3]] == [0.125, 0.0625, 0.125 / 3]
    assert stack.blocks[0].ffn == Dense(100, "gelu_tanh", bias=True)
    assert decoder(make("GPT2LMHeadModel", scale_attn_weights=False)).blocks[0].attention.scale == 1.0
    crossing = make("GPT2LMHeadModel", add_cross_attention=True)
    assert unsupported(crossing) == ["cross-attention without an encoder"]


def test_gemma2_by_default() -> None:
    model = make("Gemma2ForCausalLM")
    stack = decoder(model)
    norm = Norm("rms", 1e-6, unit_offset=True)
    assert model.head == Lm(tied=True, softcap=30.0)
    assert stack.embedding.scale == 2304**0.5  # type: ignore[union-attr]
    assert [b.attention.window for b in stack.blocks] == [Window(4095), None] * 13
    assert {b.placement for b in stack.blocks} == {Sandwich(norm, norm, norm, norm)}
    attention = stack.blocks[0].attention
    assert (attention.softcap, attention.scale, attention.heads, attention.kv_heads) == (50.0, 1 / 16, 8, 4)
    assert stack.blocks[0].ffn == Gated(9216, "gelu_tanh")
    assert unsupported(model) == []


def test_gemma2_altered() -> None:
    model = make(
        "Gemma2ForCausalLM",
        num_hidden_layers=3,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
        sliding_window=7,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        query_pre_attn_scalar=144,
    )
    blocks = decoder(model).blocks
    assert [b.attention.window for b in blocks] == [None, None, Window(6)]
    assert blocks[0].attention.softcap is None
    assert blocks[0].attention.scale == 1 / 12
    assert model.head == Lm(tied=True)
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention of the config must be false"):
        make("Gemma2ForCausalLM", use_bidirectional_attention=True)


def test_a_decoder_that_sees_both_sides_is_read_as_an_encoder() -> None:
    """Where it has another head than a language model's, or none."""

    def described(architecture: str, **settings: Any) -> ModelSpec:
        config = transformers.Gemma3TextConfig(
            architectures=[architecture], use_bidirectional_attention=True, sliding_window=512, **settings
        )
        return families.describe(config)

    for tied in (True, False):
        model = described("Gemma3TextModel", tie_word_embeddings=tied)
        assert model.decoder is None
        assert model.encoder is not None
        assert model.head == Pool()
        assert {b.attention.window for b in model.encoder.blocks} == {None, Window(256, 256)}
        assert unsupported(model) == []
    head = described("Gemma3TextForSequenceClassification", num_labels=2).head
    assert head == Classifier(labels=2, pooling="last", bias=False, padding_id=0)
    assert unsupported(described("Gemma3ForCausalLM")) == ["bidirectional attention in a decoder"]
    with pytest.raises(UnsupportedModelError, match="is_causal to false"):
        described("Gemma3TextModel", is_causal=False)


def test_t5_by_default() -> None:
    model = make("T5ForConditionalGeneration")
    norm = Norm("rms", 1e-6)
    assert model.encoder is not None
    assert model.head == Lm(tied=True, input_scale=512**-0.5)
    assert model.encoder.shared_bias == RelativeBuckets(32, 128, bidirectional=True)
    assert decoder(model).shared_bias == RelativeBuckets(32, 128, bidirectional=False)
    assert len(model.encoder.blocks) == len(decoder(model).blocks) == 6
    encoder_block, decoder_block = model.encoder.blocks[0], decoder(model).blocks[0]
    assert encoder_block.placement == Pre(norm, norm)
    assert encoder_block.cross is None
    assert decoder_block.placement == Pre(norm, norm, norm)
    assert decoder_block.cross is not None
    assert not encoder_block.attention.causal
    assert decoder_block.attention.causal
    assert not decoder_block.cross.causal
    assert encoder_block.attention.scale == 1.0
    assert encoder_block.attention.position is None
    assert encoder_block.ffn == Dense(2048, "relu")
    assert unsupported(model) == []


def test_t5_altered() -> None:
    model = make(
        "T5ForConditionalGeneration",
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        d_kv=16,
        num_decoder_layers=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
    )
    assert decoder(model).blocks[0].ffn == Gated(2048, "gelu_tanh")
    assert isinstance(model.head, Lm)
    assert model.head.input_scale == 1.0
    assert model.encoder is not None
    assert (len(model.encoder.blocks), len(decoder(model).blocks)) == (6, 2)
    assert decoder(model).blocks[0].attention.head_dim == 16
    assert model.encoder.shared_bias == RelativeBuckets(8, 20, bidirectional=True)


def test_modernbert_by_default() -> None:
    model = make("ModernBertForMaskedLM")
    norm = Norm("layer", 1e-5)
    assert model.decoder is None
    assert model.encoder is not None
    blocks = model.encoder.blocks
    assert blocks[0].placement == Pre(None, norm)
    assert {b.placement for b in blocks[1:]} == {Pre(norm, norm)}
    local = [i for i, b in enumerate(blocks) if b.attention.window == Window(64, 64)]
    assert local == [i for i in range(22) if i % 3]
    thetas = [b.attention.position.theta for b in blocks if isinstance(b.attention.position, Rotary)]
    assert thetas == [10_000.0 if i % 3 else 160_000.0 for i in range(22)]
    assert not any(b.attention.causal for b in blocks)
    assert blocks[0].ffn == Gated(1152, "gelu")
    assert model.encoder.embedding.norm == norm  # type: ignore[union-attr]
    assert model.head == MaskedLm(tied=True, activation="gelu", norm=norm, dense_bias=False, bias=True)
    assert unsupported(model) == []


def test_modernbert_altered() -> None:
    assert make("ModernBertModel").head == Pool()
    model = make(
        "ModernBertForSequenceClassification",
        num_labels=5,
        classifier_pooling="mean",
        local_attention=32,
        global_attn_every_n_layers=2,
        num_hidden_layers=4,
        local_rope_theta=1.0e3,
        global_rope_theta=2.0e3,
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
    )
    assert isinstance(model.head, Classifier)
    assert (model.head.labels, model.head.pooling) == (5, "mean")
    assert model.encoder is not None
    blocks = model.encoder.blocks
    assert [b.attention.window for b in blocks] == [None, Window(16, 16)] * 2
    assert [b.attention.position.theta for b in blocks] == [2.0e3, 1.0e3] * 2  # type: ignore[union-attr]
    assert blocks[1].placement == Pre(*[Norm("layer", 1e-5, bias=True)] * 2)
    assert blocks[0].attention.qkv_bias
    assert isinstance(blocks[0].ffn, Gated)
    assert blocks[0].ffn.bias
    tokens = make("ModernBertForTokenClassification", num_labels=2, classifier_pooling="mean").head
    assert isinstance(tokens, Classifier)
    assert (tokens.labels, tokens.pooling) == (2, None)


def test_modernbert_as_published(tmp_path: Path) -> None:
    """The same parts as the defaults', the numbers of older configs read."""
    (tmp_path / "config.json").write_text(json.dumps(MODERNBERT_BASE), encoding="utf-8")
    assert families.build_spec(checkpoint.read_config(tmp_path)) == make("ModernBertForMaskedLM")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "one entry for each of num_hidden_layers 22, but has 1"),
        (
            {"layer_types": ["chunked_attention"] * 22},
            "holds 'chunked_attention'; implemented: full_attention, sliding",
        ),
        ({"local_attention": -2}, "local_attention of the config must not be negative, got -2"),
        ({"num_attention_heads": 7}, "768 hidden features, which 7 attention heads"),
        ({"hidden_activation": "mish"}, "activation 'mish'"),
    ],
)
def test_modernbert_refusals(changes: dict[str, Any], message: str) -> None:
    config = transformers.ModernBertConfig(architectures=["ModernBertModel"])
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    with pytest.raises(UnsupportedModelError, match=message):
        families.describe(config)


def test_modernbert_with_another_head() -> None:
    name = "ModernBertForMultipleChoice"
    with pytest.raises(
        UnsupportedModelError, match=f"'{name}' is not supported. ModernBert[A-Za-z]+, of the same family"
    ):
        families.build_spec(transformers.ModernBertConfig(architectures=[name]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.BertConfig(architectures=["BertForQuestionAnswering"], num_labels=3),
            "num_labels of the config is 3",
        ),
        (transformers.DebertaConfig(architectures=["DebertaModel"], talking_head=True), "talking_head must be false"),
        (
            transformers.LongformerConfig(architectures=["LongformerModel"], attention_window=[4, 6]),
            r"attention_window of the config must be an even number .* each of the 12 layers, got \[4, 6\]",
        ),
        (transformers.LongformerConfig(architectures=["LongformerModel"], attention_window=7), "even number .* got 7"),
        (
            transformers.LongformerConfig(architectures=["LongformerForQuestionAnswering"], sep_token_id=None),
            "sep_token_id of the config must be the id",
        ),
    ],
    ids=["three-numbers", "talking-heads", "other-layers", "odd-window", "no-separator"],
)
def test_settings_of_answers_and_windows(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        families.build_spec(config)


# ---------------------------------------------------------------- classifiers over decoders


def test_a_decoder_has_classifiers() -> None:
    """One rule for all families: of texts by the last token, of each token."""
    config = transformers.LlamaConfig(architectures=["LlamaForSequenceClassification"], num_labels=4, pad_token_id=9)
    model = families.build_spec(config)
    plain = families.build_spec(transformers.LlamaConfig(architectures=["LlamaForCausalLM"]))
    assert model.head == Classifier(labels=4, pooling="last", bias=False, padding_id=9)
    assert replace(model, head=plain.head) == plain
    config = transformers.LlamaConfig(architectures=["LlamaForTokenClassification"], num_labels=4)
    assert families.build_spec(config).head == Classifier(labels=4, pooling=None)
    config.token_classification_bias = False
    assert families.build_spec(config).head == Classifier(labels=4, pooling=None, bias=False)


@pytest.mark.parametrize(
    "config",
    [
        transformers.BartConfig(architectures=["BartForQuestionAnswering"]),
        transformers.T5Config(architectures=["T5ForTokenClassification"]),
        transformers.MambaConfig(architectures=["MambaForSequenceClassification"]),
        transformers.LlamaConfig(architectures=["LlamaForQuestionAnswering"]),
    ],
    ids=lambda config: config.architectures[0],
)
def test_other_classifiers_are_refused(config: Any) -> None:
    name = config.architectures[0]
    with pytest.raises(UnsupportedModelError, match=f"'{name}' is not supported.*`octavo models` lists"):
        families.build_spec(config)


def test_the_attention_span_is_the_longest_window_unless_a_layer_sees_all() -> None:
    model = make("LlamaForCausalLM", num_hidden_layers=3)

    def windowed(*windows: Window | None, causal: bool = True) -> ModelSpec:
        stack = decoder(model)
        blocks = tuple(
            replace(block, attention=replace(block.attention, window=window, causal=causal))
            for block, window in zip(stack.blocks, windows, strict=True)
        )
        return replace(model, decoder=replace(stack, blocks=blocks))

    assert model.attention_span is None
    assert windowed(Window(7), Window(15), Window(15)).attention_span == 16
    assert windowed(Window(7), None, Window(15)).attention_span is None
    assert windowed(Window(0), Window(0), Window(0)).attention_span == 1
    assert windowed(Window(7, 7), Window(7, 7), Window(7, 7), causal=False).attention_span is None
    assert make("Gemma2ForCausalLM").attention_span is None, "every other layer sees all"
    assert replace(model, decoder=None).attention_span is None


def test_parts_without_a_module_are_named() -> None:
    model = make("LlamaForCausalLM", num_hidden_layers=2)
    first, second = decoder(model).blocks
    norm = Norm("rms", 1e-6)

    def with_block(**changes: Any) -> list[str]:
        return unsupported(replace(model, decoder=replace(decoder(model), blocks=(first, replace(second, **changes)))))

    assert unsupported(model) == []
    assert with_block(placement=AfterSublayer(norm, norm)) == []
    assert with_block(placement=Post(norm, norm)) == []
    assert with_block(ffn=Experts(Gated(8, "silu"), 4, 2)) == []
    assert with_block(ffn=Experts(Gated(8, "silu", bias=True), 4, 2)) == []
    assert with_block(attention=replace(second.attention, clip=8.0, qk_norm=PerHead(norm))) == []
    assert with_block(attention=replace(second.attention, position=Slopes((0.5,)))) == []
    assert with_block(attention=replace(second.attention, position=RelativeBuckets(8, 16, bidirectional=False))) == []
    assert with_block(ffn=Experts(Dense(8, "relu"), 4, 1, capacity=5)) == ["experts of limited capacity in a decoder"]
    assert with_block(cross=second.attention) == ["cross-attention without an encoder"]


def test_parts_of_encoder_decoder_models_without_a_module_are_named() -> None:
    model = make("T5ForConditionalGeneration", num_layers=2)
    stack = decoder(model)
    first, second = stack.blocks
    assert second.cross is not None

    def with_cross(**changes: Any) -> list[str]:
        blocks = (first, replace(second, cross=replace(second.cross, **changes)))
        return unsupported(replace(model, decoder=replace(stack, blocks=blocks)))

    assert with_cross(scale=2.0, softcap=3.0, heads=16) == []
    assert with_cross(kv_heads=4) == ["cross-attention of another shape than self-attention"]
    assert with_cross(causal=True) == ["cross-attention that is causal"]
    assert with_cross(position=Slopes((0.5,))) == ["cross-attention with positions"]
    assert with_cross(window=Window(3, 3)) == ["cross-attention with a window"]
    assert with_cross(qk_norm=PerHead(Norm("rms", 1e-6))) == ["cross-attention with norms of queries and keys"]
    assert with_cross(clip=8.0) == ["cross-attention with limits of its projections"]
    turned = replace(second, attention=replace(second.attention, position=Rotary(8, 1e4)))
    assert unsupported(replace(model, decoder=replace(stack, blocks=(first, turned)))) == [
        "a shared bias beside Rotary"
    ]


def test_families_without_weights_are_refused_for_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family may be described before its parts are implemented."""
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"])
    model = families.describe(config)
    described = replace(families.find(config), weights=None)
    monkeypatch.setitem(families._BY_ARCHITECTURE, "LlamaForCausalLM", described)
    assert "LlamaForCausalLM" not in families.supported()
    with pytest.raises(UnsupportedModelError, match="LLaMA cannot be served yet"):
        families.weight_table(config, model)
    masked = replace(model, head=MaskedLm(tied=True, activation="gelu", norm=Norm("rms", 1e-6)))
    monkeypatch.setitem(families._BY_ARCHITECTURE, "LlamaForCausalLM", replace(described, spec=lambda config: masked))
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM needs parts .*MaskedLm heads over a decoder"):
        families.build_spec(config)


def test_unknown_architecture_lists_the_supported() -> None:
    config = transformers.LlamaConfig(architectures=["FooForCausalLM"])
    with pytest.raises(UnsupportedModelError, match=r"'FooForCausalLM'.*LlamaForCausalLM.* `octavo models` lists"):
        families.build_spec(config)
    with pytest.raises(UnsupportedModelError, match='no "architectures"'):
        families.build_spec(transformers.LlamaConfig())


def test_a_headless_model_writes_where_its_head_is_tied() -> None:
    tied = transformers.LlamaConfig(architectures=["LlamaModel"], tie_word_embeddings=True)
    assert families.build_spec(tied).head == Lm(tied=True)
    untied = transformers.LlamaConfig(architectures=["LlamaModel"], tie_word_embeddings=False)
    assert families.build_spec(untied).head == Pool()
    with_encoder = transformers.MBartConfig(architectures=["MBartModel"], tie_word_embeddings=False)
    with pytest.raises(UnsupportedModelError, match="no language-model head"):
        families.build_spec(with_encoder)


def test_speech() -> None:
    """Whisper's encoder reads spectra; how long they are bounds no text."""
    config = transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"])
    model = families.build_spec(config)
    assert model.encoder is not None
    assert isinstance(model.encoder.embedding, Spectrum)
    assert model.signal == SignalInfo("audio", (80, 3000), 1500)
    assert model.max_positions == model.context_length == 448
    for name, value, words in (
        ("scale_embedding", True, "scale_embedding must be false"),
        ("encoder_attention_heads", 7, "multiple"),
    ):
        changed = transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"], **{name: value})
        with pytest.raises(UnsupportedModelError, match=words):
            families.build_spec(changed)
