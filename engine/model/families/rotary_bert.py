"""Nomic BERT, Jina v3 and GTE: BERT's encoder with rotary positions, and a gated or plain feed-forward network
(arXiv:2402.01613, arXiv:2409.10173, arXiv:2407.19669)."""

from __future__ import annotations

import re
from typing import Any

from engine.model.families.common import activation, even_head_dim, linear, norm, rotary
from engine.model.families.encoder_only import (
    answer_weights,
    check_settings,
    first_token_weights,
    masked_lm,
    masked_lm_weights,
    named_head,
    token_weights,
)
from engine.model.normalisation import Norm
from engine.model.spec import (
    AnswerSpan,
    Attention,
    Block,
    Classifier,
    Dense,
    Gated,
    MaskedLm,
    ModelSpec,
    Post,
    Stack,
    Tokens,
)
from engine.model.table import Entry, Family, Joined, Swapped, WeightTable


def spec(config: Any) -> ModelSpec:
    check_settings(config)
    kind, heads = config.model_type, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or even_head_dim(config.hidden_size, heads)
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    act = activation(config.hidden_act)
    block = Block(
        placement=Post(layer_norm, layer_norm),
        attention=Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim),
            causal=False,
            qkv_bias=kind != "nomic_bert",
            out_bias=kind != "nomic_bert",
        ),
        # GTE's gate and up projections have no biases, its down projection has one.
        ffn=Dense(config.intermediate_size, act, bias=True)
        if kind == "jina_embeddings_v3"
        else Gated(config.intermediate_size, act, bias=kind == "gte"),
    )
    encoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(
            vocab_size=config.vocab_size,
            width=config.hidden_size,
            token_types=config.type_vocab_size,
            norm=layer_norm,
        ),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=None,
    )
    masked = masked_lm(config, act if kind == "nomic_bert" else "gelu", config.layer_norm_eps)
    return ModelSpec(encoder=encoder, decoder=None, head=named_head(config, masked, "tanh"))


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    block = model.encoder.blocks[0]
    if isinstance(block.ffn, Dense):
        return _jina(model)
    return _gte(model) if block.attention.qkv_bias else _nomic(model)


def _embedding(model: ModelSpec, source: str, layer_norm: str) -> list[Entry]:
    assert model.encoder is not None
    assert isinstance(model.encoder.embedding, Tokens)
    tables = {"tokens": "word_embeddings"}
    if model.encoder.embedding.token_types:
        tables["types"] = "token_type_embeddings"
    return [
        *(
            Entry(f"encoder.embedding.{ours}", (f"{source}.embeddings.{theirs}.weight",), shard_axis=0)
            for ours, theirs in tables.items()
        ),
        *norm("encoder.embedding.norm", f"{source}.{layer_norm}", bias=True),
    ]


def _layer(number: int, block: Block, source: str, names: tuple[str, str, str, str]) -> list[Entry]:
    """Attention and the norms, by the names of its fused projection, its output, and the two norms."""
    target, part = f"encoder.blocks.{number}", block.attention
    fused, out, first, second = (f"{source}.{name}" for name in names)
    return [
        *linear(f"{target}.attention.inner.qkv", fused, part.qkv_bias, 0),
        *linear(f"{target}.attention.inner.out", out, part.out_bias, 1),
        *norm(f"{target}.attention.outer", first, bias=True),
        *norm(f"{target}.ffn.outer", second, bias=True),
    ]


def _nomic(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    entries = _embedding(model, "nomic_bert", "emb_ln")
    for i, block in enumerate(model.encoder.blocks):
        assert isinstance(block.ffn, Gated)
        source, ffn, width = f"nomic_bert.encoder.layers.{i}", f"encoder.blocks.{i}.ffn.inner", block.ffn.width
        gate_up = (f"{source}.mlp.fc12.weight", f"{source}.mlp.fc11.weight")
        entries += _layer(i, block, source, ("attn.Wqkv", "attn.out_proj", "norm1", "norm2"))
        entries.append(Entry(f"{ffn}.gate_up.weight", gate_up, Joined((width, width)), shard_axis=0))
        entries += linear(f"{ffn}.down", f"{source}.mlp.fc2", False, 1)
    masked = ("cls.predictions.transform.dense", "cls.predictions.transform.layer_norm", "cls.predictions.decoder")
    return _table(model, entries, "nomic_bert", masked, "cls.predictions.bias")


def _gte(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    entries = _embedding(model, "gte", "embeddings.LayerNorm")
    for i, block in enumerate(model.encoder.blocks):
        source, ffn = f"gte.encoder.layer.{i}", f"encoder.blocks.{i}.ffn.inner"
        entries += _layer(i, block, source, ("attention.qkv_proj", "attention.o_proj", "attn_ln", "mlp_ln"))
        entries += [
            Entry(f"{ffn}.gate_up.weight", (f"{source}.mlp.up_gate_proj.weight",), Swapped(), shard_axis=0),
            Entry(f"{ffn}.gate_up.bias", (f"{source}.mlp.up_gate_proj.bias",), Swapped(), shard_axis=0, default=0.0),
            *linear(f"{ffn}.down", f"{source}.mlp.down_proj", True, 1),
        ]
    return _table(model, entries, "gte", ("lm_head.dense", "lm_head.norm", "lm_head.decoder"), "lm_head.decoder.bias")


def _jina(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    entries = _embedding(model, "roberta", "emb_ln")
    for i, block in enumerate(model.encoder.blocks):
        source, ffn = f"roberta.encoder.layers.{i}", f"encoder.blocks.{i}.ffn.inner"
        entries += _layer(i, block, source, ("mixer.Wqkv", "mixer.out_proj", "norm1", "norm2"))
        entries += linear(f"{ffn}.up", f"{source}.mlp.fc1", True, 0)
        entries += linear(f"{ffn}.down", f"{source}.mlp.fc2", True, 1)
    masked = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")
    return _table(model, entries, "roberta", masked, "lm_head.bias")


def _table(model: ModelSpec, entries: list[Entry], source: str, masked: tuple[str, str, str], bias: str) -> WeightTable:
    """The table with the head's entries; what other heads store is ignored."""
    ignored = [rf"{source}\.pooler\..*"]
    match model.head:
        case MaskedLm():
            dense, layer_norm, output = masked
            entries += masked_lm_weights(model.head, dense=dense, layer_norm=layer_norm, output=output, bias=bias)
            ignored += [re.escape(f"{output}.bias"), re.escape(bias)]
        case Classifier(pooling=None):
            entries += token_weights("classifier")
        case Classifier() if source == "roberta":
            entries += first_token_weights("classifier.dense", "classifier.out_proj")
        case Classifier():
            entries += first_token_weights(f"{source}.pooler.dense", "classifier")
            ignored = []
        case AnswerSpan():
            entries += answer_weights()
        case _:
            ignored += [r"(cls|lm_head|classifier|qa_outputs)\..*"]
    head = f"{masked[2]}.weight" if isinstance(model.head, MaskedLm) else None
    return WeightTable(tuple(entries), prefix=f"{source}.", ignored=tuple(ignored), head=head)


_KINDS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "Model")

FAMILY = Family(
    name="Nomic BERT, Jina v3 and GTE",
    architectures=(
        *(f"{name}{kind}" for name in ("NomicBert", "JinaEmbeddingsV3", "Gte") for kind in _KINDS),
        "JinaEmbeddingsV3ForQuestionAnswering",
    ),
    brings="BERT's encoder with rotary positions, gated or plain feed-forward network",
    spec=spec,
    weights=weights,
)
