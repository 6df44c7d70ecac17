"""GGUF files of tiny vision-language models: the language model and its image projector, written by the `gguf` library
as llama.cpp's converters write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from support.gguf_files import KINDS, Kind, interleaved, put, write_numbers
from support.seeing import SeeingModel

Named = Iterator[tuple[str, Tensor]]
SIDE_OF_WINDOW = 112
_BREAK = 283  # the id of [IMG_BREAK]


@dataclass(frozen=True)
class Pair:
    """How a model of `support.seeing` becomes two files.

    Attributes:
        kind: of the language model.
        type: of the projector.
        token: the text of the image token.
        put: the projector's metadata of its own.
        names: the projector's tensors under the names that the converter gives them or looks up.
    """

    kind: Kind
    type: str
    token: str
    put: Callable[[Any, Any, Any], None]  # a writer, the config, the settings of the image processor
    names: Callable[[str, Tensor, Any], Named]


def _llava_names(name: str, tensor: Tensor, config: Any) -> Named:
    """The old script's names."""
    number = {"linear_1": "mm.0", "linear_2": "mm.2"}.get(name.split(".")[-2])
    if number is not None:
        yield f"{number}.{name.rpartition('.')[2]}", tensor
        return
    count = config.vision_config.num_hidden_layers + 1 + config.vision_feature_layer
    unread = ("post_layernorm", ".head.", *(f".layers.{layer}." for layer in range(count, 9)))
    if not any(part in name for part in unread):
        yield _of_tower(name), tensor


def _of_tower(name: str) -> str:
    """The name in published checkpoints, which have another module around the tower."""
    name = name.removeprefix("model.")
    return name if "vision_model." in name else name.replace("vision_tower.", "vision_tower.vision_model.", 1)


def _siglip_names(name: str, tensor: Tensor, config: Any) -> Named:
    yield name, tensor


def _gemma_names(name: str, tensor: Tensor, config: Any) -> Named:
    if ".head." not in name:
        name = name.replace("_weight", ".weight")
        known = {"mm_input_projection": "mm.input_projection", "mm_soft_emb_norm": "mm.soft_emb_norm"}
        stem = name.split(".")[-2]
        lifted = tensor + 1 if "soft_emb_norm.weight" in name else tensor
        yield f"{known[stem]}.weight" if stem in known else _of_tower(name), lifted


def _qwen_names(name: str, tensor: Tensor, config: Any) -> Named:
    name = name.removeprefix("model.")
    merged = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
    if ".qkv." in name and config.model_type != "qwen3_vl":
        for letter, part in zip("qkv", tensor.chunk(3), strict=True):
            yield name.replace("qkv", letter), part
    elif name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    elif name.startswith("visual.deepstack_merger_list."):
        number, kind, ending = name.split(".")[2:]
        layer = config.vision_config.deepstack_visual_indexes[int(number)]
        yield f"v.deepstack.{layer}.{kind.removeprefix('linear_')}.{ending}", tensor
    elif name.startswith("visual.merger.") and name.split(".")[2] in merged:
        yield f"{merged[name.split('.')[2]]}.{name.rpartition('.')[2]}", tensor
    else:
        yield name, tensor


def _internvl_names(name: str, tensor: Tensor, config: Any) -> Named:
    number = {"layer_norm": 0, "linear_1": 1, "linear_2": 3}.get(name.split(".")[-2])
    if number is not None:
        yield f"mlp1.{number}.{name.rpartition('.')[2]}", tensor
        return
    name = name if name.startswith("model.") else f"model.{name}"
    yield name + ".weight" * (".lambda_" in name or "position_embedding" in name), tensor


def _pixtral_names(name: str, tensor: Tensor, config: Any) -> Named:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        tensor = interleaved("num_attention_heads")(config.vision_config, tensor)
    known = {
        "linear_1": "mm.1", "linear_2": "mm.2", "norm": "mm.input_norm", "merging_layer": "mm.patch_merger",
    }  # fmt: skip
    stem, _, ending = name.rpartition(".")
    part = stem.rpartition(".")[2]
    yield f"{known[part]}.{ending}" if part in known else name, tensor


def _put_llava(writer: Any, config: Any, processor: Any) -> None:
    vision = config.vision_config
    layer = config.vision_feature_layer
    layers = layer if layer >= 0 else vision.num_hidden_layers + layer + 1
    writer.kv_data[-1].pop("clip.vision.block_count")
    writer.add_vision_block_count(layers)
    put(writer, "clip.vision.feature_layer", [layers])
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    put(writer, "clip.use_gelu", vision.hidden_act == "gelu")
    put(writer, "clip.has_llava_projector", True)


