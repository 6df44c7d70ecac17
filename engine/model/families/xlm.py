"""XLM: BERT's encoder with learned or sinusoidal positions, and heads of one matrix (arXiv:1901.07291)."""

from __future__ import annotations

from typing import Any, Literal

from engine.errors import UnsupportedModelError
from engine.model.families.common import linear, norm, tokens
from engine.model.families.encoder_only import (
    answer_span,
    answer_weights,
    check_settings,
    post_norm_encoder,
    token_classifier,
    token_weights,
    vocabulary_weights,
)
from engine.model.families.names import LayerNames, layer_weights
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import AnswerSpan, Classifier, Dense, Head, MaskedLm, ModelSpec, Pool
from engine.model.table import Entry, Family, WeightTable

# The hidden state from which a text's classes are computed, by summary_type.
_SUMMARIES: dict[str, Literal["cls", "mean", "last"]] = {
    "first": "cls",
    "last": "last",
    "mean": "mean",
    "cls_index": "last",  # if a request names no other token
}


def spec(config: Any) -> ModelSpec:
    check_settings(config)
    if config.causal:
        raise UnsupportedModelError(
            "causal of the config must be false: this architecture is served as an encoder only, which sees all tokens "
            "of an input."
        )
    if not config.is_encoder:
        raise UnsupportedModelError("is_encoder of the config must be true: transformers has no decoder for it either.")
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    # With sinusoidal_embeddings, positions are merely not trained: checkpoints store them like others. No request names
    # the language of its tokens, and without one transformers adds no language vector either.
    embedding = tokens(config, positions=Learned(config.max_position_embeddings), norm=layer_norm)
    ffn = Dense(4 * config.emb_dim, "gelu" if config.gelu_activation else "relu", bias=True)
    encoder = post_norm_encoder(config, embedding, layer_norm, ffn=ffn)
    return ModelSpec(encoder=encoder, decoder=None, head=_head(config))


def _head(config: Any) -> Head:
    name = config.architectures[0]
    if name.endswith("WithLMHeadModel"):
        if config.asm:
            raise UnsupportedModelError(
                "asm of the config must be false: an adaptive softmax over the vocabulary is not implemented."
            )
        return MaskedLm(tied=config.tie_word_embeddings)
    if name.endswith("ForSequenceClassification"):
        return _classifier(config)
    if name.endswith("ForQuestionAnsweringSimple"):
        return answer_span(config)
    return token_classifier(config) if name.endswith("ForTokenClassification") else Pool()


def _classifier(config: Any) -> Classifier:
    """One matrix over a summary of the text. Raises UnsupportedModelError if the summary is made in another way, or an
    activation follows the matrix."""
    for name in ("summary_use_proj", "summary_proj_to_labels"):
        if not getattr(config, name):
            raise UnsupportedModelError(
                f"{name} of the config must be true: the matrix that it enables returns the classes."
            )
    if config.summary_activation:
        raise UnsupportedModelError(
            f"summary_activation of the config is {config.summary_activation!r}, but must be null: an "
            "activation after the classification matrix is not implemented."
        )
    if config.summary_type not in _SUMMARIES:
        raise UnsupportedModelError(
            f"summary_type of the config is {config.summary_type!r}; implemented: {', '.join(_SUMMARIES)}."
        )
    return Classifier(labels=config.num_labels, pooling=_SUMMARIES[config.summary_type])


def weights(model: ModelSpec) -> WeightTable:
    entries = [
        Entry("encoder.embedding.tokens", ("transformer.embeddings.weight",)),
        Entry("encoder.embedding.positions", ("transformer.position_embeddings.weight",)),
        *norm("encoder.embedding.norm", "transformer.layer_norm_emb", bias=True),
    ]
    for i, block in enumerate(model.trunk.blocks):
        entries += layer_weights(f"encoder.blocks.{i}", "transformer", block, _layer(i))
    match model.head:
        case MaskedLm():
            entries += vocabulary_weights(model.head, "pred_layer.proj", ("pred_layer.proj.bias",))
        case Classifier(pooling=None):
            entries += token_weights("classifier")
        case Classifier():
            entries += linear("head.output", "sequence_summary.summary", True)
        case AnswerSpan():
            entries += answer_weights()
        case _:
            pass
    heads = () if not isinstance(model.head, Pool) else (r"(pred_layer|sequence_summary|classifier|qa_outputs)\..*",)
    return WeightTable(
        tuple(entries),
        prefix="transformer.",
        ignored=(r"transformer\.position_ids", r"transformer\.lang_embeddings\.weight", *heads),
        head="pred_layer.proj.weight" if isinstance(model.head, MaskedLm) else None,
    )


def _layer(number: int) -> LayerNames:
    """Layers have no names of their own: each kind of part is a list."""
    return LayerNames(
        qkv=(f"attentions.{number}.q_lin", f"attentions.{number}.k_lin", f"attentions.{number}.v_lin"),
        out=f"attentions.{number}.out_lin",
        norms=(f"layer_norm1.{number}", f"layer_norm2.{number}"),
        ffn=(f"ffns.{number}.lin1", f"ffns.{number}.lin2"),
    )


FAMILY = Family(
    name="XLM",
    architectures=(
        "XLMForQuestionAnsweringSimple",
        "XLMForSequenceClassification",
        "XLMForTokenClassification",
        "XLMModel",
        "XLMWithLMHeadModel",
    ),
    brings="BERT's encoder without segments, heads of a single matrix",
    spec=spec,
    weights=weights,
)
