"""DeBERTa, the first version: disentangled attention, and a bias only for queries and values (arXiv:2006.03654)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import even_head_dim, linear, multi_head
from engine.model.families.deberta_v2 import embedding, head_of, table
from engine.model.families.encoder import ANSWERING, BERT_LAYER, of
from engine.model.families.encoder_only import post_norm_encoder
from engine.model.normalisation import Norm
from engine.model.positions import Disentangled, DistanceVectors
from engine.model.spec import Attention, ModelSpec
from engine.model.table import Entry, Family, Interleaved, Sparse, WeightTable


def spec(config: Any) -> ModelSpec:
    if getattr(config, "talking_head", False):
        raise UnsupportedModelError("talking_head must be false: mixing the scores of heads is not implemented.")
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    attention = _attention(config)
    distances = None
    if attention.content_bias:
        longest = getattr(config, "max_relative_positions", -1)
        distances = DistanceVectors(config.max_position_embeddings if longest < 1 else longest)
    encoder = post_norm_encoder(config, embedding(config, layer_norm), layer_norm, attention=attention)
    return ModelSpec(encoder=replace(encoder, distances=distances), decoder=None, head=head_of(config, layer_norm))


def _attention(config: Any) -> Attention:
    terms, head_dim = config.pos_att_type or (), even_head_dim(config.hidden_size, config.num_attention_heads)
    position = None
    if config.relative_attention and ("c2p" in terms or "p2c" in terms):
        position = Disentangled("c2p" in terms, "p2c" in terms)
    # Every named term counts, computed or not.
    return multi_head(config, scale=(head_dim * (1 + len(terms))) ** -0.5, position=position, causal=False)


def weights(model: ModelSpec) -> WeightTable:
    stack = model.trunk
    entries: list[Entry] = []
    if stack.distances is not None:
        entries.append(Entry("encoder.distances.weight", ("deberta.encoder.rel_embeddings.weight",)))
    for i, block in enumerate(stack.blocks):
        position = block.attention.position
        target, source = f"encoder.blocks.{i}.attention.inner", f"deberta.encoder.layer.{i}.attention.self"
        if isinstance(position, Disentangled) and position.content_to_position:
            keys = linear(f"{target}.distance_keys", f"{source}.pos_proj", True)
            # softmax ignores a number that keys of distances add to all scores of a query.
            entries += [keys[0], Entry(keys[1].target, keys[1].sources, default=0.0)]
        if isinstance(position, Disentangled) and position.position_to_content:
            entries += linear(f"{target}.distance_queries", f"{source}.pos_q_proj", True)
    return table(model, LAYER, entries)


def _attention_weights(target: str, layer: str, part: Attention) -> list[Entry]:
    """Queries, keys and values head by head in one matrix; keys have no bias."""
    source, width = f"{layer}.attention.self", part.heads * part.head_dim
    stored = Interleaved(part.heads, 1, part.head_dim)
    biases = (f"{source}.q_bias", f"{source}.v_bias")
    return [
        Entry(f"{target}.qkv.weight", (f"{source}.in_proj.weight",), stored),
        Entry(f"{target}.qkv.bias", biases, Sparse((width, width, width), stored=(0, 2))),
        *linear(f"{target}.out", f"{layer}.attention.output.dense", True),
    ]


LAYER = replace(BERT_LAYER, attention=_attention_weights)

FAMILY = Family(
    name="DeBERTa",
    architectures=of(("Model", *ANSWERING[:-1]), "Deberta"),
    headless=("DebertaModel",),
    brings="disentangled attention, queries, keys and values stored per head",
    spec=spec,
    weights=weights,
)
