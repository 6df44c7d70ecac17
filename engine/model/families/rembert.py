"""RemBERT: BERT's encoder over narrow vectors, with a wide matrix of its own for the vocabulary (arXiv:2010.12821)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families import bert
from engine.model.families.common import linear
from engine.model.families.encoder_only import OLD_NORMS, masked_lm_weights, stack_weights
from engine.model.positions import Learned
from engine.model.spec import MaskedLm, ModelSpec
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    encoder = bert.stack(config, Learned(config.max_position_embeddings), config.input_embedding_size)
    # The vectors are mapped even where they are as wide as the layers.
    encoder = replace(encoder, embedding=replace(encoder.embedding, expansion=config.hidden_size))
    head = bert.head_of(config)
    if isinstance(head, MaskedLm):  # never tied, whatever the config says
        head = replace(head, tied=False, width=config.output_embedding_size)
    return ModelSpec(encoder=encoder, decoder=None, head=head)


def weights(model: ModelSpec) -> WeightTable:
    entries = stack_weights(model, "rembert")
    entries += linear("encoder.embedding.expansion", "rembert.encoder.embedding_hidden_mapping_in", True, 0)
    more, ignored = bert.head_weights(model, "rembert")
    if isinstance(model.head, MaskedLm):
        source = "cls.predictions"
        more = masked_lm_weights(
            model.head, dense=f"{source}.dense", layer_norm=f"{source}.LayerNorm", output=f"{source}.decoder"
        )
    return WeightTable(
        tuple(entries + more),
        prefix="rembert.",
        ignored=(*ignored, r"rembert\.embeddings\.((position|token_type)_ids|token_type_embeddings\.weight)"),
        renamed=OLD_NORMS,
    )


FAMILY = Family(
    name="RemBERT",
    architectures=tuple(f"RemBert{kind}" for kind in bert.KINDS if kind != "ForPreTraining"),
    brings="BERT's encoder with different widths for input and output embeddings",
    spec=spec,
    weights=weights,
)
