"""The architectures of GGUF files: the equivalent transformers config, and transformers' names of the tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

from safetensors.torch import save

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.gguf import hybrids
from engine.model.gguf.arrangements import AboveOne, Arrangement, AsStored, Interleaved, Kernels, OneRow
from engine.model.gguf.container import Gguf, TensorInfo
from engine.model.gguf.hybrids import ATTENTION, HEAD_NORMS, PROJECTIONS
from engine.model.gguf.metadata import Metadata
from engine.model.gguf.rope import FACTORS, LONG_FACTORS, SHORT_FACTORS, axes_of, rope_parameters
from engine.model.gguf.tensors import mapped, read_numbers, read_tensor

Config = dict[str, Any]
PROJECTORS = "clip"
"""The architecture of image projectors (`engine.model.gguf.projectors`)."""
_LAYER = re.compile(r"blk\.(\d+)\.(\w+(?:\.\w+)*)\.(weight|bias|scale)")
_BARE = re.compile(r"blk\.(\d+)\.(\w+)")  # as of factors of states


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp."""

    config: Callable[[Metadata], Config]
    # tensors of a layer, without `.weight` and `.bias`, or in full if their end differs; for experts or heads that are
    # stored together, one name for each, with `{}` for its index
    layer: Mapping[str, str]
    layers: str = "model.layers"  # the prefix of a layer's index
    # tensors beside the layers
    outer: Mapping[str, str] = field(
        default_factory=lambda: {
            "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
        }
    )  # fmt: skip
    # transforms of tensors, named as in `layer` or `outer`, with another layout
    arranged: Mapping[str, Callable[[Config], Arrangement]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor under transformers' name. `expert`: the index of one of several experts or heads that are stored
    together; None for the whole tensor. `others`: tensors with the following rows, if the file stores the tensor in
    parts."""

    name: str
    info: TensorInfo
    arrangement: Arrangement
    expert: int | None = None
    others: tuple[TensorInfo, ...] = ()

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The tensors of the file that contain it."""
        return (self.info, *self.others)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in transformers."""
        if self.expert is not None:
            return self.arrangement.shape(self.info.shape[1:])
        return self.arrangement.shape((sum(info.shape[0] for info in self.infos), *self.info.shape[1:]))


def describe(file: Gguf) -> tuple[Architecture, Config]:
    """The architecture of a file, and its config. Raises UnsupportedModelError if the architecture, or one of its
    settings, is not supported; ModelLoadError if a setting is missing or invalid."""
    metadata = Metadata(file)
    kind = file.metadata.get("general.type", "model")
    parts = file.metadata.get("split.count", 0)
    if "imatrix" in (kind, metadata.architecture):
        raise UnsupportedModelError(
            f"{file.path} is an importance matrix (imatrix), not a model. Choose the file of the model."
        )
    if kind == "mmproj" or metadata.architecture == PROJECTORS:
        raise UnsupportedModelError(
            f"{file.path} is an image projector, which serves beside a model: octavo serve MODEL --mmproj {file.path}."
        )
    if kind != "model":
        raise UnsupportedModelError(f"{file.path} is not a model: its general.type is {ascii(kind)[:80]}.")
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModelError(
            f"{file.path} is one of {parts} files of a model. Join them: llama-gguf-split --merge FIRST WHOLE."
        )
    if not file.tensors:
        held = "a vocabulary and no weights" if "tokenizer.ggml.tokens" in file.metadata else "no tensors"
        raise UnsupportedModelError(f"{file.path} contains {held}. Choose the file of the model.")
    architecture = _ARCHITECTURES.get(metadata.architecture)
    if architecture is None:
        raise UnsupportedModelError(
            f"{file.path} has the architecture {metadata.architecture or '(none)'}, which is not supported as a GGUF "
            f"file. Supported: {', '.join(sorted(_ARCHITECTURES))}. Use the checkpoint in safetensors."
        )
    if metadata.architecture == "llama" and file.metadata.get("llama.expert_count"):
        architecture = _MIXTRAL
    config = architecture.config(metadata)
    metadata.check_all_asked()
    return architecture, config


def place(file: Gguf, architecture: Architecture, config: Config) -> Iterator[Placed]:
    """The tensors of a file under transformers' names, in the file's order; tensors without one keep their own
    names."""
    for info in file.tensors.values():
        if info.name in DENSE:  # they are in separate folders
            continue
        if info.name in (FACTORS, LONG_FACTORS, SHORT_FACTORS):  # they are in the config
            continue
        if config.get("num_nextn_predict_layers") and _layer(info) >= config["num_hidden_layers"]:
            continue  # it guesses later tokens
        placed = _renamed(info, architecture, config)
        name = placed.name
        if "{}" not in name:
            yield placed
        elif len(info.shape) != (2 if ".norms." in name else 3):
            raise ModelLoadError(
                f"{file.path}: {info.name} should hold a matrix for each expert, or a vector for each head. "
                "Download it again."
            )
        else:
            for expert in range(info.shape[0]):
                yield replace(placed, name=placed.name.format(expert), expert=expert)


def _layer(info: TensorInfo) -> int:
    """The number of a tensor's layer; -1 if it belongs to none."""
    found = re.match(r"blk\.(\d+)\.", info.name)
    return -1 if found is None else int(found[1])


def place_alone(info: TensorInfo, architecture: str, config: Config) -> Placed:
    """A tensor of a file without a model, under transformers' name; its own name if it has none. `config`: the config
    (for the numbers of heads) of the model that the tensor is for. Raises UnsupportedModelError if the architecture is
    not supported."""
    found = _ARCHITECTURES.get(architecture)
    if found is None:
        raise UnsupportedModelError(
            f"the architecture {architecture[:80]!a} is not supported as a GGUF file; supported: "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    return _renamed(info, found, config)


def _renamed(info: TensorInfo, architecture: Architecture, config: Config) -> Placed:
    """A tensor under transformers' name, in which `{}` is replaced by the index of an expert or a head."""
    found = _LAYER.fullmatch(info.name)
    if bare := _BARE.fullmatch(info.name):
        known, make = architecture.layer.get(bare[2]), architecture.arranged.get(bare[2])
        full = info.name if known is None else f"{architecture.layers}.{bare[1]}.{known}"
        return Placed(full, info, AsStored() if make is None else make(config))
    if found is None:
        stem, _, ending = info.name.rpartition(".")
        name, prefix = architecture.outer.get(stem), ""
    else:
        stem, ending = found[2], found[3]
        prefix = f"{architecture.layers}.{found[1]}."
        if whole := architecture.layer.get(f"{stem}.{ending}"):
            return Placed(f"{prefix}{whole}", info, AsStored())
        name = architecture.layer.get(stem)
    if name is None:
        return Placed(info.name, info, AsStored())
    make = architecture.arranged.get(f"{stem}.{ending}", architecture.arranged.get(stem))
    return Placed(f"{prefix}{name}.{ending}", info, AsStored() if make is None else make(config))


def _plain(
    metadata: Metadata,
    model_type: str,
    name: str,
    *,
    norm: str = "rms",
    apart: tuple[str, ...] = (),
    embeds: bool = False,
) -> Config:
    """The settings of most architectures.

    Args:
        apart: settings in which layers differ; the caller handles them.
        embeds: whether the model sees later tokens, and computes vectors of texts.
    """
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    if not heads or "token_embd.weight" not in metadata.file.tensors:
        raise ModelLoadError(f"{metadata.file.path} has no attention heads, or lacks token_embd.weight.")
    head_dim, layers = metadata.count("attention.key_length", hidden // heads), metadata.count("block_count")
    if not head_dim or layers > len(metadata.file.tensors):
        raise ModelLoadError(
            f"{metadata.file.path} says that it has {layers} layers with heads of {head_dim} features, but it "
            f"contains {len(metadata.file.tensors)} tensors. Download it again."
        )
    heads_of_keys = heads
    if "attention.head_count_kv" not in apart:
        heads_of_keys = metadata.count("attention.head_count_kv", heads)
    width = 0 if "feed_forward_length" in apart else metadata.count("feed_forward_length", 0)
    metadata.must_be("attention.value_length", head_dim, otherwise="values of a different size from keys are")
    if not embeds:
        metadata.must_be("attention.causal", True, otherwise="attention to later tokens is")
        metadata.must_be("pooling_type", 0, otherwise="vectors of texts are")
    ending = "layer_norm_rms_epsilon" if norm == "rms" else "layer_norm_epsilon"
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": metadata.file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads_of_keys,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps" if norm == "rms" else "layer_norm_eps": metadata.number(f"attention.{ending}"),
        "hidden_act": "silu",
        "rope_parameters": rope_parameters(metadata),
        "tie_word_embeddings": "output.weight" not in metadata.file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in metadata.file.tensors,
    }


def _whole_rotation(metadata: Metadata, config: Config) -> Config:
    metadata.must_be("rope.dimension_count", config["head_dim"], otherwise="a rotation of some features is")
    return config


def _partial_rotation(metadata: Metadata, config: Config) -> Config:
    rotated = metadata.count("rope.dimension_count", config["head_dim"])
    config["rope_parameters"]["partial_rotary_factor"] = rotated / config["head_dim"]
    return config


def _llama(metadata: Metadata) -> Config:
    metadata.must_be("expert_count", 0, otherwise="experts are")
    metadata.must_be("expert_used_count", 0, otherwise="experts are")
    metadata.must_be("attention.sliding_window", 0, otherwise="a window is")
    return _whole_rotation(metadata, _plain(metadata, "llama", "LlamaForCausalLM"))


def _mixtral(metadata: Metadata) -> Config:
    experts = {
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "sliding_window": None,
    }
    return _whole_rotation(metadata, _plain(metadata, "mixtral", "MixtralForCausalLM") | experts)


def _qwen2(metadata: Metadata) -> Config:
    config = _plain(metadata, "qwen2", "Qwen2ForCausalLM")
    return _whole_rotation(metadata, config | {"use_sliding_window": False})


def _qwen2_vl(metadata: Metadata) -> Config:
    """The config of Qwen2-VL and 2.5-VL. In texts, the positions on all axes are equal."""
    config = _qwen2(metadata)
    config["rope_parameters"] |= axes_of(metadata)
    return config


def _qwen3_vl(metadata: Metadata) -> Config:
    metadata.count("n_deepstack_layers", 0)
    config = _qwen3(metadata)
    config["rope_parameters"] |= axes_of(metadata)
    return config


def _qwen2_moe(metadata: Metadata) -> Config:
    config = _plain(metadata, "qwen2_moe", "Qwen2MoeForCausalLM")
    return _whole_rotation(
        metadata,
        config
        | _small_experts(metadata)
        | {
            "shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length"),
            "norm_topk_prob": False,
            "use_sliding_window": False,
        },
    )


def _qwen3(metadata: Metadata) -> Config:
    config = _plain(metadata, "qwen3", "Qwen3ForCausalLM")
    return _whole_rotation(metadata, config | {"use_sliding_window": False})


def _qwen3_moe(metadata: Metadata) -> Config:
    config = _plain(metadata, "qwen3_moe", "Qwen3MoeForCausalLM")
    return _whole_rotation(
        metadata, config | _small_experts(metadata) | {"norm_topk_prob": True, "use_sliding_window": False}
    )


def _small_experts(metadata: Metadata) -> Config:
    return {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(metadata: Metadata) -> Config:
    config = _plain(metadata, "gemma", "GemmaForCausalLM")
    return _whole_rotation(metadata, config | {"hidden_act": "gelu_pytorch_tanh"})


def _gemma_2(metadata: Metadata) -> Config:
    config = _plain(metadata, "gemma2", "Gemma2ForCausalLM")
    windowed = [layer % 2 == 0 for layer in range(config["num_hidden_layers"])]
    return _whole_rotation(
        metadata,
        config
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": metadata.count("attention.sliding_window", 4096),
            "layer_types": _layer_types(windowed),
            "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
            "query_pre_attn_scalar": _query_scalar(config, layers_of_largest=46),
        },
    )


def _gemma_3(metadata: Metadata, *, embeds: bool = False) -> Config:
    config = _plain(metadata, "gemma3_text", "Gemma3ForCausalLM", embeds=embeds)
    every = metadata.count("attention.sliding_window_pattern", 6)
    windowed = [not every or bool((layer + 1) % every) for layer in range(config["num_hidden_layers"])]
    return _whole_rotation(
        metadata,
        config
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": metadata.count("attention.sliding_window"),
            "layer_types": _layer_types(windowed),
            "rope_parameters": _two_bases(metadata, config["rope_parameters"]),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": _softcap(metadata),
            "query_pre_attn_scalar": _query_scalar(config, layers_of_largest=62),
        },
    )


