"""The common part of BART and its relatives: one config, one set of names, and few places where they differ."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, cross, linear, norm, output_table, qkv, token_tables
from engine.model.normalisation import Norm
from engine.model.positions import Learned, Positions, SpannedSinusoidal
from engine.model.sinusoidal import fixed_vectors
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Post, Pre, Stack, Tokens
from engine.model.table import Entry, Row, WeightTable

NORM = Norm("layer", 1e-5, bias=True)
COPIES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")


def spec(
    config: Any,
    positions: Positions,
    *,
    pre: bool,
    embedding_norm: bool,
    head_bias: bool = True,
    vocabularies: tuple[int, int] | None = None,
) -> ModelSpec:
    """The parts of an encoder-decoder config.

    Args:
        positions: added to the embeddings of both stacks.
        pre: norms stand before the sublayers, and one after the last layer; else after each residual.
        embedding_norm: the embeddings are normalised.
        head_bias: the logits have a bias.
        vocabularies: sizes of the encoder's and of the decoder's own one, None where both stacks have one table.

    Raises:
        UnsupportedModelError: a setting that the architecture has no place for.
    """
    _check(config, positions, pre=pre, embedding_norm=embedding_norm)
    read, written = vocabularies or (config.vocab_size, config.vocab_size)

    def stack(name: str, vocab_size: int) -> Stack:
        crosses = name == "decoder"
        heads = getattr(config, f"{name}_attention_heads")
        attention = _attention(config, heads, causal=crosses)
        second = NORM if crosses else None
        block = Block(
            placement=Pre(NORM, NORM, second) if pre else Post(NORM, NORM, second),
            attention=attention,
            cross=_attention(config, heads, causal=False) if crosses else None,
            ffn=Dense(getattr(config, f"{name}_ffn_dim"), activation(config.activation_function), bias=True),
        )
        return Stack(
            hidden_size=config.d_model,
            embedding=Tokens(
                vocab_size=vocab_size,
                width=config.d_model,
                scale=config.d_model**0.5 if getattr(config, "scale_embedding", False) else 1.0,
                positions=positions,
                norm=NORM if embedding_norm else None,
            ),
            blocks=(block,) * getattr(config, f"{name}_layers"),
            final_norm=NORM if pre else None,
        )

    return ModelSpec(
        encoder=stack("encoder", read),
        decoder=stack("decoder", written),
        head=Lm(tied=config.tie_word_embeddings, bias=head_bias),
        shared_tokens=vocabularies is None,
    )


def _check(config: Any, positions: Positions, *, pre: bool, embedding_norm: bool) -> None:
    """Refuse what the architecture has no place for; settings of old configs that all relatives once shared must not
    contradict it."""
    fixed = {"normalize_before": pre, "add_final_layer_norm": pre, "normalize_embedding": embedding_norm}
    if not isinstance(positions, Learned):
        fixed["static_position_embeddings"] = True
    for name, expected in fixed.items():
        value = getattr(config, name, None)
        if value is not None and bool(value) != expected:
            raise UnsupportedModelError(f"{name} must be {str(expected).lower()} for this architecture, got {value}.")
    for name in ("encoder", "decoder"):
        heads = getattr(config, f"{name}_attention_heads")
        if config.d_model % heads:
            raise UnsupportedModelError(
                f"d_model ({config.d_model}) must be a multiple of {name}_attention_heads ({heads})."
            )


def learned(config: Any) -> Learned:
    """The table of a config's positions; its first two rows belong to none."""
    return Learned(config.max_position_embeddings + 2, offset=2)


def fixed_after_padding(config: Any) -> SpannedSinusoidal:
    """Fixed positions that are counted from the row after the padding's on.

    Raises:
        UnsupportedModelError: the padding is no token.
    """
    padding = config.pad_token_id
    if not isinstance(padding, int) or not 0 <= padding < config.vocab_size:
        raise UnsupportedModelError(
            f"pad_token_id of the config must be an id below its vocab_size {config.vocab_size}, since positions are "
            f"counted from the row after it; got {padding!r}."
        )
    first = padding + 1  # the rows before it belong to no position
    return SpannedSinusoidal(config.max_position_embeddings + first, offset=first, unplaced=padding)


def _attention(config: Any, heads: int, *, causal: bool) -> Attention:
    head_dim = config.d_model // heads
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        causal=causal,
        qkv_bias=True,
        out_bias=True,
    )


def weights(model: ModelSpec, output: str = "lm_head") -> WeightTable:
    """Names of all tensors, as every relative has them.

    Args:
        output: the name of the output matrix.
    """
    assert model.decoder is not None
    assert model.encoder is not None
    assert isinstance(model.head, Lm)
    entries = [*token_tables(model, "model.shared.weight", *COPIES), output_table(model, output)]
    if model.head.bias:
        # Models that were never resized may leave their bias of zeros out.
        entries.append(Entry("head.bias", ("final_logits_bias",), Row(), shard_axis=0, default=0.0))
    entries += stack_weights("encoder", model.encoder) + stack_weights("decoder", model.decoder)
    return WeightTable(
        tuple(entries),
        prefix="model.",
        # What fairseq noted, fixed positions under an old name, and a shared table that neither stack uses.
        ignored=(
            r"model\.(encoder|decoder)\.version",
            r"model\.(encoder|decoder)\.embed_positions\.weights",
            *(() if model.shared_tokens else (r"model\.shared\.weight",)),
        ),
        head=f"{output}.weight",
        copies=COPIES,
    )


def stack_weights(name: str, stack: Stack) -> list[Entry]:
    """Names of what a stack has besides its token table."""
    entries: list[Entry] = []
    source = f"model.{name}"
    assert isinstance(stack.embedding, Tokens)
    if stack.embedding.positions is not None:
        fixed = fixed_vectors(stack.embedding.positions)
        entries.append(Entry(f"{name}.embedding.positions", (f"{source}.embed_positions.weight",), default=fixed))
    for ours, part in (("norm", stack.embedding.norm), ("token_norm", stack.embedding.token_norm)):
        if part is not None:
            entries += norm(f"{name}.embedding.{ours}", f"{source}.layernorm_embedding", bias=True)
    if stack.final_norm is not None:
        entries += norm(f"{name}.final_norm", f"{source}.layer_norm", bias=True)
    for i, block in enumerate(stack.blocks):
        entries += block_weights(f"{name}.blocks.{i}", f"{source}.layers.{i}", block)
    return entries


def block_weights(target: str, source: str, block: Block) -> list[Entry]:
    """A layer as fairseq names it, all of whose feed-forward matrices have biases."""
    place = "before" if isinstance(block.placement, Pre) else "outer"
    own = [f"{source}.self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    entries = [
        *norm(f"{target}.attention.{place}", f"{source}.self_attn_layer_norm", bias=True),
        *qkv(f"{target}.attention.inner.qkv", (own[0], own[1], own[2]), block.attention),
        *linear(f"{target}.attention.inner.out", own[3], block.attention.out_bias, 1),
        *norm(f"{target}.ffn.{place}", f"{source}.final_layer_norm", bias=True),
        *linear(f"{target}.ffn.inner.up", f"{source}.fc1", True, 0),
        *linear(f"{target}.ffn.inner.down", f"{source}.fc2", True, 1),
    ]
    if block.cross is not None:
        q, k, v, out = (f"{source}.encoder_attn.{name}_proj" for name in ("q", "k", "v", "out"))
        entries += norm(f"{target}.cross.{place}", f"{source}.encoder_attn_layer_norm", bias=True)
        entries += cross(f"{target}.cross.inner", (q, k, v, out), block.cross)
    return entries
