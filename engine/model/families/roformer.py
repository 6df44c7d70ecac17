"""RoFormer: BERT's encoder with rotary positions of neighbouring features (arXiv:2104.09864)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import bert
from engine.model.families.common import activation, linear
from engine.model.families.encoder_only import (
    OLD_NORMS,
    first_token_weights,
    masked_lm,
    named_head,
    stack_weights,
    turned,
)
from engine.model.spec import Classifier, ModelSpec, Tokens
from engine.model.table import Family, WeightTable

_THETA = 10_000.0


def spec(config: Any) -> ModelSpec:
    if config.rotary_value:
        raise UnsupportedModelError("rotary_value of the config must be false: values that are rotated have no part.")
    encoder = turned(bert.stack(config, None, config.embedding_size), _THETA, interleaved=True)
    act = activation(config.hidden_act)
    head = named_head(config, masked_lm(config, act, config.layer_norm_eps), act)
    return ModelSpec(encoder=encoder, decoder=None, head=head)


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    assert isinstance(model.encoder.embedding, Tokens)
    entries = stack_weights(model, "roformer")
    if model.encoder.embedding.expansion is not None:
        entries += linear("encoder.embedding.expansion", "roformer.embeddings_project", True, 0)
    more, ignored = bert.head_weights(model, "roformer")
    if isinstance(model.head, Classifier) and model.head.pooling is not None:
        more = first_token_weights("classifier.dense", "classifier.out_proj")
    return WeightTable(
        tuple(entries + more),
        prefix="roformer.",
        # Sines and cosines, which the reference makes itself.
        ignored=(*ignored, r"roformer\.encoder\.embed_positions\.weight"),
        renamed=OLD_NORMS,
        head=bert.masked_table(model),
    )


FAMILY = Family(
    name="RoFormer",
    architectures=tuple(f"RoFormer{kind}" for kind in bert.KINDS if kind != "ForPreTraining"),
    brings="BERT's encoder with interleaved rotary positions",
    spec=spec,
    weights=weights,
)
