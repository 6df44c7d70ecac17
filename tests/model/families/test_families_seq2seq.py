"""Encoder-decoder families: lengths, settings that are refused, and checkpoints in the forms in which they were
published."""

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
    BLENDERBOT_90M,
    FLAN_T5_SMALL,
    LED_BASE,
    LONG_T5_TGLOBAL_BASE,
    MBART_50,
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
from engine.model.positions import QueryBuckets
from engine.model.spec import (
    ModelSpec,
    Pre,
    Stack,
)
from engine.model.transformer import Transformer

LAYER = Norm("layer", 1e-5, bias=True)


def stacks(model: ModelSpec) -> tuple[Stack, Stack]:
    assert model.encoder is not None
    assert model.decoder is not None
    return model.encoder, model.decoder


# ------------------------------------------------------------------ what is read of configs


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
    for attention in (replace(block.attention, sees=Window(4)), replace(block.attention, position=None)):
        assert named(blocks=(replace(block, attention=attention),)) == ["QueryBuckets with attention of another kind"]
    brought = replace(encoder.blocks[0].attention, position=QueryBuckets(32, 128))
    read_so = replace(encoder, blocks=(replace(encoder.blocks[0], attention=brought),))
    assert unsupported(replace(model, encoder=read_so)) == [
        "QueryBuckets outside a decoder",
        "QueryBuckets without a predicting stream",
    ]


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
