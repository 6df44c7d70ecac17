"""The common part of families of image encoders: patches, blocks with a norm before each sublayer, and their
weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import dense_network, multi_head, norm, same_layers
from engine.model.families.names import LayerNames, layer_weights, norm_weights
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Block, Embedder, ModelSpec, Patches, Pre, Stack, Tokens
from engine.model.table import Entry, Reshaped, WeightTable

_MOST_PIXELS = 1 << 14  # maximum patches of a side


def pair(name: str, size: Any) -> tuple[int, int]:
    """Height and width from a setting that is one number for both, or two. Raises UnsupportedModelError if it is
    neither."""
    both = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list | tuple) else ()
    if len(both) != 2 or not all(isinstance(n, int) and 1 <= n <= _MOST_PIXELS for n in both):
        raise UnsupportedModelError(
            f"{name} of the config must be a number of pixels from 1 to {_MOST_PIXELS}, or height and width; got "
            f"{size!r}."
        )
    return both[0], both[1]


def patches(config: Any, *, bias: bool, first: int, layer_norm: Norm | None = None) -> Patches:
    """Patches from `image_size` and `patch_size`, with a learned position for each vector. Raises UnsupportedModelError
    if no patch fits into an image."""
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
    """Blocks with a norm before each sublayer, and one at the end (arXiv:2010.11929). Raises UnsupportedModelError if
    the heads cannot share hidden_size evenly, or an activation is not implemented."""
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    block = Block(
        placement=Pre(layer_norm, layer_norm),
        attention=multi_head(config, causal=causal, qkv_bias=qkv_bias),
        ffn=dense_network(config),
    )
    return same_layers(config, embedding, block, layer_norm)


def kernel(target: str, source: str, part: Patches, *, timed: bool = False) -> list[Entry]:
    """The matrix of patches, stored as a convolution's kernel and bias; `timed`: the kernel has an axis of frames."""
    stored = (part.width, part.channels, *((part.frames,) if timed else ()), *part.patch)
    entries = [Entry(f"{target}.weight", (f"{source}.weight",), Reshaped((stored,)))]
    return entries + ([Entry(f"{target}.bias", (f"{source}.bias",))] if part.bias else [])


LAYER = LayerNames(
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    norms=("layer_norm1", "layer_norm2"),
    ffn=("mlp.fc1", "mlp.fc2"),
)


def layers_weights(stack: Stack, source: str, names: LayerNames = LAYER, target: str = "encoder") -> list[Entry]:
    """The layers of `pre_norm_encoder`, from the stored name of the list of layers and our name of the stack."""
    return [
        entry
        for i, block in enumerate(stack.blocks)
        for entry in layer_weights(f"{target}.blocks.{i}", f"{source}.{i}", block, names)
    ]


def _text_entries(model: ModelSpec) -> list[Entry]:
    """An encoder of texts beside an encoder of images, without its head."""
    source = "text_model"
    return [
        Entry("encoder.embedding.tokens", (f"{source}.embeddings.token_embedding.weight",)),
        Entry("encoder.embedding.positions", (f"{source}.embeddings.position_embedding.weight",)),
        *layers_weights(model.trunk, f"{source}.encoder.layers"),
        *norm("encoder.final_norm", f"{source}.final_layer_norm", bias=True),
    ]


def _image_entries(model: ModelSpec, target: str) -> list[Entry]:
    """An encoder of images, perhaps beside an encoder of texts, without its head; our names begin with `target`."""
    embedding = model.trunk.embedding
    assert isinstance(embedding, Patches)
    source, ours = "vision_model", f"{target}encoder"
    entries = [
        *kernel(f"{ours}.embedding.patches", f"{source}.embeddings.patch_embedding", embedding),
        Entry(f"{ours}.embedding.positions", (f"{source}.embeddings.position_embedding.weight",)),
        *norm_weights(f"{ours}.embedding.norm", f"{source}.pre_layrnorm", embedding.norm),
        *layers_weights(model.trunk, f"{source}.encoder.layers", target=ours),
        *norm(f"{ours}.final_norm", f"{source}.post_layernorm", bias=True),
    ]
    if embedding.first:
        form = Reshaped(((embedding.width,),))
        entries.append(Entry(f"{ours}.embedding.first", (f"{source}.embeddings.class_embedding",), form))
    return entries


def two_towers(
    model: ModelSpec,
    texts: Callable[[Embedder], list[Entry]],
    images: Callable[[Embedder, str], list[Entry]],
    unread: str,
) -> WeightTable:
    """A model with an encoder of texts, an encoder of images, or both, the second as the `twin` of the first.

    Args:
        images: the head of the encoder of images, from the prefix of its parameters' names.
        unread: a pattern of further names that are not read.
    """
    # The positions are buffers of old checkpoints.
    ignored = (r"(text|vision)_model\.embeddings\.position_ids", unread)

    def seen(part: ModelSpec, target: str) -> list[Entry]:
        head = images(part.head, target) if isinstance(part.head, Embedder) else []
        return _image_entries(part, target) + head

    if isinstance(model.trunk.embedding, Patches):
        return WeightTable(tuple(seen(model, "")), prefix="vision_model.", ignored=ignored)
    assert isinstance(model.head, Embedder)
    read = _text_entries(model) + texts(model.head)
    if model.twin is None:
        return WeightTable(tuple(read), prefix="text_model.", ignored=ignored)
    return WeightTable((*read, *seen(model.twin, "twin.")), ignored=ignored)
