"""Image projectors (llama.cpp's mmproj): GGUF files with the image tower of a language model in another GGUF file. A
pair of files is described like the original vision-language checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.gguf.architectures import PROJECTORS, Config, Placed, describe
from engine.model.gguf.arrangements import AboveOne, Arrangement, AsStored, Dimensions, Frames, Interleaved
from engine.model.gguf.container import Gguf, TensorInfo
from engine.model.gguf.metadata import Metadata

_LAYER = re.compile(r"v\.(blk|deepstack)\.(\d+)\.(\w+)\.(weight|bias)")
_UNSEEN = re.compile(r"v\.token_embd\.img_break|v\.(post_ln|head)\..*|.*position_ids")
"""Tensors that are not read: they are also in the language model's file, or no answer depends on them."""
_HARMLESS = (
    "has_vision_encoder", "has_text_encoder", "has_llava_projector", "projector_type", "vision.projector_type",
    "vision.projection_dim", "vision.feed_forward_length", "vision.mm_projector_type", "vision.mm_patch_merge_type",
    "vision.image_aspect_ratio", "vision.image_crop_resolution", "vision.image_split_resolution",
)  # fmt: skip
"""Settings that change nothing, or that tensors determine."""
_LEAST_PATCHES, _MOST_PATCHES = 8, 4096
"""llama.cpp's minimum and maximum of the vectors of an image that keeps its shape. Files do not contain the
checkpoint's limits."""
_WINDOW = 112  # pixels of a window's side in Qwen2.5-VL
_UNUSED = re.compile(r"<unused\d+>")

Settings = tuple[Config, Config]
"""The settings of config.json, without the language part's, and those of preprocessor_config.json."""


@dataclass(frozen=True)
class Projector:
    """A kind of projector.

    Attributes:
        settings: makes the two configs from the metadata and the language model's config.
        texts: by the language model's architecture, the class of the whole model in transformers.
        token: possible texts of the token that stands for an image. The first one in the vocabulary is used.
        last: the tensor whose rows are features of the language model.
        outer, layer: transformers' names of tensors, as in `Architecture`.
        layers: the prefix of a layer's index.
        arranged: by names as in `outer` or `layer`, the layouts of tensors that are stored differently.
        joined: for tensors that are stored in parts, a piece of the first part's name and the pieces that replace it in
            the names of the other parts.
    """

    settings: Callable[[Metadata, Config], Settings]
    texts: Mapping[str, str]
    token: tuple[str, ...]
    last: str
    outer: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str
    arranged: Mapping[str, Callable[[Metadata], Arrangement]] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def is_projector(file: Gguf) -> bool:
    """Whether a file is an image projector."""
    return file.metadata.get("general.architecture") == PROJECTORS


def describe_pair(model: Gguf, projector: Gguf) -> dict[str, Config]:
    """The files of a language model with a projector, by name: its config and the settings of its image processor.
    Raises UnsupportedModelError if the two do not fit together, or something is not supported; ModelLoadError if a
    setting is missing or invalid."""
    kind, metadata = _kind_of(projector), Metadata(projector, _HARMLESS)
    architecture = str(model.metadata.get("general.architecture"))
    whole = kind.texts.get(architecture)
    if whole is None:
        raise UnsupportedModelError(
            f"{projector.path} is a projector of the type {_type_of(projector)}, which is supported beside GGUF files "
            f"of {', '.join(sorted(kind.texts))}; {model.path} has the architecture {architecture}."
        )
    _, text = describe(model)
    features = _output(kind, projector)
    if features != text["hidden_size"]:
        raise UnsupportedModelError(
            f"{projector.path} makes vectors of {features} features, but {model.path} reads {text['hidden_size']}: "
            "they are not parts of the same model."
        )
    own, processor = kind.settings(metadata, text)
    colours = {f"image_{name}": metadata.each(f"vision.image_{name}", 3) for name in ("mean", "std")}
    metadata.check_all_asked()
    config = {
        "architectures": [whole],
        "text_config": text,
        "image_token_id": _image_token(kind, model, projector),
        "tie_word_embeddings": text["tie_word_embeddings"],
        **own,
    }
    files = {"config.json": config, "preprocessor_config.json": processor | colours}
    if "spatial_merge_size" in own:  # transformers reads it there
        files["processor_config.json"] = {"spatial_merge_size": own["spatial_merge_size"]}
    return files


