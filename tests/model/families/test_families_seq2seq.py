"""Encoder-decoder families: published configs to parts, settings that are refused, and checkpoints in the
forms in which they were published."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pages import load
from support.published import (
    BART_BASE,
    BART_LARGE_CNN,
    BIGBIRD_PEGASUS_ARXIV,
    BLENDERBOT_90M,
    BLENDERBOT_400M,
    FLAN_T5_SMALL,
    LED_BASE,
    LONG_T5_TGLOBAL_BASE,
    M2M100_418M,
    MBART_50,
    MT5_SMALL,
    NLLB_600M,
    NLLB_MOE,
    OPUS_MT_EN_DE,
    PEGASUS_X_BASE,
    PEGASUS_XSUM,
    PROPHETNET_LARGE,
    SWITCH_BASE_8,
    T5_SMALL,
    UMT5_SMALL,
    WMT19_EN_DE,
    Read,
)
from support.seq2seq import MAX_LEN, make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES
from torch import Tensor

from engine.backends.attention.base import Window
from engine.backends.torch.attention import TorchReference
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError, UnsupportedModelError
from engine.execution.loading import find_max_encoder_len, find_max_model_len
from engine.interface.generation import load_defaults
from engine.model import checkpoint
from engine.model.missing import unsupported
from engine.model.normalisation import Norm
from engine.model.positions import Learned, QueryBuckets, RelativeBuckets, Sinusoidal, SpannedSinusoidal
from engine.model.spec import (
    Attention,
    Block,
    BlockSums,
    Dense,
    Experts,
    FirstToken,
    Gated,
    GlobalStream,
    GlobalTokens,
    Lm,
    ModelSpec,
    Post,
    Pre,
    PredictingStream,
    SparseBlocks,
    Stack,
    Tokens,
)
from engine.model.transformer import Transformer

LAYER = Norm("layer", 1e-5, bias=True)
RMS = Norm("rms", 1e-6)


def stacks(model: ModelSpec) -> tuple[Stack, Stack]:
    assert model.encoder is not None
    assert model.decoder is not None
    return model.encoder, model.decoder


def heads(number: int, head_dim: int, *, causal: bool, scale: float = 1.0, bias: bool = False) -> Attention:
    return Attention(
        heads=number, kv_heads=number, head_dim=head_dim, scale=scale, causal=causal, qkv_bias=bias, out_bias=bias
    )


def relative(
    config: dict[str, Any], tokens: Tokens, placement: type[Pre] | type[Post], *, final: bool, activation: Any
) -> ModelSpec:
    """BART or a relative of it."""
    number = config["encoder_attention_heads"]
    head_dim = config["d_model"] // number
    both_ways, causal = (heads(number, head_dim, causal=c, scale=head_dim**-0.5, bias=True) for c in (False, True))
    ffn = Dense(config["encoder_ffn_dim"], activation, bias=True)
    layers = (
        Block(placement=placement(LAYER, LAYER), attention=both_ways, ffn=ffn),
        Block(placement=placement(LAYER, LAYER, LAYER), attention=causal, cross=both_ways, ffn=ffn),
    )
    encoder, decoder = (
        Stack(
            hidden_size=config["d_model"],
            embedding=tokens,
            blocks=(layer,) * config[f"{name}_layers"],
            final_norm=LAYER if final else None,
        )
        for name, layer in zip(("encoder", "decoder"), layers, strict=True)
    )
    return ModelSpec(encoder=encoder, decoder=decoder, head=Lm(tied=True, bias=True))


# ------------------------------------------------------------------ published configs


def test_t5_small(read: Read) -> None:
    encoder, decoder = (
        Stack(
            hidden_size=512,
            embedding=Tokens(vocab_size=32128, width=512),
            blocks=(
                Block(
                    placement=Pre(RMS, RMS, RMS if crosses else None),
                    attention=heads(8, 64, causal=crosses),
                    cross=heads(8, 64, causal=False) if crosses else None,
                    ffn=Dense(2048, "relu"),
                ),
            )
            * 6,
            final_norm=RMS,
            shared_bias=RelativeBuckets(32, 128, bidirectional=not crosses),
        )
        for crosses in (False, True)
    )
    assert read(T5_SMALL) == ModelSpec(
        encoder=encoder, decoder=decoder, head=Lm(tied=True, input_scale=512**-0.5), context_length=512
    )


@pytest.mark.parametrize("config", [FLAN_T5_SMALL, MT5_SMALL])
def test_t5_of_version_1_1(read: Read, config: dict[str, Any]) -> None:
    model = read(config)
    for stack in stacks(model):
        assert len(stack.blocks) == 8
        assert stack.blocks[0].ffn == Gated(1024, "gelu_tanh")
        assert (stack.blocks[0].attention.heads, stack.blocks[0].attention.head_dim) == (6, 64)
    # That the output matrix is one of its own shows when it is stored.
    assert model.head == Lm(tied=True)


def test_t5_altered(read: Read) -> None:
    model = read(
        FLAN_T5_SMALL,
        feed_forward_proj="gated-silu",
        num_decoder_layers=3,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=64,
        n_positions=1024,
    )
    encoder, decoder = stacks(model)
    assert (len(encoder.blocks), len(decoder.blocks)) == (8, 3)
    assert decoder.blocks[0].ffn == Gated(1024, "silu")
    assert decoder.shared_bias == RelativeBuckets(16, 64, bidirectional=False)
    assert model.context_length == 1024
    older = {name: value for name, value in T5_SMALL.items() if name != "n_positions"}
    assert read(older).context_length == 512
    stored = read(T5_SMALL, is_gated_act=True, dense_act_fn="gelu")  # as transformers saves it, and goes by
    assert stacks(stored)[0].blocks[0].ffn == Gated(2048, "gelu")


def test_bart_base(read: Read) -> None:
    """Published without a head, which is the embedding's table."""
    tokens = Tokens(vocab_size=50265, width=768, positions=Learned(1026, 2), norm=LAYER)
    expected = relative(BART_BASE, tokens, Post, final=False, activation="gelu")
    assert read(BART_BASE) == expected
    assert expected.max_positions == 1024


