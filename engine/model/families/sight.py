"""The vision part of vision-language models: the models that have one here, its spec and its weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from engine.errors import UnsupportedModelError
from engine.interface.vision import Framed, Leading, Surrounds, Tiling
from engine.model.families.common import linear, norm
from engine.model.families.internvl_vision import internvl, internvl_entries
from engine.model.families.names import norm_weights
from engine.model.families.ocr_vision import glm_ocr, glm_ocr_entries, paddleocr_vl, paddleocr_vl_entries
from engine.model.families.pixtral_vision import lighton_ocr, mistral3, mistral3_entries
from engine.model.families.qwen_vision import qwen2_5_vl, qwen2_vl, qwen3_vl, square_entries
from engine.model.families.vision import kernel, layers_weights, patches, pre_norm_encoder
from engine.model.normalisation import Norm
from engine.model.spec import GatedProjector, Patches, Pooled, Projector, Shuffled, Stack, Vision
from engine.model.table import Entry, Reshaped, Transposed, WeightTable

_MOST_TILES = 64


def sight(name: str, config: Any) -> Vision | None:
    """The part of a vision-language model's config that sees; None: images are not served for this architecture. Raises
    UnsupportedModelError if a setting of the config that is not implemented."""
    read = _READERS.get(name)
    if read is None:
        return None
    part, scale = read(config), getattr(getattr(config, "text_config", None), "embedding_multiplier", 1.0)
    return part if scale == 1.0 else replace(part, scale=scale)


def _tower(config: Any, layer: Any) -> Stack:
    """The layers of CLIP's or SigLIP's tower up to the last one whose hidden states are read. The other hidden states
    that are read are kept. Raises UnsupportedModelError if the tower is of another kind, or has no such layer.

    Args:
        layer: one or several numbers in ascending order, as in `hidden_states` of `transformers`: 0 is the state before
            the first layer, and negative numbers count from the end. The tower's last norm is applied to none of them.
    """
    kind = config.model_type
    if kind == "clip_vision_model":
        first = Norm("layer", config.layer_norm_eps, bias=True)
        whole = pre_norm_encoder(config, patches(config, bias=False, first=1, layer_norm=first))
    elif kind == "siglip_vision_model":
        whole = pre_norm_encoder(config, patches(config, bias=True, first=0))
    else:
        raise UnsupportedModelError(
            f"vision_config of the config is of the type {kind!r}; supported are clip_vision_model and "
            "siglip_vision_model."
        )
    count = len(whole.blocks)
    listed = layer if isinstance(layer, list | tuple) else [layer]
    numbers = [one if one >= 0 else count + 1 + one for one in listed if isinstance(one, int)]
    if not numbers or len(numbers) < len(listed) or sorted({0, *numbers}) != [0, *numbers] or numbers[-1] > count:
        raise UnsupportedModelError(
            f"vision_feature_layer of the config is {layer!r}; it must name layers of the tower's {count}, in "
            "ascending order."
        )
    *others, last = numbers
    return replace(whole, blocks=whole.blocks[:last], final_norm=None, kept=tuple(number - 1 for number in others))


def _llava(config: Any) -> Vision:
    tower = _tower(config.vision_config, config.vision_feature_layer)
    assert isinstance(tower.embedding, Patches)
    strategy = config.vision_feature_select_strategy
    if strategy not in ("default", "full"):
        raise UnsupportedModelError(
            f"vision_feature_select_strategy of the config is {strategy!r}; supported are default and full."
        )
    if strategy == "default" and not tower.embedding.first:
        raise UnsupportedModelError(
            "vision_feature_select_strategy of the config is default, which leaves out a class token, but the tower "
            "has none."
        )
    return Vision(
        tower=tower,
        token_id=config.image_token_id,
        skip=1 if strategy == "default" else 0,
        projector=Projector(config.projector_hidden_act, bool(config.multimodal_projector_bias)),
        joined=len(tower.kept) > 0,
    )


def _llava_next(config: Any) -> Vision:
    part = _llava(config)
    if not part.skip and isinstance(part.tower.embedding, Patches) and part.tower.embedding.first:
        raise UnsupportedModelError("vision_feature_select_strategy of the config must be default here, got full.")
    return replace(part, newline=True, tiling=Tiling(sizes=_sizes(config)))


def _llava_onevision(config: Any) -> Vision:
    ratio = config.vision_aspect_ratio
    named = re.fullmatch(r"anyres_max_([1-9]\d{0,3})", ratio) if isinstance(ratio, str) else None
    if named is None:
        raise UnsupportedModelError(f"vision_aspect_ratio of the config must be anyres_max_N, got {ratio!r}.")
    return replace(_llava_next(config), tiling=Tiling(sizes=_sizes(config), most=int(named[1])))


def _idefics3(config: Any) -> Vision:
    part, factor = config.vision_config, config.scale_factor
    embedding = patches(part, bias=True, first=0)
    side = embedding.image[0] // embedding.patch[0]
    square = embedding.image[0] == embedding.image[1] and embedding.patch[0] == embedding.patch[1]
    if not square or not isinstance(factor, int) or factor < 1 or side % factor:
        raise UnsupportedModelError(
            f"scale_factor of the config is {factor!r}, but a crop has {side} patches a side. It must divide them."
        )
    order = _placed(side)
    if order != tuple(range(side**2)):
        embedding = replace(embedding, order=order)
    return Vision(
        tower=pre_norm_encoder(part, embedding),
        token_id=config.image_token_id,
        skip=0,
        projector=Shuffled(factor),
        surrounds=Surrounds(),
    )


def _gemma3(config: Any) -> Vision:
    part, text, count = config.vision_config, config.text_config, config.mm_tokens_per_image
    embedding = patches(part, bias=True, first=0)
    (height, width), (rows, columns) = embedding.image, embedding.patch
    side = math.isqrt(count) if isinstance(count, int) and count > 0 else 0
    if height != width or rows != columns or not side or side**2 != count or height // rows % side:
        raise UnsupportedModelError(
            f"mm_tokens_per_image of the config is {count!r}, but a crop has {height // rows} x {width // columns} "
            "patches. It must be the square of a number that divides them."
        )
    if getattr(text, "use_bidirectional_attention", None):
        raise UnsupportedModelError("use_bidirectional_attention of the config's language part is not implemented.")
    return Vision(
        tower=pre_norm_encoder(part, embedding),
        token_id=config.image_token_id,
        skip=0,
        projector=Pooled(height // rows // side, Norm("rms", part.layer_norm_eps, unit_offset=True)),
        frame=Framed(),
        two_way="image",
    )


def _paligemma(config: Any) -> Vision:
    part = config.vision_config
    if part.model_type != "siglip_vision_model":
        raise UnsupportedModelError(
            f"vision_config of the config is of the type {part.model_type!r}; supported is siglip_vision_model."
        )
    embedding = patches(part, bias=True, first=0)
    if embedding.image[0] // embedding.patch[0] != embedding.image[1] // embedding.patch[1]:
        raise UnsupportedModelError(f"image_size of the config must be a square, got {part.image_size!r}.")
    return Vision(
        tower=pre_norm_encoder(part, embedding),
        token_id=config.image_token_id,
        skip=0,
        projector=Shuffled(1, bias=True),
        leading=Leading(),
        two_way="prompt",
    )


def _placed(side: int) -> tuple[int, ...]:
    """The row of the table of positions that each patch of a full crop has. The reference finds it with fractions in
    float32, so some patches share a row where `side` is no power of two."""
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    places = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    rows = torch.bucketize(places, bounds, right=True)
    return tuple((rows[:, None] * side + rows[None, :]).flatten().tolist())


def _sizes(config: Any) -> tuple[tuple[int, int], ...]:
    side, given = config.vision_config.image_size, config.image_grid_pinpoints
    found = tuple(tuple(each) for each in given)
    good = found and isinstance(side, int) and all(len(each) == 2 for each in found)
    if (
        not good
        or not all(isinstance(n, int) and n > 0 and n % side == 0 for each in found for n in each)
        or any(each[0] * each[1] > _MOST_TILES * side**2 for each in found)
    ):
        raise UnsupportedModelError(
            f"image_grid_pinpoints of the config must be heights and widths of at most {_MOST_TILES} tiles of "
            f"{side} x {side} pixels."
        )
    return found


_READERS: dict[str, Callable[[Any], Vision]] = {
    "LightOnOcrForConditionalGeneration": lighton_ocr,
    "LlavaForConditionalGeneration": _llava,
    "LlavaNextForConditionalGeneration": _llava_next,
    "LlavaOnevisionForConditionalGeneration": _llava_onevision,
    "Gemma3ForConditionalGeneration": _gemma3,
    "GlmOcrForConditionalGeneration": glm_ocr,
    "Idefics3ForConditionalGeneration": _idefics3,
    "PaddleOCRVLForConditionalGeneration": paddleocr_vl,
    "PaliGemmaForConditionalGeneration": _paligemma,
    "SmolVLMForConditionalGeneration": _idefics3,
    "InternVLForConditionalGeneration": internvl,
    "Mistral3ForConditionalGeneration": mistral3,
    "Qwen2VLForConditionalGeneration": qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl,
    "Qwen3_5ForConditionalGeneration": qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": qwen3_vl,
}
SEEING = frozenset(_READERS)
"""Architectures whose images are served."""
UNSEEN = {
    "Llama4ForConditionalGeneration": ": its tower's class vector comes after the patches, and the patches of a crop "
    "have positions of two axes, which is not implemented",
}
"""Why the images of other architectures are refused, after the refusal."""


def with_sight(table: WeightTable, vision: Vision) -> WeightTable:
    """A language part's table with the weights of the part that sees."""
    if vision.enclosed is not None or vision.squares:
        renamed = (
            (r"^(model\.)?vision_encoder\.", "vision_tower."),
            (r"^(model\.)?vision_projection\.", "multi_modal_projector."),
            (r"^mlp_AR\.", "projector."),
            (r"^(model\.)?(visual|vision_tower|multi_modal_projector|projector)\.", r"\2."),
            *table.renamed,
        )
        return replace(
            table,
            entries=(*table.entries, *_square_entries(vision)),
            renamed=renamed,
            ignored=(*table.ignored, *_UNREAD),
        )
    stack, tower, ours = vision.tower, "vision_tower", "tower.encoder"
    embedding = stack.embedding
    assert isinstance(embedding, Patches)
    entries = [
        *kernel(f"{ours}.embedding.patches", f"{tower}.embeddings.patch_embedding", embedding),
        Entry(f"{ours}.embedding.positions", (f"{tower}.embeddings.position_embedding.weight",)),
        *norm_weights(f"{ours}.embedding.norm", f"{tower}.pre_layrnorm", embedding.norm),
        *layers_weights(stack, f"{tower}.encoder.layers", target=ours),
        *norm_weights(f"{ours}.final_norm", f"{tower}.post_layernorm", stack.final_norm),
        *_projector_entries(vision.projector),
    ]
    if embedding.first:
        form = Reshaped(((embedding.width,),))
        entries.append(Entry(f"{ours}.embedding.first", (f"{tower}.embeddings.class_embedding",), form))
    if vision.newline:
        entries.append(Entry("vision.newline", ("image_newline",)))
    return replace(
        table,
        entries=(*table.entries, *entries),
        renamed=(
            (r"^(model\.)?(vision_tower\.(vision_model\.)?|vision_model\.)", f"{tower}."),
            (r"^(model\.)?connector\.", "connector."),
            (r"^(model\.)?(multi_modal_projector\.|image_newline$)", r"\2"),
            *table.renamed,
        ),
        ignored=(
            *(pattern for pattern in table.ignored if "multi_modal_projector" not in pattern),
            # Layers after the one that is read, and what only a tower that stands alone has.
            rf"{tower}\.(encoder\.layers\.\d+\..*|post_layernorm\..*|head\..*|embeddings\.position_ids)",
        ),
    )


