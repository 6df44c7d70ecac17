"""Tiny random vision-language checkpoints with a tokenizer, a chat template and a processor, and what transformers
makes of prompts with images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from engine import TokenInput
from engine.images import crop, place, read_cropping
from engine.images.decoding import rgb
from engine.interface.vision import VisionInfo
from support.family_shape import fill_randomly

VOCAB, IMAGE, EOS, SIDE, PATCH = 300, 3, 2, 28, 7
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": EOS,
    "pad_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": PATCH,
}  # fmt: skip
CLIP, SIGLIP = VISION | {"model_type": "clip_vision_model"}, VISION | {"model_type": "siglip_vision_model"}
SIZES = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
# Each content's images before its texts, as the templates of LLaVA have it: a content that is text shows nothing.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True)
class SeeingShape:
    """One configuration of a family.

    Attributes:
        architecture: the class in transformers, as config.json names it.
        text, vision, own: settings of the parts and of the whole.
        processor: the class of images' processor in transformers, and its settings.
    """

    architecture: str
    text: Mapping[str, Any] = field(hash=False)
    vision: Mapping[str, Any] = field(hash=False)
    own: Mapping[str, Any] = field(hash=False)
    processor: tuple[str, Mapping[str, Any]] = field(hash=False)
    whole: str = "LlavaProcessor"


_CLIP_PIXELS = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
_SQUARES = {"size": {"longest_edge": 70}, "max_image_size": {"longest_edge": SIDE}}
_SQUARE = {"size": {"height": SIDE, "width": SIDE}}
_OWN_SIZE = {"size": {"shortest_edge": 300, "longest_edge": 4000}, "patch_size": 4}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_TURNS = _AXES | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
_QWEN3 = {
    "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
_QWEN = {"vision_start_token_id": 279, "vision_end_token_id": 280, "video_token_id": 4}
_GLM = {"image_start_token_id": 279, "image_end_token_id": 280, "video_token_id": 4}
SHAPES = {
    "llava": SeeingShape(
        "LlavaForConditionalGeneration", {"model_type": "llama"}, CLIP, {}, ("CLIPImageProcessorPil", _CLIP_PIXELS)
    ),
    "llava-square": SeeingShape(
        "LlavaForConditionalGeneration", {"model_type": "qwen2"}, SIGLIP,
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "multimodal_projector_bias": False},
        ("LlavaImageProcessorPil", {"size": {"shortest_edge": SIDE}, "do_center_crop": False, "do_pad": True}),
    ),
    "llava-next": SeeingShape(
        "LlavaNextForConditionalGeneration", {"model_type": "mistral", "head_dim": 10}, CLIP,
        {"image_grid_pinpoints": SIZES},
        ("LlavaNextImageProcessorPil", _CLIP_PIXELS | {"image_grid_pinpoints": SIZES}),
        "LlavaNextProcessor",
    ),
    "granite-vision": SeeingShape(  # several layers of the tower, scaled vectors
        "LlavaNextForConditionalGeneration", {"model_type": "granite", "embedding_multiplier": 3.0,
        "logits_scaling": 0.5, "residual_multiplier": 0.7, "attention_multiplier": 0.4}, SIGLIP,
        {"image_grid_pinpoints": SIZES, "vision_feature_layer": [-3, -1], "vision_feature_select_strategy": "full"},
        ("LlavaNextImageProcessorPil", _CLIP_PIXELS | {"image_grid_pinpoints": SIZES}),
        "LlavaNextProcessor",
    ),
    "granite-vision-clip": SeeingShape(
        "LlavaNextForConditionalGeneration", {"model_type": "granite", "embedding_multiplier": 0.8}, CLIP,
        {"image_grid_pinpoints": SIZES, "vision_feature_layer": [1, 2, 3], "multimodal_projector_bias": False},
        ("LlavaNextImageProcessorPil", _CLIP_PIXELS | {"image_grid_pinpoints": SIZES}),
        "LlavaNextProcessor",
    ),
    "llava-onevision": SeeingShape(
        "LlavaOnevisionForConditionalGeneration", {"model_type": "qwen2"}, SIGLIP,
        {"image_grid_pinpoints": [*SIZES, [84, 84]], "vision_aspect_ratio": "anyres_max_2", "video_token_id": 4},
        ("LlavaOnevisionImageProcessorPil", _SQUARE | {"image_grid_pinpoints": [*SIZES, [84, 84]]}),
        "LlavaOnevisionProcessor",
    ),
    "smolvlm": SeeingShape(
        "SmolVLMForConditionalGeneration", {"model_type": "llama"}, VISION, {"scale_factor": 2},
        ("SmolVLMImageProcessorPil", _SQUARES), "Idefics3Processor",
    ),
    "idefics3": SeeingShape(  # patches of which some share a position; images that are not cut
        "Idefics3ForConditionalGeneration", {"model_type": "llama"}, VISION | {"image_size": 84, "patch_size": 4},
        {"scale_factor": 3},
        ("Idefics3ImageProcessorPil", {"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 84},
                                       "do_image_splitting": False}), "Idefics3Processor",
    ),
    "gemma3": SeeingShape(  # images of more tokens than the window
        "Gemma3ForConditionalGeneration",
        {"head_dim": 10, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"],
         "query_pre_attn_scalar": 12}, SIGLIP | {"image_size": 56}, {"mm_tokens_per_image": 16},
        ("Gemma3ImageProcessorPil", {"size": {"height": 56, "width": 56}}), "Gemma3Processor",
    ),
    "gemma3-scans": SeeingShape(
        "Gemma3ForConditionalGeneration", {"head_dim": 10, "sliding_window": 30}, SIGLIP, {"mm_tokens_per_image": 4},
        ("Gemma3ImageProcessorPil", _SQUARE | {
            "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 3,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        }), "Gemma3Processor",
    ),
    "paligemma": SeeingShape(
        "PaliGemmaForConditionalGeneration", {"model_type": "gemma", "head_dim": 10}, SIGLIP,
        {"projection_dim": 32, "tie_word_embeddings": False},
        ("SiglipImageProcessorPil", _SQUARE | {"image_seq_length": 16}), "PaliGemmaProcessor",
    ),
    "paligemma2": SeeingShape(  # prompts of more tokens than the window
        "PaliGemmaForConditionalGeneration",
        {"model_type": "gemma2", "head_dim": 10, "sliding_window": 9, "query_pre_attn_scalar": 12,
         "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 4.0},
        SIGLIP | {"image_size": 21, "intermediate_size": 44}, {"projection_dim": 32, "tie_word_embeddings": False},
        ("SiglipImageProcessorPil", {"size": {"height": 21, "width": 21}, "image_seq_length": 9}),
        "PaliGemmaProcessor",
    ),
    "qwen2-vl": SeeingShape(
        "Qwen2VLForConditionalGeneration", {"model_type": "qwen2_vl_text", "rope_parameters": _AXES},
        {"depth": 2, "embed_dim": 24, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}, _QWEN,
        ("Qwen2VLImageProcessorPil", _OWN_SIZE), "Qwen2VLProcessor",
    ),
    "qwen2.5-vl": SeeingShape(
        "Qwen2_5_VLForConditionalGeneration", {"model_type": "qwen2_5_vl_text", "rope_parameters": _AXES},
        {"depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4, "window_size": 24,
         "fullatt_block_indexes": [1], "out_hidden_size": 32}, _QWEN,
        ("Qwen2VLImageProcessorPil", _OWN_SIZE), "Qwen2VLProcessor",
    ),
    "qwen3-vl": SeeingShape(
        "Qwen3VLForConditionalGeneration", {"model_type": "qwen3_vl_text", "head_dim": 8, "rope_parameters": _TURNS},
        _QWEN3, _QWEN, ("Qwen2VLImageProcessorPil", _OWN_SIZE), "Qwen2VLProcessor",
    ),
    "qwen3-vl-moe": SeeingShape(
        "Qwen3VLMoeForConditionalGeneration",
        {"model_type": "qwen3_vl_moe_text", "head_dim": 8, "rope_parameters": _TURNS, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        _QWEN3 | {"deepstack_visual_indexes": [1]}, _QWEN, ("Qwen2VLImageProcessorPil", _OWN_SIZE), "Qwen2VLProcessor",
    ),
    "qwen3.5": SeeingShape(
        "Qwen3_5ForConditionalGeneration",
        {"model_type": "qwen3_5_text", "head_dim": 16, "rope_parameters": _TURNS | {"partial_rotary_factor": 0.5},
         "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 12},
        {name: value for name, value in _QWEN3.items() if name != "deepstack_visual_indexes"}, _QWEN,
        ("Qwen2VLImageProcessorPil", _OWN_SIZE), "Qwen2VLProcessor",
    ),
    "glm-ocr": SeeingShape(
        "GlmOcrForConditionalGeneration",
        {"model_type": "glm_ocr_text", "head_dim": 10, "rope_parameters": _AXES | {"mrope_section": [2, 1, 2]}},
        {"depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4,
         "out_hidden_size": 32}, _GLM, ("Glm46VImageProcessorPil", _OWN_SIZE), "Qwen2VLProcessor",
    ),
    "glm-ocr-large-squares": SeeingShape(  # no biases, an untied head, positions for some features
        "GlmOcrForConditionalGeneration",
        {"model_type": "glm_ocr_text", "rope_parameters": _AXES | {"mrope_section": [1, 0, 1],
         "partial_rotary_factor": 0.5}},
        {"depth": 1, "hidden_size": 24, "intermediate_size": 44, "num_heads": 3, "patch_size": 4,
         "out_hidden_size": 32, "spatial_merge_size": 3, "attention_bias": False, "rms_norm_eps": 1e-3},
        _GLM | {"tie_word_embeddings": False},
        ("Glm46VImageProcessorPil", _OWN_SIZE | {"merge_size": 3, "temporal_patch_size": 2}), "Qwen2VLProcessor",
    ),
    "paddleocr-vl": SeeingShape(
        "PaddleOCRVLForConditionalGeneration",
        {"model_type": "paddleocr_vl_text", "head_dim": 8, "rope_parameters": _AXES},
        VISION | {"image_size": 20, "patch_size": 4}, _QWEN, ("PaddleOCRVLImageProcessorPil", _OWN_SIZE),
        "Qwen2VLProcessor",
    ),
    "paddleocr-vl-biases": SeeingShape(
        "PaddleOCRVLForConditionalGeneration",
        {"model_type": "paddleocr_vl_text", "head_dim": 10, "use_bias": True,
         "rope_parameters": _AXES | {"mrope_section": [2, 1, 2]}},
        VISION | {"image_size": 27, "patch_size": 5, "num_attention_heads": 6, "num_hidden_layers": 1,
                  "layer_norm_eps": 1e-3}, _QWEN | {"tie_word_embeddings": False},
        ("PaddleOCRVLImageProcessorPil", _OWN_SIZE | {"patch_size": 5}), "Qwen2VLProcessor",
    ),
    "internvl": SeeingShape(
        "InternVLForConditionalGeneration", {"model_type": "qwen2"},
        VISION | {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}, {},
        ("GotOcr2ImageProcessorPil", _SQUARE | {"crop_to_patches": True, "max_patches": 6}), "InternVLProcessor",
    ),
    "internvl-norms": SeeingShape(  # RMS norms, also of queries and keys, biases
        "InternVLForConditionalGeneration", {"model_type": "qwen3", "head_dim": 10},
        VISION | {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH], "norm_type": "rms_norm",
                  "use_qk_norm": True, "attention_bias": True}, {},
        ("GotOcr2ImageProcessorPil", _SQUARE | {"crop_to_patches": True, "max_patches": 1}), "InternVLProcessor",
    ),
    "lighton-ocr": SeeingShape(
        "LightOnOcrForConditionalGeneration", {"model_type": "qwen3", "head_dim": 10},
        VISION | {"model_type": "pixtral", "patch_size": 4, "hidden_act": "silu"}, {"spatial_merge_size": 2},
        ("PixtralImageProcessorPil", {"patch_size": {"height": 8, "width": 8}, "size": {"longest_edge": 60}}),
        "LightOnOcrProcessor",
    ),
    "lighton-ocr-untied": SeeingShape(
        "LightOnOcrForConditionalGeneration", {"model_type": "qwen3", "head_dim": 8},
        VISION | {"model_type": "pixtral", "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2},
        {"spatial_merge_size": 1, "tie_word_embeddings": False},
        ("PixtralImageProcessorPil", {"patch_size": {"height": 8, "width": 8}, "size": {"longest_edge": 50}}),
        "LightOnOcrProcessor",
    ),
    "mistral3": SeeingShape(
        "Mistral3ForConditionalGeneration", {"model_type": "mistral", "head_dim": 10},
        VISION | {"model_type": "pixtral", "patch_size": 4, "hidden_act": "silu"}, {"spatial_merge_size": 2},
        ("PixtralImageProcessorPil", {"patch_size": {"height": 8, "width": 8}, "size": {"longest_edge": 60}}),
        "PixtralProcessor",
    ),
    "mistral3-single": SeeingShape(  # a vector for each patch
        "Mistral3ForConditionalGeneration", {"model_type": "ministral3", "head_dim": 10},
        VISION | {"model_type": "pixtral", "patch_size": 8, "hidden_size": 32},
        {"spatial_merge_size": 1, "multimodal_projector_bias": True},
        ("PixtralImageProcessorPil", {"patch_size": {"height": 8, "width": 8}, "size": {"longest_edge": 50}}),
        "PixtralProcessor",
    ),
}  # fmt: skip


_FRAME = "<start_of_image>{}<end_of_image>"


def make_tokenizer() -> Any:
    """Bytes and a few special tokens: 0 padding, 1 and 2 the beginning and the end, 3 an image."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>", "<image>", "<video>", "<fake_token_around_image>", "<global-img>"]
    special += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    frame = ["<start_of_image>", "<end_of_image>", "<img>", "</img>", "[IMG_BREAK]", "[IMG_END]", "<bos>"]
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet, *frame])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in (*special, *frame)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE,
        extra_special_tokens={"image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    )  # fmt: skip


def picture(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    """A picture of random coarse colours."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, size=(5, 5, 3), dtype=np.uint8)
    return PIL.Image.fromarray(coarse).resize((width, height), resample=PIL.Image.Resampling.BICUBIC)


@dataclass(frozen=True)
class SeeingModel:
    """A folder that the engine loads, and the reference model with the same weights."""

    shape: SeeingShape
    path: Path
    model: Any

    @property
    def mark(self) -> str:
        """Stands for an image in a prompt's text."""
        return "<start_of_image>" if self.shape.whole == "Gemma3Processor" else "<image>"

    @property
    def framed(self) -> bool:
        """Whether tokens stand around each image of a prompt."""
        return self.shape.whole == "Qwen2VLProcessor"

    @cached_property
    def processor(self) -> Any:
        """The reference's processor of images."""
        name, settings = self.shape.processor
        return getattr(transformers, name)(**settings)

    @cached_property
    def whole_processor(self) -> Any:
        """The reference's processor of texts with images."""
        vision = self.model.config.vision_config
        given = {"vision_feature_select_strategy": self.model.config.vision_feature_select_strategy}
        first = int(vision.model_type == "clip_vision_model")
        given |= {"patch_size": PATCH, "num_additional_image_tokens": first}
        return getattr(transformers, self.shape.whole)(self.processor, make_tokenizer(), **given)

    def processed(self, text: str, image: PIL.Image.Image) -> list[int]:
        """The ids that the reference's processor makes of a text with one "<image>"."""
        if self.shape.whole == "Gemma3Processor":
            count = self.model.config.mm_tokens_per_image
            processor = transformers.Gemma3Processor(self.processor, make_tokenizer(), image_seq_length=count)
            # Its own settings stand before those of the processor of images.
            own = {name: value for name, value in self.shape.processor[1].items() if "pan_and_scan" in name}
            made = processor(text=text.replace("<image>", self.mark), images=image, **own)
            return list(made["input_ids"][0])
        if self.shape.whole == "PaliGemmaProcessor":
            tokenizer = make_tokenizer()
            tokenizer.bos_token = "<bos>"
            made = transformers.PaliGemmaProcessor(self.processor, tokenizer)(text=text, images=image)
            return list(made["input_ids"][0])
        if self.framed:
            count = int(self.processor([image])["image_grid_thw"].prod()) // self.processor.merge_size**2
            return list(make_tokenizer().encode(text.replace("<image>", _FRAME.format("<image>" * count))))
        if self.shape.whole == "LightOnOcrProcessor":
            rows, columns = (int(side) // 8 for side in self.processor([image])["image_sizes"][0])
            return list(make_tokenizer().encode(text.replace("<image>", "<image>" * rows * columns)))
        if self.shape.whole == "PixtralProcessor":
            rows, columns = (int(side) // 8 for side in self.processor([image])["image_sizes"][0])
            lines = "[IMG_BREAK]".join(["<image>" * columns] * rows)
            return list(make_tokenizer().encode(text.replace("<image>", f"{lines}[IMG_END]")))
        if self.shape.whole == "InternVLProcessor":
            count = int(self.processor([image])["num_patches"][0]) * (SIDE // PATCH // 2) ** 2
            return list(make_tokenizer().encode(text.replace("<image>", f"<img>{'<image>' * count}</img>")))
        if self.shape.whole not in ("LlavaOnevisionProcessor", "Idefics3Processor"):
            found = self.whole_processor(text=text, images=image)["input_ids"]
            return list(found[0] if isinstance(found[0], list) else found)
        if self.shape.whole == "Idefics3Processor":
            rows = self.processor([[image]], return_row_col_info=True)
            vision, factor = self.model.config.vision_config, self.model.config.scale_factor
            string = get_image_prompt_string(
                rows["rows"][0][0], rows["cols"][0][0], (vision.image_size // vision.patch_size // factor) ** 2,
                "<fake_token_around_image>", "<image>", "<global-img>",
            )  # fmt: skip
            return list(make_tokenizer().encode(text.replace("<image>", string)))
        # One that is made whole has a processor of videos, which needs torchvision.
        processor: Any = object.__new__(transformers.LlavaOnevisionProcessor)
        processor.image_processor, processor.image_token = self.processor, "<image>"
        processor.num_image_tokens, processor.vision_aspect_ratio = (SIDE // PATCH) ** 2, "anyres_max_2"
        processor.vision_feature_select_strategy = "full"
        expanded = processor.replace_image_token(self.processor([[image]]), 0)
        return list(make_tokenizer().encode(text.replace("<image>", expanded)))

    def pixels(self, images: Sequence[PIL.Image.Image]) -> dict[str, Any]:
        """What the reference model is given of a prompt's images."""
        nested = not self.shape.architecture.startswith(
            ("LlavaFor", "LlavaNext", "Gemma3", "Qwen", "Intern", "Mistral", "LightOn", "Glm", "Paddle")
        )
        given: Any = [list(images)] if nested else list(images)
        made = dict(self.processor(given, return_tensors="pt"))
        for name in ("num_crops", "num_patches"):
            made.pop(name, None)
        return {name: torch.as_tensor(value) for name, value in made.items()}

    def seen(self, images: Sequence[PIL.Image.Image], ids: Sequence[int]) -> dict[str, Any]:
        """What the reference model is given beside a prompt's tokens."""
        found = self.pixels(images) if images else {}
        if self.framed:
            self.model.model.rope_deltas = None  # those of an earlier prompt
            if images:
                found["mm_token_type_ids"] = (torch.tensor([list(ids)]) == IMAGE).long()
        if images and self.shape.whole == "PaliGemmaProcessor":
            found["token_type_ids"] = torch.zeros(1, len(ids), dtype=torch.long)
        if images and self.shape.whole == "Gemma3Processor":
            found["token_type_ids"] = (torch.tensor([list(ids)]) == IMAGE).long()
        return found

    def prompt(self, parts: Sequence[int | PIL.Image.Image], info: VisionInfo) -> TokenInput:
        """Tokens and images as the engine takes them."""
        cropping = read_cropping(self.path)
        assert cropping is not None
        images = [part for part in parts if not isinstance(part, int)]
        crops = [crop(rgb(image), cropping, alone=len(images) == 1) for image in images]
        encode, left, given = make_tokenizer().encode, iter(crops), []
        for part in parts:
            if isinstance(part, int):
                given.append(part)
            else:
                tiles = next(left).tiles
                mark = "<image>" if info.texts is None else info.texts.text("<image>", tiles)
                given += encode(_FRAME.format(mark) if self.framed else mark)
        if info.leading is not None and images:
            last = len(given) - given[::-1].index(IMAGE)
            given[last:] = encode(info.leading.around(make_tokenizer().decode(given[last:])))
        ids, placed = place(given, crops, info)
        return TokenInput(ids, images=tuple(placed))


def as_published(folder: Path) -> None:
    """Store the experts of Qwen3-VL-MoE as its publisher does: [in, out]. `transformers` turns them when it reads them,
    and saves a new model as it is in memory."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    turned = {
        name: tensor.transpose(1, 2).contiguous()
        for name, tensor in stored.items()
        if name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))
    }
    save_file(stored | turned, file, {"format": "pt"})


def make_seeing_model(name: str, folder: Path, *, seed: int = 0, length: int = 512) -> SeeingModel:
    """Build the checkpoint and save it; `length`: tokens of context. Every parameter is random, so that a part which is
    left out shows."""
    shape = SHAPES[name]
    model_class: Any = getattr(transformers, shape.architecture)
    config = model_class.config_class(
        text_config=TEXT | shape.text | {"max_position_embeddings": length},
        vision_config=dict(shape.vision),
        image_token_id=IMAGE,
        **shape.own,
    )
    config.architectures = [shape.architecture]
    model = model_class(config)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        fill_randomly(model, seed)
        model.get_output_embeddings().weight[EOS] *= 2.2
    model.generation_config = transformers.GenerationConfig(eos_token_id=EOS, pad_token_id=0)
    model.eval().save_pretrained(folder)
    if "VLMoe" in shape.architecture:
        as_published(folder)
    made = SeeingModel(shape, folder, model)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("<image>", _FRAME.format("<image>") if made.framed else made.mark)
    tokenizer.save_pretrained(folder)
    stored = made.processor.to_dict()
    if shape.whole == "PixtralProcessor":  # multiplies its patches itself
        stored["patch_size"] = dict.fromkeys(("height", "width"), 8 // shape.own["spatial_merge_size"])
        whole = {"processor_class": shape.whole, "spatial_merge_size": shape.own["spatial_merge_size"]}
        (folder / "processor_config.json").write_text(json.dumps(whole))
    if shape.whole == "LightOnOcrProcessor":
        whole = {"processor_class": shape.whole, "spatial_merge_size": shape.own["spatial_merge_size"]}
        (folder / "processor_config.json").write_text(json.dumps(whole))
    (folder / "preprocessor_config.json").write_text(json.dumps(stored))
    return made
