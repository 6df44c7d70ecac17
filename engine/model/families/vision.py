"""The common part of families of image encoders: patches, blocks with a norm before each sublayer, their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, linear, norm, qkv
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Attention, Block, Dense, ModelSpec, Patches, Pre, Stack, Tokens
from engine.model.table import Entry, Reshaped, WeightTable

_MOST_PIXELS = 1 << 14  # of a side


def pair(name: str, size: Any) -> tuple[int, int]:
    """Height and width, of a setting that is one number for both, or two.

    Raises:
        UnsupportedModelError: it is neither.
    """
    both = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list | tuple) else ()
    if len(both) != 2 or not all(isinstance(n, int) and 1 <= n <= _MOST_PIXELS for n in both):
        raise UnsupportedModelError(
            f"{name} of the config must be a number of pixels from 1 to {_MOST_PIXELS}, or height and width; got "
            f"{size!r}."
        )
    return both[0], both[1]


def patches(config: Any, *, bias: bool, first: int, layer_norm: Norm | None = None) -> Patches:
    """Patches of `image_size` and `patch_size`, with a learned position for each vector.

    Args:
        first: learned vectors before them.
        layer_norm: of the sum.

    Raises:
        UnsupportedModelError: no patch fits into an image.
    """
    image, patch = pair("image_size", config.image_size), pair("patch_size", config.patch_size)
    if image[0] < patch[0] or image[1] < patch[1]:
        raise UnsupportedModelError(
            f"image_size of the config is {config.image_size}, less than its patch_size {config.patch_size}."
        )
    count = (image[0] // patch[0]) * (image[1] // patch[1])
    return Patches(
        image=image,
        patch=patch,
        channels=config.num_channels,
        width=config.hidden_size,
        bias=bias,
        first=first,
        positions=Learned(first + count),
        norm=layer_norm,
    )


def pre_norm_encoder(config: Any, embedding: Tokens | Patches, *, qkv_bias: bool = True, causal: bool = False) -> Stack:
    """Blocks with a norm before each sublayer, and one at the end (arXiv:2010.11929).

    Raises:
        UnsupportedModelError: the heads cannot share hidden_size evenly, or an activation is not implemented.
    """
    head_dim = even_head_dim(config.hidden_size, config.num_attention_heads)
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    block = Block(
        placement=Pre(layer_norm, layer_norm),
        attention=Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            causal=causal,
            qkv_bias=qkv_bias,
            out_bias=True,
        ),
        ffn=Dense(config.intermediate_size, activation(config.hidden_act), bias=True),
    )
    return Stack(
        hidden_size=config.hidden_size,
        embedding=embedding,
        blocks=(block,) * config.num_hidden_layers,
        final_norm=layer_norm,
    )


def kernel(target: str, source: str, part: Patches) -> list[Entry]:
    """The matrix of patches, stored as a convolution's kernel and its bias."""
    stored = (part.width, part.channels, *part.patch)
    entries = [Entry(f"{target}.weight", (f"{source}.weight",), Reshaped((stored,)), shard_axis=0)]
    return entries + ([Entry(f"{target}.bias", (f"{source}.bias",), shard_axis=0)] if part.bias else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class PreNormLayer:
    """A family's names for the parts of a layer."""

    queries: str = "self_attn.q_proj"
    keys: str = "self_attn.k_proj"
    values: str = "self_attn.v_proj"
    out: str = "self_attn.out_proj"
    attention_norm: str = "layer_norm1"
    up: str = "mlp.fc1"
    down: str = "mlp.fc2"
    ffn_norm: str = "layer_norm2"


def layer_weights(stack: Stack, source: str, names: PreNormLayer, target: str = "encoder") -> list[Entry]:
    """The layers of `pre_norm_encoder`.

    Args:
        source: of its layers, by their numbers.
        target: the stack.
    """
    entries: list[Entry] = []
    for i, block in enumerate(stack.blocks):
        ours, theirs = f"{target}.blocks.{i}", f"{source}.{i}"
        projections = (f"{theirs}.{names.queries}", f"{theirs}.{names.keys}", f"{theirs}.{names.values}")
        entries += [
            *qkv(f"{ours}.attention.inner.qkv", projections, block.attention),
            *linear(f"{ours}.attention.inner.out", f"{theirs}.{names.out}", True, 1),
            *norm(f"{ours}.attention.before", f"{theirs}.{names.attention_norm}", bias=True),
            *linear(f"{ours}.ffn.inner.up", f"{theirs}.{names.up}", True, 0),
            *linear(f"{ours}.ffn.inner.down", f"{theirs}.{names.down}", True, 1),
            *norm(f"{ours}.ffn.before", f"{theirs}.{names.ffn_norm}", bias=True),
        ]
    return entries


def text_entries(model: ModelSpec, head: Iterable[Entry]) -> tuple[Entry, ...]:
    """An encoder of texts that stands beside one of images (CLIP, SigLIP), with what its head reads."""
    assert model.encoder is not None
    source = "text_model"
    return (
        Entry("encoder.embedding.tokens", (f"{source}.embeddings.token_embedding.weight",), shard_axis=0),
        Entry("encoder.embedding.positions", (f"{source}.embeddings.position_embedding.weight",)),
        *layer_weights(model.encoder, f"{source}.encoder.layers", PreNormLayer()),
        *norm("encoder.final_norm", f"{source}.final_layer_norm", bias=True),
        *head,
    )


def two_towers(
    model: ModelSpec,
    texts: Callable[[ModelSpec], tuple[Entry, ...]],
    images: Callable[[ModelSpec, str], tuple[Entry, ...]],
    unread: str,
) -> WeightTable:
    """A model that is an encoder of texts, one of images, or both, the second as the `twin` of the first.

    Args:
        texts: what the encoder of texts reads.
        images: what the one of images reads, of the model and what its parameters' names begin with.
        unread: a pattern of further names that are not read.
    """
    assert model.encoder is not None
    # The positions are buffers of old checkpoints.
    ignored = (r"(text|vision)_model\.embeddings\.position_ids", unread)
    if isinstance(model.encoder.embedding, Patches):
        return WeightTable(images(model, ""), prefix="vision_model.", ignored=ignored)
    if model.twin is None:
        return WeightTable(texts(model), prefix="text_model.", ignored=ignored)
    return WeightTable(texts(model) + images(model.twin, "twin."), ignored=ignored)