def _gemma_embedding(metadata: Metadata) -> Config:
    """EmbeddingGemma: what follows the hidden states is in `sentence_files`."""
    metadata.must_be("attention.causal", False, otherwise="attention to earlier tokens only is")
    metadata.count("pooling_type", 1)
    for name in DENSE:
        stem = name.removesuffix(".weight")
        if name in metadata.file.tensors:
            outputs, inputs = metadata.file.tensors[name].shape
            metadata.must_be(f"{stem}_feat_in", inputs, otherwise="a matrix of another shape is")
            metadata.must_be(f"{stem}_feat_out", outputs, otherwise="a matrix of another shape is")
    config = _gemma_3(metadata, embeds=True)
    return config | {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}


DENSE = ("dense_2.weight", "dense_3.weight")
"""Matrices that follow the pooling."""
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}


def sentence_files(file: Gguf) -> dict[str, Any]:
    """The files that say how a model for vectors pools hidden states, in sentence-transformers' format; empty for other
    models. Raises UnsupportedModelError if the pooling is different."""
    metadata = Metadata(file)
    if metadata.architecture != "gemma-embedding":
        return {}
    pooling = metadata.count("pooling_type", 1)
    if pooling not in _POOLING:
        raise UnsupportedModelError(
            f"{file.path}: gemma-embedding.pooling_type must be one of {', '.join(map(str, _POOLING))}, got {pooling}."
        )
    stem, files = "sentence_transformers.models", dict[str, Any]()
    parts = [("", f"{stem}.Transformer"), ("1_Pooling", f"{stem}.Pooling")]
    files["sentence_bert_config.json"] = {"max_seq_length": metadata.count("context_length"), "do_lower_case": False}
    files["1_Pooling/config.json"] = {
        "word_embedding_dimension": metadata.count("embedding_length"), "pooling_mode": _POOLING[pooling],
    }  # fmt: skip
    for number, name in enumerate((each for each in DENSE if each in file.tensors), start=2):
        weight = read_tensor(mapped(file.path), file.tensors[name])
        outputs, inputs = weight.shape
        parts.append((f"{number}_Dense", f"{stem}.Dense"))
        files[f"{number}_Dense/config.json"] = {
            "in_features": inputs, "out_features": outputs, "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }  # fmt: skip
        files[f"{number}_Dense/model.safetensors"] = save({"linear.weight": weight})
    parts.append((f"{len(parts)}_Normalize", f"{stem}.Normalize"))
    files["modules.json"] = [
        {"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(parts)
    ]
    return files


def _gemma_layers(metadata: Metadata, config: Config) -> Config:
    """The settings that Gemma 3n and 4 have in common."""
    layers = config["num_hidden_layers"]
    windowed = [bool(each) for each in metadata.each("attention.sliding_window_pattern", layers)]
    vectors = metadata.count("embedding_length_per_layer_input", 0)
    table = metadata.file.tensors.get("per_layer_token_embd.weight")
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": _layer_types(windowed),
        "num_kv_shared_layers": metadata.count("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": vectors if table is not None else 0,
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "final_logit_softcapping": _softcap(metadata),
    }


def _softcap(metadata: Metadata) -> float | None:
    return metadata.number("final_logit_softcapping") if metadata.has("final_logit_softcapping") else None


def _two_bases(metadata: Metadata, of_global: Config) -> Config:
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)}
    return {"full_attention": of_global, "sliding_attention": local}


