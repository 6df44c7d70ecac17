"""DeBERTa-v2: the forms that checkpoints are stored in, that inputs of a batch do
not see each other, and what is refused. Its numbers are compared in test_golden_encoders.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.checkpoints import restore
from support.encoder_shape import EncoderCheckpoint, run
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.pages import CPU, close, load
from support.published import DEBERTA_V2_XLARGE_MNLI, DEBERTA_V3_BASE, read
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from engine import TokenInput
from engine.backends.attention.base import AttentionMetadata
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.convolution import neighbours
from engine.model.disentangled import DisentangledAttention
from engine.model.distances import column_of
from engine.model.inputs import Inputs
from engine.model.missing import unsupported
from engine.model.normalisation import Norm
from engine.model.positions import DistanceVectors
from engine.model.spec import Convolution, Lm, ModelSpec
from engine.model.table import Taps
from engine.model.transformer import Transformer

Tensors = dict[str, Tensor]
NORM = Norm("layer", 1e-7, bias=True)


def published(folder: Path, config: dict[str, Any], **changes: Any) -> ModelSpec:
    model = read(folder, config, **changes)
    assert model.encoder is not None
    assert model.decoder is None
    return model


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_buckets": 1}, "position_buckets of the config is 1 and distances reach to 512"),
        ({"position_buckets": 64, "max_relative_positions": 33}, "is 64 and distances reach to 33"),
        ({"attention_head_size": 32}, r"attention_head_size of the config is 32, but .* 64 features each"),
        ({"num_attention_heads": 7}, "768 hidden features, which 7 attention heads cannot share"),
        ({"conv_kernel_size": 4}, "conv_kernel_size 4 tokens in conv_groups 1: the first must be odd"),
        ({"conv_kernel_size": 3, "conv_groups": 5}, "hidden_size 768 a multiple of the second"),
        ({"conv_kernel_size": 3, "conv_act": "mish"}, "asks for the activation 'mish'"),
        (
            {"architectures": ["DebertaV2ForSequenceClassification"], "pooler_hidden_size": 64},
            "pooler_hidden_size of the config is 64; the head reads and returns hidden_size 768",
        ),
        (
            {"architectures": ["DebertaV2ForMaskedLM"], "legacy": False, "embedding_size": 64},
            "legacy of the config is false, .* but the table has embedding_size 64",
        ),
        ({"architectures": ["DebertaV2ForMultipleChoice"]}, "'DebertaV2ForMultipleChoice' is not supported"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_has_no_part_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        published(tmp_path, DEBERTA_V3_BASE, **changes)


def test_parts_out_of_place_are_named(tmp_path: Path) -> None:
    model = published(tmp_path, DEBERTA_V2_XLARGE_MNLI)
    stack = model.encoder
    assert stack is not None
    block = stack.blocks[0]
    assert unsupported(model) == []
    without = replace(model, encoder=replace(stack, distances=None))
    assert unsupported(without) == ["Disentangled attention without vectors of distances"]
    grouped = replace(block, attention=replace(block.attention, kv_heads=6))
    assert unsupported(replace(model, encoder=replace(stack, blocks=(grouped,)))) == [
        "Disentangled attention of heads that share keys"
    ]
    even = replace(block, beside=Convolution(2, "gelu", NORM))
    assert unsupported(replace(model, encoder=replace(stack, blocks=(even,)))) == ["a convolution of 2 tokens"]
    causal = replace(block, attention=replace(block.attention, causal=True))
    decoder = ModelSpec(encoder=None, decoder=replace(stack, blocks=(causal,)), head=Lm(tied=True))
    assert unsupported(decoder) == ["Disentangled attention in a decoder", "a convolution in a decoder"]


# ---------------------------------------------------------------- modules


def assert_columns(buckets: int, max_distance: int, length: int) -> None:
    rows = torch.zeros(1, length, 1)
    back = build_relative_position(rows, rows, bucket_size=buckets, max_position=max_distance)[0]
    span = buckets if buckets > 0 else max_distance
    part = DistanceVectors(max_distance, buckets if buckets > 0 else None)
    found = column_of(part, torch.arange(1 - length, length))
    places = torch.arange(length) - torch.arange(length)[:, None] + length - 1
    assert torch.equal(found[places], (back + span).clamp(0, 2 * span - 1))


@pytest.mark.parametrize("shape", [(256, 512, 700), (-1, 512, 700), (-1, 20, 64), (256, 64, 300), (2, 100, 200)])
def test_columns_of_distances_equal_reference(shape: tuple[int, int, int]) -> None:
    assert_columns(*shape)


@settings(max_examples=60, deadline=None)
@given(buckets=st.integers(2, 300), max_distance=st.integers(1, 600), length=st.integers(1, 300))
def test_columns_of_any_distances_equal_reference(buckets: int, max_distance: int, length: int) -> None:
    assert_columns(buckets, max_distance + (max_distance - 1 == buckets // 2), length)


def test_neighbours_are_of_the_same_input() -> None:
    metadata = AttentionMetadata.build([3, 1, 2], [3, 1, 2], CPU)
    nothing = 9
    assert neighbours(metadata, 3, nothing).tolist() == [
        [9, 0, 1],
        [0, 1, 2],
        [1, 2, 9],
        [9, 3, 9],
        [9, 4, 5],
        [4, 5, 9],
    ]
    assert neighbours(metadata, 1, nothing).tolist() == [[i] for i in range(6)]
    assert neighbours(metadata, 5, nothing)[0].tolist() == [9, 9, 0, 1, 2]


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_a_kernel_as_a_matrix_equals_the_convolution(groups: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    x, kernel = torch.randn(7, 12, generator=generator), torch.randn(18, 12 // groups, 5, generator=generator)
    taps = Taps(5, groups)
    matrix = torch.full((18, 5 * 12), torch.nan)
    assert taps.shapes(matrix.shape) == [kernel.shape]
    taps.fill(matrix, 0, kernel)
    places = neighbours(AttentionMetadata.build([7], [7], CPU), 5, 7)
    windows = F.pad(x, (0, 0, 0, 1))[places].flatten(1)
    close(windows @ matrix.t(), F.conv1d(x.t()[None], kernel, padding=2, groups=groups)[0].t())


# ---------------------------------------------------------------- checkpoints


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], EncoderCheckpoint]:
    """The checkpoint of a shape, in a folder of its own."""
    return lambda name: make_encoder_checkpoint(ENCODER_SHAPES[name], tmp_path / name)


def read_inputs(model: Transformer, inputs: list[list[int]]) -> list[Tensor]:
    """Hidden states of each input, read together."""
    lengths = [len(ids) for ids in inputs]
    ids = torch.tensor([token for part in inputs for token in part])
    positions = torch.cat([torch.arange(length) for length in lengths])
    metadata = AttentionMetadata.build(lengths, lengths, CPU)
    with torch.inference_mode():
        inputs = Inputs(token_ids=ids, positions=positions, metadata=metadata, tokens=len(ids))
        return list(model(inputs).split(lengths))


IDS = [3, 17, 41, 5, 9, 26, 5, 0, 33]


def test_tensors_of_pretraining_are_left_unused(make: Callable[[str], EncoderCheckpoint]) -> None:
    """As v3 is published: both heads of its pretraining beside the model, and positions that are not added."""
    made = make("deberta-v3")

    def publish(held: Tensors) -> Tensors:
        extra = {
            "deberta.embeddings.position_embeddings.weight": torch.zeros(512, 32),
            "deberta.embeddings.position_ids": torch.arange(512)[None],
            "lm_predictions.lm_head.dense.weight": torch.zeros(32, 32),
            "lm_predictions.lm_head.bias": torch.zeros(61),
            "mask_predictions.classifier.weight": torch.zeros(1, 32),
            "mask_predictions.LayerNorm.weight": torch.zeros(32),
        }
        return {f"deberta.{name}": tensor for name, tensor in held.items()} | extra

    restore(made.path, publish)
    reference = transformers.AutoModel.from_pretrained(made.path).eval()
    (hidden,) = read_inputs(load(made.path), [IDS])
    close(hidden, run(reference, TokenInput(IDS)).last_hidden_state[0])


def test_a_classifier_needs_its_head_and_its_tables(make: Callable[[str], EncoderCheckpoint]) -> None:
    made = make("deberta-classes")
    for name in ("pooler.dense.weight", "deberta.encoder.rel_embeddings.weight"):
        held = load_file(made.path / "model.safetensors")
        restore(made.path, lambda tensors, name=name: {key: tensors[key] for key in tensors if key != name})  # type: ignore[misc]
        with pytest.raises(ModelLoadError, match=f"lacks tensors that its config requires: {name}"):
            load(made.path)
        save_file(held, made.path / "model.safetensors")
    restore(made.path, lambda tensors: tensors | {"deberta.encoder.conv.conv.bias": torch.zeros(32)})
    with pytest.raises(ModelLoadError, match=r"do not match its config: deberta\.encoder\.conv\.conv\.bias"):
        load(made.path)


@pytest.mark.parametrize("legacy", [True, False])
def test_of_two_stored_heads_the_config_names_one(legacy: bool, make: Callable[[str], EncoderCheckpoint]) -> None:
    """A file with both layouts of the masked-language-model head."""
    made = make("deberta-masked")
    newer = load_file(make("deberta-masked-newer").path / "model.safetensors")

    def join(held: Tensors) -> Tensors:
        return held | {name: tensor for name, tensor in newer.items() if name.startswith("lm_predictions.")}

    restore(made.path, join, legacy=legacy)
    try:
        reference = transformers.AutoModelForMaskedLM.from_pretrained(made.path).eval()
    except AttributeError as error:
        pytest.skip(f"transformers {transformers.__version__} does not load the newer layout with a tied head: {error}")
    model = load(made.path)
    (hidden,) = read_inputs(model, [IDS])
    close(model.logits(hidden), run(reference, TokenInput(IDS)).logits[0])


def test_an_output_matrix_of_its_own_is_used_as_in_transformers(make: Callable[[str], EncoderCheckpoint]) -> None:
    """Although tie_word_embeddings is true; its bias goes with it."""
    made = make("deberta-masked")

    def untie(held: Tensors) -> Tensors:
        table, bias = held["deberta.embeddings.word_embeddings.weight"], held["cls.predictions.bias"]
        return held | {"cls.predictions.decoder.weight": table.flip(0), "cls.predictions.decoder.bias": bias.flip(0)}

    restore(made.path, untie)
    reference = transformers.AutoModelForMaskedLM.from_pretrained(made.path).eval()
    model = load(made.path)
    (hidden,) = read_inputs(model, [IDS])
    close(model.logits(hidden), run(reference, TokenInput(IDS)).logits[0])


# ---------------------------------------------------------------- inputs of one batch


@pytest.mark.parametrize("name", ["deberta-v2", "deberta-own", "deberta-grouped-convolution"])
def test_inputs_do_not_see_their_neighbours(name: str, make: Callable[[str], EncoderCheckpoint]) -> None:
    """A token whose vector is not a number spoils its own input, and no bit of those before and after it."""
    model = load(make(name).path, max_model_len=64)
    with torch.no_grad():
        model.trunk.tokens[60] = torch.nan
    clean = [IDS, IDS[:1], IDS[:4] * 12]
    poisoned = [[60, 2], [60], [7, 8, 60, 5, 60]]
    want = read_inputs(model, [clean[0], poisoned[0], clean[1], poisoned[1], clean[2]])
    assert all(bool(hidden.isfinite().all()) for hidden in want[::2])
    assert not any(bool(hidden.isfinite().any()) for hidden in want[1::2])
    harmless = [[11, 2], [11], [7, 8, 11, 5, 11]]
    got = read_inputs(model, [clean[0], harmless[0], clean[1], harmless[1], clean[2]])
    assert all(map(torch.equal, want[::2], got[::2]))


def test_distances_are_projected_once(make: Callable[[str], EncoderCheckpoint]) -> None:
    model = load(make("deberta-own").path)
    attentions = [module for module in model.modules() if isinstance(module, DisentangledAttention)]
    assert len(attentions) == 3
    read_inputs(model, [IDS])
    kept = [attention._bias for attention in attentions]
    read_inputs(model, [IDS[:3], IDS])
    for attention, bias in zip(attentions, kept, strict=True):
        assert bias is not None
        assert attention._bias is bias
        assert bias.keys is not None
        assert bias.keys.shape == (2, 100, 12)


@pytest.mark.parametrize("name", ["deberta-v2", "deberta-own"])
def test_half_precision_is_as_near_as_the_reference(name: str, make: Callable[[str], EncoderCheckpoint]) -> None:
    """bfloat16 is no farther from float32 than transformers' bfloat16 is, give or take its own noise."""
    made = make(name)
    ids = [number * 7 % 60 for number in range(39)]
    exact = made.hidden(TokenInput(ids))
    (ours,) = read_inputs(load(made.path, torch.bfloat16), [ids])
    theirs = run(made.model.bfloat16(), TokenInput(ids)).last_hidden_state[0]
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - exact).norm() < 1.5 * (theirs.float() - exact).norm()
