"""The modules of layers: sublayers and their norms. `engine.model.program` describes the computation."""

from __future__ import annotations

from torch import nn

from engine.backends.attention.base import AttentionBackend
from engine.errors import UnsupportedModelError
from engine.model import spec
from engine.model.block_sums import BlockSumAttention
from engine.model.convolution import TokenConvolution
from engine.model.disentangled import DisentangledAttention
from engine.model.experts import ExpertsFeedForward, NormedExperts, SharedExperts
from engine.model.fourier import FourierMixing
from engine.model.global_stream import StreamAttention
from engine.model.global_tokens import GlobalAttention
from engine.model.latent import LatentAttention
from engine.model.layer_vectors import LayerInputs, LowRankPath
from engine.model.layers import (
    CrossAttention,
    DenseFeedForward,
    GatedFeedForward,
    Linear,
    SelfAttention,
    SparseFeedForward,
    XieluFeedForward,
)
from engine.model.merged import MergedAttention
from engine.model.normalisation import Norm
from engine.model.norms import build_norm
from engine.model.place import Place
from engine.model.positions import Disentangled, QueryBuckets
from engine.model.query_buckets import BucketedAttention
from engine.model.reading import ReadingAttention
from engine.model.recurrences import build_state_layer
from engine.model.routed_attention import RoutedAttention
from engine.model.state_layers import AttentionBesideState
from engine.model.value_scores import ValueScoringAttention
from engine.model.versions import LayerVersions


class Sublayer(nn.Module):
    """The weights of outer(carry * y + after(f(before(y)))) of y = first(x); each norm and carry may be absent."""

    def __init__(
        self,
        inner: nn.Module,
        first: nn.Module | None = None,
        before: nn.Module | None = None,
        after: nn.Module | None = None,
        outer: nn.Module | None = None,
    ):
        super().__init__()
        self.first = first
        self.before = before
        self.inner = inner
        self.after = after
        self.outer = outer
        self.carry: nn.Parameter | None = None