def test_bart_large_cnn(read: Read) -> None:
    tokens = Tokens(vocab_size=50264, width=1024, positions=Learned(1026, 2), norm=LAYER)
    assert read(BART_LARGE_CNN) == relative(BART_LARGE_CNN, tokens, Post, final=False, activation="gelu")


def test_mbart_50(read: Read) -> None:
    tokens = Tokens(vocab_size=250054, width=1024, scale=32.0, positions=Learned(1026, 2), norm=LAYER)
    assert read(MBART_50) == relative(MBART_50, tokens, Pre, final=True, activation="relu")


def test_opus_mt_en_de(read: Read) -> None:
    tokens = Tokens(vocab_size=58101, width=512, scale=512**0.5, positions=Sinusoidal(512))
    assert read(OPUS_MT_EN_DE) == relative(OPUS_MT_EN_DE, tokens, Post, final=False, activation="silu")


def test_pegasus_xsum(read: Read) -> None:
    tokens = Tokens(vocab_size=96103, width=1024, scale=32.0, positions=Sinusoidal(512))
    expected = relative(PEGASUS_XSUM, tokens, Pre, final=True, activation="relu")
    assert read(PEGASUS_XSUM) == expected
    assert expected.max_positions == 512


def test_nllb_200(read: Read) -> None:
    tokens = Tokens(vocab_size=256206, width=1024, scale=32.0, positions=SpannedSinusoidal(1026, 2, unplaced=1))
    expected = relative(NLLB_600M, tokens, Pre, final=True, activation="relu")
    assert read(NLLB_600M) == replace(expected, head=Lm(tied=True))
    assert expected.max_positions == 1024
    assert read(M2M100_418M).vocab_size == 128112


def test_wmt19_en_de(read: Read) -> None:
    """Two vocabularies, neither of them named `vocab_size`, and an output matrix without a bias."""
    model = read(WMT19_EN_DE)
    tokens = Tokens(vocab_size=42024, width=1024, scale=32.0, positions=SpannedSinusoidal(1026, 2, unplaced=1))
    expected = relative(WMT19_EN_DE, tokens, Post, final=False, activation="relu")
    decoder = replace(stacks(expected)[1], embedding=replace(tokens, vocab_size=42000))
    assert model == replace(expected, decoder=decoder, head=Lm(tied=False), shared_tokens=False)
    assert (model.encoder_vocab_size, model.vocab_size) == (42024, 42000)


