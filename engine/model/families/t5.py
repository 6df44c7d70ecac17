"""T5, UMT5 and their encoder alone: relative position buckets, unscaled scores (arXiv:1910.10683)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.classification import repeats_after_start
from engine.model.families.common import activation, dense, gated, output_table, token_tables
from engine.model.families.encoder_decoder import both
from engine.model.families.names import StackNames
from engine.model.families.names import stack_weights as names_of_stack
from engine.model.normalisation import Norm
from engine.model.positions import RelativeBuckets
from engine.model.spec import Attention, Block, Dense, FeedForward, Gated, Lm, ModelSpec, Pool, Pre, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable

TRAINED_LENGTH = 512
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def spec(config: Any) -> ModelSpec:
    # transformers takes it from tie_word_embeddings of the stored config, and ties whatever that says; mT5 never
    # scales.
    scaled = getattr(config, "scale_decoder_outputs", False)
    return ModelSpec(
        encoder=encoder(config),
        decoder=stack(config, [feed_forward(config)] * config.num_decoder_layers, decoder=True),
        head=Lm(tied=config.tie_word_embeddings, input_scale=config.d_model**-0.5 if scaled else 1.0),
        # Distances have no limit; this is the length of training.
        context_length=getattr(config, "n_positions", None) or TRAINED_LENGTH,
    )


def encoder(config: Any) -> Stack:
    return stack(config, [feed_forward(config)] * config.num_layers, decoder=False)


def feed_forward(config: Any) -> Dense | Gated:
    """The feed-forward network of every layer."""
    kind = Gated if config.is_gated_act else Dense
    return kind(config.d_ff, activation(config.dense_act_fn))


def stack(config: Any, networks: list[FeedForward], *, decoder: bool) -> Stack:
    """A stack with one layer per feed-forward network; all of them add the same bias of buckets."""
    norm = Norm("rms", config.layer_norm_epsilon)
    blocks = tuple(
        Block(
            placement=Pre(attention=norm, ffn=norm, cross=norm if decoder else None),
            attention=_attention(config, causal=decoder),
            cross=_attention(config, causal=False) if decoder else None,
            ffn=ffn,
        )
        for ffn in networks
    )
    return Stack(
        hidden_size=config.d_model,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.d_model),
        blocks=blocks,
        final_norm=norm,
        # Stored with the first layer, added in every self-attention of the stack.
        shared_bias=_buckets(config, decoder=decoder),
    )


def _buckets(config: Any, *, decoder: bool) -> RelativeBuckets:
    buckets, farthest = config.relative_attention_num_buckets, config.relative_attention_max_distance
    exact = buckets // (2 if decoder else 4)
    if not 0 < exact < farthest:
        raise UnsupportedModelError(
            f"relative_attention_num_buckets of the config must be at least 4, got {buckets}, and "
            f"relative_attention_max_distance above the {exact} distances that have a bucket each, got {farthest}."
        )
    return RelativeBuckets(buckets, farthest, bidirectional=not decoder)


def own_biases(shared: Stack) -> Stack:
    """The same stack with a separate bias of buckets for each layer."""
    blocks = (
        replace(block, attention=replace(block.attention, position=shared.shared_bias)) for block in shared.blocks
    )
    return replace(shared, blocks=tuple(blocks), shared_bias=None)


def _attention(config: Any, *, causal: bool) -> Attention:
    return Attention(heads=config.num_heads, kv_heads=config.num_heads, head_dim=config.d_kv, scale=1.0, causal=causal)


def dense_or_gated(target: str, source: str, part: FeedForward) -> list[Entry]:
    """A layer's feed-forward network."""
    source = f"{source}.DenseReluDense"
    if isinstance(part, Gated):
        return gated(target, source, part, ("wi_0", "wi_1", "wo"))
    assert isinstance(part, Dense)
    return dense(target, source, part, ("wi", "wo"))


