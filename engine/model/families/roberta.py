"""RoBERTa and Data2Vec: BERT's encoder with positions counted from the padding's on (arXiv:1907.11692,
arXiv:1911.02116, arXiv:2202.03555)."""

from __future__ import annotations

from typing import Any

from engine.model.families.bert import stack
from engine.model.families.encoder_only import (
    OLD_NORMS,
    answer_weights,
    first_token_weights,
    masked_lm,
    masked_lm_weights,
    named_head,
    positions_after_padding,
    stack_weights,
    token_weights,
)
from engine.model.spec import AnswerSpan, Classifier, Head, MaskedLm, ModelSpec
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    positions = positions_after_padding(config, config.pad_token_id)
    return ModelSpec(
        encoder=stack(config, positions),
        decoder=None,
        head=head_of(config),
        context_length=positions.size - positions.offset,
    )


def head_of(config: Any) -> Head:
    """The head of a config of RoBERTa's kind: GELU before the vocabulary, whatever hidden_act says."""
    return named_head(config, masked_lm(config, "gelu", config.layer_norm_eps), "tanh")


def weights(model: ModelSpec) -> WeightTable:
    entries = stack_weights(model, "roberta")
    more, ignored = head_weights(model, "roberta")
    return WeightTable(
        tuple(entries + more),
        prefix="roberta.",
        renamed=(*OLD_NORMS, (r"^data2vec_text\.", "roberta.")),
        ignored=(*ignored, r"roberta\.embeddings\.(token_type_ids|token_type_embeddings\.weight)"),
        head="lm_head.decoder.weight" if isinstance(model.head, MaskedLm) else None,
    )


def head_weights(model: ModelSpec, source: str) -> tuple[list[Entry], tuple[str, ...]]:
    """The weights of a head as RoBERTa names them, and patterns of what may be left unused.

    Args:
        source: what the encoder's names begin with.
    """
    # Old checkpoints hold buffers, and a pooler that no head reads.
    ignored = (rf"{source}\.embeddings\.position_ids", rf"{source}\.pooler\..*")
    match model.head:
        case MaskedLm():
            entries = masked_lm_weights(
                model.head, dense="lm_head.dense", layer_norm="lm_head.layer_norm", output="lm_head.decoder",
                bias="lm_head.bias",
            )  # fmt: skip
            return entries, (*ignored, r"lm_head\.(decoder\.)?bias")
        case Classifier(pooling=None):
            return token_weights("classifier"), (*ignored, r"lm_head\..*")
        case Classifier():
            return first_token_weights("classifier.dense", "classifier.out_proj"), (*ignored, r"lm_head\..*")
        case AnswerSpan():
            return answer_weights(), (*ignored, r"lm_head\..*")
        case _:
            return [], (*ignored, r"(lm_head|classifier|qa_outputs)\..*")


KINDS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "Model")

FAMILY = Family(
    name="RoBERTa and Data2Vec",
    architectures=(
        *(f"{name}ForQuestionAnswering" for name in ("Roberta", "XLMRoberta", "Camembert")),
        *(f"{name}{kind}" for name in ("Roberta", "XLMRoberta", "Camembert", "Data2VecText") for kind in KINDS),
    ),
    brings="BERT's encoder, positions counted from the padding id",
    spec=spec,
    weights=weights,
)
