"""Encoders like BERT: rows with the differences of each family, in its parts and in the names of its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, tokens
from engine.model.families.encoder import (
    ANSWERING,
    BERT_LAYER,
    CLASSIFIERS,
    GENERATOR_HEADS,
    KINDS,
    OLD_NORMS,
    PRETRAINED,
    EncoderNames,
    HeadNames,
    bert_heads,
    encoder,
    encoder_table,
    of,
    roberta_heads,
)
from engine.model.families.encoder_only import (
    bert_head,
    bert_stack,
    check_settings,
    masked_lm,
    named_head,
    positions_after_padding,
    post_norm_encoder,
    roberta_head,
    turned,
)
from engine.model.families.names import LayerNames
from engine.model.normalisation import Norm
from engine.model.positions import Learned, RelativeBuckets
from engine.model.spec import Dense, Head, MaskedLm, ModelSpec, Repeated, Stack
from engine.model.table import Entry, WeightTable


def _learned(config: Any, width: int | None = None) -> Stack:
    return bert_stack(config, Learned(config.max_position_embeddings), width)


def _ernie(config: Any) -> Stack:
    stack = _learned(config)
    if not getattr(config, "use_task_id", False):
        return stack
    return replace(stack, embedding=replace(stack.embedding, tasks=config.task_type_vocab_size))


def _with_boxes(config: Any) -> Stack:
    stack = _learned(config)
    return replace(stack, embedding=replace(stack.embedding, boxes=config.max_2d_position_embeddings))


def _from_padding(config: Any) -> Stack:
    return bert_stack(config, positions_after_padding(config, config.pad_token_id))


def _mapped(config: Any, width: int) -> Stack:
    """The vectors are mapped even if they are as wide as the layers."""
    stack = _learned(config, width)
    return replace(stack, embedding=replace(stack.embedding, expansion=config.hidden_size))


# ---------------------------------------------------------------- RemBERT


def _rembert_head(config: Any) -> Head:
    head = bert_head(config)
    if isinstance(head, MaskedLm):  # never tied, whatever the config says
        head = replace(head, tied=False, width=config.output_embedding_size)
    return head


def _rembert_weights(model: ModelSpec) -> WeightTable:
    source = "cls.predictions"
    heads = replace(
        bert_heads("rembert"),
        masked=(f"{source}.dense", f"{source}.LayerNorm", f"{source}.decoder"),
        masked_bias=None,
    )
    names = EncoderNames(stem="rembert", expansion="encoder.embedding_hidden_mapping_in", heads=heads)
    return replace(encoder_table(model, names), head=None)


# ---------------------------------------------------------------- RoFormer


def _roformer(config: Any) -> Stack:
    if config.rotary_value:
        raise UnsupportedModelError("rotary_value of the config must be false: rotated values are not implemented.")
    return turned(bert_stack(config, None, config.embedding_size), 10_000.0, interleaved=True)


def _roformer_head(config: Any) -> Head:
    act = activation(config.hidden_act)
    return named_head(config, masked_lm(config, act, config.layer_norm_eps), act)


# ---------------------------------------------------------------- ALBERT


def _albert(config: Any) -> Stack:
    """Groups of layers with the same weights."""
    layers, groups, inner = config.num_hidden_layers, config.num_hidden_groups, config.inner_group_num
    if layers % groups:
        raise UnsupportedModelError(
            f"num_hidden_layers of the config must be a multiple of num_hidden_groups {groups}, got {layers}: groups "
            "of layers that run unequally often are not implemented."
        )
    stack = _mapped(config, config.embedding_size)
    return replace(
        stack,
        blocks=stack.blocks[:1] * (groups * inner),
        repeated=Repeated(length=inner, times=layers // groups),
    )


ALBERT_POOLER = r"albert\.pooler\..*"
ALBERT = EncoderNames(
    stem="albert",
    expansion="encoder.embedding_hidden_mapping_in",
    layer=LayerNames(
        qkv=("attention.query", "attention.key", "attention.value"),
        out="attention.dense",
        norms=("attention.LayerNorm", "full_layer_layer_norm"),
        ffn=("ffn", "ffn_output"),
    ),
    heads=HeadNames(
        masked=("predictions.dense", "predictions.LayerNorm", "predictions.decoder"),
        masked_bias="predictions.bias",
        first=("albert.pooler", "classifier"),
        unread={
            # The other head of pretraining, which detects the order of sentences.
            "masked": (ALBERT_POOLER, r"sop_classifier\..*", r"predictions\.(decoder\.)?bias"),
            "each": (ALBERT_POOLER,),
            "answer": (ALBERT_POOLER,),
            "none": (ALBERT_POOLER, r"(predictions|sop_classifier|classifier|qa_outputs)\..*"),
        },
    ),
)


def _albert_weights(model: ModelSpec) -> WeightTable:
    assert model.trunk.repeated is not None
    inner = model.trunk.repeated.length

    def layer(number: int) -> str:
        group, within = divmod(number, inner)
        return f"encoder.albert_layer_groups.{group}.albert_layers.{within}"

    return encoder_table(model, replace(ALBERT, layers=layer))


# ---------------------------------------------------------------- DistilBERT

DISTILBERT_NORM = Norm("layer", 1e-12, bias=True)


def _distilbert(config: Any) -> Stack:
    check_settings(config)
    # With sinusoidal_pos_embds, positions are merely not trained: checkpoints store them like others.
    positions = Learned(config.max_position_embeddings)
    ffn = Dense(config.hidden_dim, activation(config.activation), bias=True)
    embedding = tokens(config, positions=positions, norm=DISTILBERT_NORM)
    return post_norm_encoder(config, embedding, DISTILBERT_NORM, ffn=ffn)


# ---------------------------------------------------------------- MPNet

MPNET_BIAS = RelativeBuckets(buckets=32, max_distance=128, bidirectional=True)


def _mpnet(config: Any) -> Stack:
    """A bias by distance that all layers share."""
    check_settings(config)
    if config.relative_attention_num_buckets != MPNET_BIAS.buckets:
        raise UnsupportedModelError(
            f"relative_attention_num_buckets of the config must be {MPNET_BIAS.buckets}, the number that "
            f"transformers always uses; got {config.relative_attention_num_buckets}."
        )
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    positions = positions_after_padding(config, 1)  # whatever pad_token_id says
    embedding = tokens(config, positions=positions, norm=layer_norm)
    return replace(post_norm_encoder(config, embedding, layer_norm), shared_bias=MPNET_BIAS)


MPNET = EncoderNames(
    stem="mpnet",
    layer=replace(
        BERT_LAYER,
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        norms=("attention.LayerNorm", "output.LayerNorm"),
    ),
    heads=roberta_heads("mpnet"),
    unread=(),
)


def _mpnet_weights(model: ModelSpec) -> WeightTable:
    bias = Entry("encoder.shared_bias.weight", ("mpnet.encoder.relative_attention_bias.weight",))
    return encoder_table(model, MPNET, (bias,))


FAMILIES = (
    # Learned positions and segments, norms after the sums (arXiv:1810.04805, arXiv:2107.02137).
    encoder(
        "BERT and ERNIE",
        ("HF_ColBERT", *of(("ForQuestionAnswering", *PRETRAINED), "Bert", "Ernie")),
        "encoder with learned positions and segments; ERNIE adds task embeddings",
        stack=_ernie,
        head=bert_head,
        names=EncoderNames(
            stem="bert",
            # Buffers of old checkpoints, and tables that the config does not use.
            unread=(r"embeddings\.(position|token_type)_ids", r"embeddings\.(token|task)_type_embeddings\.weight"),
            renamed=(*OLD_NORMS, (r"^ernie\.", "bert.")),
        ),
    ),
    # arXiv:1912.13318
    encoder(
        "LayoutLM",
        of(ANSWERING, "LayoutLM"),
        "BERT's encoder with the position of each token on its page",
        stack=_with_boxes,
        head=bert_head,
        names=EncoderNames(stem="layoutlm", unread=(r"embeddings\.(position_ids|token_type_embeddings\.weight)",)),
    ),
    # Positions are counted from the padding's on (arXiv:1907.11692, arXiv:1911.02116, arXiv:2202.03555).
    encoder(
        "RoBERTa and Data2Vec",
        (
            *of(("ForQuestionAnswering",), "Roberta", "XLMRoberta", "Camembert"),
            *of(KINDS, "Roberta", "XLMRoberta", "Camembert", "Data2VecText"),
        ),
        "BERT's encoder, positions counted from the padding id",
        stack=_from_padding,
        head=roberta_head,
        names=EncoderNames(
            stem="roberta",
            heads=roberta_heads("roberta"),
            unread=(r"embeddings\.(token_type_ids|token_type_embeddings\.weight)",),
            renamed=(*OLD_NORMS, (r"^data2vec_text\.", "roberta.")),
        ),
    ),
    # A separate wide matrix for the vocabulary (arXiv:2010.12821).
    encoder(
        "RemBERT",
        of(KINDS, "RemBert"),
        "BERT's encoder with different widths for input and output embeddings",
        stack=lambda c: _mapped(c, c.input_embedding_size),
        head=_rembert_head,
        weights=_rembert_weights,
    ),
    # arXiv:2104.09864. The sines and cosines in checkpoints are the ones that the reference computes itself.
    encoder(
        "RoFormer",
        of(KINDS, "RoFormer"),
        "BERT's encoder with interleaved rotary positions",
        stack=_roformer,
        head=_roformer_head,
        names=EncoderNames(
            stem="roformer",
            expansion="embeddings_project",
            heads=replace(bert_heads("roformer"), first=("classifier.dense", "classifier.out_proj")),
            unread=(r"encoder\.embed_positions\.weight",),
        ),
    ),
    # Generators and discriminators (arXiv:2003.10555): GELU in all heads, whatever hidden_act says.
    encoder(
        "ELECTRA",
        of(("ForMaskedLM", "ForPreTraining", "ForQuestionAnswering", *CLASSIFIERS), "Electra"),
        "BERT's encoder with narrower embeddings",
        stack=lambda c: _learned(c, c.embedding_size),
        head=lambda c: named_head(c, masked_lm(c, "gelu", c.layer_norm_eps), "gelu"),
        names=EncoderNames(
            stem="electra",
            expansion="embeddings_project",
            # The head that detects replaced tokens in pretraining is unread.
            heads=replace(GENERATOR_HEADS, always_unread=(r"discriminator_predictions\..*",)),
        ),
    ),
    # arXiv:1909.11942
    encoder(
        "ALBERT",
        of(("ForQuestionAnswering", *PRETRAINED), "Albert"),
        "BERT's encoder with one set of weights for all layers",
        stack=_albert,
        head=bert_head,
        weights=_albert_weights,
    ),
    # arXiv:1910.01108
    encoder(
        "DistilBERT",
        of(ANSWERING, "DistilBert"),
        "BERT's encoder without segments",
        stack=_distilbert,
        head=lambda c: named_head(c, masked_lm(c, activation(c.activation), DISTILBERT_NORM.eps), "relu"),
        names=EncoderNames(
            stem="distilbert",
            layers="transformer.layer",
            layer=LayerNames(
                qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
                out="attention.out_lin",
                norms=("sa_layer_norm", "output_layer_norm"),
                ffn=("ffn.lin1", "ffn.lin2"),
            ),
            heads=HeadNames(
                masked=("vocab_transform", "vocab_layer_norm", "vocab_projector"),
                first=("pre_classifier", "classifier"),
                unread={
                    "none": (
                        r"vocab_(transform|layer_norm|projector)\..*",
                        r"(pre_)?classifier\..*",
                        r"qa_outputs\..*",
                    )
                },
            ),
            unread=(r"embeddings\.position_ids",),
        ),
    ),
    # arXiv:2004.09297
    encoder(
        "MPNet",
        of(ANSWERING, "MPNet"),
        "BERT's encoder without segments, relative position buckets",
        stack=_mpnet,
        head=roberta_head,
        weights=_mpnet_weights,
    ),
)
