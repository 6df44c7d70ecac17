"""T5Gemma 2: Gemma 3's blocks as an encoder and a decoder, whose attention covers both stacks' tokens at once
(arXiv:2512.14856). The vision tower is not read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    attention,
    layer_kinds,
    layer_window,
    norm,
    output_table,
    rotary,
    token_tables,
)
from engine.model.families.names import StackNames, stack_weights
from engine.model.families.t5gemma import NORMS
from engine.model.normalisation import Norm
from engine.model.spec import Block, Gated, Lm, ModelSpec, PerHead, Sandwich, Stack, Tokens
from engine.model.table import Entry, Family, Joined, WeightTable


def _spec(config: Any) -> ModelSpec:
    reader, writer = config.encoder.text_config, config.decoder
    return ModelSpec(
        encoder=_stack(reader, config.eoi_token_index, merged=False),
        decoder=_stack(writer, config.eoi_token_index, merged=True),
        head=Lm(tied=config.tie_word_embeddings, softcap=writer.final_logit_softcapping),
        context_length=min(reader.max_position_embeddings, writer.max_position_embeddings),
        shared_tokens=config.tie_word_embeddings,
    )


def _stack(config: Any, end: int | None, *, merged: bool) -> Stack:
    """A stack. `end`: the token that ends an image, which texts may have, too."""
    if config.attn_logit_softcapping is not None:  # the reference reads it but does not apply it
        raise UnsupportedModelError(
            f"attn_logit_softcapping of the config must be null for T5Gemma 2, got {config.attn_logit_softcapping}."
        )
    own, kinds = Norm("rms", config.rms_norm_eps, unit_offset=True), layer_kinds(config)
    parts: dict[str, Any] = {
        "scale": config.query_pre_attn_scalar**-0.5,
        "bias": config.attention_bias,
    }
    blocks = tuple(
        Block(
            placement=Sandwich(own, own, own, own),
            attention=attention(
                config,
                position=rotary(config, layer_type=kind),
                causal=merged,
                sees=_window(config, kind, causal=merged),
                qk_norm=PerHead(own),
                **parts,
            ),
            cross=attention(config, causal=False, **parts) if merged else None,
            merged=merged,
            ffn=Gated(config.intermediate_size, activation(config.hidden_activation)),
        )
        for kind in kinds
    )
    return Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(
            vocab_size=config.vocab_size,
            width=config.hidden_size,
            scale=config.hidden_size**0.5,
            apart=end if end is not None and 0 <= end < config.vocab_size else None,
        ),
        blocks=blocks,
        final_norm=own,
    )


def _window(config: Any, kind: str, *, causal: bool) -> Window | None:
    """A layer's window. In the encoder, half of its tokens are on either side."""
    window = layer_window(config, kind)
    if causal or window is None:
        return window
    return Window((config.sliding_window + 1) // 2 - 1, config.sliding_window // 2)


def _weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    assert model.decoder is not None
    stems = {"encoder": "model.encoder", "decoder": "model.decoder"}
    tables = (f"{stems['encoder']}.embed_tokens.weight", f"{stems['decoder']}.embed_tokens.weight")
    ends = [table.replace(".weight", ".eoi_embedding") for table in tables]
    entries = [*token_tables(model, tables[0], *tables), output_table(model, "lm_head.out_proj")]
    if isinstance(model.decoder.embedding, Tokens) and model.decoder.embedding.apart is not None:
        own = ends[0] if model.shared_tokens else ends[1]
        entries += [Entry("encoder.embedding.own", (ends[0],), default=0.0)]
        entries += [Entry("decoder.embedding.own", (own,), default=0.0)]
    names = StackNames(norms=NORMS, tokens="")
    entries += stack_weights("encoder", model.encoder, replace(names, stem=stems["encoder"]))
    entries += stack_weights("decoder", model.decoder, replace(names, stem=stems["decoder"]))
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}.attention.inner.encoded", f"{stems['decoder']}.layers.{i}.self_attn"
        width = block.attention.kv_heads * block.attention.head_dim
        for kind in ("weight", "bias") if block.attention.qkv_bias else ("weight",):
            sources = (f"{source}.k_proj.{kind}", f"{source}.v_proj.{kind}")
            entries.append(Entry(f"{target}.kv.{kind}", sources, Joined((width, width))))
        entries += norm(f"{target}.norm", f"{source}.k_norm", bias=False)
    return WeightTable(
        tuple(entries),
        prefix="model.",
        renamed=((r"^model\.encoder\.text_model\.", "model.encoder."),),  # transformers' own names
        head="lm_head.out_proj.weight",
        copies=tables,
        # Weights that only images need, and the decoder's copy of a shared vector.
        ignored=(
            r"model\.encoder\.(vision_tower|multi_modal_projector)\..*",
            r"model\.(encoder|decoder)\.embed_tokens\.eoi_embedding",
        ),
    )


FAMILY = Family(
    name="T5Gemma 2",
    architectures=("T5Gemma2ForConditionalGeneration",),
    headless=(),
    brings="Gemma 3's blocks as encoder and decoder, one softmax over both stacks' tokens, text only",
    spec=_spec,
    weights=_weights,
)