def test_led_base_16384(read: Read) -> None:
    """BART, but for the encoder's attention and the number of positions."""
    model = read(LED_BASE)
    tokens = Tokens(vocab_size=50265, width=768, positions=Learned(16384), norm=LAYER)
    expected = relative(LED_BASE, tokens, Post, final=False, activation="gelu")
    encoder, decoder = stacks(expected)
    block = encoder.blocks[0]
    attention = replace(block.attention, window=Window(512, 512), global_tokens=GlobalTokens(FirstToken()))
    assert model == replace(
        expected,
        encoder=replace(encoder, blocks=(replace(block, attention=attention),) * 6),
        decoder=replace(decoder, embedding=replace(tokens, positions=Learned(1024))),
    )


@pytest.mark.parametrize(
    ("asked", "decoder", "encoder"), [(None, 1024, 16384), (512, 512, 512), (4096, 1024, 4096), (16384, 1024, 16384)]
)
def test_stacks_with_positions_for_different_lengths(
    read: Read, tmp_path: Path, asked: int | None, decoder: int, encoder: int
) -> None:
    """--max-model-len limits both, each as far as it has positions."""
    model, config = read(LED_BASE), EngineConfig(model="x", max_model_len=asked)
    found = find_max_model_len(config, checkpoint.read_config(tmp_path), model)
    assert (found, find_max_encoder_len(config, model, found)) == (decoder, encoder)
    made = Transformer(model, TorchReference(), found, max_encoder_len=encoder, device="meta")
    assert (made.max_model_len, made.max_encoder_len) == (decoder, encoder)


def test_more_than_any_stack_has_positions_for(read: Read, tmp_path: Path) -> None:
    model, config = read(LED_BASE), EngineConfig(model="x", max_model_len=16385)
    found = find_max_model_len(config, checkpoint.read_config(tmp_path), model)
    with pytest.raises(ConfigError, match="max_model_len is 16385, but the checkpoint has positions for 1024 tokens"):
        Transformer(model, TorchReference(), found, device="meta")


def test_blenderbots(read: Read) -> None:
    tokens = Tokens(vocab_size=8008, width=1280, scale=1280**0.5, positions=Learned(128))
    assert read(BLENDERBOT_400M) == relative(BLENDERBOT_400M, tokens, Pre, final=True, activation="gelu")
    tokens = Tokens(vocab_size=54944, width=512, scale=512**0.5, positions=Learned(512), norm=LAYER)
    expected = relative(BLENDERBOT_90M, tokens, Post, final=False, activation="gelu")
    decoder = stacks(expected)[1]
    normed_first = replace(tokens, token_norm=LAYER, norm=None)
    assert read(BLENDERBOT_90M) == replace(expected, decoder=replace(decoder, embedding=normed_first))


@pytest.mark.parametrize("name", ["PLBartForConditionalGeneration", "MvpForConditionalGeneration"])
def test_the_same_as_bart(name: str, read: Read) -> None:
    kind = {
        "architectures": [name],
        "model_type": name.removesuffix("ForConditionalGeneration").lower(),
        "scale_embedding": False,
    }
    assert read(BART_LARGE_CNN | kind) == read(BART_LARGE_CNN)


def test_umt5_small(read: Read) -> None:
    """The bias by distance is each layer's own; all else is T5's."""
    own, shared = read(UMT5_SMALL), read(MT5_SMALL)
    for stack, other in zip(stacks(own), stacks(shared), strict=True):
        assert stack.shared_bias is None
        assert {block.attention.position for block in stack.blocks} == {other.shared_bias}
        plain = tuple(replace(block, attention=replace(block.attention, position=None)) for block in stack.blocks)
        assert replace(stack, blocks=plain, shared_bias=other.shared_bias) == replace(
            other, embedding=replace(other.embedding, vocab_size=256384)
        )
    assert own.head == Lm(tied=True, input_scale=512**-0.5)