# Tensors of PaddleOCR-VL's tower that are not read: its other positions, and a head.
_UNREAD = (r"visual\.vision_model\.(embeddings\.packing_position_embedding|head)\..*",)


def _square_entries(vision: Vision) -> list[Entry]:
    if vision.enclosed is not None:
        return internvl_entries(vision)
    match vision.projector:
        case GatedProjector():
            return glm_ocr_entries(vision)
        case Projector(merged=True):
            return mistral3_entries(vision)
        case Projector(each=True):
            return paddleocr_vl_entries(vision)
    return square_entries(vision)


def _projector_entries(part: Projector | GatedProjector | Shuffled | Pooled) -> list[Entry]:
    if isinstance(part, Pooled):
        source, ours = "multi_modal_projector", "vision.projector"
        return [
            *norm(f"{ours}.norm", f"{source}.mm_soft_emb_norm", bias=False),
            Entry(f"{ours}.second.weight", (f"{source}.mm_input_projection_weight",), Transposed()),
        ]
    if isinstance(part, Shuffled):
        source = "multi_modal_projector.linear" if part.bias else "connector.modality_projection.proj"
        return linear("vision.projector.second", source, part.bias)
    assert isinstance(part, Projector)
    source = "multi_modal_projector.linear_"
    return [
        *linear("vision.projector.first", f"{source}1", part.bias),
        *linear("vision.projector.second", f"{source}2", part.bias),
    ]
