"""The part of Qwen's vision-language models that sees: images of any size, in squares of patches (arXiv:2409.12191),
and windows of these (arXiv:2502.13923)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, linear
from engine.model.families.names import LayerNames, norm_weights
from engine.model.families.rope_settings import pairs_of, rotated, settings_of, theta_of
from engine.model.families.vision import kernel, layers_weights
from engine.model.normalisation import Norm
from engine.model.positions import Learned, Rotary
from engine.model.spec import Attention, Block, Dense, Gated, Patches, Pre, Projector, Stack, Vision
from engine.model.table import Entry

_EPS = 1e-6


def qwen2_vl(config: Any) -> Vision:
    """Qwen2-VL's."""
    part = config.vision_config
    ffn = Dense(int(part.embed_dim * part.mlp_ratio), activation(part.hidden_act), bias=True)
    return squares(config, part.embed_dim, part.hidden_size, Norm("layer", _EPS, bias=True), ffn)


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
    return squares(config, part.hidden_size, part.out_hidden_size, Norm("rms", _EPS), ffn, window, whole)


def qwen3_vl(config: Any) -> Vision:
    """Qwen3-VL's: learned positions, and hidden states of several layers (DeepStack, arXiv:2406.04334)."""
    part, norm = config.vision_config, Norm("layer", _EPS, bias=True)
    ffn = Dense(part.intermediate_size, activation(part.hidden_act), bias=True)
    made = squares(config, part.hidden_size, part.out_hidden_size, norm, ffn)
    if not settings_of(config.text_config, None).get("mrope_interleaved"):
        raise UnsupportedModelError("mrope_interleaved of rope_parameters must be true for this architecture.")
    count, layers = part.num_position_embeddings, tuple(getattr(part, "deepstack_visual_indexes", None) or ())
    if count < 1 or math.isqrt(count) ** 2 != count or layers != tuple(sorted({*layers} & {*range(part.depth)})):
        raise UnsupportedModelError(
            f"num_position_embeddings of the vision_config must be a square, and deepstack_visual_indexes some of its "
            f"{part.depth} layers in order; got {count!r} and {list(layers)!r}."
        )
    embedding = made.tower.embedding
    assert isinstance(embedding, Patches)
    assert isinstance(made.projector, Projector)
    return replace(
        made,
        tower=replace(made.tower, embedding=replace(embedding, bias=True, positions=Learned(count)), kept=layers),
        deep=replace(made.projector, norm=norm) if layers else None,
    )


def squares(
    config: Any,
    width: int,
    out: int,
    norm: Norm,
    ffn: Dense | Gated,
    window: int = 0,
    whole: frozenset[int] = frozenset(),
) -> Vision:
    """A tower over squares of patches.

    Args:
        width, out: features of the tower, and of its vectors.
        window: squares of a window's side; 0: there are none.
        whole: numbers of the layers that see all windows.

    Raises:
        UnsupportedModelError: a setting that is not implemented.
    """
    part = config.vision_config
    heads, side = part.num_heads, part.spatial_merge_size
    head_dim = even_head_dim(width, heads)
    check_axes(config, head_dim, out)
    position = axial(part, head_dim)

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
    tower = Stack(hidden_size=width, embedding=embedding, blocks=tuple(map(block, range(part.depth))), final_norm=norm)
    return Vision(
        tower=tower,
        token_id=config.image_token_id,
        skip=0,
        projector=Projector("gelu", merge=side**2, inner=width * side**2),
        squares=side,
        window=window,
        axes=True,
    )


def check_axes(config: Any, head_dim: int, out: int) -> None:
    """Refuse a language part without positions of three axes, and a tower whose heads of `head_dim` features have no
    positions of two axes, or whose vectors of `out` features do not fit. Raises UnsupportedModelError."""
    text = config.text_config
    settings = settings_of(text, None)
    text_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_dim % 4 or out != text.hidden_size or not pairs_of(settings, rotated(settings, text_dim, partial=True)):
        raise UnsupportedModelError(
            f"vision_config needs heads of a multiple of 4 features and vectors of {text.hidden_size}, and "
            f"rope_parameters an mrope_section of three parts of a head; got {head_dim}, {out} and "
            f"{settings.get('mrope_section')!r}."
        )
    kind = settings.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):  # the angles of an image's tokens are made without a sequence's length
        raise UnsupportedModelError(
            f"rope_type of rope_parameters is {kind!r}, whose angles depend on a sequence's length. It is not "
            "implemented beside images; default, linear, llama3 and yarn are."
        )


def axial(part: Any, head_dim: int) -> Rotary:
    """Rotary positions of two axes, each with the same frequencies for half of a head's features."""
    return Rotary(
        dim=head_dim,
        theta=theta_of(part, settings_of(part, None)),
        in_float32=True,
        pairs=tuple((axis, 2 * number) for axis in range(2) for number in range(head_dim // 4)),
    )


def square_entries(vision: Vision) -> list[Entry]:
    """The weights of such a part."""
    stack, ours = vision.tower, "tower.encoder"
    embedding = stack.embedding
    assert isinstance(embedding, Patches)
    names = LayerNames(qkv="attn.qkv", out="attn.proj", norms=("norm1", "norm2"), ffn=("mlp.fc1", "mlp.fc2"))
    merger, norm, matrices = "visual.merger", "ln_q", ("mlp.0", "mlp.2")
    positions: list[Entry] = []
    if embedding.positions is not None:
        names = replace(names, ffn=("mlp.linear_fc1", "mlp.linear_fc2"))
        norm, matrices = "norm", ("linear_fc1", "linear_fc2")
        positions = [Entry(f"{ours}.embedding.positions", ("visual.pos_embed.weight",))]
    elif stack.blocks and isinstance(stack.blocks[0].ffn, Gated):
        names = replace(names, ffn=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
    mergers = {"vision.projector": merger}
    mergers |= {f"vision.deep.{i}": f"visual.deepstack_merger_list.{i}" for i in range(len(stack.kept))}
    deep = None if vision.deep is None else vision.deep.norm
    return [
        *kernel(f"{ours}.embedding.patches", "visual.patch_embed.proj", embedding, timed=True),
        *positions,
        *layers_weights(stack, "visual.blocks", names, target=ours),
        *norm_weights(f"{ours}.final_norm", f"{merger}.{norm}", stack.final_norm),
        *(
            entry
            for i in range(len(stack.kept))
            for entry in norm_weights(f"vision.deep.{i}.norm", f"visual.deepstack_merger_list.{i}.norm", deep)
        ),
        *(
            entry
            for target, source in mergers.items()
            for name, matrix in zip(("first", "second"), matrices, strict=True)
            for entry in linear(f"{target}.{name}", f"{source}.{matrix}", True)
        ),
    ]