def place_projector(file: Gguf) -> Iterator[Placed]:
    """The tensors of a projector under transformers' names, in the file's order. Raises UnsupportedModelError if its
    type is not supported."""
    kind, metadata = _kind_of(file), Metadata(file)
    swapped, following = _swapped(file), _following(kind, file)
    parts = {info.name for infos in following.values() for info in infos}
    for info in file.tensors.values():
        stem = info.name.rpartition(".")[0]
        unseen = _UNSEEN.fullmatch(info.name) is not None and info.name not in kind.outer and stem not in kind.outer
        if info.name in parts or unseen:
            continue
        make = kind.arranged.get(info.name, kind.arranged.get(stem.rpartition(".")[2], kind.arranged.get(stem)))
        arrangement = AsStored() if make is None else make(metadata)
        yield Placed(_name(kind, metadata, info.name, swapped), info, arrangement, others=following.get(info.name, ()))


def _following(kind: Projector, file: Gguf) -> dict[str, tuple[TensorInfo, ...]]:
    """By a tensor's name, the tensors with its following rows."""
    found = {}
    for name in file.tensors:
        for first, others in kind.joined.items():
            if first in name:
                parts = (file.tensors.get(name.replace(first, other)) for other in others)
                found[name] = tuple(part for part in parts if part is not None)
    return found


def _name(kind: Projector, metadata: Metadata, stored: str, swapped: Mapping[str, str]) -> str:
    """The name of a tensor in transformers. Without one, the name in the file."""
    if stored in kind.outer:
        return kind.outer[stored]
    found = _LAYER.fullmatch(stored)
    if found is None:
        stem, _, ending = stored.rpartition(".")
        return f"{kind.outer[stem]}.{ending}" if stem in kind.outer else stored
    number, part = int(found[2]), swapped.get(found[3], found[3])
    if found[1] == "deepstack":
        layers, prefix = _deep_layers(metadata), "visual.deepstack_merger_list"
        if number not in layers or part not in _DEEP:
            return stored
        return f"{prefix}.{layers.index(number)}.{_DEEP[part]}.{found[4]}"
    known = kind.layer.get(f"{part}.{found[4]}")
    if known is not None:
        return f"{kind.layers}.{number}.{known}"
    return f"{kind.layers}.{number}.{kind.layer[part]}.{found[4]}" if part in kind.layer else stored


def _swapped(file: Gguf) -> Mapping[str, str]:
    """The right names of two tensors that old converters of llama.cpp swapped."""
    down, patch = file.tensors.get("v.blk.0.ffn_down.weight"), file.tensors.get("v.patch_embd.weight")
    gated = "v.blk.0.ffn_gate.weight" in file.tensors
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    if gated or down is None or up is None or patch is None or down.shape[-1] != patch.shape[0]:
        return {}
    if up.shape[-1] == patch.shape[0]:  # the shapes show nothing if the network is as wide as the tower
        return {}
    return {"ffn_down": "ffn_up", "ffn_up": "ffn_down"}


def _type_of(file: Gguf) -> str:
    found = file.metadata.get("clip.projector_type") or file.metadata.get("clip.vision.projector_type")
    return ascii(found)[1:-1][:80] if isinstance(found, str) else "(none)"


def _kind_of(file: Gguf) -> Projector:
    if not is_projector(file):
        raise UnsupportedModelError(
            f"{file.path} is not an image projector: its architecture is "
            f"{ascii(file.metadata.get('general.architecture'))[:80]}, not {PROJECTORS}. Choose the mmproj file of "
            "the model."
        )
    kind = _PROJECTORS.get(_type_of(file))
    if kind is None or file.metadata.get("clip.has_vision_encoder") is not True:
        hears = "" if kind is None else " without a vision encoder"
        raise UnsupportedModelError(
            f"{file.path} is a projector of the type {_type_of(file)}{hears}, which is not supported. Supported: "
            f"{', '.join(sorted(_PROJECTORS))}. Use the checkpoint in safetensors, or serve the model without images: "
            "--mmproj none."
        )
    return kind


