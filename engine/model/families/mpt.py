"""MPT: ALiBi, no biases, clipped queries, keys and values.

As in transformers (5.23), alibi_bias_max and logit_scale have no effect; a config that sets them is warned of.
"""

from __future__ import annotations

import logging
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.alibi import slopes
from engine.model.families.common import even_head_dim, head, linear
from engine.model.normalisation import Norm
from engine.model.positions import Slopes
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Pre, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable

logger = logging.getLogger("octavo.model")

NORMS = ("low_precision_layernorm", "layernorm")


def spec(config: Any) -> ModelSpec:
    _refuse(config)
    _warn(config)
    norm = Norm("layer", config.layer_norm_epsilon)
    width, heads, own = config.hidden_size, config.num_attention_heads, config.attn_config
    head_dim = even_head_dim(width, heads)
    block = Block(
        placement=Pre(attention=norm, ffn=norm),
        attention=Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if own.softmax_scale is None else own.softmax_scale,
            position=Slopes(slopes(heads)),
            clip=own.clip_qkv or None,
        ),
        # The reference pays no heed to expansion_ratio; a checkpoint of another width is refused by its shapes.
        ffn=Dense(4 * width, "gelu"),
    )
    decoder = Stack(
        hidden_size=width,
        embedding=Tokens(vocab_size=config.vocab_size, width=width),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=norm,
    )
    return ModelSpec(
        encoder=None,
        decoder=decoder,
        head=Lm(tied=config.tie_word_embeddings),
        context_length=config.max_seq_len,
    )


def _warn(config: Any) -> None:
    """Say what the reference passes over in silence."""
    passed = {
        "attn_config.alibi_bias_max": (config.attn_config.alibi_bias_max, 8),
        "logit_scale": (config.logit_scale, None),
    }
    for name, (value, usual) in passed.items():
        if value != usual:
            logger.warning(
                "the checkpoint's config sets %s to %r: transformers computes this architecture as if it were %r, and "
                "so does Octavo; the model may have been trained otherwise",
                name,
                value,
                usual,
            )


def _refuse(config: Any) -> None:
    """Refuse variants of the published code that the reference does not have, and would take for the usual form.

    Biases, learned positions and other widths need no word here: loading then finds tensors that have no place, or
    another shape.
    """
    own = config.attn_config
    served = {
        "norm_type": (config.norm_type, NORMS),
        "attn_config.alibi": (own.alibi, (True,)),
        "attn_config.attn_type": (own.attn_type, ("multihead_attention",)),
        "attn_config.prefix_lm": (own.prefix_lm, (False,)),
        "attn_config.qk_ln": (own.qk_ln, (False,)),
        "attn_config.rope": (getattr(own, "rope", False), (False,)),
        "attn_config.sliding_window_size": (getattr(own, "sliding_window_size", -1), (-1,)),
    }
    for name, (value, possible) in served.items():
        if value not in possible:
            raise UnsupportedModelError(
                f"{name} of the checkpoint's config is {value!r}, which is not implemented for this architecture. "
                f"Implemented: {', '.join(map(repr, possible))}."
            )


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("transformer.wte.weight",), shard_axis=0),
        Entry("decoder.final_norm.weight", ("transformer.norm_f.weight",)),
        *head(model, "lm_head"),
    ]
    for i in range(len(model.decoder.blocks)):
        target, source = f"decoder.blocks.{i}", f"transformer.blocks.{i}"
        entries += [
            Entry(f"{target}.attention.before.weight", (f"{source}.norm_1.weight",)),
            *linear(f"{target}.attention.inner.qkv", f"{source}.attn.Wqkv", False, 0),
            *linear(f"{target}.attention.inner.out", f"{source}.attn.out_proj", False, 1),
            Entry(f"{target}.ffn.before.weight", (f"{source}.norm_2.weight",)),
            *linear(f"{target}.ffn.inner.up", f"{source}.ffn.up_proj", False, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.ffn.down_proj", False, 1),
        ]
    return WeightTable(tuple(entries), prefix="transformer.", head="lm_head.weight")


FAMILY = Family(
    name="MPT",
    # Published configs name the class of the code that came with them.
    architectures=("MptForCausalLM", "MPTForCausalLM", "MptModel"),
    headless=("MptModel",),
    brings="ALiBi, clipped queries, keys and values, norms without biases",
    spec=spec,
    weights=weights,
)
