"""What BART and its relatives share: one config, one set of names, and few places where they differ."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, cross, linear, norm, output_table, qkv, token_tables
from engine.model.normalisation import Norm
from engine.model.positions import Learned, Positions, Sinusoidal
from engine.model.sinusoidal import fill_sinusoids
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Post, Pre, Stack, Tokens
from engine.model.table import Entry, Row, WeightTable

NORM = Norm("layer", 1e-5, bias=True)
COPIES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")


def spec(
    config: Any, positions: Positions, *, pre: bool, embedding_norm: bool, decoder_vocab: int | None = None
) -> ModelSpec:
    """The parts of an encoder-decoder config.

    Args:
        positions: added to the embeddings of both stacks.
        pre: norms stand before the sublayers, and one after the last layer; else after each residual.
        embedding_norm: the embeddings are normalised.
        decoder_vocab: size of the decoder's own vocabulary, None where both stacks have one table.

    Raises:
        UnsupportedModelError: a setting that the architecture has no place for.
    """
    _check(config, positions, pre=pre, embedding_norm=embedding_norm)

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
                scale=config.d_model**0.5 if config.scale_embedding else 1.0,
                positions=positions,
                norm=NORM if embedding_norm else None,
            ),
            blocks=(block,) * getattr(config, f"{name}_layers"),
            final_norm=NORM if pre else None,
        )

    return ModelSpec(
        encoder=stack("encoder", config.vocab_size),
        decoder=stack("decoder", decoder_vocab or config.vocab_size),
        head=Lm(tied=config.tie_word_embeddings, bias=True),
        shared_tokens=decoder_vocab is None,
    )


def _check(config: Any, positions: Positions, *, pre: bool, embedding_norm: bool) -> None:
    """Refuse what the architecture has no place for; settings of old configs that all relatives once shared must not
    contradict it."""
    fixed = {"normalize_before": pre, "add_final_layer_norm": pre, "normalize_embedding": embedding_norm}
    if isinstance(positions, Sinusoidal):
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


def weights(model: ModelSpec) -> WeightTable:
    """Names of all tensors, as every relative has them."""
    assert model.decoder is not None
    assert model.encoder is not None
    entries = [
        *token_tables(model, "model.shared.weight", *COPIES),
        output_table(model, "lm_head"),
        # Models that were never resized may leave their bias of zeros out.
        Entry("head.bias", ("final_logits_bias",), Row(), shard_axis=0, default=0.0),
    ]
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        source = f"model.{name}"
        assert isinstance(stack.embedding, Tokens)
        if stack.embedding.positions is not None:
            fixed = fill_sinusoids if isinstance(stack.embedding.positions, Sinusoidal) else None
            entries.append(Entry(f"{name}.embedding.positions", (f"{source}.embed_positions.weight",), default=fixed))
        if stack.embedding.norm is not None:
            entries += norm(f"{name}.embedding.norm", f"{source}.layernorm_embedding", bias=True)
        if stack.final_norm is not None:
            entries += norm(f"{name}.final_norm", f"{source}.layer_norm", bias=True)
        for i, block in enumerate(stack.blocks):
            entries += block_weights(f"{name}.blocks.{i}", f"{source}.layers.{i}", block)
    return WeightTable(
        tuple(entries),
        prefix="model.",
        # What fairseq noted, and a shared table that neither stack uses.
        ignored=(
            r"model\.(encoder|decoder)\.version",
            *(() if model.shared_tokens else (r"model\.shared\.weight",)),
        ),
        head="lm_head.weight",
        copies=COPIES,
    )


def block_weights(target: str, source: str, block: Block) -> list[Entry]:
    """Names of a layer's tensors."""
    place = "before" if isinstance(block.placement, Pre) else "outer"
    own = [f"{source}.self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    entries = [
        *norm(f"{target}.attention.{place}", f"{source}.self_attn_layer_norm", bias=True),
        *qkv(f"{target}.attention.inner.qkv", (own[0], own[1], own[2]), block.attention),
        *linear(f"{target}.attention.inner.out", own[3], True, 1),
        *norm(f"{target}.ffn.{place}", f"{source}.final_layer_norm", bias=True),
        *linear(f"{target}.ffn.inner.up", f"{source}.fc1", True, 0),
        *linear(f"{target}.ffn.inner.down", f"{source}.fc2", True, 1),
    ]
    if block.cross is not None:
        q, k, v, out = (f"{source}.encoder_attn.{name}_proj" for name in ("q", "k", "v", "out"))
        entries += norm(f"{target}.cross.{place}", f"{source}.encoder_attn_layer_norm", bias=True)
        entries += cross(f"{target}.cross.inner", (q, k, v, out), block.cross)
    return entries