def test_long_t5(read: Read) -> None:
    """T5, but for what the encoder's tokens see."""
    model = read(LONG_T5_TGLOBAL_BASE)
    own = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}
    plain = read(LONG_T5_TGLOBAL_BASE | own)
    encoder = stacks(plain)[0]
    assert (plain.head, model.context_length) == (Lm(tied=True), 4096)

    def seeing(sums: BlockSums | None) -> ModelSpec:
        block = encoder.blocks[0]
        attention = replace(block.attention, window=Window(127, 127), block_sums=sums)
        blocks = (replace(block, attention=attention),) * 12
        bias = None if sums is None else RelativeBuckets(32, 128, bidirectional=True)
        return replace(plain, encoder=replace(encoder, blocks=blocks, block_bias=bias))

    assert model == seeing(BlockSums(16, RMS))
    assert read(LONG_T5_TGLOBAL_BASE, encoder_attention_type="local") == seeing(None)


def test_bigbird_pegasus(read: Read) -> None:
    """A relative of BART without biases in attention, and blocks in the encoder."""
    tokens = Tokens(vocab_size=96103, width=1024, scale=32.0, positions=Learned(4096))
    expected = relative(BIGBIRD_PEGASUS_ARXIV, tokens, Pre, final=True, activation="gelu_tanh")

    def seeing(blocks: SparseBlocks | None, bias: bool) -> ModelSpec:
        encoder, decoder = stacks(expected)
        both_ways = replace(encoder.blocks[0].attention, qkv_bias=bias, out_bias=bias)
        causal = replace(decoder.blocks[0].attention, qkv_bias=bias, out_bias=bias)
        read = replace(encoder.blocks[0], attention=replace(both_ways, blocks=blocks))
        written = replace(decoder.blocks[0], attention=causal, cross=both_ways)
        return replace(
            expected,
            encoder=replace(encoder, blocks=(read,) * 16),
            decoder=replace(decoder, blocks=(written,) * 16),
        )

    assert read(BIGBIRD_PEGASUS_ARXIV) == seeing(SparseBlocks(64, 3), False)
    assert read(BIGBIRD_PEGASUS_ARXIV, attention_type="original_full", use_bias=True) == seeing(None, True)


def test_pegasus_x(read: Read) -> None:
    """A relative of BART without biases in attention; blocks of every other layer of the encoder begin earlier."""
    model = read(PEGASUS_X_BASE)
    tokens = Tokens(vocab_size=96103, width=768, scale=768**0.5, positions=SpannedSinusoidal(16384))
    expected = relative(PEGASUS_X_BASE, tokens, Pre, final=True, activation="relu")
    encoder, decoder = stacks(expected)
    both_ways, causal = (
        replace(stack.blocks[0].attention, qkv_bias=False, out_bias=False) for stack in (encoder, decoder)
    )
    first, second = (
        replace(encoder.blocks[0], attention=replace(both_ways, stream=GlobalStream(512, shift, LAYER)))
        for shift in (0, 256)
    )
    written = replace(decoder.blocks[0], attention=causal, cross=both_ways)
    assert model == replace(
        expected,
        encoder=replace(encoder, blocks=(first, second) * 6, global_vectors=128),
        decoder=replace(decoder, blocks=(written,) * 12),
        head=Lm(tied=True),
    )
    even = read(PEGASUS_X_BASE, stagger_local_blocks=False, block_size=511)
    assert {block.attention.stream for block in stacks(even)[0].blocks} == {GlobalStream(511, 0, LAYER)}


def test_prophetnet_large(read: Read, tmp_path: Path) -> None:
    """BART's blocks; the decoder's queries bring their scores of distances, and the head reads a stream of next tokens,
    which needs one position more."""
    named = {"d_model": 1024, "encoder_attention_heads": 16, "encoder_layers": 12, "decoder_layers": 12}
    tokens = Tokens(vocab_size=30522, width=1024, positions=Learned(512, offset=1), norm=LAYER)
    expected = relative(PROPHETNET_LARGE | named, tokens, Post, final=False, activation="gelu")
    decoder = stacks(expected)[1]
    own = replace(decoder.blocks[0].attention, position=QueryBuckets(32, 128))
    blocks = (replace(decoder.blocks[0], attention=own),) * 12
    model = read(PROPHETNET_LARGE)
    assert model == replace(
        expected,
        decoder=replace(decoder, blocks=blocks, predicting=PredictingStream(2)),
        head=Lm(tied=True),
        context_length=510,
    )
    length = find_max_model_len(EngineConfig(model="x"), checkpoint.read_config(tmp_path), model)
    assert (length, find_max_encoder_len(EngineConfig(model="x"), model, length)) == (510, 511)
    # Neither losses nor what older configs say of positions changes an answer.
    assert read(PROPHETNET_LARGE, disable_ngram_loss=True, eps=0.0, decoder_max_position_embeddings=9) == model
    assert stacks(read(PROPHETNET_LARGE, ngram=3))[1].predicting == PredictingStream(3)