def _put_gemma(writer: Any, config: Any, processor: Any) -> None:
    vision = config.vision_config
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    writer.add_vision_use_gelu(True)
    side = int(config.mm_tokens_per_image**0.5)
    writer.add_vision_projector_scale_factor(vision.image_size // vision.patch_size // side)


def _put_idefics(writer: Any, config: Any, processor: Any) -> None:
    writer.add_vision_attention_layernorm_eps(config.vision_config.layer_norm_eps)
    writer.add_vision_projector_scale_factor(config.scale_factor)
    writer.add_vision_use_gelu(True)
    put(writer, "clip.vision.preproc_image_size", processor["size"]["longest_edge"])


def _put_qwen(writer: Any, config: Any, processor: Any) -> None:
    vision = config.vision_config
    writer.add_vision_attention_layernorm_eps(1e-6)
    if config.model_type == "qwen2_5_vl":
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision.fullatt_block_indexes[0] + 1)
    if config.model_type == "qwen3_vl":
        writer.add_vision_use_gelu(True)
        writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
        writer.add_vision_is_deepstack_layers([i in vision.deepstack_visual_indexes for i in range(vision.depth)])


def _put_internvl(writer: Any, config: Any, processor: Any) -> None:
    vision = config.vision_config
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(int(1 / config.downsample_ratio))
    put(writer, "clip.vision.preproc_min_tiles", processor["min_patches"])
    put(writer, "clip.vision.preproc_max_tiles", processor["max_patches"])


def _put_pixtral(writer: Any, config: Any, processor: Any) -> None:
    writer.add_vision_attention_layernorm_eps(1e-5)
    put(writer, f"clip.use_{config.vision_config.hidden_act}", True)
    writer.add_vision_spatial_merge_size(config.spatial_merge_size)


def _axes(writer: Any, config: Any) -> None:
    """Settings of Qwen's language models."""
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    if config.model_type == "qwen3_vl_text":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        put(writer, f"{writer.arch}.n_deepstack_layers", 2)


def _gemma(writer: Any, config: Any) -> None:
    KINDS["gemma3"].write(writer, config)
    put(writer, "gemma3.attention.sliding_window_pattern", 2)


_QWEN_2 = replace(KINDS["qwen2"], name="qwen2vl", write=_axes)
PAIRS: dict[str, Pair] = {
    "llava": Pair(KINDS["llama"], "mlp", "<image>", _put_llava, _llava_names),
    "llava-square": Pair(KINDS["qwen2"], "mlp", "<image>", _put_llava, _llava_names),
    "gemma3": Pair(replace(KINDS["gemma3"], write=_gemma), "gemma3", "<image_soft_token>", _put_gemma, _gemma_names),
    "smolvlm": Pair(KINDS["llama"], "idefics3", "<image>", _put_idefics, _siglip_names),
    "qwen2-vl": Pair(_QWEN_2, "qwen2vl_merger", "<|image_pad|>", _put_qwen, _qwen_names),
    "qwen2.5-vl": Pair(_QWEN_2, "qwen2.5vl_merger", "<|image_pad|>", _put_qwen, _qwen_names),
    "qwen3-vl": Pair(replace(KINDS["qwen3"], name="qwen3vl", write=_axes), "qwen3vl_merger", "<|image_pad|>",
                     _put_qwen, _qwen_names),
    "internvl": Pair(KINDS["qwen2"], "internvl", "<IMG_CONTEXT>", _put_internvl, _internvl_names),
    "internvl-norms": Pair(KINDS["qwen3"], "internvl", "<IMG_CONTEXT>", _put_internvl, _internvl_names),
    "mistral3": Pair(KINDS["mistral3"], "pixtral", "[IMG]", _put_pixtral, _pixtral_names),
}  # fmt: skip


def write_pair(model: SeeingModel, pair: Pair, folder: Path, *, format: str = "F32") -> tuple[Path, Path]:
    """The language model and the projector; the image processor's settings in the model's folder are followed where
    GGUF files have them, and where they have none, made equal to those of llama.cpp. `format`: of the matrices whose
    rows are whole blocks of it."""
    _as_llama_cpp(model)
    text, projector = folder / "tiny.gguf", folder / "mmproj-tiny.gguf"
    state = load_file(model.path / "model.safetensors")
    parts = {name: tensor for name, tensor in state.items() if _of_language(name)}
    config = model.model.config.text_config
    config.tie_word_embeddings = False
    parts.setdefault("lm_head.weight", model.model.lm_head.weight.detach())
    write_numbers(text, pair.kind, config, {_plain(name): tensor for name, tensor in parts.items()},
                  formats=(format,), tokenizer=_vocabulary(model, pair))  # fmt: skip
    write_projector(model, pair, projector, format=format)
    return text, projector


