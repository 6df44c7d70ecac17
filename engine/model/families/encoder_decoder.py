"""A family like BART as a row of a table: its differences from BART, read from a config.

`encoder_decoders.py` contains the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from engine.errors import UnsupportedModelError
from engine.interface.outputs import RepeatedInput
from engine.model.families.common import activation, multi_head, output_table, token_tables
from engine.model.families.names import StackNames, stack_weights
from engine.model.normalisation import Norm
from engine.model.positions import Learned, Positions, SpannedSinusoidal
from engine.model.spec import Block, Dense, Lm, ModelSpec, Post, Pre, Stack, Tokens
from engine.model.table import Entry, Family, Row, WeightTable

NORM = Norm("layer", 1e-5, bias=True)
COPIES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")


def both(*names: str) -> tuple[str, ...]:
    """BartForConditionalGeneration and BartModel for Bart."""
    return tuple(f"{name}{kind}" for name in names for kind in ("ForConditionalGeneration", "Model"))


def encoder_decoder(
    name: str,
    architectures: tuple[str, ...],
    brings: str,
    *,
    positions: Callable[[Any], Positions],
    pre: bool,
    embedding_norm: bool,
    head_bias: bool = True,
    attention_bias: Callable[[Any], bool] = lambda config: True,
    vocabularies: Callable[[Any], tuple[int, int] | None] = lambda config: None,
    reads: Callable[[Any, Stack], Stack] = lambda config, encoder: encoder,
    writes: Callable[[Any, Stack], Stack] = lambda config, decoder: decoder,
    refuse: Callable[[Any], None] | None = None,
    output: str = "lm_head",
    more: Callable[[ModelSpec], list[Entry]] = lambda model: [],
    renamed: tuple[tuple[str, str], ...] = (),
    repeats: Callable[[Any], RepeatedInput] | None = None,
) -> Family:
    """The family of these encoder-decoders.

    Args:
        name, architectures, brings, repeats: see `Family`.
        positions: positions added to the embeddings of both stacks.
        pre: whether norms come before the sublayers, with one after the last layer; otherwise they come after each
            residual.
        embedding_norm: whether the embeddings are normalised.
        head_bias, attention_bias: whether the logits and the attention have biases.
        vocabularies: sizes of the encoder's and the decoder's own vocabulary; None if both stacks share one table.
        reads, writes: the encoder and the decoder, derived from BART's.
        refuse: raises UnsupportedModelError for further settings that no part expresses.
        more: entries for parts that BART does not have.
        renamed: older names (`WeightTable.renamed`).
    """

    def spec(config: Any) -> ModelSpec:
        if refuse is not None:
            refuse(config)
        own = positions(config)
        _check(config, own, pre=pre, embedding_norm=embedding_norm)
        sizes = vocabularies(config)
        placed = partial(stack_of, config, own, pre=pre, embedding_norm=embedding_norm, bias=attention_bias(config))
        read, written = sizes or (config.vocab_size, config.vocab_size)
        return ModelSpec(
            encoder=reads(config, placed("encoder", read)),
            decoder=writes(config, placed("decoder", written)),
            head=Lm(tied=config.tie_word_embeddings, bias=head_bias),
            shared_tokens=sizes is None,
        )

    def table(model: ModelSpec) -> WeightTable:
        found = weights(model, output)
        return replace(found, entries=(*found.entries, *more(model)), renamed=renamed)

    return Family(
        name=name,
        architectures=architectures,
        headless=tuple(one for one in architectures if one.endswith("Model") and not one.endswith("MTModel")),
        brings=brings,
        spec=spec,
        weights=table,
        repeats=repeats,
    )


def stack_of(
    config: Any, positions: Positions, side: str, vocab_size: int, *, pre: bool, embedding_norm: bool, bias: bool = True
) -> Stack:
    """The encoder or the decoder of a config; arguments as those of `encoder_decoder`."""
    crosses = side == "decoder"
    attention = multi_head(config, heads=getattr(config, f"{side}_attention_heads"), causal=crosses, bias=bias)
    second = NORM if crosses else None
    block = Block(
        placement=Pre(NORM, NORM, second) if pre else Post(NORM, NORM, second),
        attention=attention,
        cross=replace(attention, causal=False) if crosses else None,
        ffn=Dense(getattr(config, f"{side}_ffn_dim"), activation(config.activation_function), bias=True),
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
        blocks=(block,) * getattr(config, f"{side}_layers"),
        final_norm=NORM if pre else None,
    )


def _check(config: Any, positions: Positions, *, pre: bool, embedding_norm: bool) -> None:
    """Refuse settings that the architecture does not support; settings of old configs that all relatives once shared
    must not contradict it."""
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
    """Fixed positions that are counted from the row after the padding's. Raises UnsupportedModelError if the padding is
    not a token."""
    padding = config.pad_token_id
    if not isinstance(padding, int) or not 0 <= padding < config.vocab_size:
        raise UnsupportedModelError(
            f"pad_token_id of the config must be an id below its vocab_size {config.vocab_size}, since positions are "
            f"counted from the row after it; got {padding!r}."
        )
    first = padding + 1  # the rows before it belong to no position
    return SpannedSinusoidal(config.max_position_embeddings + first, offset=first, unplaced=padding)


def weights(model: ModelSpec, output: str = "lm_head") -> WeightTable:
    """Names of all tensors, which all relatives share."""
    assert model.decoder is not None
    assert model.encoder is not None
    assert isinstance(model.head, Lm)
    entries = [*token_tables(model, "model.shared.weight", *COPIES), output_table(model, output)]
    if model.head.bias:
        # Models that were never resized may lack their bias of zeros.
        entries.append(Entry("head.bias", ("final_logits_bias",), Row(), default=0.0))
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        entries += stack_weights(side, stack, replace(FAIRSEQ, stem=f"model.{side}"))
    return WeightTable(
        tuple(entries),
        prefix="model.",
        # Values that fairseq stored, fixed positions under an old name, and a shared table that neither stack uses.
        ignored=(
            r"model\.(encoder|decoder)\.version",
            r"model\.(encoder|decoder)\.embed_positions\.weights",
            *(() if model.shared_tokens else (r"model\.shared\.weight",)),
        ),
        head=f"{output}.weight",
        copies=COPIES,
    )


# A stack under fairseq's names, without its token table.
FAIRSEQ = StackNames(
    tokens="",
    positions="embed_positions.weight",
    embedding_norm="layernorm_embedding",
    final_norm="layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    cross=("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj", "encoder_attn.out_proj"),
    cross_norm="encoder_attn_layer_norm",
    ffn=("fc1", "fc2"),
)
