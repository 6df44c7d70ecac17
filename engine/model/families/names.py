"""The names of weights in checkpoints, as data: a table of weights follows from them and from a model's parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.model.families.common import (
    PROJECTIONS,
    cross,
    dense,
    experts,
    fused_experts,
    gated,
    head,
    linear,
    multiplied,
    norm,
    qkv,
    residual_scaled,
)
from engine.model.normalisation import Norm
from engine.model.sinusoidal import fixed_vectors
from engine.model.spec import (
    NO_NETWORK,
    AfterSublayer,
    Attention,
    Block,
    Corrected,
    Dense,
    EachHead,
    Experts,
    FeedForward,
    Gated,
    ModelSpec,
    NormedResidual,
    Opened,
    Parallel,
    Placement,
    Post,
    Pre,
    Sandwich,
    Shared,
    Stack,
    StateLayer,
    Tokens,
)
from engine.model.table import Entry, Reshaped, Same, Transform, WeightTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a layer's experts. They follow the name of the layer.

    Attributes:
        router: the matrix of the router.
        each: the prefix of expert indices; the `matrices` are below each index.
        fused: the prefix of matrices of all experts in one; `fused_router` is then the router's name, if different.
        always: the network for every token; `opening` is the matrix of its gate.
        corrections: possible names of the score correction, stored according to `correction_form`.
        uncorrected: whether checkpoints may have none.
    """

    router: str = "mlp.gate"
    each: str = "mlp.experts"
    matrices: tuple[str, str, str] = PROJECTIONS
    fused: str | None = "mlp.experts"
    fused_router: str | None = None
    always: str = "mlp.shared_experts"
    opening: str = "mlp.shared_expert_gate"
    corrections: tuple[str, ...] = ("mlp.gate.e_score_correction_bias",)
    correction_form: Transform | None = None
    uncorrected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Names of a layer's weights, LLaMA's by default. They follow the name of the layer.

    Attributes:
        qkv: the matrices of queries, keys and values, or the single matrix with all three.
        qkv_form: how they are stored; None: queries first, then keys, then values.
        out: the matrix after attention.
        gate: the matrix that makes the gates of attention's results.
        attention: the entries of another form of attention, from our name, the layer's name and the part.
        mixing: the entries of a layer's part that carries a state, from the same arguments.
        qk_norm: norms of queries and keys, with `{}` for q or k, or `{word}` for query or key, and with `{head}` if the
            norm of each head is a separate vector. Empty if `attention` gives them.
        norms: one name for each norm of the placement, in the order of application; a function if placements differ.
        carried: the vectors by which the stream is multiplied before attention and the network are added.
        ffn: gate, up and down of a gated network, or its fused gate and up, and down; up and down of a plain one. For
            other forms, a function of our name, the layer's name and the part.
        experts: names for layers with experts.
        cross, cross_norm: queries, keys, values and output of attention to an encoder, and its norm.
        matrix: how each matrix is stored; None: like ours.
        norm_weight: how the weight of each norm is stored; None: like ours.
    """

    qkv: str | tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_form: Callable[[Attention], Transform] | None = None
    out: str = "self_attn.o_proj"
    attention: Callable[[str, str, Attention], list[Entry]] | None = None
    gate: str = "self_attn.gate_proj"
    mixing: Callable[[str, str, StateLayer], list[Entry]] | None = None
    qk_norm: str = "self_attn.{}_norm"
    norms: tuple[str, ...] | Callable[[Placement], tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    carried: tuple[str, ...] = ()
    ffn: tuple[str, ...] | Callable[[str, str, FeedForward], list[Entry]] = (
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    experts: ExpertNames = ExpertNames()
    cross: tuple[str, str, str, str] | None = None
    cross_norm: str = ""
    matrix: Transform | None = None
    norm_weight: Transform | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackNames(LayerNames):
    """Names of the weights of an encoder or a decoder, LLaMA's by default.

    Attributes:
        stem: the prefix of all names.
        tokens: the token table after the stem; empty if it is stored elsewhere.
        positions: the full name of the position table after the stem.
        embedding_norm, final_norm, layers: their names after the stem.
    """

    stem: str = "model"
    tokens: str = "embed_tokens"
    positions: str = ""
    embedding_norm: str = ""
    final_norm: str = "norm"
    layers: str = "layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderNames(StackNames):
    """Names of the weights of a decoder-only model, LLaMA's by default.

    Checkpoints of the headless model omit the first word of the stem.

    Attributes:
        head: the output matrix.
        unread: patterns of names that no answer depends on (`WeightTable.ignored`), after the stem and a dot.
        guesses: whether checkpoints contain extra layers that predict later tokens; transformers does not read them
            either.
        renamed: older names (`WeightTable.renamed`).
    """

    head: str = "lm_head"
    # By default the frequencies that old checkpoints store as buffers.
    unread: tuple[str, ...] = (r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
    guesses: bool = False
    renamed: tuple[tuple[str, str], ...] = ()


def decoder_table(model: ModelSpec, names: DecoderNames) -> WeightTable:
    """The weights of a decoder and its head under these names."""
    stack = model.trunk
    unread = (*names.unread, *((rf"{names.layers}\.{len(stack.blocks)}\..*",) if names.guesses else ()))
    pattern = names.stem.replace(".", r"\.")
    return WeightTable(
        (*stack_weights("decoder", stack, names), *head(model, names.head)),
        prefix=f"{names.stem.split('.')[0]}.",
        ignored=tuple(rf"{pattern}\.{name}" for name in unread),
        renamed=names.renamed,
        head=f"{names.head}.weight",
    )


def stack_weights(side: str, stack: Stack, names: StackNames) -> list[Entry]:
    """The weights of an encoder or a decoder; `side` says which, as in our names."""
    embedding, stem, entries = stack.embedding, names.stem, list[Entry]()
    assert isinstance(embedding, Tokens)
    if names.tokens:
        entries.append(Entry(f"{side}.embedding.tokens", (f"{stem}.{names.tokens}.weight",)))
    if embedding.positions is not None:
        fixed = fixed_vectors(embedding.positions)
        entries.append(Entry(f"{side}.embedding.positions", (f"{stem}.{names.positions}",), default=fixed))
    for ours, part in (("norm", embedding.norm), ("token_norm", embedding.token_norm)):
        entries += norm_weights(f"{side}.embedding.{ours}", f"{stem}.{names.embedding_norm}", part)
    entries += norm_weights(f"{side}.final_norm", f"{stem}.{names.final_norm}", stack.final_norm, names.norm_weight)
    for i, block in enumerate(stack.blocks):
        entries += layer_weights(f"{side}.blocks.{i}", f"{stem}.{names.layers}.{i}", block, names)
    return entries


def layer_weights(target: str, source: str, block: Block, names: LayerNames) -> list[Entry]:
    """The weights of a layer.

    Args:
        target: our name of the layer.
        source: its name in checkpoints.
    """
    part, inner, ffn = block.attention, f"{target}.attention.inner", f"{target}.ffn.inner"
    norms = names.norms(block.placement) if callable(names.norms) else names.norms
    # A layer with fewer norms than names has one norm for both sublayers.
    entries = [
        entry
        for (place, own), name in zip(norm_places(block.placement), norms, strict=False)
        for entry in norm_weights(f"{target}.{place}", f"{source}.{name}", own, names.norm_weight)
    ]
    if block.carried:
        places = ("attention.carry", "ffn.carry")
        entries += [Entry(f"{target}.{o}", (f"{source}.{t}",)) for o, t in zip(places, names.carried, strict=True)]
    if isinstance(block.mixing, StateLayer):
        assert names.mixing is not None
        both = part.heads > 0
        entries += names.mixing(f"{inner}.state" if both else inner, source, block.mixing)
        inner = f"{inner}.attention" if both else inner
    if not part.heads:
        entries += network_weights(ffn, source, block.ffn, names)
        return multiplied(residual_scaled(entries, block.residual_scale), block.factors)
    if names.attention is not None:
        entries += names.attention(inner, source, part)
    elif isinstance(names.qkv, str):
        how = names.matrix if names.qkv_form is None else names.qkv_form(part)
        entries += linear(f"{inner}.qkv", f"{source}.{names.qkv}", part.qkv_bias, how)
    else:
        queries, keys, values = (f"{source}.{name}" for name in names.qkv)
        entries += qkv(f"{inner}.qkv", (queries, keys, values), part, names.qkv_form and names.qkv_form(part))
    if names.attention is None:
        entries += linear(f"{inner}.out", f"{source}.{names.out}", part.out_bias, names.matrix)
    if part.gate is not None:
        entries += linear(f"{inner}.gate", f"{source}.{names.gate}", False)
    if names.qk_norm:
        entries += qk_norm_weights(f"{inner}.qk_norm", f"{source}.{names.qk_norm}", part)
    if part.sinks is not None:
        entries.append(Entry(f"{inner}.sinks", (f"{source}.self_attn.sinks",)))
    if block.cross is not None and names.cross is not None:
        place = "outer" if isinstance(block.placement, Post) else "before"
        own = block.placement.cross if isinstance(block.placement, Pre | Post) else None
        queries, keys, values, out = (f"{source}.{name}" for name in names.cross)
        entries += norm_weights(f"{target}.cross.{place}", f"{source}.{names.cross_norm}", own)
        entries += cross(f"{target}.cross.inner", (queries, keys, values, out), block.cross)
    entries += network_weights(ffn, source, block.ffn, names)
    normed = isinstance(block.placement, Sandwich | AfterSublayer)
    return multiplied(residual_scaled(entries, block.residual_scale, normed=normed), block.factors)


def norm_places(placement: Placement) -> list[tuple[str, Norm | None]]:
    """Our names of a layer's norms, in the order of application."""
    match placement:
        case Pre(first, second):
            return [("attention.before", first), ("ffn.before", second)]
        case Post(first, second):
            return [("attention.outer", first), ("ffn.outer", second)]
        case AfterSublayer(first, second):
            return [("attention.after", first), ("ffn.after", second)]
        case NormedResidual(first, second):
            return [("attention.first", first), ("ffn.first", second)]
        case Sandwich(first, second, third, fourth, _, _):
            places = ("attention.before", "attention.after", "ffn.before", "ffn.after")
            return [*zip(places, (first, second, third, fourth), strict=True)]
        case Parallel(norms):
            return [*zip(("attention.before", "ffn.before"), norms, strict=False)]


