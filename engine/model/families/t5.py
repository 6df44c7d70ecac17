"""T5: pre-norm RMS encoder and decoder, relative position buckets, no score scaling (arXiv:1910.10683)."""

from __future__ import annotations

from typing import Any

from engine.model.families.classification import repeats_after_start
from engine.model.families.common import activation, cross, linear, norm, output_table, qkv, token_tables
from engine.model.normalisation import Norm
from engine.model.positions import RelativeBuckets
from engine.model.spec import Attention, Block, Dense, Gated, Lm, ModelSpec, Pre, Stack, Tokens
from engine.model.table import Entry, Family, Joined, WeightTable

TRAINED_LENGTH = 512
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def spec(config: Any) -> ModelSpec:
    # transformers has it from tie_word_embeddings of the stored config, and ties whatever that says; mT5 never scales.
    scaled = getattr(config, "scale_decoder_outputs", False)
    return ModelSpec(
        encoder=encoder(config),
        decoder=_stack(config, config.num_decoder_layers, decoder=True),
        head=Lm(tied=config.tie_word_embeddings, input_scale=config.d_model**-0.5 if scaled else 1.0),
        # Distances have no end; this is what the models were trained with.
        context_length=getattr(config, "n_positions", None) or TRAINED_LENGTH,
    )


def encoder(config: Any) -> Stack:
    """The encoder of a config."""
    return _stack(config, config.num_layers, decoder=False)


def _stack(config: Any, layers: int, *, decoder: bool) -> Stack:
    norm = Norm("rms", config.layer_norm_epsilon)
    kind = Gated if config.is_gated_act else Dense
    block = Block(
        placement=Pre(attention=norm, ffn=norm, cross=norm if decoder else None),
        attention=_attention(config, causal=decoder),
        cross=_attention(config, causal=False) if decoder else None,
        ffn=kind(config.d_ff, activation(config.dense_act_fn)),
    )
    return Stack(
        hidden_size=config.d_model,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.d_model),
        blocks=(block,) * layers,
        final_norm=norm,
        # Stored with the first layer, added in every self-attention of the stack.
        shared_bias=RelativeBuckets(
            buckets=config.relative_attention_num_buckets,
            max_distance=config.relative_attention_max_distance,
            bidirectional=not decoder,
        ),
    )


def _attention(config: Any, *, causal: bool) -> Attention:
    return Attention(heads=config.num_heads, kv_heads=config.num_heads, head_dim=config.d_kv, scale=1.0, causal=causal)


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    assert model.encoder is not None
    assert isinstance(model.head, Lm)
    entries = [*token_tables(model, "shared.weight", *COPIES), output_table(model, "lm_head")]
    entries += [*stack_weights("encoder", model.encoder), *stack_weights("decoder", model.decoder)]
    return WeightTable(
        tuple(entries),
        # A bias that old checkpoints store and nothing reads, and a shared table that neither stack uses.
        ignored=(
            r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
            *(() if model.shared_tokens else (r"shared\.weight",)),
        ),
        head="lm_head.weight",
        expects_head=model.head.input_scale == 1.0,  # version 1.1, FLAN and mT5
        copies=COPIES,
    )


def stack_weights(name: str, stack: Stack) -> list[Entry]:
    """The weights of the encoder or the decoder, all but the token table."""
    bias = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    entries = [
        Entry(f"{name}.shared_bias.weight", (bias,), shard_axis=1),
        *norm(f"{name}.final_norm", f"{name}.final_layer_norm", bias=False),
    ]
    for i, block in enumerate(stack.blocks):
        entries += _block(f"{name}.blocks.{i}", f"{name}.block.{i}.layer", block)
    return entries


def _block(target: str, source: str, block: Block) -> list[Entry]:
    own, last = f"{source}.0.SelfAttention", 1 if block.cross is None else 2
    entries = [
        *norm(f"{target}.attention.before", f"{source}.0.layer_norm", bias=False),
        *qkv(f"{target}.attention.inner.qkv", (f"{own}.q", f"{own}.k", f"{own}.v"), block.attention),
        *linear(f"{target}.attention.inner.out", f"{own}.o", False, 1),
        *norm(f"{target}.ffn.before", f"{source}.{last}.layer_norm", bias=False),
        *linear(f"{target}.ffn.inner.down", f"{source}.{last}.DenseReluDense.wo", False, 1),
    ]
    if block.cross is not None:
        other = f"{source}.1.EncDecAttention"
        entries += norm(f"{target}.cross.before", f"{source}.1.layer_norm", bias=False)
        entries += cross(f"{target}.cross.inner", (f"{other}.q", f"{other}.k", f"{other}.v", f"{other}.o"), block.cross)
    up = f"{source}.{last}.DenseReluDense.wi"
    if isinstance(block.ffn, Gated):
        lengths = (block.ffn.width, block.ffn.width)
        names = (f"{up}_0.weight", f"{up}_1.weight")
        entries.append(Entry(f"{target}.ffn.inner.gate_up.weight", names, Joined(lengths), shard_axis=0))
    else:
        entries += linear(f"{target}.ffn.inner.up", up, False, 0)
    return entries


FAMILY = Family(
    name="T5",
    architectures=("T5ForConditionalGeneration", "T5Model", "MT5ForConditionalGeneration", "MT5Model"),
    headless=("T5Model", "MT5Model"),
    brings="encoder and decoder, relative buckets, gated GELU",
    spec=spec,
    weights=weights,
    repeats=repeats_after_start,
)
