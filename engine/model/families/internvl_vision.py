"""The part of InternVL that sees: BEiT's tower, whose squares of patches become a vector each (arXiv:2504.10479)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.interface.vision import Enclosed
from engine.model.families.common import activation, dense_network, linear, multi_head, same_layers
from engine.model.families.names import LayerNames, layer_weights, norm_weights
from engine.model.families.vision import kernel, patches
from engine.model.normalisation import Norm
from engine.model.spec import Block, Patches, Projector, Sandwich, Vision, WholeProjection
from engine.model.table import Entry, Reshaped, Row

_LAYER = LayerNames(
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.projection_layer",
    qk_norm="attention.{}_norm",
    norms=("layernorm_before", "", "layernorm_after", ""),
    ffn=("mlp.fc1", "mlp.fc2"),
)


def internvl(config: Any) -> Vision:
    """Raises UnsupportedModelError for a setting that is not implemented."""
    part = config.vision_config
    layer, strategy, ratio = config.vision_feature_layer, config.vision_feature_select_strategy, config.downsample_ratio
    embedding = patches(part, bias=True, first=1)
    sides = {pixels // size for pixels, size in zip(embedding.image, embedding.patch, strict=True)}
    factor = int(1 / ratio) if isinstance(ratio, float) and 0 < ratio <= 1 else 0
    if len(sides) != 1 or not factor or 1 / factor != ratio or sides.pop() % factor:
        raise UnsupportedModelError(
            "downsample_ratio of the config must be 1 / N, where N divides the patches of a square image; got "
            f"{ratio!r}."
        )
    if (layer, strategy) != (-1, "default") or not part.use_mean_pooling or not part.use_absolute_position_embeddings:
        raise UnsupportedModelError(
            "Implemented are vision_feature_layer -1, vision_feature_select_strategy default, use_mean_pooling and "
            f"use_absolute_position_embeddings; got {layer!r}, {strategy!r}, {part.use_mean_pooling!r} and "
            f"{part.use_absolute_position_embeddings!r}."
        )
    rms = part.norm_type == "rms_norm"
    norm = Norm("rms" if rms else "layer", part.layer_norm_eps, bias=not rms)
    scale = Norm("affine", 0.0)
    attention = multi_head(
        part,
        causal=False,
        qkv_bias=part.attention_bias,
        out_bias=True,
        qk_norm=WholeProjection(Norm("rms", 1e-6)) if part.use_qk_norm else None,
    )
    block = Block(placement=Sandwich(norm, scale, norm, scale), attention=attention, ffn=dense_network(part))
    return Vision(
        tower=same_layers(part, embedding, block),
        token_id=config.image_token_id,
        skip=1,
        projector=Projector(
            activation(config.projector_hidden_act),
            merge=factor**2,
            norm=Norm("layer", 1e-5, bias=True),
            shuffles=True,
        ),
        enclosed=Enclosed(),
    )


def internvl_entries(vision: Vision) -> list[Entry]:
    """The weights of such a part."""
    stack, ours, tower, source = vision.tower, "tower.encoder", "vision_tower", "multi_modal_projector"
    embedding = stack.embedding
    assert isinstance(embedding, Patches)
    assert isinstance(vision.projector, Projector)
    entries = [
        *kernel(f"{ours}.embedding.patches", f"{tower}.embeddings.patch_embeddings.projection", embedding),
        Entry(f"{ours}.embedding.first", (f"{tower}.embeddings.cls_token",), Reshaped(((1, 1, embedding.width),))),
        Entry(f"{ours}.embedding.positions", (f"{tower}.embeddings.position_embeddings",), Row()),
        *norm_weights("vision.projector.norm", f"{source}.layer_norm", vision.projector.norm),
        *linear("vision.projector.first", f"{source}.linear_1", True),
        *linear("vision.projector.second", f"{source}.linear_2", True),
    ]
    for i, block in enumerate(stack.blocks):
        target, layer = f"{ours}.blocks.{i}", f"{tower}.encoder.layer.{i}"
        scales = {f"{target}.attention.after.weight": "lambda_1", f"{target}.ffn.after.weight": "lambda_2"}
        found = layer_weights(target, layer, block, _LAYER)
        entries += [entry for entry in found if entry.target not in scales]
        entries += [Entry(scale, (f"{layer}.{name}",)) for scale, name in scales.items()]
    return entries
