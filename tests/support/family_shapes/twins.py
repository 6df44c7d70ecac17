"""Architectures that share a row with others, or differ from them in a few settings."""

from typing import Any

from support.family_shape import DECODER as BASE
from support.family_shape import FamilyShape

WINDOWS: dict[str, Any] = BASE | {
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
# Queries grow within a prompt of 40 tokens. Configs of Mistral 4 write into it, so each shape has its own.
TEMPERED: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
BASES: dict[str, Any] = {
    "full_attention": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 3}
LATENT: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 60,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 24,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "max_position_embeddings": 128,
}
GROUPS: dict[str, Any] = {
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}

SHAPES = {
    "ministral3": FamilyShape(
        "Ministral3ForCausalLM",
        BASE | {"head_dim": 10, "sliding_window": None, "rope_parameters": dict(TEMPERED)},
        prompts=(0, 2, 1, 3),
    ),
    "ministral3-window-tied": FamilyShape(
        "Ministral3ForCausalLM",
        BASE | {"head_dim": 8, "sliding_window": 9, "rope_parameters": dict(TEMPERED), "tie_word_embeddings": True},
        prompts=(3, 8, 1, 0),
    ),
    "cwm": FamilyShape(
        "CwmForCausalLM",
        WINDOWS | {"head_dim": 10, "rope_parameters": {"rope_theta": 300.0}, "mlp_bias": True},
        prompts=(3, 4, 0, 1),
    ),
    "jais2": FamilyShape("Jais2ForCausalLM", BASE | {"head_dim": 10}, prompts=(4, 12, 0, 1)),
    "jais2-no-biases-tied": FamilyShape(
        "Jais2ForCausalLM",
        BASE | {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
        prompts=(4, 6, 1, 0),
    ),
    "flex-olmo": FamilyShape(
        "FlexOlmoForCausalLM",
        BASE | {"intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 3},
        prompts=(1, 3, 0, 2),
    ),
    "persimmon": FamilyShape("PersimmonForCausalLM", BASE | {"num_key_value_heads": 4}, prompts=(8, 10, 0, 1)),
    "persimmon-no-norms-tied": FamilyShape(
        "PersimmonForCausalLM",
        BASE
        | {
            "num_key_value_heads": 4,
            "qk_layernorm": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.25},
        },
        eos_gain=4.0,
        prompts=(1, 18, 0, 2),
    ),
    "granite-swa": FamilyShape(
        "GraniteSWAForCausalLM",
        WINDOWS
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
            "layer_rope_theta": [0, 300.0, 1000.0],
            "mlp_bias": True,
        },
        prompts=(1, 3, 0, 2),
    ),
    "granite-moe-swa": FamilyShape(
        "GraniteMoeSWAForCausalLM",
        WINDOWS
        | {
            "intermediate_size": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.7,
            "attention_bias": True,
        },
        prompts=(0, 1, 2, 3),
    ),
    "hyperclovax": FamilyShape(
        "HyperCLOVAXForCausalLM",
        BASE
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
            "mlp_bias": True,
        },
        prompts=(2, 4, 0, 1),
    ),
    "hyperclovax-plain-norms-tied": FamilyShape(
        "HyperCLOVAXForCausalLM",
        BASE
        | {"use_post_norm": False, "residual_multiplier": 1.4, "attention_bias": True, "tie_word_embeddings": True},
        eos_gain=2.2,
        prompts=(2, 23, 0, 1),
    ),
    "solar-open": FamilyShape(
        "SolarOpenForCausalLM",
        BASE | GROUPS | {"head_dim": 12, "attention_bias": True},
        seed=1,
        prompts=(1, 3, 0, 4),
    ),
    "glm4-moe-lite": FamilyShape(
        "Glm4MoeLiteForCausalLM",
        LATENT | GROUPS | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        prompts=(0, 3, 2, 1),
    ),
    "glm4-moe-lite-biases-tied": FamilyShape(
        "Glm4MoeLiteForCausalLM",
        LATENT
        | GROUPS
        | {
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_interleave": False,
            "tie_word_embeddings": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        prompts=(0, 5, 1, 4),
    ),
    "mistral4": FamilyShape(
        "Mistral4ForCausalLM",
        LATENT | GROUPS | {"rope_parameters": dict(TEMPERED), "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        prompts=(3, 4, 0, 6),
    ),
    "mistral4-ungrouped-dense-first": FamilyShape(
        "Mistral4ForCausalLM",
        LATENT
        | GROUPS
        | {
            "rope_parameters": dict(TEMPERED),
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
        },
        seed=1,
        prompts=(4, 7, 0, 1),
    ),
    "youtu": FamilyShape("YoutuForCausalLM", LATENT, eos_gain=2.6, prompts=(0, 1, 2, 3)),
    "minicpm3": FamilyShape(
        "MiniCPM3ForCausalLM", LATENT | {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 18}, prompts=(2, 9, 0, 1)
    ),
    "minicpm3-untied": FamilyShape(
        "MiniCPM3ForCausalLM",
        LATENT
        | {
            "scale_emb": 2.5,
            "scale_depth": None,
            "dim_model_base": None,
            "q_lora_rank": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        eos_gain=2.2,
        prompts=(1, 25, 0, 2),
    ),
    "exaone-moe": FamilyShape(
        "ExaoneMoeForCausalLM",
        WINDOWS | EXPERTS | {"n_group": 2, "topk_group": 1, "num_shared_experts": 2, "first_k_dense_replace": 1},
        prompts=(3, 15, 1, 0),
    ),
    "exaone-moe-full-layers-tied": FamilyShape(
        "ExaoneMoeForCausalLM",
        BASE
        | EXPERTS
        | {
            "sliding_window": 7,
            "layer_types": ["full_attention", "full_attention"],
            "norm_topk_prob": False,
            "mlp_layer_types": ["sparse", "dense"],
            "tie_word_embeddings": True,
            "head_dim": 10,
        },
        prompts=(0, 2, 1, 3),
    ),
    "hunyuan3": FamilyShape("HYV3ForCausalLM", BASE | EXPERTS | {"head_dim": 10}, prompts=(0, 2, 1, 3)),
    "hunyuan3-biases-tied": FamilyShape(
        "HYV3ForCausalLM",
        BASE
        | EXPERTS
        | {
            "head_dim": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "mlp_layer_types": ["sparse", "dense"],
            "num_shared_experts": 2,
        },
        seed=1,
        prompts=(0, 1, 4, 2),
    ),
    "afmoe": FamilyShape(
        "AfmoeForCausalLM",
        WINDOWS | EXPERTS | {"head_dim": 10, "num_dense_layers": 1, "route_scale": 1.7, "mup_enabled": True},
        eos_gain=1.4,
        prompts=(3, 5, 0, 1),
    ),
    "afmoe-biases-tied": FamilyShape(
        "AfmoeForCausalLM",
        WINDOWS
        | EXPERTS
        | {
            "head_dim": 8,
            "num_dense_layers": 0,
            "num_shared_experts": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        eos_gain=2.6,
        prompts=(8, 22, 1, 0),
    ),
    "laguna": FamilyShape(
        "LagunaForCausalLM",
        WINDOWS
        | EXPERTS
        | {
            "head_dim": 12,
            "num_attention_heads_per_layer": [4, 6, 2],
            "shared_expert_intermediate_size": 28,
            "rope_parameters": BASES,
            "moe_routed_scaling_factor": 1.6,
        },
        prompts=(7, 10, 0, 2),
    ),
    "laguna-elements-biases-tied": FamilyShape(
        "LagunaForCausalLM",
        WINDOWS
        | EXPERTS
        | {
            "head_dim": 8,
            "gating": "per-element",
            "attention_bias": True,
            "shared_expert_intermediate_size": 20,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": BASES,
            "tie_word_embeddings": True,
        },
        seed=1,
        eos_gain=2.2,
        prompts=(4, 9, 0, 1),
    ),
    "mellum": FamilyShape("MellumForCausalLM", WINDOWS | EXPERTS | {"head_dim": 10}, prompts=(2, 4, 0, 1)),
    "mellum-biases-tied": FamilyShape(
        "MellumForCausalLM",
        WINDOWS
        | EXPERTS
        | {
            "head_dim": 8,
            "attention_bias": True,
            "norm_topk_prob": False,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "tie_word_embeddings": True,
        },
        eos_gain=2.2,
        prompts=(6, 44, 0, 1),
    ),
    "cohere2-moe": FamilyShape(
        "Cohere2MoeForCausalLM",
        WINDOWS
        | {
            "head_dim": 8,
            "intermediate_size": 20,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "logit_scale": 0.4,
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
            "prefix_dense_intermediate_size": 44,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        prompts=(2, 4, 1, 0),
    ),
    "cohere2-moe-rms-untied": FamilyShape(
        "Cohere2MoeForCausalLM",
        WINDOWS
        | {
            "head_dim": 10,
            "intermediate_size": 20,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        prompts=(2, 5, 0, 3),
    ),
}
