"""The image towers of GLM-OCR (that of GLM-4.1V, arXiv:2507.01006) and PaddleOCR-VL (arXiv:2510.14528). Like Qwen's,
they read images of any size in squares of patches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import gated, gated_network, linear, norm
from engine.model.families.names import LayerNames, norm_weights
from engine.model.families.qwen_vision import axial, check_axes, squares
from engine.model.families.vision import kernel, layers_weights, patches, pre_norm_encoder
from engine.model.normalisation import Norm
from engine.model.spec import GatedProjector, Patches, PerHead, Projector, Vision
from engine.model.table import Entry, Unfolded

_EPS = 1e-5  # of the projectors' norms
_LAYER = LayerNames(
    qkv="attn.qkv",
    out="attn.proj",
    qk_norm="attn.{}_norm",
    norms=("norm1", "norm2"),
    ffn=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def glm_ocr(config: Any) -> Vision:
    """Raises UnsupportedModelError for a setting that is not implemented."""
    part = config.vision_config
    bias, rms = bool(part.attention_bias), Norm("rms", part.rms_norm_eps)
    network = gated_network(part, bias=bias)
    made = squares(config, part.hidden_size, part.out_hidden_size, rms, network)
    embedding, merge = made.tower.embedding, part.spatial_merge_size**2
    assert isinstance(embedding, Patches)
    blocks = tuple(
        replace(
            block,
            attention=replace(block.attention, qk_norm=PerHead(rms), qkv_bias=bias, out_bias=bias),
        )
        for block in made.tower.blocks
    )
    inner = replace(network, width=part.out_hidden_size * part.in_channels, bias=False)
    return replace(
        made,
        tower=replace(made.tower, embedding=replace(embedding, bias=True), blocks=blocks),
        projector=GatedProjector(merge, Norm("layer", _EPS, bias=True), inner),
    )


def glm_ocr_entries(vision: Vision) -> list[Entry]:
    """The weights of such a part."""
    stack, ours, merger = vision.tower, "tower.encoder", "visual.merger"
    embedding, projector = stack.embedding, vision.projector
    assert isinstance(embedding, Patches)
    assert isinstance(projector, GatedProjector)
    side = vision.squares
    downsample = Unfolded(projector.merge, (embedding.width, side, side))
    return [
        *kernel(f"{ours}.embedding.patches", "visual.patch_embed.proj", embedding, timed=True),
        *layers_weights(stack, "visual.blocks", _LAYER, target=ours),
        *norm_weights(f"{ours}.final_norm", "visual.post_layernorm", stack.final_norm),
        Entry("vision.projector.merged.weight", ("visual.downsample.weight",), downsample),
        Entry("vision.projector.merged.bias", ("visual.downsample.bias",)),
        *linear("vision.projector.first", f"{merger}.proj", False),
        *norm("vision.projector.norm", f"{merger}.post_projection_norm", bias=True),
        *gated("vision.projector.network", merger, projector.network),
    ]


def paddleocr_vl(config: Any) -> Vision:
    """Raises UnsupportedModelError for a setting that is not implemented."""
    part, side = config.vision_config, config.vision_config.spatial_merge_size
    embedding = patches(part, bias=True, first=0)
    (height, width), (rows, columns) = embedding.image, embedding.patch
    if height != width or rows != columns:
        raise UnsupportedModelError(
            f"image_size and patch_size of the vision_config must be squares, got {part.image_size!r} and "
            f"{part.patch_size!r}."
        )
    tower = pre_norm_encoder(part, replace(embedding, image=(0, 0), cells=True))
    head_dim = part.hidden_size // part.num_attention_heads
    check_axes(config, head_dim, config.text_config.hidden_size)
    position = axial(part, head_dim)
    blocks = tuple(replace(block, attention=replace(block.attention, position=position)) for block in tower.blocks)
    return Vision(
        tower=replace(tower, blocks=blocks),
        token_id=config.image_token_id,
        skip=0,
        projector=Projector(
            "gelu",
            merge=side**2,
            inner=part.hidden_size * side**2,
            norm=Norm("layer", _EPS, bias=True),
            each=True,
        ),
        squares=side,
        axes=True,
    )


def paddleocr_vl_entries(vision: Vision) -> list[Entry]:
    """The weights of such a part."""
    stack, ours, tower = vision.tower, "tower.encoder", "visual.vision_model"
    embedding, projector = stack.embedding, vision.projector
    assert isinstance(embedding, Patches)
    assert isinstance(projector, Projector)
    return [
        *kernel(f"{ours}.embedding.patches", f"{tower}.embeddings.patch_embedding", embedding),
        Entry(f"{ours}.embedding.positions", (f"{tower}.embeddings.position_embedding.weight",)),
        *layers_weights(stack, f"{tower}.encoder.layers", target=ours),
        *norm_weights(f"{ours}.final_norm", f"{tower}.post_layernorm", stack.final_norm),
        *norm_weights("vision.projector.norm", "projector.pre_norm", projector.norm),
        *linear("vision.projector.first", "projector.linear_1", True),
        *linear("vision.projector.second", "projector.linear_2", True),
    ]