def _output(kind: Projector, file: Gguf) -> int:
    """The number of features of the projector's vectors."""
    info = file.tensors.get(kind.last)
    if info is None or len(info.shape) != 2:
        raise UnsupportedModelError(
            f"{file.path} is a projector of the type {_type_of(file)}, but it lacks the matrix {kind.last}. Use the "
            "checkpoint in safetensors."
        )
    return info.shape[1 if kind.last == _GEMMA_LAST else 0]


def _image_token(kind: Projector, model: Gguf, projector: Gguf) -> int:
    """The id of the token that stands for an image. Any token that never occurs in texts will do, because vectors
    replace it. Raises UnsupportedModelError if there is none."""
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    texts = tokens if isinstance(tokens, list) else []
    for wanted in kind.token:
        if wanted in texts:
            return texts.index(wanted)
    unused = [number for number, text in enumerate(texts) if isinstance(text, str) and _UNUSED.fullmatch(text)]
    if not unused:
        raise UnsupportedModelError(
            f"The vocabulary of {model.path} has no token for images ({' or '.join(kind.token)}), which the projector "
            f"{projector.path} needs. Use the checkpoint in safetensors."
        )
    return unused[-1]


def _tower(metadata: Metadata) -> Config:
    """The settings that all towers have. Raises ModelLoadError if one is missing, or tensors contradict it."""
    width, patch = metadata.count("vision.embedding_length"), metadata.count("vision.patch_size")
    layers, heads = metadata.count("vision.block_count"), metadata.count("vision.attention.head_count")
    file = metadata.file
    up, down = (file.tensors.get(f"v.blk.0.ffn_{name}.weight") for name in ("up", "down"))
    kernel = file.tensors.get("v.patch_embd.weight")
    counted = heads and 0 < layers <= len(file.tensors)
    if not counted or up is None or down is None or kernel is None or not len(up.shape) == len(down.shape) == 2:
        raise ModelLoadError(
            f"{file.path} should have {layers} layers with {heads} heads, but lacks their tensors, such as "
            "v.patch_embd.weight or v.blk.0.ffn_up.weight. Download it again."
        )
    return {
        "hidden_size": width,
        "intermediate_size": (down if _swapped(file) else up).shape[0],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": metadata.count("vision.image_size"),
        "patch_size": patch,
        "num_channels": kernel.shape[1] if len(kernel.shape) == 4 else 3,
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
    }


def _activation(metadata: Metadata, gelu: str) -> str:
    """The activation of a tower. `gelu`: the name of the family's GELU in transformers."""
    silu = metadata.flag("use_silu", False)
    return gelu if metadata.flag("use_gelu", False) else "silu" if silu else "quick_gelu"


def _llava(metadata: Metadata, text: Config) -> Settings:
    tower, tensors = _tower(metadata), metadata.file.tensors
    clip = "v.class_embd" in tensors
    activation = _activation(metadata, "gelu")
    layer, count = -1, tower["num_hidden_layers"]
    if metadata.has("vision.feature_layer"):
        layer = metadata.count("vision.feature_layer")
    side = tower["image_size"]
    config: Config = {
        "model_type": "llava",
        "vision_config": tower
        | {
            "model_type": "clip_vision_model" if clip else "siglip_vision_model",
            "hidden_act": activation if clip else "gelu_pytorch_tanh",
        },
        "vision_feature_layer": layer if layer < 0 else layer - count - 1,
        "vision_feature_select_strategy": "default" if clip else "full",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": "mm.0.bias" in tensors,
    }
    # The original model pads an image to a square with the mean colour (arXiv:2310.03744).
    processor = {
        "image_processor_type": "LlavaImageProcessor", "size": {"shortest_edge": side}, "do_pad": True,
        "do_center_crop": False,
    }  # fmt: skip
    if metadata.has("vision.image_grid_pinpoints"):
        raise UnsupportedModelError(
            f"{metadata.file.path} asks for images in tiles (clip.vision.image_grid_pinpoints, LLaVA-NeXT), which is "
            "not supported in GGUF files. Use the checkpoint in safetensors."
        )
    return config, processor


