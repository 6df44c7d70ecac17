"""MPT: ALiBi, no biases, clipped queries, keys and values.

As in transformers (5.23), alibi_bias_max and logit_scale have no effect; a config that sets them causes a warning.
"""

from __future__ import annotations

import logging
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.alibi import slopes
from engine.model.families.common import multi_head
from engine.model.families.decoder import decoder
from engine.model.families.names import DecoderNames
from engine.model.normalisation import Norm
from engine.model.positions import Slopes
from engine.model.spec import Attention, Dense

logger = logging.getLogger("octavo.model")

NORMS = ("low_precision_layernorm", "layernorm")


def _attention(config: Any) -> Attention:
    own = config.attn_config
    usual = {} if own.softmax_scale is None else {"scale": own.softmax_scale}
    position = Slopes(slopes(config.num_attention_heads))
    return multi_head(config, position=position, bias=False, clip=own.clip_qkv or None, **usual)


def _check(config: Any) -> None:
    _refuse(config)
    _warn(config)


def _warn(config: Any) -> None:
    """Warn about settings that the reference silently ignores."""
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
    """Refuse variants of the published code that the reference lacks and would treat as the usual form.

    Biases, learned positions and other widths need no check here: loading finds tensors without an entry, or with
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


FAMILY = decoder(
    "MPT",
    # Published configs name the class of the code that came with them.
    ("MptForCausalLM", "MPTForCausalLM", "MptModel"),
    "ALiBi, clipped queries, keys and values, norms without biases",
    attention=_attention,
    # The reference ignores expansion_ratio; a checkpoint of another width is refused by its shapes.
    ffn=lambda c: Dense(4 * c.hidden_size, "gelu"),
    norm=lambda c: Norm("layer", c.layer_norm_epsilon),
    context_length=lambda c: c.max_seq_len,
    refuse=_check,
    names=DecoderNames(
        stem="transformer",
        tokens="wte",
        final_norm="norm_f",
        layers="blocks",
        qkv="attn.Wqkv",
        out="attn.out_proj",
        norms=("norm_1", "norm_2"),
        ffn=("ffn.up_proj", "ffn.down_proj"),
        unread=(),
    ),
)
