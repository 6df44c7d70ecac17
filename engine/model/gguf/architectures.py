"""The architectures of GGUF files: the equivalent transformers config, and transformers' names of the tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.gguf.arrangements import AboveOne, Arrangement, AsStored, Interleaved, OneRow
from engine.model.gguf.container import Gguf, TensorInfo
from engine.model.gguf.metadata import Metadata
from engine.model.gguf.rope import FACTORS, LONG_FACTORS, SHORT_FACTORS, rope_parameters

Config = dict[str, Any]
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        config: makes the config from the metadata.
        layer: tensors of a layer, without `.weight` and `.bias`; for experts or heads that are stored together, one
            name for each, with `{}` for its index.
        layers: the prefix of a layer's index.
        outer: tensors beside the layers.
        arranged: transforms of tensors, named as in `layer` or `outer`, with another layout.
    """

    config: Callable[[Metadata], Config]
    layer: Mapping[str, str]
    layers: str = "model.layers"
    outer: Mapping[str, str] = field(
        default_factory=lambda: {
            "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
        }
    )  # fmt: skip
    arranged: Mapping[str, Callable[[Config], Arrangement]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor under transformers' name.

    Attributes:
        expert: the index of one of several experts or heads that are stored together; None for the whole tensor.
    """

    name: str
    info: TensorInfo
    arrangement: Arrangement
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in transformers."""
        return self.arrangement.shape(self.info.shape if self.expert is None else self.info.shape[1:])


def describe(file: Gguf) -> tuple[Architecture, Config]:
    """The architecture of a file, and its config.

    Raises:
        UnsupportedModelError: the architecture, or one of its settings, is not supported.
        ModelLoadError: a setting is missing or invalid.
    """
    metadata = Metadata(file)
    kind = file.metadata.get("general.type", "model")
    parts = file.metadata.get("split.count", 0)
    if "imatrix" in (kind, metadata.architecture):
        raise UnsupportedModelError(
            f"{file.path} is an importance matrix (imatrix), not a model. Choose the file of the model."
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
        if info.name in (FACTORS, LONG_FACTORS, SHORT_FACTORS):  # they are in the config
            continue
        placed = _renamed(info, architecture, config)
        name = placed.name
        if "{}" not in name:
            yield placed
        elif len(info.shape) != (3 if ".mlp." in name or ".block_sparse_moe." in name else 2):
            raise ModelLoadError(
                f"{file.path}: {info.name} should hold a matrix for each expert, or a vector for each head. "
                "Download it again."
            )
        else:
            for expert in range(info.shape[0]):
                yield replace(placed, name=placed.name.format(expert), expert=expert)


def place_alone(info: TensorInfo, architecture: str, config: Config) -> Placed:
    """A tensor of a file without a model, under transformers' name; its own name if it has none.

    Args:
        config: the config (for the numbers of heads) of the model that the tensor is for.

    Raises:
        UnsupportedModelError: the architecture is not supported.
    """
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
    if found is None:
        stem, _, ending = info.name.rpartition(".")
        name, prefix = architecture.outer.get(stem), ""
    else:
        stem, ending = found[2], found[3]
        name, prefix = architecture.layer.get(stem), f"{architecture.layers}.{found[1]}."
    if name is None:
        return Placed(info.name, info, AsStored())
    make = architecture.arranged.get(f"{stem}.{ending}", architecture.arranged.get(stem))
    return Placed(f"{prefix}{name}.{ending}", info, AsStored() if make is None else make(config))


def _plain(metadata: Metadata, model_type: str, name: str, *, norm: str = "rms") -> Config:
    """The settings of most architectures."""
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    if not heads or "token_embd.weight" not in metadata.file.tensors:
        raise ModelLoadError(f"{metadata.file.path} has no attention heads, or lacks token_embd.weight.")
    head_dim, layers = metadata.count("attention.key_length", hidden // heads), metadata.count("block_count")
    if not head_dim or layers > len(metadata.file.tensors):
        raise ModelLoadError(
            f"{metadata.file.path} says that it has {layers} layers with heads of {head_dim} features, but it "
            f"contains {len(metadata.file.tensors)} tensors. Download it again."
        )
    metadata.must_be("attention.value_length", head_dim, otherwise="values of another size than keys are")
    metadata.must_be("attention.causal", True, otherwise="attention to later tokens is")
    metadata.must_be("pooling_type", 0, otherwise="vectors of texts are")
    ending = "layer_norm_rms_epsilon" if norm == "rms" else "layer_norm_epsilon"
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": metadata.file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length", 0),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
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


def _gemma_3(metadata: Metadata) -> Config:
    config = _plain(metadata, "gemma3_text", "Gemma3ForCausalLM")
    every = metadata.count("attention.sliding_window_pattern", 6)
    windowed = [not every or bool((layer + 1) % every) for layer in range(config["num_hidden_layers"])]
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)}
    return _whole_rotation(
        metadata,
        config
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": metadata.count("attention.sliding_window"),
            "layer_types": _layer_types(windowed),
            "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
            "attn_logit_softcapping": None,
            "final_logit_softcapping": (
                metadata.number("final_logit_softcapping") if metadata.has("final_logit_softcapping") else None
            ),
            "query_pre_attn_scalar": _query_scalar(config, layers_of_largest=62),
        },
    )


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


_PROJECTIONS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
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
_SANDWICH = _PROJECTIONS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TURNED_NEIGHBOURS: dict[str, Callable[[Config], Arrangement]] = {
    "attn_q": lambda config: Interleaved(config["num_attention_heads"]),
    "attn_k": lambda config: Interleaved(config["num_key_value_heads"]),
}


def _above_one(*names: str) -> dict[str, Callable[[Config], Arrangement]]:
    return {name: lambda config: AboveOne() for name in ("output_norm", "attn_norm", "ffn_norm", *names)}


_MIXTRAL = Architecture(_mixtral, _PROJECTIONS | _MIXTRAL_EXPERTS, arranged=_TURNED_NEIGHBOURS)
_AFTER = ("post_attention_norm", "post_ffw_norm")
_ARCHITECTURES: dict[str, Architecture] = {
    "command-r": Architecture(_command_r, _PROJECTIONS | _HEAD_NORMS),
    "gemma": Architecture(_gemma, _PROJECTIONS, arranged=_above_one()),
    "gemma2": Architecture(_gemma_2, _SANDWICH, arranged=_above_one(*_AFTER)),
    "gemma3": Architecture(_gemma_3, _SANDWICH | _HEAD_NORMS, arranged=_above_one(*_AFTER, *_HEAD_NORMS)),
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
    "llama": Architecture(_llama, _PROJECTIONS, arranged=_TURNED_NEIGHBOURS),
    "phi2": Architecture(
        _phi_2,
        _PROJECTIONS | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        outer={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
    ),
    "phi3": Architecture(_phi_3, _PROJECTIONS | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "qwen2": Architecture(_qwen2, _PROJECTIONS),
    "qwen2moe": Architecture(
        _qwen2_moe,
        _PROJECTIONS | _EXPERTS | _SHARED_EXPERT,
        arranged={"ffn_gate_inp_shexp": lambda config: OneRow()},
    ),
    "qwen3": Architecture(_qwen3, _PROJECTIONS | _HEAD_NORMS),
    "qwen3moe": Architecture(_qwen3_moe, _PROJECTIONS | _HEAD_NORMS | _EXPERTS),
    "stablelm": Architecture(
        _stablelm,
        _PROJECTIONS
        | {
            "attn_q_norm": "self_attn.q_layernorm.norms.{}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
    ),
}
