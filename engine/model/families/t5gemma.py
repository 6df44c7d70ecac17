"""T5Gemma: Gemma 2's blocks as an encoder and a decoder (arXiv:2504.06225)."""

from __future__ import annotations

from typing import Any

from engine.backends.attention.base import Window
from engine.model.families.common import activation, attention, cross, head, layer_kinds, layer_window, norm, rotary
from engine.model.families.names import StackNames, stack_weights
from engine.model.normalisation import Norm
from engine.model.spec import Block, Gated, Lm, ModelSpec, Sandwich, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable

NORMS = (
    "pre_self_attn_layernorm",
    "post_self_attn_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _spec(config: Any) -> ModelSpec:
    reader, writer = config.encoder, config.decoder
    return ModelSpec(
        encoder=_stack(reader, crosses=False),
        decoder=_stack(writer, crosses=True),
        head=Lm(tied=config.tie_word_embeddings, softcap=writer.final_logit_softcapping),
        context_length=min(reader.max_position_embeddings, writer.max_position_embeddings),
        shared_tokens=False,
    )


def _stack(config: Any, *, crosses: bool) -> Stack:
    own, kinds = Norm("rms", config.rms_norm_eps, unit_offset=True), layer_kinds(config)
    parts: dict[str, Any] = {
        "scale": config.query_pre_attn_scalar**-0.5,
        "bias": config.attention_bias,
        "softcap": config.attn_logit_softcapping,
    }
    placement = Sandwich(own, own, own, own, *((own, own) if crosses else ()))
    blocks = tuple(
        Block(
            placement=placement,
            attention=attention(
                config,
                position=rotary(config),
                causal=crosses,
                sees=_window(config, kind, causal=crosses),
                **parts,
            ),
            cross=attention(config, causal=False, **parts) if crosses else None,
            ffn=Gated(config.intermediate_size, activation(config.hidden_activation)),
        )
        for kind in kinds
    )
    return Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size, scale=config.hidden_size**0.5),
        blocks=blocks,
        final_norm=own,
    )


def _window(config: Any, kind: str, *, causal: bool) -> Window | None:
    """A layer's window; in the encoder, a token sees this many tokens on both sides, not counting itself."""
    window = layer_window(config, kind)
    return window if causal or window is None else Window(window.left + 1, window.left + 1)


def _weights(model: ModelSpec) -> WeightTable:
    entries: list[Entry] = []
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        assert stack is not None
        stem = f"model.{side}"
        entries += stack_weights(side, stack, StackNames(norms=NORMS, stem=stem))
        for i, block in enumerate(stack.blocks):
            if block.cross is None:
                continue
            target, source = f"{side}.blocks.{i}.cross", f"{stem}.layers.{i}"
            names = [f"{source}.cross_attn.{each}_proj" for each in "qkvo"]
            entries += cross(f"{target}.inner", (names[0], names[1], names[2], names[3]), block.cross)
            entries += norm(f"{target}.before", f"{source}.pre_cross_attn_layernorm", bias=False)
            entries += norm(f"{target}.after", f"{source}.post_cross_attn_layernorm", bias=False)
    entries += head(model, "lm_head.out_proj")
    return WeightTable(tuple(entries), prefix="model.", head="lm_head.out_proj.weight")


FAMILY = Family(
    name="T5Gemma",
    architectures=("T5GemmaForConditionalGeneration",),
    headless=(),
    brings="Gemma 2's blocks as encoder and decoder: rotary positions, sandwich norms, windows, soft caps",
    spec=_spec,
    weights=_weights,
)
