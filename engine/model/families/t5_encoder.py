"""T5's encoder alone, which makes vectors of texts (Sentence-T5, arXiv:2108.08877; GTR, arXiv:2112.07899)."""

from __future__ import annotations

from typing import Any

from engine.model.families.t5 import TRAINED_LENGTH, encoder, stack_weights
from engine.model.spec import ModelSpec, Pool
from engine.model.table import Entry, Family, WeightTable

_TOKENS, _SHARED = "encoder.embed_tokens.weight", "shared.weight"


def spec(config: Any) -> ModelSpec:
    return ModelSpec(
        encoder=encoder(config),
        decoder=None,
        head=Pool(),
        context_length=getattr(config, "n_positions", None) or TRAINED_LENGTH,
    )


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    # Where both tables are stored and differ, the encoder's own is read.
    names = (_SHARED, _TOKENS) if model.shared_tokens else (_TOKENS,)
    return WeightTable(
        (
            *(Entry("encoder.embedding.tokens", (name,), shard_axis=0) for name in names),
            *stack_weights("encoder", model.encoder),
        ),
        # What was trained with a decoder may still have it.
        ignored=(r"decoder\..*", r"lm_head\.weight", *(() if model.shared_tokens else (r"shared\.weight",))),
        copies=(_TOKENS,),
    )


FAMILY = Family(
    name="T5's encoder",
    architectures=("T5EncoderModel", "MT5EncoderModel"),
    brings="T5's encoder alone, for embeddings",
    spec=spec,
    weights=weights,
)
