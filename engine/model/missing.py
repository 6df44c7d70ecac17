"""The parts of a model that have no implementation yet."""

from __future__ import annotations

from engine.model import spec
from engine.model.activations import ACTIVATIONS
from engine.model.positions import Disentangled, Learned, QueryBuckets, Rotary


def unsupported(model: spec.ModelSpec) -> list[str]:
    """The parts of the model without an implementation, one per line; empty if the whole model is supported."""
    missing: list[str] = []
    if model.decoder is None and isinstance(model.head, spec.Lm):
        missing.append("language-model heads over an encoder")
    if model.decoder is not None and isinstance(model.head, spec.MaskedLm):
        missing.append("MaskedLm heads over a decoder")
    if isinstance(model.head, spec.Classifier) and isinstance(model.head.pooling, spec.FirstStates):
        embedding = model.trunk.embedding
        if not isinstance(embedding, spec.Patches) or embedding.first < model.head.pooling.count:
            missing.append("FirstStates that stand for no learned vectors")  # an input may be too short to have them
    head: spec.Activation | None = None
    match model.head:
        case spec.MaskedLm() | spec.Classifier():
            head = model.head.activation
        case spec.Lm(layer=spec.HeadLayer() as layer):
            head = layer.activation
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
            missing.extend(_unsupported_layers(stack, paged=stack is model.decoder))
            for block in stack.blocks:
                missing.extend(_unsupported_block(block))
            if stack.predicting is not None or any(part.query_bias for part in stack.attentions):
                missing.extend(_unsupported_predicting(stack, decodes=stack is model.decoder))
            for attention in stack.attentions:
                if attention.latent is not None:
                    missing.extend(_unsupported_latent(attention, paged=stack is model.decoder))
                if attention.routed is not None:
                    missing.extend(_unsupported_routed(attention, attention.routed, paged=stack is model.decoder))
                if attention.value_scores is not None:
                    missing.extend(_unsupported_value_scores(attention, paged=stack is model.decoder))
                if isinstance(attention.position, Disentangled) and stack.distances is None:
                    missing.append("Disentangled attention without vectors of distances")
                if isinstance(attention.sees, spec.BlockSums) and (
                    stack.shared_bias is None or stack.block_bias is None
                ):
                    missing.append("sums of blocks without biases by distance that layers share")
                if isinstance(attention.sees, spec.GlobalStream) and not stack.global_vectors:
                    missing.append("attention to vectors beside tokens where there are none")
                if stack.shared_bias is not None and attention.position is not None:
                    missing.append(f"a shared bias beside {type(attention.position).__name__}")
    if model.encoder is not None and model.decoder is not None and model.rotary_limits:
        # An encoder's inputs have separate lengths, which no plan contains.
        missing.append("rotary factors that depend on length beside cross-attention")
    if model.decoder is not None:
        if not isinstance(model.decoder.embedding, spec.Tokens):
            missing.append("a decoder that reads no token ids")
        missing.extend(_unsupported_decoder(model.decoder, has_encoder=model.encoder is not None))
    if model.twin is not None:
        missing.extend(unsupported(model.twin))
        if model.decoder is not None or model.twin.decoder is not None or model.twin.signal is None:
            missing.append("a twin of other models than encoders, or one that reads no signals")
    if model.vision is not None:
        missing.extend(unsupported(spec.ModelSpec(encoder=model.vision.tower, decoder=None, head=spec.Pool())))
        projector = model.vision.projector
        if isinstance(projector, spec.Projector) and projector.activation not in ACTIVATIONS:
            missing.append(f"activation {projector.activation}")
    return list(dict.fromkeys(missing))


def _unsupported_decoder(stack: spec.Stack, *, has_encoder: bool) -> list[str]:
    missing = ["layers of the same weights in a decoder"] if stack.repeated is not None else []
    if not stack.attentions:
        missing.append("a decoder without attention")
    for block in stack.blocks:
        if block.bottleneck is not None:
            missing.append("a bottleneck in a decoder")
        if block.mixing is not None:
            if not isinstance(block.mixing, spec.StateLayer):
                missing.append("Fourier transforms in a decoder")  # they would see later tokens
            if isinstance(block.placement, spec.Parallel) or has_encoder:
                missing.append("a state in layers of another kind")
        if not block.attention.heads:
            continue
        if not block.attention.causal:
            missing.append("bidirectional attention in a decoder")
        if block.attention.content_bias:
            missing.append("Disentangled attention in a decoder")
        if block.attention.spans is not None:
            missing.append("convolutions beside attention in a decoder")
        if (routed := experts_of(block.ffn)) is not None and routed.capacity is not None:
            missing.append("experts of limited capacity in a decoder")  # tokens that come one by one would have room
        if isinstance(block.attention.sees, spec.Sparse):
            missing.append(f"{type(block.attention.sees).__name__} in a decoder")
        if block.beside is not None:
            missing.append("a convolution in a decoder")  # it would see later tokens
        if block.cross is not None:
            found = _unsupported_cross(block.cross, block.attention)
            missing.extend(found if has_encoder else ["cross-attention without an encoder"])
    return missing