def weights(model: ModelSpec, network: Callable[[str, str, FeedForward], list[Entry]] = dense_or_gated) -> WeightTable:
    """Names of all tensors. `network`: the entries of a feed-forward network, from its name here and its layer's
    prefix."""
    assert model.decoder is not None
    assert model.encoder is not None
    assert isinstance(model.head, Lm)
    entries = [*token_tables(model, "shared.weight", *COPIES), output_table(model, "lm_head")]
    entries += [*stack_weights("encoder", model.encoder, network), *stack_weights("decoder", model.decoder, network)]
    return WeightTable(
        tuple(entries),
        # A bias that old checkpoints store and nothing uses, and a shared table that neither stack uses.
        ignored=(
            r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
            *(() if model.shared_tokens else (r"shared\.weight",)),
        ),
        head="lm_head.weight",
        expects_head=model.head.input_scale == 1.0,  # version 1.1, FLAN and mT5
        copies=COPIES,
    )


def stack_weights(
    side: str, stack: Stack, network: Callable[[str, str, FeedForward], list[Entry]] = dense_or_gated
) -> list[Entry]:
    """The weights of the encoder or the decoder, without the token table; `network` as in `weights`."""
    own, other, last = "layer.0.SelfAttention", "layer.1.EncDecAttention", 2 if side == "decoder" else 1
    names = StackNames(
        stem=side,
        tokens="",
        final_norm="final_layer_norm",
        layers="block",
        qkv=(f"{own}.q", f"{own}.k", f"{own}.v"),
        out=f"{own}.o",
        norms=("layer.0.layer_norm", f"layer.{last}.layer_norm"),
        cross=(f"{other}.q", f"{other}.k", f"{other}.v", f"{other}.o"),
        cross_norm="layer.1.layer_norm",
        ffn=lambda target, source, part: network(target, f"{source}.layer.{last}", part),
    )
    entries = names_of_stack(side, stack, names)
    if stack.shared_bias is not None:
        entries.append(_bias(f"{side}.shared_bias", f"{side}.block.0"))
    for i, block in enumerate(stack.blocks):
        if block.attention.position is not None:
            entries.append(_bias(f"{side}.blocks.{i}.attention.inner.distance_bias", f"{side}.block.{i}"))
    return entries


def _bias(target: str, source: str) -> Entry:
    return Entry(f"{target}.weight", (f"{source}.layer.0.SelfAttention.relative_attention_bias.weight",))


def _own_biases(config: Any) -> ModelSpec:
    """UMT5: each layer has a bias of relative buckets."""
    model = spec(config)
    assert model.encoder is not None
    assert model.decoder is not None
    # transformers ties and scales whatever the stored config says.
    head = Lm(tied=config.tie_word_embeddings, input_scale=config.d_model**-0.5)
    return replace(model, encoder=own_biases(model.encoder), decoder=own_biases(model.decoder), head=head)


def _encoder_alone(config: Any) -> ModelSpec:
    length = getattr(config, "n_positions", None) or TRAINED_LENGTH
    return ModelSpec(encoder=encoder(config), decoder=None, head=Pool(), context_length=length)


def _encoder_weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    own, shared = "encoder.embed_tokens.weight", "shared.weight"
    # If both tables are stored and differ, the encoder's own is used.
    names = (shared, own) if model.shared_tokens else (own,)
    return WeightTable(
        (
            *(Entry("encoder.embedding.tokens", (name,)) for name in names),
            *stack_weights("encoder", model.encoder),
        ),
        # A checkpoint that was trained with a decoder may still contain it.
        ignored=(r"decoder\..*", r"lm_head\.weight", *(() if model.shared_tokens else (r"shared\.weight",))),
        copies=(own,),
    )


FAMILIES = (
    Family(
        name="T5",
        architectures=both("T5", "MT5"),
        headless=("T5Model", "MT5Model"),
        brings="encoder and decoder, relative position buckets, gated GELU",
        spec=spec,
        weights=weights,
        repeats=repeats_after_start,
    ),
    # arXiv:2304.09151
    Family(
        name="UMT5",
        architectures=both("UMT5"),
        headless=("UMT5Model",),
        brings="encoder and decoder, relative position buckets per layer",
        spec=_own_biases,
        weights=weights,
    ),
    # Vectors of texts (Sentence-T5, arXiv:2108.08877; GTR, arXiv:2112.07899).
    Family(
        name="T5's encoder",
        architectures=("T5EncoderModel", "MT5EncoderModel"),
        brings="T5's encoder alone, for embeddings",
        spec=_encoder_alone,
        weights=_encoder_weights,
    ),
)
