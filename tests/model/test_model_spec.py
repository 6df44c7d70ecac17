"""Configs to parts: heads, spans, and what is refused before any weight is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers
from support.published import decoder

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.interface.outputs import SignalInfo
from engine.model import families
from engine.model.missing import unsupported
from engine.model.normalisation import Norm
from engine.model.positions import RelativeBuckets, Rotary, Slopes
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
    SparseBlocks,
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


def test_other_rotary_scalings_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_type 'proportional'.*Implemented: default, linear, dynamic"):
        make("LlamaForCausalLM", rope_parameters={"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0})


def test_partial_rotation_is_refused_where_the_family_has_none() -> None:
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor must be 1.*0.5"):
        make("LlamaForCausalLM", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})


def test_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'laplace'.*Implemented: .*silu"):
        make("LlamaForCausalLM", hidden_act="laplace")


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
            replace(block, attention=replace(block.attention, sees=window, causal=causal))
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
    assert with_block(attention=replace(second.attention, sees=SparseBlocks(4, 1))) == [
        "SparseBlocks in attention of another kind", "SparseBlocks in a decoder"
    ]  # fmt: skip


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
    assert with_cross(sees=Window(3, 3)) == ["cross-attention to some keys only"]
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