def _unsupported_layers(stack: spec.Stack, *, paged: bool) -> list[str]:
    """The missing features for layers that read more than the stream, or other layers' keys."""
    reading = [block.attention.reads is not None for block in stack.blocks]
    sources = [(part, stack.blocks[part.reads].attention) for part in stack.attentions if part.reads is not None]
    shapes = [(part.kv_heads, part.head_dim) == (own.kv_heads, own.head_dim) for part, own in sources]
    sequential = all(not isinstance(block.placement, spec.Parallel) for block in stack.blocks)
    inputs = [block.input for block in stack.blocks]
    widths = {part.width for part in inputs if part is not None}
    vectors = stack.layer_vectors
    found = {
        "keys of other layers outside a decoder": any(reading) and not paged,
        # Layers are numbered as their pages are.
        "layers that read keys of others before some that have their own": reading != sorted(reading),
        "keys of another shape than those of the layer that reads them": not all(shapes),
        "norms of values outside a decoder": not paged
        and any(part.value_norm is not None for part in stack.attentions),
        "layers that read vectors which the stack does not make": widths != ({vectors.width} if vectors else set()),
        "vectors of layers beside parallel sublayers": bool(widths) and not sequential,
        "factors of layers beside parallel sublayers": any(block.factor for block in stack.blocks) and not sequential,
        "several versions of an encoder's stream": stack.versions is not None and not paged,
        "carried streams without norms before sublayers": any(
            block.carried
            and not (isinstance(block.placement, spec.Pre) and block.placement.attention and block.placement.ffn)
            for block in stack.blocks
        ),
        "low-rank paths beside one version of the stream": stack.versions is None
        and any(block.low_rank is not None for block in stack.blocks),
        "factors of layers beside several versions of the stream": stack.versions is not None
        and any(block.factor for block in stack.blocks),
    }
    return [name for name, present in found.items() if present]


def _unsupported_predicting(stack: spec.Stack, *, decodes: bool) -> list[str]:
    ends = (stack.final_norm, stack.projection, stack.shared_bias, stack.repeated)
    tokens = stack.embedding
    plain = isinstance(tokens, spec.Tokens) and not (
        tokens.expansion or tokens.projection or tokens.tasks or stack.sides
    )
    found = {
        "outside a decoder": not decodes,
        "without a predicting stream": stack.predicting is None,
        f"with positions other than {Learned.__name__}": not isinstance(tokens.positions, Learned),
        "with vectors of another kind than tokens and their positions": not plain,
        "with a norm, a projection, a shared bias or repeated layers": ends != (None,) * len(ends),
        f"in layers other than {spec.Post.__name__} with {spec.Dense.__name__}": any(
            not isinstance(block.placement, spec.Post) or not isinstance(block.ffn, spec.Dense)
            for block in stack.blocks
        ),
        "with attention of another kind": not all(_is_bucketed(block.attention) for block in stack.blocks),
    }
    return [f"{QueryBuckets.__name__} {name}" for name, present in found.items() if present]


def _is_bucketed(part: spec.Attention) -> bool:
    """Whether attention has buckets of queries, and nothing beside its heads that their module does not support."""
    parts = (part.temperature, part.sees, part.qk_norm, part.clip, part.softcap, part.sinks, part.spans, part.latent)
    beside = (*parts, part.gate)
    return part.query_bias and beside == (None,) * len(beside)


def _unsupported_cross(cross: spec.Attention, own: spec.Attention) -> list[str]:
    found = {
        # Both kinds of K and V are in the same pages.
        "of another shape than self-attention": (cross.kv_heads, cross.head_dim) != (own.kv_heads, own.head_dim),
        "that is causal": cross.causal,
        "with positions": cross.position is not None,
        "to some keys only": cross.sees is not None,
        "with norms of queries and keys": cross.qk_norm is not None,
        "with limits of its projections": cross.clip is not None,
        "with a temperature": cross.temperature is not None,
        "with sinks": cross.sinks is not None,
        "with a gate": cross.gate is not None,
    }
    return [f"cross-attention {name}" for name, present in found.items() if present]


def _unsupported_latent(part: spec.Attention, *, paged: bool) -> list[str]:
    found = {
        "outside a decoder": not paged,
        f"with positions other than {Rotary.__name__}": part.position is not None
        and not isinstance(part.position, Rotary),
        "with norms of queries and keys": part.qk_norm is not None,
        "with limits of its projections": part.clip is not None,
        "with sinks": part.sinks is not None,
        "with a gate": part.gate is not None,
    }
    return [f"latent attention {name}" for name, present in found.items() if present]


