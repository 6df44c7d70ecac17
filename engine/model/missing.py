"""Which parts of a model have no implementation yet."""

from __future__ import annotations

from engine.model import spec
from engine.model.layers import ACTIVATIONS
from engine.model.positions import Disentangled, RelativeBuckets


def unsupported(model: spec.ModelSpec) -> list[str]:
    """What of the model has no implementation, one line a part; empty if all of it can be served."""
    missing: list[str] = []
    if model.decoder is None:
        missing.append("models without a decoder")
    if not isinstance(model.head, spec.Lm):
        missing.append(f"{type(model.head).__name__} heads")
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            missing.extend(_unsupported_embedding(stack.embedding))
            for block in stack.blocks:
                missing.extend(_unsupported_block(block))
    if model.decoder is not None:
        missing.extend(_unsupported_decoder(model.decoder, has_encoder=model.encoder is not None))
    return list(dict.fromkeys(missing))


def _unsupported_embedding(part: spec.Embedding) -> list[str]:
    if isinstance(part, spec.Patches):
        return ["image patches"]
    return ["token types"] if part.token_types > 0 else []


def _unsupported_decoder(stack: spec.Stack, *, has_encoder: bool) -> list[str]:
    missing = []
    for block in stack.blocks:
        attention, cross = block.attention, block.cross
        if not attention.causal:
            missing.append("bidirectional attention in a decoder")
        if cross is not None and not has_encoder:
            missing.append("cross-attention without an encoder")
        # Both kinds of K and V lie in the same pages.
        if cross is not None and (cross.kv_heads, cross.head_dim) != (attention.kv_heads, attention.head_dim):
            missing.append("cross-attention of another shape than self-attention")
    return missing


def _unsupported_block(block: spec.Block) -> list[str]:
    attention, ffn = block.attention, block.ffn
    expert = ffn.expert if isinstance(ffn, spec.Experts) else ffn
    found = {
        "experts with biases": isinstance(ffn, spec.Experts) and expert.bias,
        f"activation {expert.activation}": expert.activation not in ACTIVATIONS,
        f"{type(attention.position).__name__} in attention": isinstance(
            attention.position, RelativeBuckets | Disentangled
        ),
        "cross-attention between these norms": block.cross is not None
        and not isinstance(block.placement, spec.Pre | spec.Post),
    }
    return [name for name, present in found.items() if present]