def _gemma_3(metadata: Metadata, text: Config) -> Settings:
    tower = _tower(metadata)
    factor, side = metadata.count("vision.projector.scale_factor", 4), tower["image_size"]
    metadata.must_be("use_gelu", True, otherwise="other activations are")
    tokens = (side // max(tower["patch_size"], 1) // max(factor, 1)) ** 2
    config = {
        "model_type": "gemma3",
        "vision_config": tower | {"model_type": "siglip_vision_model", "hidden_act": "gelu_pytorch_tanh"},
        "mm_tokens_per_image": tokens,
    }
    return config, {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}}


def _idefics_3(metadata: Metadata, text: Config) -> Settings:
    tower = _tower(metadata)
    metadata.must_be("use_gelu", True, otherwise="other activations are")
    side = tower["image_size"]
    config = {
        "model_type": "idefics3",
        "vision_config": tower | {"hidden_act": "gelu_pytorch_tanh"},
        "scale_factor": metadata.count("vision.projector.scale_factor", 2),
    }
    processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": metadata.count("vision.preproc_image_size", side)},
        "max_image_size": {"longest_edge": side},
        "do_image_splitting": True,
    }
    return config, processor


def _qwen(metadata: Metadata, model_type: str, text_type: str, text: Config) -> tuple[Config, Config, Config]:
    """The settings of Qwen's models, whose images keep their shape: the tower's, the whole model's, the processor's."""
    tower, file = _tower(metadata), metadata.file
    merge, patch = metadata.count("vision.spatial_merge_size", 2), tower["patch_size"]
    if "v.patch_embd.weight.1" not in file.tensors:
        raise ModelLoadError(f"{file.path} lacks the tensor v.patch_embd.weight.1. Download it again.")
    part = {
        "depth": tower["num_hidden_layers"],
        "hidden_size": tower["hidden_size"],
        "intermediate_size": tower["intermediate_size"],
        "num_heads": tower["num_attention_heads"],
        "patch_size": patch,
        "in_channels": tower["num_channels"],
        "spatial_merge_size": merge,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
    }
    text["model_type"] = text_type
    unit = (patch * merge) ** 2
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {
            "shortest_edge": metadata.count("vision.image_min_pixels", _LEAST_PATCHES * unit),
            "longest_edge": metadata.count("vision.image_max_pixels", _MOST_PATCHES * unit),
        },
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": 2,
    }
    return part, {"model_type": model_type}, processor


def _qwen_2_vl(metadata: Metadata, text: Config) -> Settings:
    part, config, processor = _qwen(metadata, "qwen2_vl", "qwen2_vl_text", text)
    width, inner = part["hidden_size"], part["intermediate_size"]
    if not width or inner % width:
        raise UnsupportedModelError(
            f"{metadata.file.path}: the tower's networks have {inner} features, which is no multiple of its {width}."
        )
    own = {
        "embed_dim": width,
        "hidden_size": text["hidden_size"],
        "mlp_ratio": inner // width,
        "hidden_act": _activation(metadata, "gelu"),
    }
    return config | {"vision_config": part | own}, processor


def _qwen_2_5_vl(metadata: Metadata, text: Config) -> Settings:
    part, config, processor = _qwen(metadata, "qwen2_5_vl", "qwen2_5_vl_text", text)
    every, layers = metadata.count("vision.n_wa_pattern"), part["depth"]
    own = {
        "hidden_act": _activation(metadata, "gelu"),
        "window_size": metadata.count("vision.window_size", _WINDOW),
        # Without a pattern, attention in all layers covers the whole image.
        "fullatt_block_indexes": [i for i in range(layers) if not every or (i + 1) % every == 0],
    }
    return config | {"vision_config": part | own}, processor


