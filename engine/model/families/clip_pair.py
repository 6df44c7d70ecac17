"""CLIP: a causal encoder of texts and an encoder of images with a common vector space (arXiv:2103.00020)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import tokens
from engine.model.families.vision import patches, pre_norm_encoder, two_towers
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import AtToken, Embedder, ModelSpec
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    name = config.architectures[0]
    if name == "CLIPModel":
        images = _of_images(config.vision_config, config.projection_dim)
        return _of_texts(config.text_config, config.projection_dim, images)
    features = config.projection_dim if name.endswith("WithProjection") else None
    return _of_images(config, features) if name.startswith("CLIPVision") else _of_texts(config, features)


def _of_texts(config: Any, features: int | None, twin: ModelSpec | None = None) -> ModelSpec:
    end = config.eos_token_id
    if not isinstance(end, int):
        raise UnsupportedModelError(f"eos_token_id of the text's config must be one token id, got {end!r}.")
    embedding = tokens(config, positions=Learned(config.max_position_embeddings))
    return ModelSpec(
        encoder=pre_norm_encoder(config, embedding, causal=True),
        decoder=None,
        # Configs of the first checkpoints have 2, which their tokenizers do not use: there, the largest id ends a text.
        head=Embedder(pooling=AtToken(None if end == 2 else end), features=features),
        twin=twin,
    )


def _of_images(config: Any, features: int | None) -> ModelSpec:
    embedding = patches(config, bias=False, first=1, layer_norm=Norm("layer", config.layer_norm_eps, bias=True))
    encoder = pre_norm_encoder(config, embedding)
    return ModelSpec(encoder=encoder, decoder=None, head=Embedder(pooling="cls", features=features))


def weights(model: ModelSpec) -> WeightTable:
    # The scale of similarities only matters for losses and for probabilities of pairs.
    return two_towers(model, _text_head, _image_head, r"logit_scale")


def _text_head(head: Embedder) -> list[Entry]:
    return [Entry("head.output.weight", ("text_projection.weight",))] if head.features else []


def _image_head(head: Embedder, target: str) -> list[Entry]:
    stored = ("visual_projection.weight",)
    return [Entry(f"{target}head.output.weight", stored)] if head.features else []


FAMILY = Family(
    name="CLIP",
    architectures=(
        "CLIPModel", "CLIPTextModel", "CLIPTextModelWithProjection", "CLIPVisionModel", "CLIPVisionModelWithProjection",
    ),
    brings="text and image encoders with a common vector space",
    spec=spec,
    weights=weights,
)  # fmt: skip
