"""SigLIP: an encoder of texts and an encoder of images with a common vector space; a learned query pools an image
(arXiv:2303.15343)."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine.model.families.common import dense_network, linear, norm, tokens
from engine.model.families.vision import patches, pre_norm_encoder, two_towers
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Embedder, ModelSpec, Pool, Probe
from engine.model.table import Entry, Family, Reshaped, WeightTable


def spec(config: Any) -> ModelSpec:
    name = config.architectures[0]
    if name == "SiglipModel":
        return _of_texts(config.text_config, _of_images(config.vision_config))
    return _of_images(config) if name.startswith("SiglipVision") else _of_texts(config)


def _of_texts(config: Any, twin: ModelSpec | None = None) -> ModelSpec:
    embedding = tokens(config, positions=Learned(config.max_position_embeddings))
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
        ffn = dense_network(config)
        layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
        head = Embedder(pooling=Probe(heads=config.num_attention_heads, norm=layer_norm, ffn=ffn))
    return ModelSpec(encoder=encoder, decoder=None, head=head)


def weights(model: ModelSpec) -> WeightTable:
    # Scale and offset of similarities only matter for probabilities of pairs.
    images = model.twin or model
    assert images.encoder is not None
    head = partial(_image_head, images.encoder.hidden_size)
    return two_towers(model, _text_head, head, r"logit_(scale|bias)")


def _text_head(_head: Embedder) -> list[Entry]:
    return linear("head.output", "text_model.head", True)


def _image_head(width: int, _head: Embedder, target: str) -> list[Entry]:
    probe, head = f"{target}head.probe", "vision_model.head"
    return [
        Entry(f"{probe}.query", (f"{head}.probe",), Reshaped(((1, 1, width),))),
        Entry(f"{probe}.qkv.weight", (f"{head}.attention.in_proj_weight",)),
        Entry(f"{probe}.qkv.bias", (f"{head}.attention.in_proj_bias",)),
        *linear(f"{probe}.out", f"{head}.attention.out_proj", True),
        *norm(f"{probe}.norm", f"{head}.layernorm", bias=True),
        *linear(f"{probe}.up", f"{head}.mlp.fc1", True),
        *linear(f"{probe}.down", f"{head}.mlp.fc2", True),
    ]


FAMILY = Family(
    name="SigLIP",
    architectures=("SiglipModel", "SiglipTextModel", "SiglipVisionModel"),
    brings="text and image encoders with a common vector space; padded texts, attention pooling for images",
    spec=spec,
    weights=weights,
)