def _unsupported_routed(part: spec.Attention, routed: spec.RoutedHeads, *, paged: bool) -> list[str]:
    beside = (part.temperature, part.qk_norm, part.value_norm, part.reads, part.sinks, part.spans, part.gate)
    found = {
        "outside a decoder": not paged,
        "of another number than that of KV heads": part.heads != routed.active * part.kv_heads,
        "with other parts of attention": beside != (None,) * len(beside) or part.latent is not None,
        "with biases of projections": part.qkv_bias or part.out_bias,
    }
    return [f"heads that each token chooses {name}" for name, present in found.items() if present]


def _unsupported_value_scores(part: spec.Attention, *, paged: bool) -> list[str]:
    beside = (
        part.temperature,
        part.value_norm,
        part.reads,
        part.sinks,
        part.spans,
        part.gate,
        part.latent,
        part.routed,
    )
    found = {
        "outside a decoder": not paged,
        "with other parts of attention": beside != (None,) * len(beside) or part.clip is not None,
        f"with positions other than {Rotary.__name__}": part.position is not None
        and not isinstance(part.position, Rotary),
    }
    return [f"values that add to scores {name}" for name, present in found.items() if present]


def _unsupported_block(block: spec.Block) -> list[str]:
    attention, ffn = block.attention, block.ffn
    routed = experts_of(ffn)
    network = ffn if routed is None else routed.expert
    assert not isinstance(network, spec.Experts | spec.Shared)
    if isinstance(network, spec.NormedSum):
        network = network.always
    activation = None if isinstance(network, spec.Clamped | spec.Xielu) else network.activation
    found = {
        f"activation {activation}": activation is not None and activation not in ACTIVATIONS,
        **_unsupported_attention(attention),
        "layers that mix no tokens": not attention.heads
        and block.mixing is None
        and not isinstance(block.placement, spec.Pre),
        "attention beside mixing of another kind": attention.heads > 0
        and block.mixing is not None
        and (not isinstance(block.mixing, spec.StateLayer) or not _is_plain(attention)),
        "one softmax for two attentions of another kind": block.merged
        and not (_is_plain(attention) and isinstance(attention.qk_norm, spec.PerHead) and block.cross is not None),
        **_unsupported_bottleneck(block),
        **_unsupported_convolution(block.beside),
        "vectors beside tokens in layers of another kind": isinstance(attention.sees, spec.GlobalStream)
        and not (isinstance(block.placement, spec.Pre) and isinstance(ffn, spec.Dense)),
        "cross-attention between these norms": block.cross is not None
        and not block.merged
        and not isinstance(block.placement, spec.Pre | spec.Post)
        and getattr(block.placement, "before_cross", None) is None,
    }
    return [name for name, present in found.items() if present]


def experts_of(ffn: spec.FeedForward) -> spec.Experts | None:
    """The experts of a feed-forward network; None if there are none."""
    routed = ffn.routed if isinstance(ffn, spec.Shared | spec.NormedSum) else ffn
    return routed if isinstance(routed, spec.Experts) else None


def _unsupported_attention(part: spec.Attention) -> dict[str, bool]:
    kernel = 1 if part.spans is None else part.spans.kernel
    return {
        "Disentangled attention of heads that share keys": part.content_bias and part.heads != part.kv_heads,
        f"convolutions of {kernel} tokens beside attention": kernel % 2 == 0,
        "convolutions beside attention with rotary positions": part.spans is not None
        and isinstance(part.position, Rotary),
        f"{type(part.sees).__name__} in attention of another kind": isinstance(part.sees, spec.Sparse)
        and not _is_bare(part),
    }


def _is_plain(part: spec.Attention) -> bool:
    """Whether attention has nothing that needs another module."""
    beside = (part.reads, part.latent, part.routed, part.value_scores, part.spans)
    sparse = isinstance(part.sees, spec.Sparse)
    return beside == (None,) * len(beside) and not sparse and not part.content_bias and not part.query_bias


def _is_bare(part: spec.Attention) -> bool:
    """Whether attention has only heads, as modules of sparse attention require."""
    beside = (part.position, part.qk_norm, part.clip, part.softcap, part.sinks, part.spans, part.latent)
    return beside == (None,) * len(beside) and not part.causal and part.heads == part.kv_heads


def _unsupported_bottleneck(block: spec.Block) -> dict[str, bool]:
    part = block.bottleneck
    if part is None:
        return {}
    return {
        f"a bottleneck with {part.norm.kind} norms": part.norm.kind != "affine",
        "a bottleneck without attention": block.mixing is not None,
        "a bottleneck with attention to an encoder": block.cross is not None,
        "a bottleneck beside a convolution": block.beside is not None,
    }


def _unsupported_convolution(part: spec.Convolution | None) -> dict[str, bool]:
    if part is None:
        return {}
    return {
        f"activation {part.activation}": part.activation not in ACTIVATIONS,
        f"a convolution of {part.kernel} tokens": part.kernel % 2 == 0,
    }
