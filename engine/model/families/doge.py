"""Doge: values add to the scores of their keys (dynamic mask attention, arXiv:2508.02124)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import attention, gated_network, head_dim_of, linear, qkv, rms, rotary, sliding_window
from engine.model.families.decoder import decoder, pairs
from engine.model.families.names import DecoderNames
from engine.model.spec import Attention, PerHead, ValueScores
from engine.model.table import Entry

_PIECE = 8  # kernels read so many features of a head at once


def _attention(c: Any) -> Attention:
    features = head_dim_of(c)
    return attention(
        c,
        head_dim=(features // _PIECE + 1) * _PIECE,
        scale=features**-0.5,
        position=rotary(c),
        sees=sliding_window(c.sliding_window),
        qk_norm=PerHead(rms(c)),
        value_scores=ValueScores(features, c.keep_window_size),
        bias=c.attention_bias,
    )


def _attention_weights(target: str, layer: str, part: Attention) -> list[Entry]:
    assert part.value_scores is not None
    source, heads = f"{layer}.self_attn", replace(part, head_dim=part.value_scores.features)
    return [
        *qkv(f"{target}.qkv", (f"{source}.q_proj", f"{source}.k_proj", f"{source}.v_proj"), heads),
        *linear(f"{target}.steps", f"{source}.dt_proj", part.qkv_bias),
        Entry(f"{target}.decay", (f"{source}.A",)),
        *linear(f"{target}.out", f"{source}.o_proj", part.out_bias),
    ]


def _refusals(c: Any) -> None:
    if c.is_moe:
        raise UnsupportedModelError(
            "is_moe of the config is true: the experts of a token would be chosen by other tokens of its prompt, too, "
            "later ones included. So its answer would depend on the parts in which a prompt is computed."
        )
    if not isinstance(c.keep_window_size, int) or c.keep_window_size < 1:
        raise UnsupportedModelError(f"keep_window_size of the config must be at least 1, got {c.keep_window_size!r}.")


FAMILY = decoder(
    "Doge",
    pairs("Doge"),
    "values that add to the scores of their keys, QK norms per head, learned factors of residuals; without experts, "
    "up to keep_window_size tokens",
    attention=_attention,
    ffn=lambda c: gated_network(c, bias=c.mlp_bias),
    carried=True,
    context_length=lambda c: min(c.max_position_embeddings, c.keep_window_size),
    refuse=_refusals,
    names=DecoderNames(
        attention=_attention_weights,
        carried=("input_residual", "post_attention_residual"),
    ),
)