def write_projector(
    model: SeeingModel, pair: Pair, path: Path, *, format: str = "F32", changes: Mapping[str, Any] = {}
) -> None:
    """The projector; `changes`: other metadata, by whole names."""
    import gguf

    state = load_file(model.path / "model.safetensors")
    config, vision = model.model.config, model.model.config.vision_config
    processor = json.loads((model.path / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_type("mmproj")
    writer.add_name("tiny")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(pair.type)
    writer.add_vision_projection_dim(config.text_config.hidden_size)
    size = getattr(vision, "image_size", 560)
    if pair.type == "pixtral":
        size = processor["size"]["longest_edge"]
    patch = vision.patch_size
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    inner = getattr(vision, "intermediate_size", None) or int(width * vision.mlp_ratio)
    writer.add_vision_image_size(size if isinstance(size, int) else size[0])
    writer.add_vision_patch_size(patch if isinstance(patch, int) else patch[0])
    writer.add_vision_embedding_length(width)
    writer.add_vision_feed_forward_length(inner)
    writer.add_vision_block_count(layers)
    writer.add_vision_head_count(getattr(vision, "num_heads", None) or vision.num_attention_heads)
    writer.add_vision_image_mean(processor["image_mean"])
    writer.add_vision_image_std(processor["image_std"])
    pair.put(writer, config, processor)
    for name, value in changes.items():
        writer.kv_data[-1].pop(name, None)
        put(writer, name, value)
    if pair.type == "pixtral":  # llama.cpp takes it from here
        table = next(tensor for name, tensor in state.items() if name.endswith("embed_tokens.weight"))
        writer.add_tensor("v.token_embd.img_break", table[_BREAK].float().numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(layers, 4))
    for stored, tensor in state.items():
        if _of_language(stored) or "position_ids" in stored:
            continue
        for name, part in pair.names(stored, tensor.float(), config):
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            kind = gguf.GGMLQuantizationType[format if part.dim() == 2 else "F32"]
            if part.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
                kind = gguf.GGMLQuantizationType.F32
            assert found is not None or name.startswith(("mm.", "v.")), name
            writer.add_tensor(found or name, gguf.quantize(part.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _of_language(name: str) -> bool:
    return (
        "language_model." in name
        or "text_model." in name
        or name.startswith(("lm_head.", "model.layers.", "model.embed_tokens.", "model.norm."))
    )


def _plain(name: str) -> str:
    """The name in a model that is only the language part."""
    if name.endswith("lm_head.weight"):
        return "lm_head.weight"
    for prefix in ("model.language_model.", "language_model.model.", "model.text_model.", "model."):
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name


def _as_llama_cpp(model: SeeingModel) -> None:
    """Give the checkpoint the settings of images that GGUF files cannot hold."""
    file, vision = model.path / "preprocessor_config.json", model.model.config.vision_config
    processor = json.loads(file.read_text())
    if model.shape.whole == "LlavaProcessor":
        mean = {name: processor[name] for name in ("image_mean", "image_std")}
        processor = mean | {
            "image_processor_type": "LlavaImageProcessor", "size": {"shortest_edge": vision.image_size},
            "do_pad": True, "do_center_crop": False,
        }  # fmt: skip
    if model.shape.whole == "Qwen2VLProcessor":
        unit = (vision.patch_size * vision.spatial_merge_size) ** 2
        processor["size"] = {"shortest_edge": 8 * unit, "longest_edge": 4096 * unit}
    file.write_text(json.dumps(processor))
    config = json.loads((model.path / "config.json").read_text())
    if config["model_type"] == "qwen2_5_vl":
        config["vision_config"]["window_size"] = SIDE_OF_WINDOW
    if config["model_type"] == "gemma3":
        config["text_config"]["query_pre_attn_scalar"] = config["text_config"]["head_dim"]
    (model.path / "config.json").write_text(json.dumps(config))


def _renamed(text: str, pair: Pair) -> str:
    """A token's text, or a template, as in the vocabularies of the family."""
    text = text.replace("<image>", pair.token)
    if pair.type.startswith("qwen"):
        text = text.replace("<start_of_image>", "<|vision_start|>").replace("<end_of_image>", "<|vision_end|>")
    return text


def _vocabulary(model: SeeingModel, pair: Pair) -> dict[str, Any]:
    """The tokenizer of the checkpoint's folder; two bytes that no text has make its only merge."""
    stored = json.loads((model.path / "tokenizer.json").read_text())
    known = {number: text for text, number in stored["model"]["vocab"].items()}
    special = {entry["id"] for entry in stored["added_tokens"]}
    rows = model.model.config.text_config.vocab_size
    merged = len(known)
    known |= {merged: "ÀÁ"} | {number: f"[PAD{number}]" for number in range(merged + 1, rows)}
    template = json.loads((model.path / "tokenizer_config.json").read_text()).get("chat_template")
    file = model.path / "chat_template.jinja"
    template = file.read_text() if file.exists() else template
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [_renamed(known[number], pair) for number in range(rows)],
        "tokenizer.ggml.token_type": [3 if number in special or number > merged else 1 for number in range(rows)],
        "tokenizer.ggml.merges": ["À Á"], "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _renamed(template, pair),
    }  # fmt: skip
