"""EuroBERT: LLaMA's blocks, in which tokens see later ones (arXiv:2503.05500)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import attention, gated_network, rotary
from engine.model.families.decoder import decoder
from engine.model.families.names import DecoderNames, decoder_table, stack_weights
from engine.model.spec import ModelSpec, Pool
from engine.model.table import WeightTable


def _spec(config: Any) -> ModelSpec:
    if config.architectures[0] != "EuroBertModel":
        raise UnsupportedModelError(
            f"{config.architectures[0]} has a head that is not implemented; EuroBertModel is served, for embeddings."
        )
    return ModelSpec(encoder=_LAYERS.spec(config).decoder, decoder=None, head=Pool())


def _weights(model: ModelSpec) -> WeightTable:
    names = DecoderNames()
    table = decoder_table(replace(model, encoder=None, decoder=model.encoder), names)
    return replace(table, entries=tuple(stack_weights("encoder", model.trunk, names)), head=None)


_LAYERS = decoder(
    "EuroBERT",
    ("EuroBertModel",),
    "LLaMA's blocks as an encoder",
    attention=lambda c: attention(c, position=rotary(c), causal=False, bias=c.attention_bias),
    ffn=lambda c: gated_network(c, bias=c.mlp_bias),
)
FAMILY = replace(_LAYERS, spec=_spec, weights=_weights, headless=())
