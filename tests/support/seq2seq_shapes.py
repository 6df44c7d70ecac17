"""Shapes of the encoder-decoder families, each with what tells it from the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from support.seq2seq import MAX_LEN, Seq2SeqShape

T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 40,
}
BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
}
SWITCH: dict[str, Any] = T5 | {"num_experts": 3, "num_sparse_encoder_layers": 1}
LONG_T5: dict[str, Any] = T5 | {"local_radius": 11}
SUMS = {"encoder_attention_type": "transient-global", "global_block_size": 16}
GATED = {"feed_forward_proj": "gated-gelu"}
FSMT: dict[str, Any] = BART | {"decoder_attention_heads": 2}
BIG_BIRD: dict[str, Any] = BART | {"block_size": 6, "num_random_blocks": 1}
PEGASUS_X: dict[str, Any] = BART | {"encoder_layers": 3, "block_size": 12, "num_global_tokens": 5}
PROPHET: dict[str, Any] = {
    "hidden_size": 32,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "max_position_embeddings": MAX_LEN + 2,
    "num_buckets": 6,
    "relative_max_distance": 24,
}

LED: dict[str, Any] = {name: value for name, value in BART.items() if name != "max_position_embeddings"} | {
    "max_encoder_position_embeddings": 256,
    "max_decoder_position_embeddings": MAX_LEN,
    "attention_window": 16,
}


def without_positions(folder: Path) -> None:
    """Take fixed positions out of a checkpoint, as published ones have none."""
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if "embed_positions" not in name}
    save_file(kept, file, metadata={"format": "pt"})


GEMMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "query_pre_attn_scalar": 6,
    "max_position_embeddings": MAX_LEN,
    "sliding_window": 9,
}
GEMMA3 = GEMMA | {
    "sliding_window_pattern": 2,
    "layer_types": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
# A vision tower that no text needs.
SIGHT = {
    "vision_config": {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 8,
        "patch_size": 4,
    },
    "mm_tokens_per_image": 4,
}

SHAPES = {
    "t5": Seq2SeqShape("T5ForConditionalGeneration", T5, seeds=(0, 0, 0, 0, 0)),
    "t5-gated": Seq2SeqShape(
        "T5ForConditionalGeneration",
        T5 | GATED | {"tie_word_embeddings": False},
        own_head=True,
        eos=(7, 40),
        seeds=(0, 0, 0, 0, 3),
    ),
    "t5-own-head-scaled": Seq2SeqShape(
        "T5ForConditionalGeneration", T5 | {"num_heads": 3}, own_head=True, eos_gain=2.4, seeds=(0, 1, 0, 0, 0)
    ),
    "mt5": Seq2SeqShape("MT5ForConditionalGeneration", T5 | GATED, own_head=True, seeds=(0, 0, 0, 0, 0)),
    "umt5": Seq2SeqShape("UMT5ForConditionalGeneration", T5 | GATED, seeds=(0, 1, 0, 0, 0)),
    "umt5-plain-own-head": Seq2SeqShape(
        "UMT5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "relu", "num_heads": 3},
        own_head=True,
        eos=(7, 40),
        seeds=(2, 0, 0, 0, 0),
    ),
    "longt5": Seq2SeqShape("LongT5ForConditionalGeneration", LONG_T5, seeds=(0, 1, 2, 0, 0)),
    "longt5-sums": Seq2SeqShape("LongT5ForConditionalGeneration", LONG_T5 | SUMS, seeds=(0, 2, 0, 0, 0)),
    "bigbird-pegasus": Seq2SeqShape(
        "BigBirdPegasusForConditionalGeneration", BIG_BIRD, eos_gain=3.2, seeds=(0, 0, 0, 0, 0)
    ),
    "bigbird-pegasus-biases-untied": Seq2SeqShape(
        "BigBirdPegasusForConditionalGeneration",
        BIG_BIRD
        | {"block_size": 7, "num_random_blocks": 3, "use_bias": True, "scale_embedding": False}
        | {"tie_word_embeddings": False, "activation_function": "relu", "decoder_attention_heads": 2},
        eos=(7, 40),
        seed=1,
        eos_gain=2.4,
        seeds=(1, 0, 0, 0, 0),
    ),
    "pegasus-x": Seq2SeqShape("PegasusXForConditionalGeneration", PEGASUS_X, seeds=(1, 0, 0, 1, 2)),
    "pegasus-x-even-untied": Seq2SeqShape(
        "PegasusXForConditionalGeneration",
        PEGASUS_X
        | {"stagger_local_blocks": False, "block_size": 9, "num_global_tokens": 1, "scale_embedding": False}
        | {"tie_word_embeddings": False, "activation_function": "relu", "decoder_attention_heads": 2},
        eos=(7, 40),
        seed=1,
        seeds=(0, 0, 1, 0, 0),
    ),
    "switch-experts": Seq2SeqShape(
        "SwitchTransformersForConditionalGeneration", SWITCH | {"num_sparse_decoder_layers": 1}, seeds=(2, 0, 0, 0, 0)
    ),
    "switch-experts-few-places-apart": Seq2SeqShape(
        "SwitchTransformersForConditionalGeneration",
        SWITCH
        | {"expert_capacity": 5, "num_sparse_encoder_layers": 3, "num_sparse_decoder_layers": 3, "router_bias": True}
        | {"tie_word_embeddings": False, "dense_act_fn": "gelu_new"},
        seeds=(0, 0, 0, 0, 0),
    ),
    "bart": Seq2SeqShape("BartForConditionalGeneration", BART, seeds=(0, 0, 1, 0, 0)),
    "bart-scaled-other-heads": Seq2SeqShape(
        "BartForConditionalGeneration",
        BART
        | {"scale_embedding": True, "encoder_attention_heads": 8, "encoder_layers": 3, "activation_function": "relu"},
        eos=(7, 40),
        seed=1,
        seeds=(2, 0, 10, 0, 1),
    ),
    "bart-all-tables-apart": Seq2SeqShape(
        "BartForConditionalGeneration", BART | {"tie_word_embeddings": False}, seeds=(2, 0, 0, 0, 4)
    ),
    "mbart": Seq2SeqShape(
        "MBartForConditionalGeneration", BART | {"scale_embedding": True}, eos_gain=4.2, seeds=(0, 0, 0, 0, 0)
    ),
    "mbart-deep-decoder": Seq2SeqShape(
        "MBartForConditionalGeneration",
        BART | {"encoder_layers": 1, "activation_function": "relu"},
        cached=False,
        seed=2,
        eos_gain=3.2,
        seeds=(0, 0, 0, 0, 0),
    ),
    "marian": Seq2SeqShape(
        "MarianMTModel",
        BART | {"scale_embedding": True, "activation_function": "swish"},
        seed=1,
        eos_gain=3.2,
        seeds=(0, 0, 0, 0, 0),
    ),
    "marian-two-vocabularies": Seq2SeqShape(
        "MarianMTModel",
        BART | {"share_encoder_decoder_embeddings": False, "encoder_layers": 3, "decoder_attention_heads": 2},
        own_vocab=131,
        seed=2,
        eos_gain=1.4,
        seeds=(1, 10, 5, 0, 4),
    ),
    "marian-two-vocabularies-own-head": Seq2SeqShape(
        "MarianMTModel",
        BART | {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "decoder_layers": 1},
        own_vocab=61,
        seed=1,
        eos_gain=1.4,
        seeds=(0, 0, 0, 0, 0),
    ),
    "pegasus": Seq2SeqShape(
        "PegasusForConditionalGeneration",
        BART | {"scale_embedding": True, "activation_function": "relu"},
        seed=2,
        seeds=(0, 0, 0, 0, 0),
    ),
    "m2m100": Seq2SeqShape(
        "M2M100ForConditionalGeneration",
        BART | {"scale_embedding": True, "activation_function": "relu", "pad_token_id": 1},
        seed=2,
        seeds=(0, 0, 0, 0, 0),
    ),
    "m2m100-unscaled-other-sizes": Seq2SeqShape(
        "M2M100ForConditionalGeneration",
        BART | {"d_model": 36, "encoder_layers": 3, "scale_embedding": False, "activation_function": "gelu"},
        eos=(7, 40),
        eos_gain=2.4,
        seeds=(0, 0, 0, 0, 0),
    ),
    "m2m100-apart": Seq2SeqShape(
        "M2M100ForConditionalGeneration",
        BART | {"tie_word_embeddings": False, "decoder_attention_heads": 8},
        seed=1,
        eos_gain=2.4,
        seeds=(0, 0, 0, 0, 0),
    ),
    "fsmt": Seq2SeqShape(
        "FSMTForConditionalGeneration", FSMT, own_vocab=131, finish=without_positions, seed=2, seeds=(2, 0, 1, 0, 0)
    ),
    "fsmt-tied-unscaled": Seq2SeqShape(
        "FSMTForConditionalGeneration",
        FSMT
        | {"scale_embedding": False, "tie_word_embeddings": True, "encoder_layers": 3, "pad_token_id": 1}
        | {"src_vocab_size": 97},
        eos=(7, 40),
        eos_gain=3.2,
        seeds=(0, 2, 0, 0, 0),
    ),
    "blenderbot": Seq2SeqShape(
        "BlenderbotForConditionalGeneration",
        BART | {"scale_embedding": True, "encoder_layers": 2},
        eos_gain=4.2,
        seeds=(0, 0, 0, 0, 0),
    ),
    "blenderbot-apart": Seq2SeqShape(
        "BlenderbotForConditionalGeneration",
        BART | {"encoder_layers": 3, "tie_word_embeddings": False, "activation_function": "relu"},
        eos=(7, 40),
        eos_gain=2.4,
        seeds=(0, 0, 0, 0, 14),
    ),
    "blenderbot-small": Seq2SeqShape(
        "BlenderbotSmallForConditionalGeneration",
        BART | {"scale_embedding": True},
        seed=2,
        eos_gain=4.2,
        seeds=(0, 4, 0, 0, 0),
    ),
    "blenderbot-small-apart": Seq2SeqShape(
        "BlenderbotSmallForConditionalGeneration",
        BART | {"encoder_layers": 3, "tie_word_embeddings": False},
        eos=(7, 40),
        seed=1,
        seeds=(0, 0, 4, 1, 0),
    ),
    "led": Seq2SeqShape("LEDForConditionalGeneration", LED, seed=2, eos_gain=3.2, seeds=(0, 0, 0, 0, 0)),
    "led-windows-of-layers-apart": Seq2SeqShape(
        "LEDForConditionalGeneration",
        LED
        | {"encoder_layers": 3, "attention_window": [4, 128, 32], "tie_word_embeddings": False}
        | {"activation_function": "relu", "decoder_attention_heads": 2},
        eos=(7, 40),
        seed=2,
        eos_gain=3.2,
        seeds=(3, 0, 1, 0, 0),
    ),
    "prophetnet": Seq2SeqShape(
        "ProphetNetForConditionalGeneration", PROPHET, seed=1, eos_gain=4.2, seeds=(0, 0, 0, 0, 1)
    ),
    "prophetnet-one-stream-apart": Seq2SeqShape(
        "ProphetNetForConditionalGeneration",
        PROPHET
        | {"ngram": 1, "num_encoder_layers": 3, "num_decoder_attention_heads": 2, "num_buckets": 9}
        | {"activation_function": "relu", "tie_word_embeddings": False, "disable_ngram_loss": True, "eps": 0.1},
        eos=(7, 40),
        seed=1,
        eos_gain=3.2,
        seeds=(0, 0, 0, 0, 0),
    ),
    "plbart": Seq2SeqShape("PLBartForConditionalGeneration", BART, seeds=(0, 7, 1, 0, 0)),
    "plbart-unscaled-apart": Seq2SeqShape(
        "PLBartForConditionalGeneration",
        BART | {"scale_embedding": False, "encoder_layers": 3, "tie_word_embeddings": False},
        seed=1,
        seeds=(0, 0, 2, 0, 0),
    ),
    "mvp": Seq2SeqShape("MvpForConditionalGeneration", BART, seeds=(0, 0, 1, 0, 0)),
    "mvp-scaled-apart": Seq2SeqShape(
        "MvpForConditionalGeneration",
        BART | {"scale_embedding": True, "encoder_layers": 3, "tie_word_embeddings": False},
        eos=(7, 40),
        seed=1,
        eos_gain=2.4,
        seeds=(0, 0, 5, 0, 0),
    ),
    "pegasus-apart": Seq2SeqShape(
        "PegasusForConditionalGeneration",
        BART | {"encoder_layers": 3, "tie_word_embeddings": False},
        eos=(11, 40),
        eos_gain=2.4,
        seeds=(0, 0, 0, 0, 0),
    ),
    "t5gemma2": Seq2SeqShape(
        "T5Gemma2ForConditionalGeneration",
        {"encoder": {"text_config": GEMMA3} | SIGHT, "decoder": GEMMA3},
        seeds=(0, 0, 0, 0, 0),
    ),
    "t5gemma2-odd-biases": Seq2SeqShape(
        "T5Gemma2ForConditionalGeneration",
        {
            "encoder": {"text_config": GEMMA3 | {"num_hidden_layers": 3, "sliding_window": 8, "head_dim": 6}}
            | SIGHT
            | {"eoi_token_index": 40},
            "decoder": GEMMA3
            | {
                "num_key_value_heads": 1,
                "head_dim": 14,
                "attention_bias": True,
                "final_logit_softcapping": 8.0,
                "layer_types": ["full_attention", "sliding_attention"],
            },
        },
        seeds=(1, 4, 0, 0, 8),
    ),
    "t5gemma": Seq2SeqShape(
        "T5GemmaForConditionalGeneration", {"encoder": GEMMA, "decoder": GEMMA}, seeds=(1, 0, 1, 0, 0)
    ),
    "t5gemma-biases-other-encoder-untied": Seq2SeqShape(
        "T5GemmaForConditionalGeneration",
        {
            "encoder": GEMMA | {"hidden_size": 40, "num_hidden_layers": 3, "attention_bias": True, "head_dim": 6},
            "decoder": GEMMA
            | {
                "attention_bias": True,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": 8.0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
            },
            "tie_word_embeddings": False,
        },
        eos=(7, 40),
        eos_gain=1.4,
        seeds=(0, 1, 1, 0, 15),
    ),
}
