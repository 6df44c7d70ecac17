"""Florence-2: DaViT makes vectors of an image, which BART's encoder reads before a text (arXiv:2311.06242)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, linear, norm
from engine.model.families.encoder_decoder import NORM, learned, stack_of, weights
from engine.model.spec import DualPyramid, DualStage, Lm, ModelSpec, Tokens
from engine.model.table import Entry, Family, Reshaped, WeightTable

_PIXELS = 768  # of a side, in published checkpoints. A folder's preprocessor may say otherwise.
_MOST = 1 << 12
_EACH = (
    "depths",
    "patch_size",
    "patch_stride",
    "patch_padding",
    "patch_prenorm",
    "embed_dim",
    "num_heads",
    "num_groups",
)


def _spec(config: Any) -> ModelSpec:
    text = config.text_config
    if text.model_type != "bart":
        raise UnsupportedModelError(f"model_type of text_config must be 'bart', got {text.model_type!r}.")
    encoder, decoder = (
        stack_of(text, learned(text), side, text.vocab_size, pre=False, embedding_norm=True)
        for side in ("encoder", "decoder")
    )
    assert isinstance(encoder.embedding, Tokens)
    image = _image(config.vision_config, text.d_model)
    return ModelSpec(
        encoder=replace(encoder, embedding=replace(encoder.embedding, image=image)),
        decoder=decoder,
        head=Lm(tied=config.tie_word_embeddings),
        context_length=text.max_position_embeddings,
    )


def _image(config: Any, width: int) -> DualPyramid:
    lists = [list(getattr(config, name)) for name in _EACH]
    sizes = [config.in_channels, config.window_size, config.max_position_embeddings, config.max_temporal_embeddings]
    numbers = [*sizes, *(number for name, each in zip(_EACH, lists, strict=True) for number in each)]
    counts = {len(each) for each in lists}
    if len(counts) != 1 or not 0 < min(counts) <= 8 or not all(0 <= number <= _MOST for number in numbers):
        raise UnsupportedModelError(
            f"{', '.join(_EACH)} of vision_config must list one number from 0 to {_MOST} for each of up to 8 stages, "
            f"got {', '.join(map(str, lists))}."
        )
    if min(sizes) < 1:
        raise UnsupportedModelError(
            "in_channels, window_size, max_position_embeddings and max_temporal_embeddings of vision_config must be "
            f"positive, got {', '.join(map(str, sizes))}."
        )
    if config.projection_dim != width:
        raise UnsupportedModelError(
            f"projection_dim of vision_config must be d_model of text_config, {width}, got {config.projection_dim}."
        )
    stages = []
    for layers, kernel, stride, padding, norm_first, features, heads, groups in zip(*lists, strict=True):
        if 0 in (kernel, stride, heads, groups, features) or features % heads or features % groups:
            raise UnsupportedModelError(
                "patch_size, patch_stride and embed_dim of vision_config must be positive, and num_heads and "
                f"num_groups must divide embed_dim; got {kernel}, {stride}, {heads}, {groups} and {features}."
            )
        stages.append(
            DualStage(
                width=features,
                layers=layers,
                heads=heads,
                groups=groups,
                inner=int(features * config.mlp_ratio),
                kernel=kernel,
                stride=stride,
                padding=padding,
                norm_first=bool(norm_first),
            )
        )
    return DualPyramid(
        image=(_PIXELS, _PIXELS),
        channels=config.in_channels,
        window=config.window_size,
        stages=tuple(stages),
        norm=NORM,
        activation=activation(config.activation_function),
        places=config.max_position_embeddings,
        times=config.max_temporal_embeddings,
        projection=config.projection_dim,
        qkv_bias=bool(config.qkv_bias),
    )


def _weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    assert isinstance(model.encoder.embedding, Tokens)
    assert model.encoder.embedding.image is not None
    table = weights(model)
    text = tuple(
        replace(entry, sources=tuple(name.replace("model.", "model.language_model.", 1) for name in entry.sources))
        for entry in table.entries
    )
    copies = tuple(name.replace("model.", "model.language_model.", 1) for name in table.copies)
    images = _image_weights(model.encoder.embedding.image)
    return replace(table, entries=(*text, *images), copies=copies, ignored=())


def _image_weights(part: DualPyramid) -> list[Entry]:
    ours, projector = "encoder.embedding.image", "model.multi_modal_projector"
    entries = [
        Entry(f"{ours}.rows", (f"{projector}.image_position_embed.row_embeddings.weight",)),
        Entry(f"{ours}.columns", (f"{projector}.image_position_embed.column_embeddings.weight",)),
        Entry(f"{ours}.times", (f"{projector}.visual_temporal_embed.pos_idx_to_embed",)),
        *linear(f"{ours}.projection", f"{projector}.image_projection", False),
        *norm(f"{ours}.norm", f"{projector}.image_proj_norm", bias=True),
    ]
    inputs = part.channels
    for number, stage in enumerate(part.stages):
        target, source = f"{ours}.stages.{number}", f"model.vision_tower.convs.{number}"
        stored = Reshaped(((stage.width, inputs, stage.kernel, stage.kernel),))
        entries += [
            Entry(f"{target}.convolution.weight", (f"{source}.conv.weight",), stored),
            Entry(f"{target}.convolution.bias", (f"{source}.conv.bias",)),
            *norm(f"{target}.norm", f"{source}.norm", bias=True),
        ]
        for layer in range(stage.layers):
            source = f"model.vision_tower.blocks.{number}.{layer}"
            for place, (kind, attention) in enumerate((("spatial", "window_attn"), ("channel", "channel_attn"))):
                entries += _layer_weights(
                    f"{target}.blocks.{2 * layer + place}", f"{source}.{kind}_block", attention, part.qkv_bias
                )
        inputs = stage.width
    return entries


def _layer_weights(target: str, source: str, attention: str, qkv_bias: bool) -> list[Entry]:
    return [
        *linear(f"{target}.near", f"{source}.conv1", True),
        *norm(f"{target}.before", f"{source}.norm1", bias=True),
        *linear(f"{target}.attention.qkv", f"{source}.{attention}.qkv", qkv_bias),
        *linear(f"{target}.attention.out", f"{source}.{attention}.proj", True),
        *linear(f"{target}.second_near", f"{source}.conv2", True),
        *norm(f"{target}.after", f"{source}.norm2", bias=True),
        *linear(f"{target}.up", f"{source}.ffn.fc1", True),
        *linear(f"{target}.down", f"{source}.ffn.fc2", True),
    ]


FAMILY = Family(
    name="Florence-2",
    architectures=("Florence2ForConditionalGeneration",),
    brings="an image and a task, to texts and boxes: DaViT's vectors before the text in BART's encoder",
    spec=_spec,
    weights=_weights,
)