def test_parts_of_a_predicting_stream_out_of_place_are_named(read: Read) -> None:
    model = read(PROPHETNET_LARGE)
    encoder, decoder = stacks(model)
    block = decoder.blocks[0]

    def named(**changes: Any) -> list[str]:
        return unsupported(replace(model, decoder=replace(decoder, **changes)))

    assert named() == []
    assert named(predicting=None) == ["QueryBuckets without a predicting stream"]
    assert named(final_norm=LAYER) == ["QueryBuckets with a norm, a projection, a shared bias or repeated layers"]
    assert named(embedding=replace(decoder.embedding, positions=None)) == [
        "QueryBuckets with positions other than Learned"
    ]
    for tokens in ({"expansion": 64}, {"token_types": 2}):
        assert named(embedding=replace(decoder.embedding, **tokens)) == [
            "QueryBuckets with vectors of another kind than tokens and their positions"
        ]
    assert named(blocks=(replace(block, placement=Pre(LAYER, LAYER, LAYER)),)) == [
        "QueryBuckets in layers other than Post with Dense"
    ]
    for attention in (replace(block.attention, window=Window(4)), replace(block.attention, position=None)):
        assert named(blocks=(replace(block, attention=attention),)) == ["QueryBuckets with attention of another kind"]
    brought = replace(encoder.blocks[0].attention, position=QueryBuckets(32, 128))
    read_so = replace(encoder, blocks=(replace(encoder.blocks[0], attention=brought),))
    assert unsupported(replace(model, encoder=read_so)) == [
        "QueryBuckets outside a decoder",
        "QueryBuckets without a predicting stream",
    ]


def test_switch_base_8(read: Read) -> None:
    """Every second layer has experts; those of the encoder have room for 64 tokens of an input."""
    model = read(SWITCH_BASE_8)
    for stack, capacity in zip(stacks(model), (64, None), strict=True):
        dense = Dense(3072, "relu")
        experts = Experts(dense, count=8, active=1, normalize=False, capacity=capacity)
        assert [block.ffn for block in stack.blocks] == [dense, experts] * 6
    none = read(SWITCH_BASE_8, num_sparse_encoder_layers=24)  # more than there are layers
    assert {block.ffn for block in stacks(none)[0].blocks} == {Dense(3072, "relu")}


def test_relatives_altered(read: Read) -> None:
    model = read(
        BART_BASE | {"architectures": ["BartForConditionalGeneration"]},
        encoder_attention_heads=4,
        decoder_ffn_dim=100,
        decoder_layers=2,
        max_position_embeddings=64,
        scale_embedding=True,
        tie_word_embeddings=False,
    )
    encoder, decoder = stacks(model)
    assert (encoder.blocks[0].attention.heads, encoder.blocks[0].attention.head_dim) == (4, 192)
    assert decoder.blocks[0].cross == heads(12, 64, causal=False, scale=1 / 8, bias=True)
    assert (len(decoder.blocks), decoder.blocks[0].ffn) == (2, Dense(100, "gelu", bias=True))
    assert decoder.embedding == Tokens(
        vocab_size=50265, width=768, scale=768**0.5, positions=Learned(66, 2), norm=LAYER
    )
    assert model.head == Lm(tied=False, bias=True)
    apart = read(OPUS_MT_EN_DE, share_encoder_decoder_embeddings=False, decoder_vocab_size=40_000)
    assert (apart.encoder_vocab_size, apart.vocab_size, apart.shared_tokens) == (58101, 40_000, False)


