"""Division of a model among ranks that compute each layer together (tensor parallelism, arXiv:1909.08053).

A rank has some of the heads of each attention, some of the hidden features of each network (of each expert, too), and
some rows of the vocabulary. The rows of `qkv`, `up` and `gate_up` are divided, and so are the columns of `out` and
`down`, whose results the ranks add up. Norms, routers and tables of positions are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from engine.model.positions import Disentangled, QueryBuckets, RoundedSlopes, Slopes, TwoSidedSlopes
from engine.model.spec import (
    Attention,
    Block,
    Clamped,
    Dense,
    EachHead,
    Experts,
    FeedForward,
    Gated,
    Latent,
    Lm,
    ModelSpec,
    NormedSum,
    Opened,
    Pyramid,
    Shared,
    Sparse,
    SparselyGated,
    Spectrum,
    Stack,
    Tokens,
    WholeProjection,
    Xielu,
)

Range = tuple[int, int]
T = TypeVar("T", bound=FeedForward | Opened | Clamped)
_UNITS = (256, 64, 32, 8, 1)  # quantised matrices have scales for up to 256 inputs


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one rank among `count`."""

    rank: int
    count: int

    def of(self, size: int, unit: int = 1) -> Range:
        """The range of `size` things that the rank has, in pieces of `unit`."""
        pieces = size // unit
        return pieces * self.rank // self.count * unit, pieces * (self.rank + 1) // self.count * unit


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a parameter that a rank has.

    Attributes:
        axis: the axis that is divided.
        sizes: sizes of the pieces that follow each other along it in the whole parameter.
        ranges: the range of each piece that the rank has.
        inputs: whether it divides the inputs of a matrix.
    """

    axis: int
    sizes: tuple[int, ...]
    ranges: tuple[Range, ...]
    inputs: bool = False

    @property
    def own_sizes(self) -> list[int]:
        """The size of the rank's part of each piece."""
        return [end - begin for begin, end in self.ranges]

    def piece(self, number: int) -> Cut:
        """The cut of one of the pieces alone."""
        return replace(self, sizes=(self.sizes[number],), ranges=(self.ranges[number],))


ABSENT = "absent"
"""Instead of a cut: a bias that only rank 0 adds. The others have zeros."""
Cuts = dict[str, Cut | str]


