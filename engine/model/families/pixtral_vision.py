"""The image tower of Mistral 3 and LightOnOCR: Pixtral's, over images of any size, with rotary positions of two axes
(arXiv:2410.07073)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.interface.vision import Lined
from engine.model.families.common import activation, gated_network, linear, multi_head, same_layers
from engine.model.families.names import LayerNames, norm_weights
from engine.model.families.rope_settings import settings_of, theta_of
from engine.model.families.vision import kernel, layers_weights
from engine.model.normalisation import Norm
from engine.model.positions import Rotary
from engine.model.spec import Activation, Block, Patches, Pre, Projector, Vision
from engine.model.table import Entry, Unfolded

_NORM = Norm("rms", 1e-5)
_LAYER = LayerNames(
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    norms=("attention_norm", "ffn_norm"),
    ffn=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
)


def mistral3(config: Any) -> Vision:
    """Raises UnsupportedModelError for a setting that is not implemented."""
    if config.vision_feature_layer != -1:
        raise UnsupportedModelError(
            f"vision_feature_layer of the config must be -1, got {config.vision_feature_layer}."
        )
    act, bias = activation(config.projector_hidden_act), bool(config.multimodal_projector_bias)
    return replace(_pixtral(config, act, bias=bias), lined=Lined())


def lighton_ocr(config: Any) -> Vision:
    """The tower of LightOnOCR. It has no texts among an image's vectors. Raises UnsupportedModelError for a setting
    that is not implemented."""
    return _pixtral(config, "gelu", bias=False)


def _pixtral(config: Any, act: Activation, *, bias: bool) -> Vision:
    part, text, merge = config.vision_config, config.text_config, config.spatial_merge_size
    head_dim, patch = part.hidden_size // part.num_attention_heads, part.patch_size
    if part.model_type != "pixtral" or not isinstance(patch, int) or head_dim % 4:
        raise UnsupportedModelError(
            "vision_config of the config must be of the type pixtral, its patch_size one number, and the features of a "
            f"head a multiple of 4; got {part.model_type!r}, {patch!r} and {head_dim}."
        )
    position = Rotary(
        dim=head_dim,
        theta=theta_of(part, settings_of(part, None)),
        pairs=tuple((axis, 2 * number + axis) for axis in range(2) for number in range(head_dim // 4)),
    )
    attention = multi_head(part, causal=False, bias=False, position=position)
    block = Block(placement=Pre(_NORM, _NORM), attention=attention, ffn=gated_network(part))
    embedding = Patches(
        image=(0, 0), patch=(patch, patch), channels=part.num_channels, width=part.hidden_size, bias=False, norm=_NORM
    )
    return Vision(
        tower=same_layers(part, embedding, block, Norm("rms", text.rms_norm_eps)),
        token_id=config.image_token_id,
        skip=0,
        projector=Projector(act, bias=bias, merge=merge**2, merged=True),
        squares=merge,
    )


def mistral3_entries(vision: Vision) -> list[Entry]:
    """The weights of such a part."""
    stack, ours, tower, source = vision.tower, "tower.encoder", "vision_tower", "multi_modal_projector"
    embedding, projector = stack.embedding, vision.projector
    assert isinstance(embedding, Patches)
    assert isinstance(projector, Projector)
    return [
        *kernel(f"{ours}.embedding.patches", f"{tower}.patch_conv", embedding),
        *norm_weights(f"{ours}.embedding.norm", f"{tower}.ln_pre", embedding.norm),
        *layers_weights(stack, f"{tower}.transformer.layers", _LAYER, target=ours),
        *norm_weights(f"{ours}.final_norm", f"{source}.norm", stack.final_norm),
        *linear("vision.projector.merged", f"{source}.patch_merger.merging_layer", False, Unfolded(projector.merge)),
        *linear("vision.projector.first", f"{source}.linear_1", projector.bias),
        *linear("vision.projector.second", f"{source}.linear_2", projector.bias),
    ]
