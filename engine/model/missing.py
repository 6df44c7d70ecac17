"""Which parts of a model have no implementation yet."""

from __future__ import annotations

from engine.model import spec
from engine.model.activations import ACTIVATIONS
from engine.model.positions import Disentangled, RelativeBuckets


def unsupported(model: spec.ModelSpec) -> list[str]:
    """What of the model has no implementation, one line a part; empty if all of it can be served."""
    missing: list[str] = []
    if model.decoder is None and isinstance(model.head, spec.Lm):
        missing.append("language-model heads over an encoder")
    if model.decoder is not None and isinstance(model.head, spec.MaskedLm):
        missing.append("MaskedLm heads over a decoder")
    head: spec.Activation | None = None
    match model.head:
        case spec.MaskedLm() | spec.Classifier():
            head = model.head.activation
        case spec.Embedder(pooling=spec.Probe() as probe):
            head = probe.ffn.activation
        case spec.Embedder() if model.decoder is not None:
            missing.append("Embedder heads over a decoder")
        case _:
            pass
    if head is not None and head not in ACTIVATIONS:
        missing.append(f"activation {head}")
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            for block in stack.blocks:
                missing.extend(_unsupported_block(block))
                if isinstance(block.attention.position, Disentangled) and stack.distances is None:
                    missing.append("Disentangled attention without vectors of distances")
                if stack.shared_bias is not None and block.attention.position is not None:
                    missing.append(f"a shared bias beside {type(block.attention.position).__name__}")
    if model.encoder is not None and model.decoder is not None and model.rotary_limits:
        # An encoder's inputs have lengths of their own, which no plan tells.
        missing.append("rotary factors that depend on length beside cross-attention")
    if model.decoder is not None:
        if not isinstance(model.decoder.embedding, spec.Tokens):
            missing.append("a decoder that reads no token ids")
        missing.extend(_unsupported_decoder(model.decoder, has_encoder=model.encoder is not None))
    if model.twin is not None:
        missing.extend(unsupported(model.twin))
        if model.decoder is not None or model.twin.decoder is not None or model.twin.signal is None:
            missing.append("a twin of other models than encoders, or one that reads no signals")
    return list(dict.fromkeys(missing))


def _unsupported_decoder(stack: spec.Stack, *, has_encoder: bool) -> list[str]:
    missing = []
    for block in stack.blocks:
        if not block.attention.causal:
            missing.append("bidirectional attention in a decoder")
        if block.attention.content_bias:
            missing.append("Disentangled attention in a decoder")
        if block.beside is not None:
            missing.append("a convolution in a decoder")  # it would see later tokens
        if block.cross is not None:
            found = _unsupported_cross(block.cross, block.attention)
            missing.extend(found if has_encoder else ["cross-attention without an encoder"])
    return missing


def _unsupported_cross(cross: spec.Attention, own: spec.Attention) -> list[str]:
    found = {
        # Both kinds of K and V lie in the same pages.
        "of another shape than self-attention": (cross.kv_heads, cross.head_dim) != (own.kv_heads, own.head_dim),
        "that is causal": cross.causal,
        "with positions": cross.position is not None,
        "with a window": cross.window is not None,
        "with norms of queries and keys": cross.qk_norm is not None,
        "with limits of its projections": cross.clip is not None,
        "with sinks": cross.sinks is not None,
    }
    return [f"cross-attention {name}" for name, present in found.items() if present]


def _unsupported_block(block: spec.Block) -> list[str]:
    attention, ffn = block.attention, block.ffn
    routed = ffn.routed if isinstance(ffn, spec.Shared) else ffn
    network = routed.expert if isinstance(routed, spec.Experts) else routed
    activation = None if isinstance(network, spec.Clamped) else network.activation
    found = {
        f"activation {activation}": activation is not None and activation not in ACTIVATIONS,
        "RelativeBuckets in attention": isinstance(attention.position, RelativeBuckets),
        "Disentangled attention of heads that share keys": attention.content_bias
        and attention.heads != attention.kv_heads,
        **_unsupported_convolution(block.beside),
        "cross-attention between these norms": block.cross is not None
        and not isinstance(block.placement, spec.Pre | spec.Post),
    }
    return [name for name, present in found.items() if present]


def _unsupported_convolution(part: spec.Convolution | None) -> dict[str, bool]:
    if part is None:
        return {}
    return {
        f"activation {part.activation}": part.activation not in ACTIVATIONS,
        f"a convolution of {part.kernel} tokens": part.kernel % 2 == 0,
    }
