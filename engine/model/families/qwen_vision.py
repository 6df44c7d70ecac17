"""The part of Qwen's vision-language models that sees: images of any size, in squares of patches (arXiv:2409.12191), and
windows of these (arXiv:2502.13923)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, linear
from engine.model.families.names import LayerNames, norm_weights
from engine.model.families.rope_settings import pairs_of, rotated, settings_of, theta_of
from engine.model.families.vision import kernel, layers_weights
from engine.model.normalisation import Norm
from engine.model.positions import Rotary
from engine.model.spec import Attention, Block, Dense, Gated, Patches, Pre, Projector, Stack, Vision
from engine.model.table import Entry

_EPS = 1e-6


def qwen2_vl(config: Any) -> Vision:
    """Qwen2-VL's."""
    part = config.vision_config
    ffn = Dense(int(part.embed_dim * part.mlp_ratio), activation(part.hidden_act), bias=True)
    return _squares(config, part.embed_dim, part.hidden_size, Norm("layer", _EPS, bias=True), ffn)


def qwen2_5_vl(config: Any) -> Vision:
    """Qwen2.5-VL's."""
    part = config.vision_config
    ffn = Gated(part.intermediate_size, activation(part.hidden_act), bias=True)
    window = part.window_size // part.spatial_merge_size // part.patch_size
    if window < 1:
        raise UnsupportedModelError(
            f"window_size of the vision_config is {part.window_size}: less than the {part.spatial_merge_size} patches "
            f"of {part.patch_size} pixels that become a vector."
        )
    whole = frozenset(part.fullatt_block_indexes)
    return _squares(config, part.hidden_size, part.out_hidden_size, Norm("rms", _EPS), ffn, window, whole)


def _squares(
    config: Any, width: int, out: int, norm: Norm, ffn: Dense | Gated, window: int = 0, whole: frozenset[int] = frozenset()
) -> Vision:
    """A tower over squares of patches.

    Args:
        width, out: features of the tower, and of its vectors.
        window: squares of a window's side; 0: there are none.
        whole: numbers of the layers that see all windows.

    Raises:
        UnsupportedModelError: a setting that is not implemented.
    """
    part, text = config.vision_config, config.text_config
    heads, squares = part.num_heads, part.spatial_merge_size
    head_dim = even_head_dim(width, heads)
    settings = settings_of(text, None)
    text_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_dim % 4 or out != text.hidden_size or not pairs_of(settings, rotated(settings, text_dim, partial=False)):
        raise UnsupportedModelError(
            f"vision_config needs heads of a multiple of 4 features and vectors of {text.hidden_size}, and "
            f"rope_parameters an mrope_section of three parts of a head; got {head_dim}, {out} and "
            f"{settings.get('mrope_section')!r}."
        )
    position = Rotary(
        dim=head_dim,
        theta=theta_of(part, settings_of(part, None)),
        in_float32=True,
        pairs=tuple((axis, 2 * number) for axis in range(2) for number in range(head_dim // 4)),
    )

    def block(number: int) -> Block:
        attention = Attention(
            heads=heads, kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5, position=position, causal=False,
            qkv_bias=True, out_bias=True, in_parts=window > 0 and number not in whole,
        )  # fmt: skip
        return Block(placement=Pre(norm, norm), attention=attention, ffn=ffn)

    embedding = Patches(
        image=(0, 0), patch=(part.patch_size, part.patch_size), channels=part.in_channels, width=width,
        frames=part.temporal_patch_size, bias=False,
    )  # fmt: skip
    tower = Stack(
        hidden_size=width, embedding=embedding, blocks=tuple(map(block, range(part.depth))), final_norm=norm
    )
    return Vision(
        tower=tower,
        token_id=config.image_token_id,
        skip=0,
        projector=Projector("gelu", merge=squares**2, inner=width * squares**2),
        squares=squares,
        window=window,
        axes=True,
    )


def square_entries(vision: Vision) -> list[Entry]:
    """The weights of such a part."""
    stack, ours = vision.tower, "tower.encoder"
    embedding = stack.embedding
    assert isinstance(embedding, Patches)
    gated = isinstance(stack.blocks[0].ffn, Gated)
    names = LayerNames(
        qkv="attn.qkv",
        out="attn.proj",
        norms=("norm1", "norm2"),
        ffn=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj") if gated else ("mlp.fc1", "mlp.fc2"),
    )
    return [
        *kernel(f"{ours}.embedding.patches", "visual.patch_embed.proj", embedding),
        *layers_weights(stack, "visual.blocks", names, target=ours),
        *norm_weights(f"{ours}.final_norm", "visual.merger.ln_q", stack.final_norm),
        *linear("vision.projector.first", "visual.merger.mlp.0", True, 0),
        *linear("vision.projector.second", "visual.merger.mlp.2", True, 1),
    ]