class SequentialBlock(nn.Module):
    """Attention, attention to an encoder if there is one, then the feed-forward network, each with a residual. A layer
    may lack the first or the last. `versions`: the stream's versions."""

    def __init__(
        self,
        block: spec.Block,
        hidden_size: int,
        memory_size: int,
        backend: AttentionBackend,
        place: Place,
        versions: spec.Versions | None = None,
    ):
        super().__init__()
        norms: dict[str, tuple[Norm | None, Norm | None, Norm | None]]
        match block.placement:
            case spec.Pre(attention, ffn, cross):
                norms = {"before": (attention, cross, ffn)}
            case spec.NormedResidual(attention, ffn):
                norms = {"first": (attention, None, ffn)}
            case spec.Post(attention, ffn, cross):
                norms = {"outer": (attention, cross, ffn)}
            case spec.AfterSublayer(attention, ffn):
                norms = {"after": (attention, None, ffn)}
            case spec.Sandwich() as around:
                norms = {
                    "before": (around.before_attention, around.before_cross, around.before_ffn),
                    "after": (around.after_attention, around.after_cross, around.after_ffn),
                }
            case _:
                raise UnsupportedModelError(f"A {type(block.placement).__name__} block is not sequential.")
        attention_norms, cross_norms, ffn_norms = (
            {name: build_norm(three[i], hidden_size, place) for name, three in norms.items()} for i in range(3)
        )
        mixes = block.attention.heads or block.mixing is not None
        own: nn.Module | None = None
        if block.merged and block.cross is not None:
            own = MergedAttention(block.attention, block.cross, hidden_size, memory_size, backend, place)
        elif mixes:
            own = build_attention(block, hidden_size, backend, place)
        self.attention = None if own is None else Sublayer(own, **attention_norms)
        self.reads_tokens = block.reads_tokens
        if block.reads_tokens:
            assert isinstance(own, SelfAttention)
            own.qkv = Linear(2 * hidden_size, own.qkv.outputs, block.attention.qkv_bias, place)
        self.low_rank = None if block.low_rank is None else LowRankPath(block.low_rank, hidden_size, place)
        self.cross = None
        if block.cross is not None and not block.merged:
            inner = CrossAttention(block.cross, hidden_size, memory_size, backend, place)
            self.cross = Sublayer(inner, **cross_norms)
        self.ffn = None
        if block.ffn != spec.NO_NETWORK:
            self.ffn = Sublayer(build_feed_forward(block.ffn, hidden_size, place), **ffn_norms)
        for sublayer in (self.attention, self.ffn) if block.carried else ():
            if sublayer is not None:
                sublayer.carry = place.parameter(hidden_size)
        self.versions = None if versions is None else LayerVersions(versions, hidden_size, place)
        self.input = None if block.input is None else LayerInputs(block.input, hidden_size, place)
        self.factor = place.parameter(1) if block.factor else None


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + ffn(norm(x)), where both may use the same norm.

    Parameters have the same names as in a sequential block; a single norm belongs to attention.
    """

    def __init__(self, block: spec.Block, hidden_size: int, memory_size: int, backend: AttentionBackend, place: Place):
        super().__init__()
        assert isinstance(block.placement, spec.Parallel)
        norms = [build_norm(norm, hidden_size, place) for norm in block.placement.norms]
        own = build_attention(block, hidden_size, backend, place)
        self.attention = Sublayer(own, before=norms[0])
        self.ffn = Sublayer(
            build_feed_forward(block.ffn, hidden_size, place), before=norms[1] if len(norms) > 1 else None
        )


class BottleneckBlock(nn.Module):
    """norm(x + exit(f(entrance(x)))), where f is attention and feed-forward networks on fewer features."""

    def __init__(self, block: spec.Block, hidden_size: int, backend: AttentionBackend, place: Place):
        super().__init__()
        part = block.bottleneck
        assert part is not None
        width, norm, whole = part.width, part.norm, part.values == "whole"
        self.entrance = Linear(hidden_size, width, True, place)
        self.entrance_norm = build_norm(norm, width, place)
        # For queries and keys, if values do not use it.
        self.second_entrance = Linear(hidden_size, width, True, place) if whole else None
        self.second_norm = build_norm(norm, width, place) if whole else None
        attention = SelfAttention(block.attention, width, backend, place, values_size=hidden_size if whole else None)
        self.attention = Sublayer(attention, outer=build_norm(norm, width, place))
        self.networks = nn.ModuleList(
            Sublayer(build_feed_forward(block.ffn, width, place), outer=build_norm(norm, width, place))
            for _ in range(part.networks)
        )
        self.exit = Linear(width, hidden_size, True, place)
        self.exit_norm = build_norm(norm, hidden_size, place)


class ConvolvedBlock(nn.Module):
    """norm(y + convolution(x)) of y = inner(x), a layer."""

    def __init__(self, inner: nn.Module, part: spec.Convolution, hidden_size: int, place: Place):
        super().__init__()
        self.inner = inner
        self.convolution = TokenConvolution(part, hidden_size, place)
        self.norm = build_norm(part.norm, hidden_size, place)


def build_attention(block: spec.Block, hidden_size: int, backend: AttentionBackend, place: Place) -> nn.Module:
    """The module of a block's attention to its own tokens, or the module that mixes them instead."""
    if isinstance(block.mixing, spec.StateLayer):
        state = build_state_layer(block.mixing, hidden_size, place)
        if not block.attention.heads:
            return state
        return AttentionBesideState(SelfAttention(block.attention, hidden_size, backend, place), state)
    if block.mixing is not None:
        return FourierMixing()
    part = block.attention
    if part.latent is not None:
        return LatentAttention(part, part.latent, hidden_size, backend, place)
    if part.routed is not None:
        return RoutedAttention(part, part.routed, hidden_size, backend, place)
    if part.value_scores is not None:
        return ValueScoringAttention(part, part.value_scores, hidden_size, backend, place)
    if part.reads is not None:
        return ReadingAttention(part, hidden_size, backend, place)
    kind = _MODULES.get(type(part.sees)) or _MODULES.get(type(part.position)) or SelfAttention
    return kind(part, hidden_size, backend, place)


_MODULES: dict[type, type[SelfAttention]] = {
    spec.GlobalTokens: GlobalAttention,
    spec.BlockSums: BlockSumAttention,
    spec.GlobalStream: StreamAttention,
    Disentangled: DisentangledAttention,
    QueryBuckets: BucketedAttention,
}


def build_feed_forward(part: spec.FeedForward, hidden_size: int, place: Place) -> nn.Module:
    match part:
        case spec.Dense():
            return DenseFeedForward(part, hidden_size, place)
        case spec.Gated():
            return GatedFeedForward(part, hidden_size, place)
        case spec.Xielu():
            return XieluFeedForward(part, hidden_size, place)
        case spec.Experts():
            return ExpertsFeedForward(part, hidden_size, place)
        case spec.Shared():
            return SharedExperts(part, hidden_size, place)
        case spec.SparselyGated():
            return SparseFeedForward(part, hidden_size, place)
        case spec.NormedSum():
            return NormedExperts(part, hidden_size, place)


def build_block(
    block: spec.Block,
    hidden_size: int,
    memory_size: int,
    backend: AttentionBackend,
    place: Place,
    versions: spec.Versions | None = None,
) -> nn.Module:
    """The module of one layer.

    Args:
        memory_size: features of the encoder's hidden states, for a block that attends to them.
        versions: the stream's versions.
    """
    if block.bottleneck is not None:
        return BottleneckBlock(block, hidden_size, backend, place)
    layer: nn.Module
    if isinstance(block.placement, spec.Parallel):
        layer = ParallelBlock(block, hidden_size, memory_size, backend, place)
    else:
        layer = SequentialBlock(block, hidden_size, memory_size, backend, place, versions)
    return layer if block.beside is None else ConvolvedBlock(layer, block.beside, hidden_size, place)
