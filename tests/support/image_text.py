"""Tiny CLIP, SigLIP, ViT and DeiT checkpoints as published folders look: with preprocessor_config.json and, where they
read texts, a tokenizer of bytes."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from support.family_shape import fill_randomly

LABELS = ["cat", "dog", "boat"]
START, END, FILLER = 256, 257, 258
_SIDE = 24
_IMAGES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": _SIDE,
    "patch_size": 8,
}  # fmt: skip
_TEXTS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 259,
    "max_position_embeddings": 40, "bos_token_id": START, "eos_token_id": END, "pad_token_id": FILLER,
}  # fmt: skip
_CLASSES = _IMAGES | {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
_SQUARE: dict[str, Any] = {"size": {"height": _SIDE, "width": _SIDE}}
_CROPPED = {"size": {"height": 28, "width": 30}, "crop_size": {"height": _SIDE, "width": _SIDE}}
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "clip": (
        "CLIPModel",
        "CLIPImageProcessorPil",
        {"text_config": _TEXTS, "vision_config": _IMAGES, "projection_dim": 16},
        {"size": {"shortest_edge": _SIDE}, "crop_size": {"height": _SIDE, "width": _SIDE}},
    ),
    "siglip": (
        "SiglipModel",
        "SiglipImageProcessorPil",
        {"text_config": _TEXTS | {"projection_size": 32}, "vision_config": _IMAGES},
        _SQUARE,
    ),
    "vit": ("ViTForImageClassification", "ViTImageProcessorPil", _CLASSES, _SQUARE),
    "vit-vectors": ("ViTModel", "ViTImageProcessorPil", _IMAGES, _SQUARE),
    "deit": ("DeiTForImageClassification", "DeiTImageProcessorPil", _CLASSES, _CROPPED),
    "deit-teacher": ("DeiTForImageClassificationWithTeacher", "DeiTImageProcessorPil", _CLASSES, _CROPPED),
    "deit-vectors": ("DeiTModel", "DeiTImageProcessorPil", _IMAGES, _CROPPED),
}


@dataclass(frozen=True)
class ImageModel:
    """A folder that the engine loads, and the reference of it."""

    path: Path
    model: Any
    processor: Any

    @torch.no_grad()
    def of_image(self, image: PIL.Image.Image) -> Tensor:
        """The unit vector of an image, or the probabilities of its classes."""
        pixels = self.processor(image.convert("RGB"), return_tensors="pt").pixel_values
        if hasattr(self.model, "get_image_features"):
            return _unit(self.model.get_image_features(pixels))
        output = self.model(pixels)
        if "logits" not in output:  # what the class token has become
            return F.normalize(output.last_hidden_state[0, 0], dim=0)
        return output.logits[0].softmax(-1)  # type: ignore[no-any-return]

    @torch.no_grad()
    def of_text(self, text: str) -> Tensor:
        """The unit vector of a text."""
        ids = [START, *text.encode(), END]
        if self.path.name == "siglip":
            ids += [FILLER] * (40 - len(ids))
        return _unit(self.model.get_text_features(torch.tensor([ids])))


def _unit(output: Any) -> Tensor:
    vector = output if isinstance(output, Tensor) else output.pooler_output
    return vector[0] / vector[0].norm()  # type: ignore[no-any-return]


def make_image_model(kind: str, folder: Path) -> ImageModel:
    """One of `KINDS` in a folder of that name, filled at random."""
    architecture, processor_class, settings, preprocessing = KINDS[kind]
    path = folder / kind
    model_class: Any = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**settings))
    fill_randomly(model.eval(), 0)
    model.save_pretrained(path)
    processor: Any = getattr(transformers, processor_class)(**preprocessing)
    processor.save_pretrained(path)
    if "text_config" in settings:
        _tokenizer().save_pretrained(path)
    return ImageModel(path, model, processor)


def _tokenizer() -> Any:
    """A token for each byte, and those that frame a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = {character: number for number, character in enumerate(_bytes_in_order(alphabet))}
    fast = Tokenizer(models.BPE(vocab=order | {"<s>": START, "</s>": END, "<pad>": FILLER}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", START), ("</s>", END)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def _bytes_in_order(alphabet: list[str]) -> list[str]:
    """The characters that stand for the bytes 0 to 255 at byte level."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [value for value in range(256) if value not in shown]
    character = {value: chr(value) for value in shown} | {value: chr(256 + i) for i, value in enumerate(hidden)}
    assert sorted(character.values()) == alphabet
    return [character[value] for value in range(256)]


def picture(seed: int, width: int = 50, height: int = 40) -> PIL.Image.Image:
    """An image of a few colours that change slowly."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3)).astype(np.uint8)
    return PIL.Image.fromarray(small).resize((width, height), resample=PIL.Image.Resampling.BICUBIC)


def data_url(image: PIL.Image.Image) -> str:
    """It as a data: URL of a PNG."""
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
