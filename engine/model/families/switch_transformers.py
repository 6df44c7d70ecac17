"""Switch Transformers: T5 with layers of experts, one per token (arXiv:2101.03961).

An expert of the encoder takes `expert_capacity` tokens of an input. A decoder's tokens come one by one, so there is
always room for them; only if `transformers` gets several decoder tokens at once does the limit apply there too.
"""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import t5
from engine.model.families.common import activation, linear
from engine.model.spec import Dense, Experts, FeedForward, Lm, ModelSpec
from engine.model.table import Entry, Family, Same, Stacked, WeightTable


def spec(config: Any) -> ModelSpec:
    if config.router_dtype != "float32":
        raise UnsupportedModelError(f"router_dtype of the config must be float32; got {config.router_dtype}.")
    if config.expert_capacity < 1:
        raise UnsupportedModelError(f"expert_capacity of the config must be at least 1; got {config.expert_capacity}.")
    scaled = config.tie_word_embeddings
    return ModelSpec(
        encoder=t5.stack(config, _networks(config, decoder=False), decoder=False),
        decoder=t5.stack(config, _networks(config, decoder=True), decoder=True),
        head=Lm(tied=config.tie_word_embeddings, input_scale=config.d_model**-0.5 if scaled else 1.0),
        context_length=getattr(config, "n_positions", None) or t5.TRAINED_LENGTH,
    )


def _networks(config: Any, *, decoder: bool) -> list[FeedForward]:
    """Experts in every n-th layer, the second layer being the first of them."""
    dense = Dense(config.d_ff, activation(config.dense_act_fn))
    experts = Experts(
        dense,
        count=config.num_experts,
        active=1,
        normalize=False,
        router_bias=config.router_bias,
        capacity=None if decoder else config.expert_capacity,
    )
    layers = config.num_decoder_layers if decoder else config.num_layers
    step = config.decoder_sparse_step if decoder else config.encoder_sparse_step
    return [experts if step == 1 or (step > 0 and i % step == 1) else dense for i in range(layers)]


def weights(model: ModelSpec) -> WeightTable:
    return t5.weights(model, _network)


def _network(target: str, source: str, part: FeedForward) -> list[Entry]:
    source = f"{source}.mlp"
    if isinstance(part, Dense):
        return [*linear(f"{target}.up", f"{source}.wi", False), *linear(f"{target}.down", f"{source}.wo", False)]
    assert isinstance(part, Experts)
    each = [f"{source}.experts.expert_{i}" for i in range(part.count)]
    return [
        *linear(f"{target}.router", f"{source}.router.classifier", part.router_bias),
        Entry(f"{target}.up.weight", tuple(f"{one}.wi.weight" for one in each), Stacked(Same(), part.count)),
        Entry(f"{target}.down.weight", tuple(f"{one}.wo.weight" for one in each), Stacked(Same(), part.count)),
    ]


FAMILY = Family(
    name="Switch Transformers",
    architectures=("SwitchTransformersForConditionalGeneration", "SwitchTransformersModel"),
    headless=("SwitchTransformersModel",),
    brings="encoder and decoder, MoE with limited capacity and one expert per token",
    spec=spec,
    weights=weights,
)
