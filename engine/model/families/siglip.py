"""SigLIP: an encoder of texts and one of images, whose vectors lie in one space; a learned query pools an image
(arXiv:2303.15343)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, linear, norm
from engine.model.families.vision import (
    PreNormLayer,
    kernel,
    layer_weights,
    patches,
    pre_norm_encoder,
    text_entries,
    two_towers,
)
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Dense, Embedder, ModelSpec, Patches, Pool, Probe, Tokens
from engine.model.table import Entry, Family, Reshaped, WeightTable


def spec(config: Any) -> ModelSpec:
    name = config.architectures[0]
    if name == "SiglipModel":
        return _of_texts(config.text_config, _of_images(config.vision_config))
    return _of_images(config) if name.startswith("SiglipVision") else _of_texts(config)


def _of_texts(config: Any, twin: ModelSpec | None = None) -> ModelSpec:
    embedding = Tokens(
        vocab_size=config.vocab_size, width=config.hidden_size, positions=Learned(config.max_position_embeddings)
    )
    return ModelSpec(
        encoder=pre_norm_encoder(config, embedding),
        decoder=None,
        head=Embedder(pooling="last", features=config.projection_size, bias=True),
        twin=twin,
        filler=config.pad_token_id,
    )


def _of_images(config: Any) -> ModelSpec:
    encoder = pre_norm_encoder(config, patches(config, bias=True, first=0))
    head: Embedder | Pool = Pool()
    if config.vision_use_head:
        ffn = Dense(config.intermediate_size, activation(config.hidden_act), bias=True)
        layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
        head = Embedder(pooling=Probe(heads=config.num_attention_heads, norm=layer_norm, ffn=ffn))
    return ModelSpec(encoder=encoder, decoder=None, head=head)


def weights(model: ModelSpec) -> WeightTable:
    # Scale and offset of similarities count for probabilities of pairs alone.
    return two_towers(model, _text_entries, _image_entries, r"logit_(scale|bias)")


def _text_entries(model: ModelSpec) -> tuple[Entry, ...]:
    return text_entries(model, linear("head.output", "text_model.head", True, 0))


def _image_entries(model: ModelSpec, target: str) -> tuple[Entry, ...]:
    """The weights of the encoder of images.

    Args:
        target: what the names of parameters begin with.
    """
    assert model.encoder is not None
    embedding = model.encoder.embedding
    assert isinstance(embedding, Patches)
    source, ours = "vision_model", f"{target}encoder"
    entries = (
        *kernel(f"{ours}.embedding.patches", f"{source}.embeddings.patch_embedding", embedding),
        Entry(f"{ours}.embedding.positions", (f"{source}.embeddings.position_embedding.weight",)),
        *layer_weights(model.encoder, f"{source}.encoder.layers", PreNormLayer(), ours),
        *norm(f"{ours}.final_norm", f"{source}.post_layernorm", bias=True),
    )
    if not isinstance(model.head, Embedder):
        return entries
    probe, head, width = f"{target}head.probe", f"{source}.head", embedding.width
    return (
        *entries,
        Entry(f"{probe}.query", (f"{head}.probe",), Reshaped(((1, 1, width),))),
        Entry(f"{probe}.qkv.weight", (f"{head}.attention.in_proj_weight",)),
        Entry(f"{probe}.qkv.bias", (f"{head}.attention.in_proj_bias",)),
        *linear(f"{probe}.out", f"{head}.attention.out_proj", True, 1),
        *norm(f"{probe}.norm", f"{head}.layernorm", bias=True),
        *linear(f"{probe}.up", f"{head}.mlp.fc1", True, 0),
        *linear(f"{probe}.down", f"{head}.mlp.fc2", True, 1),
    )


FAMILY = Family(
    name="SigLIP",
    architectures=("SiglipModel", "SiglipTextModel", "SiglipVisionModel"),
    brings="text and image encoders with a common vector space; padded texts, attention pooling for images",
    spec=spec,
    weights=weights,
)
