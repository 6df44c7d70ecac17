"""Jina v2: BERT's encoder with ALiBi on either side and a gated feed-forward network (arXiv:2310.19923)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.alibi import slopes
from engine.model.families.common import linear, multi_head, tokens
from engine.model.families.encoder import BERT_LAYER, KINDS, EncoderNames, encoder, of
from engine.model.families.encoder_only import bert_head, check_settings, post_norm_encoder
from engine.model.normalisation import Norm
from engine.model.positions import TwoSidedSlopes
from engine.model.spec import Activation, FeedForward, Gated, Stack
from engine.model.table import Entry

_GATES: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}


def _stack(config: Any) -> Stack:
    if getattr(config, "position_embedding_type", None) != "alibi":
        raise UnsupportedModelError(
            "position_embedding_type of the config must be 'alibi' for this family, got "
            f"{getattr(config, 'position_embedding_type', None)!r}."
        )
    kind = getattr(config, "feed_forward_type", None)
    if kind not in _GATES:
        raise UnsupportedModelError(f"feed_forward_type of the config is {kind!r}; implemented: {', '.join(_GATES)}.")
    if "qk-post-norm" in str(getattr(config, "auto_map", "")):
        raise UnsupportedModelError(
            "The config's auto_map names the variant with norms of queries and keys (the model for code), whose "
            "blocks have norms that are not implemented. The models for texts are served."
        )
    check_settings(config, positions="alibi")
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    attention = multi_head(config, position=TwoSidedSlopes(slopes(config.num_attention_heads)), causal=False)
    # The gates' matrix has no bias; the other one has.
    ffn = Gated(config.intermediate_size, _GATES[kind], bias=True)
    embedding = tokens(config, token_types=config.type_vocab_size, norm=layer_norm)
    return post_norm_encoder(config, embedding, layer_norm, attention=attention, ffn=ffn)


def _network_weights(target: str, source: str, _part: FeedForward) -> list[Entry]:
    return [
        # The activated part comes first, as in our own matrix.
        Entry(f"{target}.gate_up.weight", (f"{source}.mlp.gated_layers.weight",)),
        Entry(f"{target}.gate_up.bias", (f"{source}.mlp.gated_layers.bias",), default=0.0),
        *linear(f"{target}.down", f"{source}.mlp.wo", True),
    ]


FAMILY = encoder(
    "Jina v2",
    of(KINDS, "JinaBert"),
    "BERT's encoder with symmetric ALiBi and gated feed-forward networks",
    stack=_stack,
    head=bert_head,
    names=EncoderNames(
        stem="bert",
        layer=replace(BERT_LAYER, norms=("attention.output.LayerNorm", "mlp.layernorm"), ffn=_network_weights),
        unread=(r"embeddings\.(position|token_type)_ids",),
        renamed=(),
    ),
)
