"""ProphetNet: a decoder whose head reads a stream of next tokens (arXiv:2001.04063)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    linear,
    multi_head,
    output_table,
    token_tables,
)
from engine.model.families.names import StackNames, stack_weights
from engine.model.normalisation import Norm
from engine.model.positions import Learned, QueryBuckets
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Post, PredictingStream, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable

NORM = Norm("layer", 1e-5, bias=True)
COPIES = ("prophetnet.encoder.word_embeddings.weight", "prophetnet.decoder.word_embeddings.weight")


def spec(config: Any) -> ModelSpec:
    _check(config)
    # transformers reads positions from the row after the padding's on.
    positions = Learned(config.max_position_embeddings, offset=1)

    def attention(heads: int, buckets: QueryBuckets | None = None) -> Attention:
        return multi_head(config, heads=heads, position=buckets, causal=buckets is not None)

    def stack(name: str) -> Stack:
        decodes = name == "decoder"
        heads = getattr(config, f"num_{name}_attention_heads")
        buckets = QueryBuckets(config.num_buckets, config.relative_max_distance) if decodes else None
        second = NORM if decodes else None
        block = Block(
            placement=Post(NORM, NORM, second),
            attention=attention(heads, buckets),
            cross=attention(heads) if decodes else None,
            ffn=Dense(getattr(config, f"{name}_ffn_dim"), activation(config.activation_function), bias=True),
        )
        size = config.hidden_size
        return Stack(
            hidden_size=size,
            embedding=Tokens(vocab_size=config.vocab_size, width=size, positions=positions, norm=NORM),
            blocks=(block,) * getattr(config, f"num_{name}_layers"),
            final_norm=None,
            predicting=PredictingStream(config.ngram) if decodes else None,
        )

    return ModelSpec(
        encoder=stack("encoder"),
        decoder=stack("decoder"),
        head=Lm(tied=config.tie_word_embeddings),
        context_length=config.max_position_embeddings - 2,  # a token's row and the row of the next token
    )


def _check(config: Any) -> None:
    """Refuse settings that the reference cannot compute, or computes in two ways."""
    if not config.add_cross_attention:
        raise UnsupportedModelError("add_cross_attention must be true: the decoder attends to the encoder.")
    if config.pad_token_id != 0:
        raise UnsupportedModelError(
            "pad_token_id of the config must be 0: with another one transformers counts distances from the first token "
            f"in one way and those from later ones in another; got {config.pad_token_id!r}."
        )
    if config.max_position_embeddings < 3:
        raise UnsupportedModelError(
            "max_position_embeddings of the config must be at least 3, since one row is padding's and a token needs "
            f"the next one's, too; got {config.max_position_embeddings}."
        )
    exact, farthest = config.num_buckets // 2, config.relative_max_distance
    if not 0 < exact < farthest:
        raise UnsupportedModelError(
            f"num_buckets of the config must be at least 2, got {config.num_buckets}, and relative_max_distance above "
            f"the {exact} distances that have a bucket each, got {farthest}."
        )


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    assert model.decoder is not None
    return WeightTable(
        (
            *token_tables(model, "prophetnet.word_embeddings.weight", *COPIES),
            output_table(model, "lm_head"),
            *_stack("encoder", model.encoder),
            *_stack("decoder", model.decoder),
            Entry("decoder.predicting", ("prophetnet.decoder.ngram_embeddings.weight",)),
        ),
        prefix="prophetnet.",
        # A shared table that neither stack uses.
        ignored=() if model.shared_tokens else (r"prophetnet\.word_embeddings\.weight",),
        head="lm_head.weight",
        copies=COPIES,
    )


NAMES = StackNames(
    tokens="",
    positions="position_embeddings.weight",
    embedding_norm="embeddings_layer_norm",
    qkv=("self_attn.query_proj", "self_attn.key_proj", "self_attn.value_proj"),
    out="self_attn.out_proj",
    norms=("self_attn_layer_norm", "feed_forward_layer_norm"),
    cross=("cross_attn.query_proj", "cross_attn.key_proj", "cross_attn.value_proj", "cross_attn.out_proj"),
    cross_norm="cross_attn_layer_norm",
    ffn=("feed_forward.intermediate", "feed_forward.output"),
)


def _stack(side: str, stack: Stack) -> list[Entry]:
    """Names in a stack besides its token table."""
    entries = stack_weights(side, stack, replace(NAMES, stem=f"prophetnet.{side}"))
    for i, block in enumerate(stack.blocks):
        if block.attention.query_bias:
            scores = f"{side}.blocks.{i}.attention.inner.distance_scores"
            source = f"prophetnet.{side}.layers.{i}.self_attn.relative_pos_embeddings"
            entries += linear(scores, source, True)
    return entries


FAMILY = Family(
    name="ProphetNet",
    architectures=("ProphetNetForConditionalGeneration", "ProphetNetModel"),
    headless=("ProphetNetModel",),
    brings="encoder and decoder, a second stream for the next token, relative positions computed from queries",
    spec=spec,
    weights=weights,
)
