"""ProphetNet: a decoder whose head reads a stream of next tokens (arXiv:2001.04063)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, cross, even_head_dim, linear, norm, output_table, qkv, token_tables
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

    def stack(name: str) -> Stack:
        decodes = name == "decoder"
        heads = getattr(config, f"num_{name}_attention_heads")
        buckets = QueryBuckets(config.num_buckets, config.relative_max_distance) if decodes else None
        second = NORM if decodes else None
        block = Block(
            placement=Post(NORM, NORM, second),
            attention=_attention(config, heads, buckets),
            cross=_attention(config, heads) if decodes else None,
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
        context_length=config.max_position_embeddings - 2,  # a token's row and that of the next one
    )


def _check(config: Any) -> None:
    """Refuse what the reference cannot compute, or computes in two ways."""
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


def _attention(config: Any, heads: int, buckets: QueryBuckets | None = None) -> Attention:
    head_dim = even_head_dim(config.hidden_size, heads)
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=buckets,
        causal=buckets is not None,
        qkv_bias=True,
        out_bias=True,
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


def _stack(name: str, stack: Stack) -> list[Entry]:
    """Names of what a stack has besides its token table."""
    source = f"prophetnet.{name}"
    entries = [
        Entry(f"{name}.embedding.positions", (f"{source}.position_embeddings.weight",)),
        *norm(f"{name}.embedding.norm", f"{source}.embeddings_layer_norm", bias=True),
    ]
    for i, block in enumerate(stack.blocks):
        entries += _block(f"{name}.blocks.{i}", f"{source}.layers.{i}", block)
    return entries


def _block(target: str, source: str, block: Block) -> list[Entry]:
    def projections(module: str) -> tuple[str, str, str, str]:
        queries, keys, values, out = (f"{source}.{module}.{name}_proj" for name in ("query", "key", "value", "out"))
        return queries, keys, values, out

    *parts, out = projections("self_attn")
    entries = [
        *qkv(f"{target}.attention.inner.qkv", (parts[0], parts[1], parts[2]), block.attention),
        *linear(f"{target}.attention.inner.out", out, True, 1),
        *norm(f"{target}.attention.outer", f"{source}.self_attn_layer_norm", bias=True),
        *linear(f"{target}.ffn.inner.up", f"{source}.feed_forward.intermediate", True, 0),
        *linear(f"{target}.ffn.inner.down", f"{source}.feed_forward.output", True, 1),
        *norm(f"{target}.ffn.outer", f"{source}.feed_forward_layer_norm", bias=True),
    ]
    if block.attention.query_bias:
        scores = f"{target}.attention.inner.distance_scores"
        entries += linear(scores, f"{source}.self_attn.relative_pos_embeddings", True, None)
    if block.cross is not None:
        entries += cross(f"{target}.cross.inner", projections("cross_attn"), block.cross)
        entries += norm(f"{target}.cross.outer", f"{source}.cross_attn_layer_norm", bias=True)
    return entries


FAMILY = Family(
    name="ProphetNet",
    architectures=("ProphetNetForConditionalGeneration", "ProphetNetModel"),
    headless=("ProphetNetModel",),
    brings="encoder and decoder, a second stream for the next token, relative positions computed from queries",
    spec=spec,
    weights=weights,
)
