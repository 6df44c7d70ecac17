"""Nomic BERT, Jina v3 and GTE: BERT's encoder with rotary positions, and a gated or plain feed-forward network
(arXiv:2402.01613, arXiv:2409.10173, arXiv:2407.19669)."""

from __future__ import annotations

import re
from typing import Any

from engine.model.families.common import (
    activation,
    attention,
    dense_network,
    even_head_dim,
    gated_network,
    linear,
    rotary,
    tokens,
)
from engine.model.families.encoder import KINDS, EncoderNames, HeadNames, encoder_table, of
from engine.model.families.encoder_only import check_settings, masked_lm, named_head, post_norm_encoder
from engine.model.families.names import LayerNames
from engine.model.normalisation import Norm
from engine.model.spec import Dense, FeedForward, ModelSpec
from engine.model.table import Entry, Family, Swapped, WeightTable


def spec(config: Any) -> ModelSpec:
    check_settings(config)
    kind, bias = config.model_type, config.model_type != "nomic_bert"
    if not getattr(config, "head_dim", None):
        even_head_dim(config.hidden_size, config.num_attention_heads)
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    act = activation(config.hidden_act)
    heads = config.num_attention_heads
    encoder = post_norm_encoder(
        config,
        tokens(config, token_types=config.type_vocab_size, norm=layer_norm),
        layer_norm,
        attention=attention(config, kv_heads=heads, position=rotary(config), causal=False, bias=bias),
        # GTE's gate and up projections have no biases; its down projection has one.
        ffn=dense_network(config) if kind == "jina_embeddings_v3" else gated_network(config, bias=kind == "gte"),
    )
    masked = masked_lm(config, act if kind == "nomic_bert" else "gelu", config.layer_norm_eps)
    return ModelSpec(encoder=encoder, decoder=None, head=named_head(config, masked, "tanh"))


def _heads(stem: str, masked: tuple[str, str, str], bias: str, first: tuple[str, str]) -> HeadNames:
    """Names of heads; the pooler is unread unless the head of the first token uses it."""
    pooler = rf"{stem}\.pooler\..*"
    return HeadNames(
        masked=masked,
        masked_bias=bias,
        first=first,
        unread={
            "masked": (pooler, re.escape(f"{masked[2]}.bias"), re.escape(bias)),
            "each": (pooler,),
            "answer": (pooler,),
            "first": () if first[0].startswith(stem) else (pooler,),
            "none": (pooler, r"(cls|lm_head|classifier|qa_outputs)\..*"),
        },
    )


def _gte_network(target: str, source: str, _part: FeedForward) -> list[Entry]:
    up_gate = f"{source}.mlp.up_gate_proj"
    return [
        Entry(f"{target}.gate_up.weight", (f"{up_gate}.weight",), Swapped()),
        Entry(f"{target}.gate_up.bias", (f"{up_gate}.bias",), Swapped(), default=0.0),
        *linear(f"{target}.down", f"{source}.mlp.down_proj", True),
    ]


NOMIC = EncoderNames(
    stem="nomic_bert",
    embedding_norm="emb_ln",
    layers="encoder.layers",
    layer=LayerNames(
        qkv="attn.Wqkv", out="attn.out_proj", norms=("norm1", "norm2"), ffn=("mlp.fc12", "mlp.fc11", "mlp.fc2")
    ),
    heads=_heads(
        "nomic_bert",
        ("cls.predictions.transform.dense", "cls.predictions.transform.layer_norm", "cls.predictions.decoder"),
        "cls.predictions.bias",
        ("nomic_bert.pooler.dense", "classifier"),
    ),
    unread=(),
    renamed=(),
)
GTE = EncoderNames(
    stem="gte",
    layer=LayerNames(qkv="attention.qkv_proj", out="attention.o_proj", norms=("attn_ln", "mlp_ln"), ffn=_gte_network),
    heads=_heads(
        "gte",
        ("lm_head.dense", "lm_head.norm", "lm_head.decoder"),
        "lm_head.decoder.bias",
        ("gte.pooler.dense", "classifier"),
    ),
    unread=(),
    renamed=(),
)
JINA = EncoderNames(
    stem="roberta",
    embedding_norm="emb_ln",
    layers="encoder.layers",
    layer=LayerNames(qkv="mixer.Wqkv", out="mixer.out_proj", norms=("norm1", "norm2"), ffn=("mlp.fc1", "mlp.fc2")),
    heads=_heads(
        "roberta",
        ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
        "lm_head.bias",
        ("classifier.dense", "classifier.out_proj"),
    ),
    unread=(),
    renamed=(),
)


def weights(model: ModelSpec) -> WeightTable:
    block = model.trunk.blocks[0]
    if isinstance(block.ffn, Dense):
        return encoder_table(model, JINA)
    return encoder_table(model, GTE if block.attention.qkv_bias else NOMIC)


FAMILY = Family(
    name="Nomic BERT, Jina v3 and GTE",
    architectures=(*of(KINDS, "NomicBert", "JinaEmbeddingsV3", "Gte"), "JinaEmbeddingsV3ForQuestionAnswering"),
    brings="BERT's encoder with rotary positions, gated or plain feed-forward network",
    spec=spec,
    weights=weights,
)