def _qwen_3_vl(metadata: Metadata, text: Config) -> Settings:
    names = {
        "qwen3": ("qwen3_vl", "qwen3_vl_text"), "qwen3_moe": ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        "qwen3_5_text": ("qwen3_5", "qwen3_5_text"), "qwen3_5_moe_text": ("qwen3_5_moe", "qwen3_5_moe_text"),
    }  # fmt: skip
    part, config, processor = _qwen(metadata, *names[text["model_type"]], text)
    metadata.must_be("use_gelu", True, otherwise="other activations are")
    table = metadata.file.tensors.get("v.position_embd.weight")
    text["rope_parameters"]["mrope_interleaved"] = True
    own = {
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": 0 if table is None else table.shape[0],
        "deepstack_visual_indexes": _deep_layers(metadata),
    }
    return config | {"vision_config": part | own}, processor


def _deep_layers(metadata: Metadata) -> list[int]:
    """Numbers of the layers whose hidden states are kept."""
    layers = metadata.count("vision.block_count")
    if not metadata.has("vision.is_deepstack_layers"):
        return []
    flags = metadata.each("vision.is_deepstack_layers", layers)
    return [number for number, kept in enumerate(flags) if kept]


def _internvl(metadata: Metadata, text: Config) -> Settings:
    tower, tensors = _tower(metadata), metadata.file.tensors
    side, factor = tower["image_size"], metadata.count("vision.projector.scale_factor", 2)
    config = {
        "model_type": "internvl",
        "vision_config": tower
        | {
            "image_size": [side, side],
            "patch_size": [tower["patch_size"]] * 2,
            "hidden_act": _activation(metadata, "gelu"),
            "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
            "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
            "attention_bias": "v.blk.0.attn_q.bias" in tensors,
        },
        "downsample_ratio": 1 / max(factor, 1),
        "projector_hidden_act": "gelu",
    }
    processor = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": side, "width": side},
        "min_patches": metadata.count("vision.preproc_min_tiles", 1),
        "max_patches": metadata.count("vision.preproc_max_tiles", 12),
        "crop_to_patches": True,
    }
    return config, processor


def _pixtral(metadata: Metadata, text: Config) -> Settings:
    tower, tensors = _tower(metadata), metadata.file.tensors
    merger = tensors.get("mm.patch_merger.weight")
    if merger is None or len(merger.shape) != 2:
        raise UnsupportedModelError(
            f"{metadata.file.path} lacks the matrix mm.patch_merger.weight: of the type pixtral, projectors of "
            "Mistral 3 are supported. Use --mmproj none to serve the model without images."
        )
    merged = merger.shape[1] // max(tower["hidden_size"], 1)  # patches of a vector
    merge, patch = metadata.count("vision.spatial_merge_size", math.isqrt(merged)), tower["patch_size"]
    tower |= {
        "model_type": "pixtral", "hidden_act": _activation(metadata, "gelu"),
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10_000.0)},
        "head_dim": tower["hidden_size"] // tower["num_attention_heads"],
    }  # fmt: skip
    config = {
        "model_type": "mistral3",
        "vision_config": tower,
        "spatial_merge_size": merge,
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": "mm.1.bias" in tensors,
    }
    processor = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": tower["image_size"]},
        "patch_size": {"height": patch, "width": patch},
    }
    return config, processor