@pytest.mark.parametrize(
    ("config", "changes", "parts"),
    [
        (BART_LARGE_CNN, {"normalize_before": True}, ("normalize_before must be false", "True")),
        (BART_LARGE_CNN, {"add_final_layer_norm": True}, ("add_final_layer_norm must be false",)),
        (BART_LARGE_CNN, {"normalize_embedding": False}, ("normalize_embedding must be true",)),
        (MBART_50, {"normalize_before": False}, ("normalize_before must be true",)),
        (OPUS_MT_EN_DE, {"static_position_embeddings": False}, ("static_position_embeddings must be true",)),
        (PEGASUS_XSUM, {"normalize_embedding": True}, ("normalize_embedding must be false",)),
        (OPUS_MT_EN_DE, {"decoder_vocab_size": 90}, ("decoder_vocab_size (90)", "58101", "share_encoder_decoder")),
        (BART_LARGE_CNN, {"decoder_attention_heads": 7}, ("d_model (1024)", "decoder_attention_heads (7)")),
        (PEGASUS_XSUM, {"activation_function": "laplace"}, ("'laplace'",)),
        (T5_SMALL, {"feed_forward_proj": "gated-laplace"}, ("'laplace'",)),
        (T5_SMALL, {"relative_attention_num_buckets": 3}, ("relative_attention_num_buckets", "at least 4, got 3")),
        (T5_SMALL, {"relative_attention_max_distance": 8}, ("relative_attention_max_distance above the 8", "got 8")),
        (UMT5_SMALL, {"relative_attention_max_distance": 16}, ("relative_attention_max_distance above the 16",)),
        (BART_BASE, {"tie_word_embeddings": False}, ("BartModel has no language-model head",)),
        (
            BART_LARGE_CNN | {"architectures": ["MvpForConditionalGeneration"], "model_type": "mvp"},
            {"use_prompt": True},
            ("use_prompt must be false",),
        ),
        (WMT19_EN_DE, {"tie_word_embeddings": True}, ("src_vocab_size (42024)", "tgt_vocab_size (42000)")),
        (LED_BASE, {"attention_window": [1024] * 5}, ("attention_window", "6 layers")),
        (NLLB_600M, {"pad_token_id": None}, ("pad_token_id", "256206", "None")),
        (BLENDERBOT_90M, {"normalize_before": True}, ("normalize_before must be false",)),
        (LONG_T5_TGLOBAL_BASE, {"encoder_attention_type": "full"}, ("encoder_attention_type", "local", "'full'")),
        (PEGASUS_X_BASE, {"block_size": 511}, ("block_size", "must be even", "511")),
        (PROPHETNET_LARGE, {"add_cross_attention": False}, ("add_cross_attention must be true",)),
        (PROPHETNET_LARGE, {"pad_token_id": 1}, ("pad_token_id of the config must be 0", "got 1")),
        (PROPHETNET_LARGE, {"num_buckets": 1}, ("num_buckets of the config must be at least 2, got 1",)),
        (PROPHETNET_LARGE, {"relative_max_distance": 16}, ("relative_max_distance above the 16", "got 16")),
        (PROPHETNET_LARGE, {"max_position_embeddings": 2}, ("max_position_embeddings", "at least 3", "got 2")),
        (PROPHETNET_LARGE, {"num_decoder_attention_heads": 7}, ("1024 hidden features, which 7 attention heads",)),
        (SWITCH_BASE_8, {"router_dtype": "bfloat16"}, ("router_dtype", "float32", "bfloat16")),
        (SWITCH_BASE_8, {"expert_capacity": 0}, ("expert_capacity", "at least 1", "0")),
        (SWITCH_BASE_8, {"dense_act_fn": "gated-gelu"}, ("'gated-gelu'",)),
        (NLLB_MOE, {}, ("'NllbMoeForConditionalGeneration' is not supported",)),
    ],
)
def test_refused(read: Read, config: dict[str, Any], changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(config, **changes)
    for part in parts:
        assert part in str(caught.value)


def test_decoding_defaults_of_published_models(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All that these files say is honoured; where there is no generation_config.json, config.json says it."""
    opus = {
        "bad_words_ids": [[58100]], "bos_token_id": 0, "decoder_start_token_id": 58100, "eos_token_id": 0,
        "forced_eos_token_id": 0, "max_length": 512, "num_beams": 6, "pad_token_id": 58100, "renormalize_logits": True,
    }  # fmt: skip
    for config, own, start, eos, expected in (
        (T5_SMALL, None, 0, 1, {}),
        (FLAN_T5_SMALL, {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}, 0, 1, {}),
        (BART_BASE, None, 2, 2, {"num_beams": 4, "no_repeat_ngram_size": 3, "early_stopping": True,
                                 "forced_bos_token_id": 0, "forced_eos_token_id": [2]}),
        (BART_LARGE_CNN, None, 2, 2, {"num_beams": 4, "no_repeat_ngram_size": 3, "early_stopping": True,
                                      "length_penalty": 2.0, "min_length": 56, "max_length": 142,
                                      "forced_bos_token_id": 0, "forced_eos_token_id": [2]}),
        (OPUS_MT_EN_DE, None, 58100, 0, {"num_beams": 6, "max_length": 512, "forced_eos_token_id": [0],
                                         "bad_words_ids": [[58100]]}),
        (OPUS_MT_EN_DE, opus, 58100, 0, {"num_beams": 6, "max_length": 512, "forced_eos_token_id": [0],
                                         "bad_words_ids": [[58100]], "renormalize_logits": True}),
        (WMT19_EN_DE, None, 2, 2, {"num_beams": 5, "max_length": 200, "length_penalty": 1.15, "early_stopping": False}),
    ):  # fmt: skip
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if own is not None:
            (folder / "generation_config.json").write_text(json.dumps(own), encoding="utf-8")
        with caplog.at_level(logging.WARNING, "octavo"):
            defaults = load_defaults(folder, checkpoint.read_config(folder), config.get("vocab_size", 42000))
        assert defaults.values == expected
        assert (defaults.decoder_start_token_id, defaults.eos_ids, defaults.ignored) == (start, {eos}, ())
    assert not caplog.records


@pytest.mark.parametrize(
    ("own", "config", "start"),
    [
        ({"decoder_start_token_id": 5}, {"decoder_start_token_id": 6}, 5),
        ({"decoder_start_token_id": [5]}, {}, 5),
        ({"decoder_start_token_id": [5, 7]}, {"decoder_start_token_id": 6}, 6),
        ({"bos_token_id": 4}, {"decoder_start_token_id": 6}, 6),
        ({"bos_token_id": 4}, {"decoder_start_token_id": None}, 4),
        ({"decoder_start_token_id": 60_000}, {"decoder_start_token_id": None, "bos_token_id": 3}, 3),
        ({}, {"decoder_start_token_id": None, "bos_token_id": None}, None),
    ],
)
def test_decoder_start(tmp_path: Path, own: dict[str, Any], config: dict[str, Any], start: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BART_BASE | config), encoding="utf-8")
    (tmp_path / "generation_config.json").write_text(json.dumps(own), encoding="utf-8")
    for honour in (True, False):
        defaults = load_defaults(tmp_path, checkpoint.read_config(tmp_path), 50265, honour=honour)
        assert defaults.decoder_start_token_id == start


# ------------------------------------------------------------------ forms of checkpoints

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Any]
SHARED = "model.shared.weight"
COPIES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")


def rewritten(name: str, folder: Path, change: Change, **config: Any) -> tuple[Tensors, Tensors]:
    """The parameters of a shape as it was saved, and with its tensors changed."""
    shape = SHAPES[name]
    model = make_seq2seq_checkpoint(replace(shape, finish=None), folder)
    before = dict(load(folder, max_model_len=MAX_LEN).named_parameters())
    file = model.path / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    changed = change(tensors)
    save_file(tensors if changed is None else changed, file)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(settings | config), encoding="utf-8")
    return before, dict(load(folder, max_model_len=MAX_LEN).named_parameters())


def assert_same(before: Tensors, after: Tensors) -> None:
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def under(*names: str) -> Change:
    """The token table stored under these names instead of the usual one."""

    def change(tensors: Tensors) -> None:
        table = tensors.pop(next(name for name in (SHARED, "shared.weight") if name in tensors))
        tensors.update({name: table.clone() for name in names})

    return change


@pytest.mark.parametrize("name", ["bart", "marian", "pegasus"])
@pytest.mark.parametrize("names", [(SHARED, *COPIES), COPIES, COPIES[:2], *((name,) for name in COPIES)], ids=len)
def test_one_table_under_any_of_its_names(name: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """As the files of several versions of transformers have it."""
    assert_same(*rewritten(name, tmp_path, under(*names)))


@pytest.mark.parametrize(
    "names", [("shared.weight", "encoder.embed_tokens.weight"), ("decoder.embed_tokens.weight",), ("lm_head.weight",)]
)
def test_one_table_of_t5(names: tuple[str, ...], tmp_path: Path) -> None:
    assert_same(*rewritten("t5", tmp_path, under(*names)))


def test_a_head_of_its_own_is_usual_in_t5_of_version_1_1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The config says that it is tied all the same."""
    quiet, loud = tmp_path / "quiet", tmp_path / "loud"
    with caplog.at_level(logging.WARNING, "octavo"):
        before, _ = rewritten("t5-gated", quiet, lambda tensors: None)
        assert "head.weight" in before
        assert not caplog.records
        rewritten("t5-own-head-scaled", loud, lambda tensors: None)
        assert "lm_head.weight is stored with different values" in caplog.text


def test_what_old_t5_files_hold_besides(tmp_path: Path) -> None:
    extra = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(12, 4)}
    assert_same(*rewritten("t5", tmp_path, lambda tensors: tensors | extra))


@pytest.mark.parametrize("name", ["marian", "pegasus"])
def test_stored_sinusoids(name: str, tmp_path: Path) -> None:
    """Each stack's are used as they are stored, and made by the formula where they are not."""
    names = {stack: f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")}
    other = torch.randn(MAX_LEN, 32)
    before, after = rewritten(name, tmp_path / "stored", lambda tensors: tensors | {names["encoder"]: other})
    assert_same(before | {"encoder.embedding.positions": other}, after)
    before, after = rewritten(
        name, tmp_path / "missing", lambda tensors: {k: v for k, v in tensors.items() if k not in names.values()}
    )
    assert_same(before, after)
    longer = {names["decoder"]: torch.zeros(MAX_LEN + 1, 32)}
    with pytest.raises(ModelLoadError, match=rf"decoder\.embed_positions.*\[{MAX_LEN}, 32\].*\[{MAX_LEN + 1}, 32\]"):
        rewritten(name, tmp_path / "longer", lambda tensors: tensors | longer)


def test_a_bias_of_zeros_may_be_missing(tmp_path: Path) -> None:
    before, after = rewritten(
        "bart", tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != "final_logits_bias"}
    )
    assert before["head.bias"].abs().min() > 0
    assert_same(before | {"head.bias": torch.zeros_like(before["head.bias"])}, after)


@pytest.mark.parametrize(
    ("name", "architecture"), [("bart", "BartModel"), ("marian", "MarianModel"), ("pegasus", "PegasusModel")]
)
def test_headless(name: str, architecture: str, tmp_path: Path) -> None:
    """Without the head's bias, and without the prefix of names."""
    before, after = rewritten(
        name,
        tmp_path,
        lambda tensors: {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")},
        architectures=[architecture],
    )
    assert_same(before | {"head.bias": torch.zeros_like(before["head.bias"])}, after)


@pytest.mark.parametrize(("place", "stack"), [(0, "encoder"), (1, "decoder")])
def test_one_table_of_its_own(place: int, stack: str, tmp_path: Path) -> None:
    """The other stack has the shared one; the head is stored besides."""
    own = torch.randn(97, 32)
    head = torch.randn(97, 32)
    before, after = rewritten(
        "bart",
        tmp_path,
        lambda tensors: tensors | {COPIES[place]: own, "lm_head.weight": head},
        tie_word_embeddings=False,
    )
    shared = before.pop("decoder.embedding.tokens")
    tables = dict.fromkeys(("encoder.embedding.tokens", "decoder.embedding.tokens"), shared)
    assert_same(before | tables | {f"{stack}.embedding.tokens": own, "head.weight": head}, after)


def test_an_unclear_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"decoder\.embed_tokens\.weight and model\.shared\.weight have diff"
    ):
        rewritten("bart", tmp_path, lambda tensors: tensors | {COPIES[1]: torch.randn(97, 32)})


@pytest.mark.parametrize("missing", [SHARED, "model.decoder.layers.0.encoder_attn.k_proj.bias"])
def test_missing_tensors_are_named(missing: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="lacks tensors that its config requires: " + missing.replace(".", r"\.")):
        rewritten("bart", tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != missing})


def test_a_head_that_is_not_tied_must_be_stored(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"lacks tensors .*: lm_head\.weight"):
        rewritten("bart", tmp_path, lambda tensors: None, tie_word_embeddings=False)