def heads_of(part: Attention, share: Share) -> tuple[Range, Range]:
    """The heads and KV heads of a rank. If there are fewer KV heads than ranks, several ranks have the same."""
    group = part.heads // part.kv_heads
    if part.kv_heads >= share.count:
        begin, end = share.of(part.kv_heads)
        return (begin * group, end * group), (begin, end)
    begin, end = share.of(part.heads)
    return (begin, end), (begin // group, begin // group + 1)


def width_of(width: int, share: Share) -> Range:
    """The hidden features of a network that a rank has."""
    unit = next(unit for unit in _UNITS if width % unit == 0 and width // unit >= share.count)
    return share.of(width, unit)


def refusals(model: ModelSpec, count: int) -> list[str]:
    """The reasons why a model cannot be divided among `count` ranks; empty if it can."""
    found = {
        "a second model beside it (twin)": model.twin is not None,
        "images": model.vision is not None,
        "speech, whose word times need all heads": model.encoder is not None
        and isinstance(model.encoder.embedding, Spectrum),
        "an encoder of images in stages": model.encoder is not None
        and (isinstance(model.encoder.embedding, Pyramid) or getattr(model.encoder.embedding, "image", None)),
        "a head that chooses among some tokens": isinstance(model.head, Lm) and model.head.choices is not None,
        f"a vocabulary of {model.vocab_size} tokens": splits_vocabulary(model) and model.vocab_size < count,
    }
    reasons = [name for name, present in found.items() if present]
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            reasons += _refused_stack(stack)
            for block in stack.blocks:
                reasons += _refused_block(block, count)
    return list(dict.fromkeys(reasons))


def _refused_stack(stack: Stack) -> list[str]:
    found = {
        "several versions of the stream": stack.versions is not None,
        "vectors of layers": stack.layer_vectors is not None,
        "a predicting stream": stack.predicting is not None,
        "vectors beside tokens": stack.global_vectors > 0,
        "vectors of distances": stack.distances is not None,
        "sums of blocks": stack.block_bias is not None,
    }
    return [name for name, present in found.items() if present]


def _refused_block(block: Block, count: int) -> list[str]:
    found = {
        "layers with a state, or without attention": block.mixing is not None,
        "bottlenecks": block.bottleneck is not None,
        "one softmax over two attentions": block.merged,
        "convolutions beside layers": block.beside is not None,
        "low-rank paths": block.low_rank is not None,
        "layers that read tokens": block.reads_tokens or block.input is not None,
    }
    reasons = [name for name, present in found.items() if present]
    for part in (block.attention, block.cross):
        if part is not None and part.heads:
            reasons += _refused_attention(part, count)
    networks = list(_networks(block.ffn))
    if any(isinstance(part, SparselyGated) or (isinstance(part, Dense) and part.groups > 1) for part in networks):
        reasons.append("networks whose features depend on each other")
    narrow = [part.width for part in networks if 0 < part.width < count]
    return reasons + [f"a network of {width} features" for width in narrow]


def _refused_attention(part: Attention, count: int) -> list[str]:
    few = part.kv_heads < count
    found = {
        "one matrix for keys and values": part.one_for_both,
        "layers that read keys of others": part.reads is not None,
        "norms over all heads at once": isinstance(part.qk_norm, WholeProjection),
        "heads that each token chooses": part.routed is not None,
        "values that add to scores": part.value_scores is not None,
        "convolutions beside heads": part.spans is not None,
        "sparse attention": isinstance(part.sees, Sparse),
        "attention to distances": isinstance(part.position, Disentangled | QueryBuckets),
        f"{part.heads} heads with {part.kv_heads} K/V heads": few
        and (count % part.kv_heads != 0 or part.heads % count != 0),
    }
    return [name for name, present in found.items() if present]


def _networks(part: FeedForward | Opened | Clamped) -> Iterator[Dense | Gated | SparselyGated | Xielu | Clamped]:
    match part:
        case Experts():
            yield part.expert
        case Shared() | NormedSum():
            yield part.routed.expert
            yield from _networks(part.always)
        case Opened():
            yield part.inner
        case _:
            yield part


def splits_vocabulary(model: ModelSpec) -> bool:
    """Whether ranks have parts of the vocabulary: in the table and in the output matrix."""
    return isinstance(model.head, Lm) and model.decoder is not None and isinstance(model.decoder.embedding, Tokens)


# ---- the smaller model


def shard(model: ModelSpec, share: Share) -> ModelSpec:
    """The part of a model that a rank has; `refusals` must be empty."""
    encoder, decoder = (None if stack is None else _stack(stack, share) for stack in (model.encoder, model.decoder))
    if splits_vocabulary(model):
        rows = share.of(model.vocab_size)
        decoder = None if decoder is None else _with_rows(decoder, rows)
        if encoder is not None and model.shared_tokens and isinstance(encoder.embedding, Tokens):
            encoder = _with_rows(encoder, rows)
    return replace(model, encoder=encoder, decoder=decoder)


def _with_rows(stack: Stack, rows: Range) -> Stack:
    assert isinstance(stack.embedding, Tokens)
    return replace(stack, embedding=replace(stack.embedding, rows=rows))


def _stack(stack: Stack, share: Share) -> Stack:
    return replace(stack, blocks=tuple(_block(block, share) for block in stack.blocks))


def _block(block: Block, share: Share) -> Block:
    return replace(
        block,
        attention=_attention(block.attention, share),
        cross=None if block.cross is None else _attention(block.cross, share),
        ffn=_network(block.ffn, share),
    )


def _attention(part: Attention, share: Share) -> Attention:
    if not part.heads:
        return part
    (begin, end), (first, last) = heads_of(part, share)
    position = part.position
    if isinstance(position, Slopes | TwoSidedSlopes | RoundedSlopes):
        position = replace(position, values=position.values[begin:end])
    return replace(part, heads=end - begin, kv_heads=last - first, position=position)


def _network(part: T, share: Share) -> T:
    changes: dict[str, Any]
    match part:
        case Experts():
            changes = {"expert": _network(part.expert, share)}
        case Shared() | NormedSum():
            always: FeedForward | Opened = part.always
            changes = {"routed": _network(part.routed, share), "always": _network(always, share)}
        case Opened():
            changes = {"inner": _network(part.inner, share)}
        case _:
            begin, end = width_of(part.width, share) if part.width else (0, 0)
            changes = {"width": end - begin}
    return replace(part, **changes)


# ---- the parts of parameters


def cuts(model: ModelSpec, share: Share) -> Cuts:
    """The parts of a model's parameters that a rank has, by their names in the Transformer; others it has whole."""
    found: Cuts = {}
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack is None:
            continue
        for number, block in enumerate(stack.blocks):
            prefix = f"{name}.blocks.{number}"
            if block.attention.heads:
                found |= _attention_cuts(f"{prefix}.attention.inner", block.attention, share)
            if block.cross is not None:
                found |= _cross_cuts(f"{prefix}.cross.inner", block.cross, share)
            found |= _network_cuts(f"{prefix}.ffn.inner", block.ffn, share)
        if stack.shared_bias is not None:
            found[f"{name}.shared_bias.weight"] = _heads_cut(stack.attentions[0], share, axis=1)
    if splits_vocabulary(model):
        rows = Cut(0, (model.vocab_size,), (share.of(model.vocab_size),))
        names = ["decoder.embedding.tokens", "head.weight", "head.bias", "head.output.weight", "head.output.bias"]
        names += ["encoder.embedding.tokens"] if model.shared_tokens else []
        found |= dict.fromkeys(names, rows)
    return found


def _heads_cut(part: Attention, share: Share, axis: int = 0, features: int = 1) -> Cut:
    begin, end = heads_of(part, share)[0]
    return Cut(axis, (part.heads * features,), ((begin * features, end * features),))


def _rows_and_sum(prefix: str, rows: str, cut: Cut, last: str, columns: Cut, share: Share) -> Cuts:
    """The cuts of a matrix whose outputs are divided, and of one whose results are added up; of their biases, too."""
    found: Cuts = {f"{prefix}.{rows}.weight": cut, f"{prefix}.{rows}.bias": cut}
    found[f"{prefix}.{last}.weight"] = replace(columns, inputs=True)
    return found | ({f"{prefix}.{last}.bias": ABSENT} if share.rank else {})


def _latent_cuts(prefix: str, part: Attention, latent: Latent, share: Share) -> Cuts:
    queries = _heads_cut(part, share, 0, latent.content + latent.rotary)
    found = _rows_and_sum(prefix, "queries", queries, "out", _heads_cut(part, share, 1, latent.values), share)
    return found | {f"{prefix}.{name}.weight": _heads_cut(part, share) for name in ("keys", "values")}


def _attention_cuts(prefix: str, part: Attention, share: Share) -> Cuts:
    if part.latent is not None:
        return _latent_cuts(prefix, part, part.latent, share)
    size = part.head_dim
    heads, kv = heads_of(part, share)
    ranges = tuple((begin * size, end * size) for begin, end in (heads, kv, kv))
    rows = Cut(0, (part.heads * size, part.kv_heads * size, part.kv_heads * size), ranges)
    found = _rows_and_sum(prefix, "qkv", rows, "out", _heads_cut(part, share, 1, size), share)
    if part.gate is not None:
        found[f"{prefix}.gate.weight"] = _heads_cut(part, share, 0, 1 if part.gate.per_head else size)
    if part.sinks is not None:
        found[f"{prefix}.sinks"] = _heads_cut(part, share)
    if isinstance(part.qk_norm, EachHead):
        for kind in ("weight", "bias"):
            for place, name in enumerate(("queries", "keys")):
                found[f"{prefix}.qk_norm.{name}.{kind}"] = rows.piece(place)
    found[f"{prefix}.distance_bias.weight"] = _heads_cut(part, share, axis=1)
    return found


def _cross_cuts(prefix: str, part: Attention, share: Share) -> Cuts:
    size = part.head_dim
    begin, end = heads_of(part, share)[1]
    kv = Cut(0, (part.kv_heads * size,) * 2, ((begin * size, end * size),) * 2)
    queries = _heads_cut(part, share, 0, size)
    found = _rows_and_sum(prefix, "queries", queries, "out", _heads_cut(part, share, 1, size), share)
    return found | {f"{prefix}.kv.weight": kv, f"{prefix}.kv.bias": kv}


def _network_cuts(prefix: str, part: FeedForward | Opened | Clamped, share: Share, axis: int = 0) -> Cuts:
    match part:
        case Experts():
            return _network_cuts(prefix, part.expert, share, axis=1)
        case Shared() | NormedSum():
            routed = _network_cuts(f"{prefix}.routed", part.routed, share)
            return routed | _network_cuts(f"{prefix}.always", part.always, share)
        case Opened():
            return _network_cuts(f"{prefix}.inner", part.inner, share)
        case _:
            if not part.width:
                return {}
            own = width_of(part.width, share)
            pieces = 2 if isinstance(part, Gated | Clamped) else 1
            first = "up" if axis or pieces == 1 else "gate_up"
            rows = Cut(axis, (part.width,) * pieces, (own,) * pieces)
            return _rows_and_sum(prefix, first, rows, "down", Cut(axis + 1, (part.width,), (own,)), share)