def norm_weights(target: str, source: str, part: Norm | None, weight: Transform | None = None) -> list[Entry]:
    """The weight and the bias of a norm, if it has them; None has neither."""
    return [] if part is None else norm(target, source, bias=part.bias, weight=part.weight, transform=weight)


def qk_norm_weights(target: str, names: str, part: Attention) -> list[Entry]:
    """Norms of queries and keys, if attention has them; `names` as in `LayerNames.qk_norm`."""
    entries: list[Entry] = []
    for ours, word, heads in (("queries", "query", part.heads), ("keys", "key", part.kv_heads)):
        name = partial(names.format, word[0], word=word)
        match part.qk_norm:
            case None:
                pass
            case EachHead():
                apart = "{head}" in names
                stored = tuple(f"{name(head=i)}.weight" for i in range(heads if apart else 1))
                shape = (part.head_dim,) if apart else (heads, part.head_dim)
                form = Reshaped((shape,) * len(stored))
                entries.append(Entry(f"{target}.{ours}.weight", stored, form))
            case own:
                entries += norm_weights(f"{target}.{ours}", name(), own.norm)
    return entries


def network_weights(target: str, source: str, part: FeedForward, names: LayerNames) -> list[Entry]:
    """A feed-forward network, gated or plain, or experts; or none."""
    if part == NO_NETWORK:
        return []
    if callable(names.ffn):
        return names.ffn(target, source, part)
    match part, names.ffn:
        case Shared(chosen, always), _:
            return network_weights(f"{target}.routed", source, chosen, names) + _always(target, source, always, names)
        case Experts(), _:
            return _experts(target, source, part, names.experts)
        case Gated(), (gate, up, down):
            return gated(target, source, part, (gate, up, down))
        case Gated(), (gate_up, down):
            return [
                *linear(f"{target}.gate_up", f"{source}.{gate_up}", part.bias),
                *linear(f"{target}.down", f"{source}.{down}", part.bias),
            ]
        case Dense(), (up, down):
            return dense(target, source, part, (up, down), names.matrix)
    raise AssertionError(f"{type(part).__name__} is not stored as {', '.join(names.ffn)}")


def _always(target: str, source: str, part: Dense | Gated | Opened, names: LayerNames) -> list[Entry]:
    stored = f"{source}.{names.experts.always}"
    if isinstance(part, Opened):
        opening = linear(f"{target}.always.opening", f"{source}.{names.experts.opening}", False)
        return opening + gated(f"{target}.always.inner", stored, part.inner)
    assert isinstance(part, Gated)
    return gated(f"{target}.always", stored, part)


def _experts(target: str, source: str, part: Experts, names: ExpertNames) -> list[Entry]:
    entries = experts(target, f"{source}.{names.each}", part, names.matrices, f"{source}.{names.router}")
    if names.fused is not None:
        entries += fused_experts(target, f"{source}.{names.fused}", f"{source}.{names.fused_router or names.router}")
    if isinstance(part.routing, Corrected):
        form = names.correction_form or Same()
        default = 0.0 if names.uncorrected else None
        for name in names.corrections:
            entries.append(Entry(f"{target}.correction", (f"{source}.{name}",), form, default=default))
    return entries
