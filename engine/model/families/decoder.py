"""A family of decoders as a row of a table: each argument of `decoder` is a part of the model, read from a config.

`decoders.py`, `older_decoders.py` and `expert_decoders.py` contain the rows. An argument that a row leaves out has
LLaMA's value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.model.families.common import gated_network, lm, rms, tokens
from engine.model.families.names import DecoderNames, decoder_table
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, FeedForward, Lm, ModelSpec, Placement, Pre, Stack, StateLayer, Tokens
from engine.model.table import Family, WeightTable

Factors = tuple[tuple[str, tuple[float, ...], tuple[int, ...]], ...]


def before_each_sublayer(_config: Any, norm: Norm) -> Placement:
    return Pre(norm, norm)


def pairs(*names: str) -> tuple[str, ...]:
    """LlamaForCausalLM and LlamaModel for Llama."""
    return tuple(f"{name}{kind}" for name in names for kind in ("ForCausalLM", "Model"))


def decoder(
    name: str,
    architectures: tuple[str, ...],
    brings: str,
    *,
    attention: Callable[[Any], Attention | list[Attention]],
    mixing: Callable[[Any], list[StateLayer | None]] | None = None,
    ffn: Callable[[Any], FeedForward | list[FeedForward]] = gated_network,
    norm: Callable[[Any], Norm] = rms,
    placement: Callable[[Any, Norm], Placement | list[Placement]] = before_each_sublayer,
    embedding: Callable[[Any], Tokens] = tokens,
    final_norm: Callable[[Any], Norm | None] | None = None,
    crosses: Callable[[Any], bool] | None = None,
    head: Callable[[Any], Lm] = lm,
    carried: bool = False,
    residual_scale: Callable[[Any], float] | None = None,
    factors: Callable[[Any], Factors | list[Factors]] | None = None,
    projection: Callable[[Any], int | None] | None = None,
    context_length: Callable[[Any], int] | None = None,
    refuse: Callable[[Any], None] | None = None,
    names: DecoderNames | None = None,
    weights: Callable[[ModelSpec], WeightTable] | None = None,
    reads_mxfp4: bool = False,
) -> Family:
    """The family of these decoders.

    Args:
        name, architectures, brings, reads_mxfp4: see `Family`. Architectures whose names end with Model have no head.
        attention, ffn: one for all layers, or a list with one for each.
        mixing: for each layer, the part that carries a state; None if it has none.
        norm: the norm of the layers, and of the end unless `final_norm` is set.
        placement: the placement of a layer's norms, from the config and the norm: one for all layers, or a list.
        crosses: whether layers also attend to an encoder, by attention of the same form.
        carried, residual_scale, factors, projection, context_length: see `Block`, `Stack` and `ModelSpec`; factors may
            be a list with those of each layer.
        refuse: raises UnsupportedModelError for settings that no part expresses.
        names: names of the weights; None for LLaMA's.
        weights: the table of weights, if names are not sufficient.
    """

    def spec(config: Any) -> ModelSpec:
        if refuse is not None:
            refuse(config)
        own, found, networks = norm(config), attention(config), ffn(config)
        layers = len(found) if isinstance(found, list) else config.num_hidden_layers
        attentions = found if isinstance(found, list) else [found] * layers
        order, factor = placement(config, own), 1.0 if residual_scale is None else residual_scale(config)
        crossing = crosses is not None and crosses(config)
        if crossing:
            order = Pre(own, own, own)
        orders = order if isinstance(order, list) else [order] * layers
        multiplied = () if factors is None else factors(config)
        blocks = tuple(
            Block(
                placement=place,
                attention=part,
                mixing=state,
                cross=part if crossing else None,
                ffn=network,
                residual_scale=factor,
                carried=carried,
                factors=own_factors,
            )
            for place, part, state, network, own_factors in zip(
                orders,
                attentions,
                [None] * layers if mixing is None else mixing(config),
                networks if isinstance(networks, list) else [networks] * layers,
                multiplied if isinstance(multiplied, list) else [multiplied] * layers,
                strict=True,
            )
        )
        stack = Stack(
            hidden_size=config.hidden_size,
            embedding=embedding(config),
            blocks=blocks,
            final_norm=own if final_norm is None else final_norm(config),
            projection=None if projection is None else projection(config),
        )
        length = None if context_length is None else context_length(config)
        return ModelSpec(encoder=None, decoder=stack, head=head(config), context_length=length)

    def table(model: ModelSpec) -> WeightTable:
        return decoder_table(model, names or DecoderNames())

    return Family(
        name=name,
        architectures=architectures,
        headless=tuple(n for n in architectures if n.endswith("Model") and not n.endswith("HeadModel")),
        brings=brings,
        spec=spec,
        weights=weights or table,
        reads_mxfp4=reads_mxfp4,
    )
