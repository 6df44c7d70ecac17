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
from support.seeing import EOS, IMAGE, VOCAB, make_tokenizer

IMAGES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 30,
    "patch_size": 8, "qkv_bias": False,
}  # fmt: skip
TEXTS: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 24, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40,
    "max_position_embeddings": 70, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS,
    "decoder_start_token_id": EOS,
}  # fmt: skip
BOTH: dict[str, Any] = TEXTS | {
    "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "max_position_embeddings": 120,
}  # fmt: skip


@dataclass(frozen=True)
class WriterShape:
    """One configuration of a family.

    Attributes:
        encoder, decoder: the types of their configs, and settings. The encoder of Florence-2 reads an image and a text;
            `encoder` is then the tower's, and `decoder` that of the whole model of texts.
        processor: the class of images' processor in transformers, and its settings.
    """

    encoder: tuple[str, Mapping[str, Any]] = field(hash=False)
    decoder: tuple[str, Mapping[str, Any]] = field(hash=False)
    processor: tuple[str, Mapping[str, Any]] = field(hash=False)
    seed: int = 0  # of the weights

    @property
    def reads_texts(self) -> bool:
        """The encoder reads a text after the image. Otherwise it begins the answer."""
        return self.encoder[0] == "florence_vision"


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
    # Grids that end within a window.
    "florence2": WriterShape(
        ("florence_vision", {"depths": [1, 2], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1],
                             "patch_prenorm": [False, True], "embed_dim": [12, 20], "num_heads": [2, 5],
                             "num_groups": [3, 4], "window_size": 3, "projection_dim": 24, "max_temporal_embeddings": 4,
                             "max_position_embeddings": 9}),
        ("bart", BOTH),
        ("CLIPImageProcessorPil", {"size": {"height": 40, "width": 28}, "do_center_crop": False}),
    ),
    # A norm before the first convolution, no padding, scaled vectors, a head of its own, a wide image.
    "florence2-wide": WriterShape(
        ("florence_vision", {"depths": [2, 1, 1], "patch_size": [3, 2, 3], "patch_stride": [2, 1, 2],
                             "patch_padding": [0, 0, 1], "patch_prenorm": [True, False, True], "embed_dim": [6, 8, 14],
                             "num_heads": [3, 2, 7], "num_groups": [2, 4, 1], "window_size": 4, "mlp_ratio": 2.5,
                             "qkv_bias": False, "activation_function": "gelu_new", "projection_dim": 32,
                             "max_temporal_embeddings": 1, "max_position_embeddings": 12}),
        ("bart", BOTH | {"d_model": 32, "scale_embedding": True, "activation_function": "relu", "encoder_layers": 3,
                         "tie_word_embeddings": False}),
        ("CLIPImageProcessorPil", {"size": {"shortest_edge": 30}, "crop_size": {"height": 17, "width": 45},
                                   "resample": 2}),
        seed=3,
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

    def begin(self, text: str) -> list[int]:
        """The decoder's first tokens of a request with a text."""
        return [EOS] if self.shape.reads_texts else [EOS, *make_tokenizer().encode(text)]

    def beside(self, text: str) -> list[int]:
        """The tokens that the encoder reads after the image."""
        return make_tokenizer().encode(f"<s>{text}</s>") if self.shape.reads_texts else []

    def asked(self, pixels: torch.Tensor, text: str, positions: int) -> tuple[Any, dict[str, Any]]:
        """The input of the reference's `generate` for one image, and further arguments."""
        if not self.shape.reads_texts:
            return pixels[None], {}
        return [IMAGE] * positions + self.beside(text), {"pixel_values": pixels[None]}


def _writer_config(shape: WriterShape) -> Any:
    parts = [{"model_type": kind, **settings} for kind, settings in (shape.encoder, shape.decoder)]
    parts[1] |= {"is_decoder": True, "add_cross_attention": True}
    return transformers.VisionEncoderDecoderConfig(encoder=parts[0], decoder=parts[1])


def make_writer(name: str, folder: Path) -> WriterModel:
    """Build the checkpoint and save it. Every parameter is random, so that a part which is left out shows."""
    shape = SHAPES[name]
    if shape.reads_texts:
        texts = {"model_type": shape.decoder[0], **shape.decoder[1]}
        tied = texts.pop("tie_word_embeddings", True)  # the tables of both stacks are one
        config: Any = transformers.Florence2Config(
            text_config=texts, vision_config=shape.encoder[1], image_token_id=IMAGE, tie_word_embeddings=tied
        )
        model: Any = transformers.Florence2ForConditionalGeneration(config)
    else:
        config = _writer_config(shape)
        model = transformers.VisionEncoderDecoderModel(config)
    config.architectures = [type(model).__name__]
    with torch.no_grad():
        fill_randomly(model, shape.seed)
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