def _gemma_3n(metadata: Metadata) -> Config:
    config = _plain(metadata, "gemma3n_text", "Gemma3nForCausalLM", apart=("feed_forward_length",))
    config = _gemma_layers(metadata, config)
    layers, low_rank = config["num_hidden_layers"], metadata.file.tensors.get("blk.0.laurel_l.weight")
    cutoffs = metadata.each("activation_sparsity_scale", layers, default=-math.inf)
    return _whole_rotation(
        metadata,
        config
        | {
            "intermediate_size": [int(each) for each in metadata.each("feed_forward_length", layers)],
            "rope_parameters": _two_bases(metadata, config["rope_parameters"]),
            "final_logit_softcapping": config["final_logit_softcapping"] or 30.0,
            "altup_num_inputs": metadata.count("altup.num_inputs"),
            "altup_active_idx": metadata.count("altup.active_idx"),
            "laurel_rank": 1 if low_rank is None else low_rank.shape[0],
            # The share of gates that stay shut; a cutoff is kept as its quantile.
            "activation_sparsity_pattern": [round(NormalDist().cdf(each), 7) for each in cutoffs],
        },
    )  # fmt: skip


def _gemma_4(metadata: Metadata) -> Config:
    apart = ("feed_forward_length", "attention.head_count_kv")
    config = _gemma_layers(metadata, _plain(metadata, "gemma4_text", "Gemma4ForCausalLM", apart=apart))
    layers, wide = config["num_hidden_layers"], config["head_dim"]
    narrow = metadata.count("attention.key_length_swa", wide)
    metadata.must_be("attention.value_length_swa", narrow, otherwise="values of a different size from keys are")
    metadata.must_be("rope.dimension_count", wide, otherwise="a rotation of some features is")
    metadata.must_be("rope.dimension_count_swa", narrow, otherwise="a rotation of some features is")
    widths = [int(each) for each in metadata.each("feed_forward_length", layers)]
    own = [int(each) for each in metadata.each("attention.head_count_kv", layers, config["num_attention_heads"])]
    kinds, tensors = config["layer_types"], metadata.file.tensors
    first = layers - config["num_kv_shared_layers"]
    globals_ = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    doubled = len(set(widths)) > 1
    if any(width != widths[0] * (2 if doubled and i >= first else 1) for i, width in enumerate(widths)):
        raise UnsupportedModelError(
            f"{metadata.file.path}: feed_forward_length is {widths}; supported in GGUF files of Gemma 4: one width, "
            "or twice that in the layers that read other layers' keys. Use the checkpoint in safetensors."
        )
    local = next((own[i] for i, kind in enumerate(kinds) if kind != "full_attention"), own[0])
    experts = "blk.0.ffn_gate_inp.weight" in tensors
    return config | {
        "head_dim": narrow,
        "num_key_value_heads": local,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": doubled,
        "per_layer_config": {str(i): {"head_dim": wide, "num_key_value_heads": own[i]} for i in globals_},
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in tensors for i in globals_ if i < first),
        "rope_parameters": _two_bases(metadata, _share_rotation(metadata)),
        "enable_moe_block": experts,
        "num_experts": metadata.count("expert_count", 0) or None,
        "top_k_experts": metadata.count("expert_used_count", 0) or None,
        "moe_intermediate_size": metadata.count("expert_feed_forward_length", 0) or None,
    }


