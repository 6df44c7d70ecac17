"""Vision-language models whose language part is a supported family: they are served as that family, without vision."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.sight import sight
from engine.model.spec import Vision
from engine.model.table import Turned, WeightTable

logger = logging.getLogger("octavo.model")

# Models that, without an image, compute the same as their language part.
ARCHITECTURES = frozenset(
    {
        "AyaVisionForConditionalGeneration",
        "Gemma3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "LightOnOcrForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "PaddleOCRVLForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
    }
)
# Models that they are built around, by the type of the inner config. Qwen's rotary positions have three axes, which are
# equal for texts.
_FAMILIES = {
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "paddleocr_vl_text": "Ernie4_5ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# Models that store the matrices of experts [in, out].
_TURNED = frozenset({"Qwen3VLMoeForConditionalGeneration"})
# Models whose logits have the cap of their language part. The heads of the others are matrices alone.
_CAPPED = frozenset(
    {
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
    }
)
_BARE = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}
# Models in which all tokens of a prompt with images see each other.
_LEADING = frozenset({"PaliGemmaForConditionalGeneration"})
_WHOLE = "config_of_the_whole"
_MARK = "language_part_of"  # in the config of a language part: the architecture of the whole model


def language_part(config: Any) -> Any:
    """The config of a vision-language model's language part; for other models, the config itself. Raises
    UnsupportedModelError if the language part is not supported."""
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    if name not in ARCHITECTURES:
        return config
    text = config.text_config
    own = _FAMILIES.get(text.model_type)
    if own is None:
        raise UnsupportedModelError(
            f"{name} has a language part of the type {text.model_type!r}, which is not supported. Supported: "
            f"{', '.join(sorted(_FAMILIES))}."
        )
    text.architectures = [own]
    # Settings of the whole model about the end of texts, and whether its head is the token table.
    text.tie_word_embeddings = config.tie_word_embeddings
    for setting in ("dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, setting, None) is None:
            setattr(text, setting, getattr(config, setting, None))
    if name in _TURNED:
        text.norm_topk_prob = True  # of any config
    if name not in _CAPPED:
        for setting in _BARE.keys() & vars(text).keys():
            setattr(text, setting, _BARE[setting])
    if name in _LEADING:
        text.use_bidirectional_attention = None  # it applies only to prompts with images (`Vision.two_way`)
    setattr(text, _MARK, name)
    setattr(text, _WHOLE, config)
    return text


def whole_of(config: Any) -> str | None:
    """The architecture of the whole model that this language part's config is from, or None."""
    name = getattr(config, _MARK, None)
    return name if isinstance(name, str) else None


def vision_of(config: Any) -> Vision | None:
    """The vision part of the model whose language part this config describes; None, with the reason in the log, if the
    vision part is not implemented."""
    name = whole_of(config)
    if name is None:
        return None
    try:
        return sight(name, getattr(config, _WHOLE))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, UnsupportedModelError) as error:
        logger.warning("%s is served as a text model, and requests with images are refused: %s", name, error)
        return None


def without_vision(table: WeightTable, name: str) -> WeightTable:
    """A family's weights in a checkpoint that also contains a vision encoder; `name`: the architecture of the whole."""
    entries = table.entries
    if name in _TURNED:
        entries = tuple(
            replace(entry, transform=Turned()) if entry.sources[0].endswith(_FUSED) else entry for entry in entries
        )
    return replace(
        table,
        entries=entries,
        renamed=(
            (r"^language_model\.(model|lm_head)\.", r"\1."),
            (r"^model\.(language_model|text_model)\.", "model."),
            *table.renamed,
        ),
        ignored=(*table.ignored, *_UNUSED),
    )


_FUSED = (".experts.gate_up_proj", ".experts.down_proj")
_UNUSED = (
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector)\..*",
    r"(model\.)?(vision_encoder|vision_projection)\..*",
    r"(model\.)?image_newline",
    r"(model\.)?(projector|mlp_AR)\..*",
    r"(v|mm)\..*",  # of an image projector in a GGUF file, if nothing is known about the tensor
    r"(model\.)?(audio_tower|embed_vision|embed_audio|vision_embedder)\..*",
)
