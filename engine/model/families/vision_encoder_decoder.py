"""Encoder-decoders that read an image and write its text. TrOCR (arXiv:2109.10282) has an encoder of patches and a
decoder like BART's, Donut (arXiv:2111.15664) Swin's encoder and mBART's decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, linear, norm, output_table
from engine.model.families.encoder_decoder import FAIRSEQ, fixed_after_padding, learned, stack_of
from engine.model.families.names import stack_weights
from engine.model.families.vision import pair
from engine.model.families.vit import tower, tower_weights, unread
from engine.model.normalisation import Norm
from engine.model.spec import Lm, ModelSpec, Pre, Pyramid, PyramidStage, Stack
from engine.model.table import Entry, Family, Joined, Reshaped, WeightTable

_SWIN, _QKV = "donut-swin", ("query", "key", "value")
_MOST = 1 << 12
_INDEX = r"encoder\..*\.relative_position_index"  # a buffer of the reference
_FIRST = {"vit": 1, "deit": 2}  # learned vectors before those of an image's patches, by the encoder's type


def spec(config: Any) -> ModelSpec:
    seen, written = config.encoder, config.decoder
    if seen.model_type not in (*_FIRST, _SWIN):
        raise UnsupportedModelError(
            f"encoder of the config is of the type {seen.model_type!r}; supported are {', '.join((*_FIRST, _SWIN))}."
        )
    encoder = _pyramid(seen) if seen.model_type == _SWIN else tower(seen, _FIRST[seen.model_type])
    decoder = _decoder(written)
    given = getattr(written, "cross_attention_hidden_size", None)
    if (given or decoder.hidden_size) != encoder.hidden_size:
        raise UnsupportedModelError(
            "cross_attention_hidden_size of the decoder's config must be the number of the encoder's features, "
            f"{encoder.hidden_size}, got {given!r}: a matrix between encoder and decoder is not implemented."
        )
    return ModelSpec(
        encoder=encoder,
        decoder=decoder,
        head=Lm(tied=written.tie_word_embeddings),
        context_length=written.max_position_embeddings,
        shared_tokens=False,
    )


def _pyramid(config: Any) -> Stack:
    image, patch = pair("image_size", config.image_size), pair("patch_size", config.patch_size)
    depths, heads, first, window = config.depths, config.num_heads, config.embed_dim, config.window_size
    counts = [*depths, *heads, first, window]
    if not all(isinstance(n, int) and 0 < n <= _MOST for n in counts) or not 0 < len(depths) == len(heads) <= 8:
        raise UnsupportedModelError(
            f"depths, num_heads, embed_dim and window_size of the encoder's config must be from 1 to {_MOST}. The "
            f"first two list one number for each of up to 8 stages. Got {depths}, {heads}, {first} and {window}."
        )
    widths = [first << number for number in range(len(depths))]
    stages = tuple(
        PyramidStage(width, layers, each, int(config.mlp_ratio * width))
        for width, layers, each in zip(widths, depths, heads, strict=True)
    )
    part = Pyramid(
        image=image,
        patch=patch,
        channels=config.num_channels,
        window=window,
        stages=stages,
        norm=Norm("layer", config.layer_norm_eps, bias=True),
        activation=activation(config.hidden_act),
        qkv_bias=bool(config.qkv_bias),
    )
    uneven = any(size % own for size, own in zip(image, patch, strict=True))
    if uneven or any(stage.width % stage.heads for stage in stages):
        raise UnsupportedModelError(
            f"num_heads {heads} of the encoder's config must divide the features {widths} of its stages, and "
            f"patch_size {patch} its image_size {image}."
        )
    if config.use_absolute_embeddings or config.layer_norm_eps != 1e-5 or min(map(min, part.grids)) < part.window:
        raise UnsupportedModelError(
            "use_absolute_embeddings of the encoder's config must be false, layer_norm_eps 1e-05, and window_size at "
            f"most the positions of a stage's side; got {config.use_absolute_embeddings}, {config.layer_norm_eps}, "
            f"{part.window} and {part.grids}."
        )
    return Stack(hidden_size=widths[-1], embedding=part, blocks=(), final_norm=None)


def _pyramid_weights(part: Pyramid) -> list[Entry]:
    ours, source = "encoder.embedding", "encoder.embeddings"
    stored = (part.stages[0].width, part.channels, *part.patch)
    entries = [
        Entry(f"{ours}.patches.weight", (f"{source}.patch_embeddings.projection.weight",), Reshaped((stored,))),
        Entry(f"{ours}.patches.bias", (f"{source}.patch_embeddings.projection.bias",)),
        *norm(f"{ours}.norm", f"{source}.norm", bias=True),
    ]
    for number, stage in enumerate(part.stages):
        target, source = f"{ours}.stages.{number}", f"encoder.encoder.layers.{number}"
        if number + 1 < len(part.stages):
            entries += linear(f"{target}.reduction", f"{source}.downsample.reduction", False)
            entries += norm(f"{target}.norm", f"{source}.downsample.norm", bias=True)
        for layer in range(stage.layers):
            entries += _layer_weights(f"{target}.blocks.{layer}", f"{source}.blocks.{layer}", stage, part.qkv_bias)
    return entries


def _layer_weights(target: str, source: str, stage: PyramidStage, qkv_bias: bool) -> list[Entry]:
    attention, fused = f"{source}.attention.self", Joined((stage.width,) * 3)
    kinds = ("weight", "bias") if qkv_bias else ("weight",)
    return [
        *norm(f"{target}.before", f"{source}.layernorm_before", bias=True),
        *(Entry(f"{target}.qkv.{kind}", tuple(f"{attention}.{name}.{kind}" for name in _QKV), fused) for kind in kinds),
        *linear(f"{target}.out", f"{source}.attention.output.dense", True),
        Entry(f"{target}.distances", (f"{attention}.relative_position_bias_table",)),
        *norm(f"{target}.after", f"{source}.layernorm_after", bias=True),
        *linear(f"{target}.up", f"{source}.intermediate.dense", True),
        *linear(f"{target}.down", f"{source}.output.dense", True),
    ]


def _decoder(config: Any) -> Stack:
    kind = config.model_type
    if kind == "trocr":
        positions = learned(config) if config.use_learned_position_embeddings else fixed_after_padding(config)
        norms = {"pre": False, "embedding_norm": bool(config.layernorm_embedding)}
        return stack_of(config, positions, "decoder", config.vocab_size, **norms)
    if kind == "mbart":
        return stack_of(config, learned(config), "decoder", config.vocab_size, pre=True, embedding_norm=True)
    raise UnsupportedModelError(f"decoder of the config is of the type {kind!r}; supported are trocr, mbart.")


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    assert model.decoder is not None
    seen = model.encoder.embedding
    stem, ends = "decoder.model.decoder", isinstance(model.decoder.blocks[0].placement, Pre)
    output = "decoder.lm_head" if ends else "decoder.output_projection"
    entries = [
        *(_pyramid_weights(seen) if isinstance(seen, Pyramid) else tower_weights(model.encoder, "encoder")),
        Entry("decoder.embedding.tokens", (f"{stem}.embed_tokens.weight",)),
        output_table(model, output),
        *stack_weights("decoder", model.decoder, replace(FAIRSEQ, stem=stem)),
    ]
    fixed = r"decoder\.model\.decoder\.embed_positions\.(weights|_float_tensor)"
    return WeightTable(tuple(entries), ignored=(*unread("encoder"), fixed, _INDEX), head=f"{output}.weight")


FAMILY = Family(
    name="TrOCR, Donut",
    architectures=("VisionEncoderDecoderModel",),
    brings="an image's text: an encoder of patches (ViT, DeiT) or Swin's, a decoder like BART's or mBART's",
    spec=spec,
    weights=weights,
)