def _share_rotation(metadata: Metadata) -> Config:
    """Rotary positions of some pairs of features: the frequencies of the others are divided by a huge number."""
    base = metadata.number("rope.freq_base", 1_000_000.0)
    if FACTORS not in metadata.file.tensors:
        return {"rope_type": "default", "rope_theta": base}
    divisors = read_numbers(metadata.file, FACTORS)
    turning = sum(each == 1.0 for each in divisors)
    if any(each != 1.0 for each in divisors[:turning]) or any(each < 1e20 for each in divisors[turning:]):
        raise UnsupportedModelError(
            f"{metadata.file.path}: {FACTORS} of Gemma 4 must be 1 for the first frequencies and huge for the others."
        )
    return {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": turning / len(divisors)}


def _mistral_3(metadata: Metadata) -> Config:
    metadata.must_be("expert_count", 0, otherwise="experts are")
    metadata.must_be("expert_used_count", 0, otherwise="experts are")
    config = _plain(metadata, "mistral", "MistralForCausalLM") | {"sliding_window": None}
    growth = metadata.number("attention.temperature_scale", 0.0)
    if growth:
        settings = config["rope_parameters"]
        original = settings.get("original_max_position_embeddings", config["max_position_embeddings"])
        length = metadata.count("attention.temperature_length", original)
        if length != original:
            raise UnsupportedModelError(
                f"{metadata.file.path}: attention.temperature_length must be the original context length {original}, "
                f"got {length}. Use the checkpoint in safetensors."
            )
        settings |= {"llama_4_scaling_beta": growth, "original_max_position_embeddings": original}
        config |= {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    return _whole_rotation(metadata, config)


def _layer_types(windowed: list[bool]) -> list[str]:
    return ["sliding_attention" if each else "full_attention" for each in windowed]


def _query_scalar(config: Config, layers_of_largest: int) -> float:
    """GGUF files do not contain the scale of scores: llama.cpp recognises the largest models by their number of
    layers."""
    if config["num_hidden_layers"] == layers_of_largest:
        scalar: int = config["hidden_size"] // config["num_attention_heads"]
        return scalar
    head_dim: int = config["head_dim"]
    return head_dim


def _phi_2(metadata: Metadata) -> Config:
    config = _plain(metadata, "phi", "PhiForCausalLM", norm="layer")
    return _partial_rotation(metadata, config | {"hidden_act": "gelu_new", "qk_layernorm": False})


def _phi_3(metadata: Metadata) -> Config:
    config = _plain(metadata, "phi3", "Phi3ForCausalLM")
    config["sliding_window"] = metadata.count("attention.sliding_window", 0) or None
    config["original_max_position_embeddings"] = metadata.count(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    config["pad_token_id"] = None
    return _partial_rotation(metadata, config)


def _gpt_2(metadata: Metadata) -> Config:
    config = _plain(metadata, "gpt2", "GPT2LMHeadModel", norm="layer")
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise UnsupportedModelError(f"{metadata.file.path}: GPT-2 has as many key and value heads as queries.")
    return {
        "architectures": config["architectures"],
        "model_type": "gpt2",
        "vocab_size": config["vocab_size"],
        "n_positions": config["max_position_embeddings"],
        "n_embd": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "layer_norm_epsilon": config["layer_norm_eps"],
        "activation_function": "gelu_new",
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def _command_r(metadata: Metadata) -> Config:
    config = _plain(metadata, "cohere", "CohereForCausalLM", norm="layer")
    return _whole_rotation(
        metadata,
        config
        | {
            "logit_scale": metadata.number("logit_scale", 1.0),
            "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.file.tensors,
        },
    )


def _stablelm(metadata: Metadata) -> Config:
    config = _plain(metadata, "stablelm", "StableLmForCausalLM", norm="layer")
    # Converters mark blocks as parallel even if a config does not say so; the stored norms show whether that is true.
    metadata.must_be("use_parallel_residual", True, False, otherwise="others are")
    return _partial_rotation(
        metadata,
        config
        | {
            "use_parallel_residual": "blk.0.ffn_norm.weight" not in metadata.file.tensors,
            "use_qkv_bias": config["attention_bias"],
            "qk_layernorm": "blk.0.attn_q_norm.weight" in metadata.file.tensors,
        },
    )


def _granite_hybrid(metadata: Metadata) -> Config:
    config = _plain(metadata, "granitemoehybrid", "GraniteMoeHybridForCausalLM", apart=("attention.head_count_kv",))
    return hybrids.granite_hybrid(metadata, config)


def _falcon_h1(metadata: Metadata) -> Config:
    return hybrids.falcon_h1(metadata, _plain(metadata, "falcon_h1", "FalconH1ForCausalLM"))


def _jamba(metadata: Metadata) -> Config:
    return hybrids.jamba(metadata, _plain(metadata, "jamba", "JambaForCausalLM", apart=("attention.head_count_kv",)))


def _nemotron_h(metadata: Metadata) -> Config:
    apart = ("attention.head_count_kv", "feed_forward_length")
    norm = "rms" if metadata.has("attention.layer_norm_rms_epsilon") else "layer"
    config = _plain(metadata, "nemotron_h", "NemotronHForCausalLM", norm=norm, apart=apart)
    if norm == "layer":
        config["rms_norm_eps"] = config["layer_norm_eps"]
    return hybrids.nemotron_h(metadata, config)


def _qwen3_5(metadata: Metadata) -> Config:
    return hybrids.delta_rule(metadata, _plain(metadata, "qwen3_5_text", "Qwen3_5ForCausalLM"))


def _qwen3_5_moe(metadata: Metadata) -> Config:
    return hybrids.delta_rule(metadata, _plain(metadata, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"))


def _qwen3_next(metadata: Metadata) -> Config:
    return hybrids.delta_rule(metadata, _plain(metadata, "qwen3_next", "Qwen3NextForCausalLM"))


def _lfm2(metadata: Metadata) -> Config:
    config = _of_lfm2(metadata, "lfm2", "Lfm2ForCausalLM")
    return config | {"block_auto_adjust_ff_dim": False}  # the length of the networks is what the adjustment gives


def _lfm2_moe(metadata: Metadata) -> Config:
    sigmoid = 2
    metadata.must_be("expert_gating_func", sigmoid, otherwise="other scores of experts are")
    return _of_lfm2(metadata, "lfm2_moe", "Lfm2MoeForCausalLM") | {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "num_dense_layers": metadata.count("leading_dense_block_count"),
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    }


def _of_lfm2(metadata: Metadata, model_type: str, name: str) -> Config:
    """Layers without heads of keys are convolutions."""
    metadata.must_be("attention.sliding_window", 0, otherwise="a window is")
    config = _plain(metadata, model_type, name, apart=("attention.head_count_kv",))
    heads = [int(count) for count in metadata.each("attention.head_count_kv", config["num_hidden_layers"])]
    config["num_key_value_heads"] = max(heads)
    if others := sorted(set(heads) - {0, config["num_key_value_heads"]}):
        raise UnsupportedModelError(
            f"{metadata.file.path}: layers of LFM2 have {config['num_key_value_heads']} heads of keys or none, but one "
            f"has {others[0]}."
        )
    config |= {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": metadata.count("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.conv.bias" in metadata.file.tensors,
    }
    return _whole_rotation(metadata, config)


_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_SANDWICH = PROJECTIONS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_VECTORS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_OUTER_VECTORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_TURNED_NEIGHBOURS: dict[str, Callable[[Config], Arrangement]] = {
    "attn_q": lambda config: Interleaved(config["num_attention_heads"]),
    "attn_k": lambda config: Interleaved(config["num_key_value_heads"]),
}


def _above_one(*names: str) -> dict[str, Callable[[Config], Arrangement]]:
    return {name: lambda config: AboveOne() for name in ("output_norm", "attn_norm", "ffn_norm", *names)}


_MIXTRAL = Architecture(_mixtral, PROJECTIONS | _MIXTRAL_EXPERTS, arranged=_TURNED_NEIGHBOURS)
_AFTER = ("post_attention_norm", "post_ffw_norm")
_LFM2 = ATTENTION | {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_EXPERTS = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_LFM2_OUTER = {
    # Older files call the norm at the end that of the embedding, as transformers does.
    "token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm", "output": "lm_head",
}  # fmt: skip
_KERNELS: dict[str, Callable[[Config], Arrangement]] = {"shortconv.conv.weight": lambda config: Kernels()}
_NEMOTRON = Architecture(
    _nemotron_h, hybrids.NEMOTRON, layers="backbone.layers", outer=hybrids.NEMOTRON_OUTER, arranged=hybrids.SCANNED
)
_DELTA_EXPERTS = hybrids.DELTA | _EXPERTS | _SHARED_EXPERT
_CORRECTED = hybrids.CORRECTED | {"ffn_gate_inp_shexp": lambda config: OneRow()}
_ARCHITECTURES: dict[str, Architecture] = {
    "command-r": Architecture(_command_r, PROJECTIONS | HEAD_NORMS),
    "gemma": Architecture(_gemma, PROJECTIONS, arranged=_above_one()),
    "gemma2": Architecture(_gemma_2, _SANDWICH, arranged=_above_one(*_AFTER)),
    "gemma3": Architecture(_gemma_3, _SANDWICH | HEAD_NORMS, arranged=_above_one(*_AFTER, *HEAD_NORMS)),
    "gemma-embedding": Architecture(
        _gemma_embedding, _SANDWICH | HEAD_NORMS, arranged=_above_one(*_AFTER, *HEAD_NORMS)
    ),
    "gemma3n": Architecture(
        _gemma_3n,
        _SANDWICH
        | HEAD_NORMS
        | _LAYER_VECTORS
        | {
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale.weight": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        outer=_OUTER_VECTORS
        | {"altup_proj": "model.altup_projections.{}", "altup_unembd_proj": "model.altup_unembed_projections.{}"},
    ),
    "gemma4": Architecture(
        _gemma_4,
        _SANDWICH
        | HEAD_NORMS
        | _LAYER_VECTORS
        | {
            "layer_output_scale.weight": "layer_scalar",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps": "experts.{}.gate_up_proj",
            "ffn_gate_exps": "experts.{}.gate_proj",
            "ffn_up_exps": "experts.{}.up_proj",
            "ffn_down_exps": "experts.{}.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        outer=_OUTER_VECTORS,
    ),
    "falcon-h1": Architecture(_falcon_h1, hybrids.FALCON, outer=hybrids.PRE_FF_OUTER, arranged=hybrids.SCANNED),
    "granitehybrid": Architecture(_granite_hybrid, hybrids.GRANITE, arranged=_TURNED_NEIGHBOURS | hybrids.SCANNED),
    "jamba": Architecture(_jamba, hybrids.JAMBA, outer=hybrids.PRE_FF_OUTER, arranged=hybrids.CHANNEL_SCANNED),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen35": Architecture(_qwen3_5, hybrids.DELTA, arranged=hybrids.CORRECTED),
    "qwen35moe": Architecture(_qwen3_5_moe, _DELTA_EXPERTS, arranged=_CORRECTED),
    "qwen3next": Architecture(_qwen3_next, _DELTA_EXPERTS, arranged=_CORRECTED),
    "gpt2": Architecture(
        _gpt_2,
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        layers="transformer.h",
        outer={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
    ),
    "lfm2": Architecture(_lfm2, _LFM2, outer=_LFM2_OUTER, arranged=_KERNELS),
    "lfm2moe": Architecture(_lfm2_moe, _LFM2 | _LFM2_EXPERTS, outer=_LFM2_OUTER, arranged=_KERNELS),
    "llama": Architecture(_llama, PROJECTIONS, arranged=_TURNED_NEIGHBOURS),
    "mistral3": Architecture(_mistral_3, PROJECTIONS, arranged=_TURNED_NEIGHBOURS),
    "phi2": Architecture(
        _phi_2,
        PROJECTIONS | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        outer={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
    ),
    "phi3": Architecture(_phi_3, PROJECTIONS | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "qwen2": Architecture(_qwen2, PROJECTIONS),
    "qwen2moe": Architecture(
        _qwen2_moe, PROJECTIONS | _EXPERTS | _SHARED_EXPERT, arranged={"ffn_gate_inp_shexp": lambda config: OneRow()}
    ),
    "qwen3": Architecture(_qwen3, PROJECTIONS | HEAD_NORMS),
    "qwen2vl": Architecture(_qwen2_vl, PROJECTIONS),
    "qwen3vl": Architecture(_qwen3_vl, PROJECTIONS | HEAD_NORMS),
    "qwen3moe": Architecture(_qwen3_moe, PROJECTIONS | HEAD_NORMS | _EXPERTS),
    "stablelm": Architecture(
        _stablelm,
        PROJECTIONS
        | {"attn_q_norm": "self_attn.q_layernorm.norms.{}", "attn_k_norm": "self_attn.k_layernorm.norms.{}"},
    ),
}