_GEMMA_LAST = "mm.input_projection.weight"
_DEEP = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_PARTS = "vision_tower.vision_model.embeddings"
_OUTER = {
    "v.class_embd": f"{_PARTS}.class_embedding", "v.patch_embd": f"{_PARTS}.patch_embedding",
    "v.position_embd": f"{_PARTS}.position_embedding", "v.pre_ln": "vision_tower.vision_model.pre_layrnorm",
}  # fmt: skip
_SIGLIP = {
    name: stored.replace("vision_tower.", "") for name, stored in _OUTER.items() if name not in ("v.class_embd",)
} | {"v.post_ln": "vision_model.post_layernorm"}
_LAYERS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2", "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}  # fmt: skip
_MERGED = {"v.patch_embd": "visual.patch_embed.proj", "v.position_embd": "visual.pos_embed"}
_BLOCK = {"attn_qkv": "attn.qkv", "attn_q": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_FRAMES: dict[str, Callable[[Metadata], Arrangement]] = {"v.patch_embd.weight": lambda metadata: Frames()}
_QKV = {".attn_q.": (".attn_k.", ".attn_v.")}
_TURNED: Callable[[Metadata], Arrangement] = lambda metadata: Interleaved(  # noqa: E731
    metadata.count("vision.attention.head_count")
)
_OF_LLAVA = ("llama", "qwen2", "qwen3", "phi3")


def _of_qwen(settings: Callable[[Metadata, Config], Settings], whole: str, network: dict[str, str]) -> Projector:
    return Projector(
        settings,
        {"qwen2vl": whole},
        ("<|image_pad|>",),
        "mm.2.weight",
        _MERGED | {"v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"},
        _BLOCK | network,
        "visual.blocks",
        arranged=_FRAMES,
        joined=_QKV | {"v.patch_embd.weight": ("v.patch_embd.weight.1",)},
    )


_PROJECTORS: dict[str, Projector] = {
    "mlp": Projector(
        _llava,
        dict.fromkeys(_OF_LLAVA, "LlavaForConditionalGeneration"),
        ("<image>", "<unk>"),
        "mm.2.weight",
        _OUTER | {"mm.0": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2"},
        _LAYERS,
        "vision_tower.vision_model.encoder.layers",
    ),
    "gemma3": Projector(
        _gemma_3,
        {"gemma3": "Gemma3ForConditionalGeneration"},
        ("<image_soft_token>",),
        _GEMMA_LAST,
        _SIGLIP
        | {
            _GEMMA_LAST: "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        _LAYERS,
        "vision_model.encoder.layers",
        arranged={"mm.soft_emb_norm": lambda metadata: AboveOne()},
    ),
    "idefics3": Projector(
        _idefics_3,
        {"llama": "Idefics3ForConditionalGeneration"},
        ("<image>",),
        "mm.model.fc.weight",
        _SIGLIP | {"mm.model.fc": "connector.modality_projection.proj"},
        _LAYERS,
        "vision_model.encoder.layers",
    ),
    "qwen2vl_merger": _of_qwen(
        _qwen_2_vl, "Qwen2VLForConditionalGeneration", {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    ),
    "qwen2.5vl_merger": _of_qwen(
        _qwen_2_5_vl,
        "Qwen2_5_VLForConditionalGeneration",
        {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    ),
    "qwen3vl_merger": Projector(
        _qwen_3_vl,
        {
            "qwen3vl": "Qwen3VLForConditionalGeneration",
            "qwen35": "Qwen3_5ForConditionalGeneration",
            "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
        },
        ("<|image_pad|>",),
        "mm.2.weight",
        _MERGED
        | {
            "v.post_ln": "visual.merger.norm",
            "mm.0": "visual.merger.linear_fc1",
            "mm.2": "visual.merger.linear_fc2",
        },
        _BLOCK | {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        "visual.blocks",
        arranged=_FRAMES,
        joined=_QKV | {"v.patch_embd.weight": ("v.patch_embd.weight.1",)},
    ),
    "internvl": Projector(
        _internvl,
        dict.fromkeys(("llama", "qwen2", "qwen3"), "InternVLForConditionalGeneration"),
        ("<IMG_CONTEXT>",),
        "mm.model.mlp.3.weight",
        {
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
        {
            "attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
            "attn_q_norm": "attention.q_norm", "attn_k_norm": "attention.k_norm",
            "attn_out": "attention.projection_layer", "ln1": "layernorm_before", "ln2": "layernorm_after",
            "ls1.weight": "lambda_1", "ls2.weight": "lambda_2", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
        },
        "vision_tower.encoder.layer",
        arranged={
            "v.class_embd": lambda metadata: Dimensions(3),
            "v.position_embd.weight": lambda metadata: Dimensions(3),
        },
    ),
    "pixtral": Projector(
        _pixtral,
        dict.fromkeys(("llama", "mistral3"), "Mistral3ForConditionalGeneration"),
        ("[IMG]",),
        "mm.2.weight",
        {
            "v.patch_embd": "vision_tower.patch_conv", "v.pre_ln": "vision_tower.ln_pre",
            "mm.1": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        },
        {
            "attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
            "attn_out": "attention.o_proj", "ln1": "attention_norm", "ln2": "ffn_norm",
            "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        "vision_tower.transformer.layers",
        arranged={"attn_q": _TURNED, "attn_k": _TURNED},
    ),
}  # fmt: skip
