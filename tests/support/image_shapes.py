"""Tiny random checkpoints of encoders of images, alone or beside an encoder of texts, and what transformers makes of
their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from support.family_shape import fill_randomly

VOCAB = 61
END = 60

IMAGES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 30,  # three patches and something that none covers
    "patch_size": 8,
}
GREY: dict[str, Any] = IMAGES | {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "num_channels": 1, "image_size": 16,
    "patch_size": 4, "layer_norm_eps": 1e-3,
}  # fmt: skip
WIDE: dict[str, Any] = {"image_size": [16, 40], "patch_size": [8, 4], "hidden_act": "gelu_new", "num_channels": 2}
TEXTS: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 20,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class ImageShape:
    """One configuration of a family.

    Attributes:
        architecture: the class in transformers, as config.json names it.
        settings: keywords of its config.
    """

    architecture: str
    settings: Mapping[str, Any] = field(hash=False)
    seed: int = 0


SHAPES = {
    "vit": ImageShape("ViTModel", IMAGES),
    "vit-wide": ImageShape("ViTModel", IMAGES | WIDE | {"qkv_bias": False}, seed=1),
    "vit-classes": ImageShape("ViTForImageClassification", IMAGES | {"num_labels": 5}, seed=2),
    "vit-grey-classes": ImageShape("ViTForImageClassification", GREY | {"num_labels": 3, "qkv_bias": False}, seed=3),
    "vit-many-classes": ImageShape(
        "ViTForImageClassification", IMAGES | {"num_labels": 4, "problem_type": "multi_label_classification"}, seed=4
    ),
    "deit": ImageShape("DeiTModel", IMAGES, seed=5),
    "deit-grey": ImageShape("DeiTModel", GREY, seed=6),
    "deit-classes": ImageShape("DeiTForImageClassification", IMAGES | {"num_labels": 5}, seed=7),
    "deit-grey-classes": ImageShape("DeiTForImageClassification", GREY | {"num_labels": 3}, seed=8),
    "deit-teacher": ImageShape("DeiTForImageClassificationWithTeacher", IMAGES | {"num_labels": 5}, seed=20),
    "deit-grey-teacher": ImageShape(
        "DeiTForImageClassificationWithTeacher",
        GREY | {"num_labels": 4, "problem_type": "multi_label_classification"},
        seed=21,
    ),
    "clip": ImageShape("CLIPModel", {"text_config": TEXTS, "vision_config": IMAGES, "projection_dim": 20}, seed=9),
    "clip-grey": ImageShape(
        "CLIPModel",
        {
            "text_config": TEXTS | {"eos_token_id": 2, "hidden_act": "gelu"},
            "vision_config": GREY | {"hidden_act": "gelu"},
            "projection_dim": 28,
        },
        seed=10,
    ),
    "clip-texts": ImageShape("CLIPTextModel", TEXTS, seed=11),
    "clip-texts-projected": ImageShape("CLIPTextModelWithProjection", TEXTS | {"projection_dim": 12}, seed=12),
    "clip-images": ImageShape("CLIPVisionModel", IMAGES, seed=13),
    "clip-images-projected": ImageShape("CLIPVisionModelWithProjection", GREY | {"projection_dim": 12}, seed=14),
    "siglip": ImageShape(
        "SiglipModel", {"text_config": TEXTS | {"projection_size": 32}, "vision_config": IMAGES}, seed=15
    ),
    "siglip-grey": ImageShape(
        "SiglipModel",
        {"text_config": TEXTS | {"projection_size": 24, "hidden_act": "gelu"}, "vision_config": GREY},
        seed=16,
    ),
    "siglip-texts": ImageShape("SiglipTextModel", TEXTS | {"projection_size": 20}, seed=17),
    "siglip-images": ImageShape("SiglipVisionModel", IMAGES, seed=18),
    "siglip-images-headless": ImageShape("SiglipVisionModel", GREY | {"vision_use_head": False}, seed=19),
}


@dataclass(frozen=True)
class ImageCheckpoint:
    """A folder that the engine loads, and the reference model with the same weights."""

    shape: ImageShape
    path: Path
    model: Any

    @property
    def image_config(self) -> Any:
        """The config of what reads images; None if nothing does."""
        config = getattr(self.model.config, "vision_config", self.model.config)
        return config if hasattr(config, "image_size") else None

    @property
    def reads_texts(self) -> bool:
        """It reads token ids."""
        return hasattr(self.model.config, "text_config") or hasattr(self.model.config, "vocab_size")

    def images(self, count: int) -> list[NDArray[np.float32]]:
        """Random pixels; none where nothing reads them."""
        config = self.image_config
        if config is None:
            return []
        size = config.image_size
        shape = (config.num_channels, *((size, size) if isinstance(size, int) else size))
        rng = np.random.default_rng(self.shape.seed)
        return [rng.normal(size=shape).astype(np.float32) for _ in range(count)]

    def texts(self) -> list[list[int]]:
        """Token ids that end in several ways, one input as long as it may be."""
        if not self.reads_texts:
            return []
        longest = [1, *(3 + 5 * i % 50 for i in range(18)), END]
        return [[1, 5, 7, END], [1, END], [1, 9, END, 4, END, 0, 0], [1], [1, 40, 30], longest]

    @torch.no_grad()
    def of_image(self, pixels: NDArray[np.float32]) -> Tensor:
        """The vector of an image that a request gets, not normalised, or the numbers of its classes."""
        given = torch.from_numpy(pixels)[None]
        if hasattr(self.model, "get_image_features"):
            return _vector(self.model.get_image_features(given))
        output = self.model(given)
        if "logits" in output:
            return output.logits[0]  # type: ignore[no-any-return]
        name = self.shape.architecture
        if name.startswith(("ViT", "DeiT")):  # what its class token has become
            return output.last_hidden_state[0, 0]  # type: ignore[no-any-return]
        if not {"pooler_output", "image_embeds"} & set(output):
            return output.last_hidden_state[0].mean(0)  # type: ignore[no-any-return]
        return _vector(output)

    @torch.no_grad()
    def of_text(self, ids: Sequence[int]) -> Tensor:
        """The vector of a text, not normalised."""
        given = torch.tensor([list(ids)])
        if hasattr(self.model, "get_text_features"):
            return _vector(self.model.get_text_features(given))
        return _vector(self.model(given))


def _vector(output: Any) -> Tensor:
    for name in ("image_embeds", "text_embeds", "pooler_output"):
        if not isinstance(output, Tensor) and output.get(name) is not None:
            return output[name][0]  # type: ignore[no-any-return]
    return output[0]  # type: ignore[no-any-return]


def make_image_checkpoint(shape: ImageShape, folder: Path) -> ImageCheckpoint:
    """Build the checkpoint and save it. Every parameter is random, so that a part which is left out shows."""
    model_class: Any = getattr(transformers, shape.architecture)
    model = model_class(model_class.config_class(**shape.settings))
    model.set_attn_implementation("eager")
    fill_randomly(model.eval(), shape.seed)
    model.save_pretrained(folder)
    return ImageCheckpoint(shape, folder, model)
