"""UMT5: T5 whose layers have a bias of relative buckets each (arXiv:2304.09151)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families import t5
from engine.model.spec import Lm, ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    model = t5.spec(config)
    assert model.encoder is not None
    assert model.decoder is not None
    # transformers ties and scales whatever the stored config says.
    head = Lm(tied=config.tie_word_embeddings, input_scale=config.d_model**-0.5)
    return replace(model, encoder=t5.own_biases(model.encoder), decoder=t5.own_biases(model.decoder), head=head)


FAMILY = Family(
    name="UMT5",
    architectures=("UMT5ForConditionalGeneration", "UMT5Model"),
    headless=("UMT5Model",),
    brings="encoder and decoder, relative position buckets per layer",
    spec=spec,
    weights=t5.weights,
)
