"""Tiny random encoder-decoders that read an image and write its text, with a tokenizer and a processor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import PIL.Image
import torch
import transformers

from support.family_shape import fill_randomly
from support.seeing import EOS, VOCAB, make_tokenizer

IMAGES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 30,
    "patch_size": 8, "qkv_bias": False,
}  # fmt: skip
TEXTS: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 24, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40,
    "max_position_embeddings": 70, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS,
    "decoder_start_token_id": EOS,
}  # fmt: skip


@dataclass(frozen=True)
class WriterShape:
    """One configuration of a family.

    Attributes:
        encoder, decoder: the types of their configs, and settings.
        processor: the class of images' processor in transformers, and its settings.
    """

    encoder: tuple[str, Mapping[str, Any]] = field(hash=False)
    decoder: tuple[str, Mapping[str, Any]] = field(hash=False)
    processor: tuple[str, Mapping[str, Any]] = field(hash=False)


SHAPES = {
    "trocr": WriterShape(
        ("vit", IMAGES), ("trocr", TEXTS | {"cross_attention_hidden_size": 32}),
        ("ViTImageProcessorPil", {"size": {"height": 30, "width": 30}}),
    ),
    # A table of fixed positions, scaled vectors without a norm, a head of its own, a wide image.
    "trocr-fixed": WriterShape(
        ("deit", IMAGES | {"hidden_size": 24, "num_hidden_layers": 3, "image_size": [16, 40], "patch_size": [8, 4]}),
        ("trocr", TEXTS | {"use_learned_position_embeddings": False, "scale_embedding": True,
                           "layernorm_embedding": False, "activation_function": "relu", "decoder_layers": 3,
                           "tie_word_embeddings": False}),
        ("DeiTImageProcessorPil", {"size": {"height": 20, "width": 44}, "crop_size": {"height": 16, "width": 40}}),
    ),
    # Stages whose grids end within a window and a square; a learned scale of vectors.
    "donut": WriterShape(
        ("donut-swin", {"image_size": [40, 28], "patch_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3],
                        "window_size": 3, "mlp_ratio": 2.5}),
        ("mbart", TEXTS | {"scale_embedding": True}),
        ("DonutImageProcessorPil", {"size": {"height": 40, "width": 28}}),
    ),
    "donut-turned": WriterShape(
        ("donut-swin", {"image_size": [20, 36], "patch_size": [2, 4], "embed_dim": 8, "depths": [2, 1, 2],
                        "num_heads": [1, 2, 4], "window_size": 2, "qkv_bias": False, "hidden_act": "gelu_new"}),
        ("mbart", TEXTS | {"d_model": 32, "decoder_layers": 3, "tie_word_embeddings": False}),
        ("DonutImageProcessorPil", {"size": {"height": 20, "width": 36}, "do_align_long_axis": True, "resample": 3}),
    ),
    "vit-mbart": WriterShape(
        ("vit", IMAGES | {"hidden_size": 24, "qkv_bias": True}),
        ("mbart", TEXTS | {"scale_embedding": True, "decoder_layers": 1, "tie_word_embeddings": False}),
        ("ViTImageProcessorPil", {"size": {"height": 30, "width": 30}, "do_normalize": False}),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class WriterModel:
    """A folder that the engine loads, and the reference model with the same weights."""

    shape: WriterShape
    path: Path
    model: Any

    @cached_property
    def processor(self) -> Any:
        """The reference's processor of images."""
        name, settings = self.shape.processor
        return getattr(transformers, name)(**settings)

    def pixels(self, images: Sequence[PIL.Image.Image]) -> torch.Tensor:
        """The inputs of the reference model."""
        return torch.as_tensor(self.processor(list(images), return_tensors="pt")["pixel_values"])


def make_writer(name: str, folder: Path, *, seed: int = 0) -> WriterModel:
    """Build the checkpoint and save it. Every parameter is random, so that a part which is left out shows."""
    shape = SHAPES[name]
    parts = [{"model_type": kind, **settings} for kind, settings in (shape.encoder, shape.decoder)]
    parts[1] |= {"is_decoder": True, "add_cross_attention": True}
    config = transformers.VisionEncoderDecoderConfig(encoder=parts[0], decoder=parts[1])
    config.architectures = ["VisionEncoderDecoderModel"]
    model: Any = transformers.VisionEncoderDecoderModel(config)
    with torch.no_grad():
        fill_randomly(model, seed)
        model.get_output_embeddings().weight[EOS] *= 1.4
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=EOS, pad_token_id=0, decoder_start_token_id=EOS
    )
    model.eval().save_pretrained(folder)
    made = WriterModel(shape, folder, model)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(made.processor.to_dict()))
    return made
