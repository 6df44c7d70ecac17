"""A decoder's layers as one call of the library, instead of one or more for each part of each layer.

A small model's step is over before Python has called all of its kernels. So the modules of a stack are walked once,
after their weights were laid out, and what each would compute is written down as operations of a
`engine.native.program`. The modules stay what they were: the oracle, and the way on which everything runs that has no
operation (experts, disentangled attention, formats or weights without kernels of our own).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine import native
from engine.attention.base import AttentionMetadata, Bias, DistanceBias, Paged, PositionBias, Window
from engine.attention.native import NativeAttention
from engine.model import spec
from engine.model.blocks import ParallelBlock, SequentialBlock, Sublayer
from engine.model.layers import (
    CrossAttention,
    CrossPages,
    DenseFeedForward,
    GatedFeedForward,
    Linear,
    QkNorm,
    SelfAttention,
)
from engine.model.norms import LayerNorm, RmsNorm
from engine.model.positions import AttentionPosition, Rotary
from engine.native import gemm
from engine.native.activations import FUNCTIONS
from engine.native.arguments import FORMATS
from engine.native.program import AddedBias, Pages, PageTensors, Program, Rows
from engine.native.rotary import LONGEST_HEAD


class NotLowered(Exception):
    """A part has no operation; the message says which."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What attentions share that can be described to the kernel together.

    Attributes:
        layer: one of the layers.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: Window | None
    cross: bool


class LoweredStack:
    """The layers of a decoder, its final norm and projection.

    Args:
        blocks, final_norm, projection: the modules, weights laid out.
        hidden_size: features of the residual stream.
        angles: for each rotary part cosines [length, head_dim] and sines [length, dim / 2].
        biases: for each part that adds a bias to the scores, what a backend is handed.
        shared_bias: the bias of self-attentions without a part of their own.

    Raises:
        NotLowered: something has no operation.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        final_norm: nn.Module | None,
        projection: nn.Module | None,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        angles: Mapping[Rotary, tuple[Tensor, Tensor]],
        biases: Mapping[AttentionPosition, Bias],
        shared_bias: Bias | None,
    ):
        if dtype not in FORMATS or not native.available():
            raise NotLowered(f"there are no kernels for {dtype}" if native.available() else "there is no library")
        self._dtype = dtype
        self._angles, self._biases, self._shared_bias = angles, biases, shared_bias
        self.program = Program(dtype)
        self._buffers: dict[tuple[str, int], Rows] = {}
        self._stream = self.program.buffer(hidden_size)
        self.program.give(self._stream)
        self._pending: Rows | None = None  # what the stream still lacks
        self._pages: list[Pages] = []
        self._bound: list[Tensor | None] = []
        self._calls: list[_Call] = []
        self._backend: NativeAttention | None = None
        for block in blocks:
            self._pages.append(Pages())
            self._bound.append(None)
            match block:
                case SequentialBlock():
                    self._sequential(block)
                case ParallelBlock():
                    self._parallel(block)
                case _:
                    raise NotLowered(f"{type(block).__name__} has no operation")
        result = self._normed(final_norm)
        if projection is not None:
            result = self._linear(projection, result, "projected")
        # The result is memory of its own: the program's is overwritten by the next step.
        self._result = result
        if result.buffer != self._stream.buffer:
            self.program.give(result)

    def forward(
        self,
        x: Tensor,
        turns: Tensor,
        metadata: AttentionMetadata,
        caches: Sequence[Paged],
        slots: Tensor,
        cross: CrossPages | None,
    ) -> Tensor:
        """Hidden states [Tp, features] of embedded tokens x [Tp, hidden], which are overwritten; the other arguments
        are those of `Transformer.forward`.

        Raises:
            IndexError: a row's pages or a token's slot lie outside the cache, or its angles outside the tables.
        """
        x, turns = x.contiguous(), turns.long().contiguous()
        for number, cache in enumerate(caches):
            if self._bound[number] is not cache.keys:
                self._bound[number] = cache.keys
                self._pages[number].bind(
                    PageTensors(cache.keys, cache.values, cache.key_scales, cache.value_scales, cache.key_centre)
                )
        backend = self._backend
        assert backend is not None
        calls = []
        for call in self._calls:
            kv, rows = caches[call.layer], metadata
            if call.cross:
                assert cross is not None
                kv, rows = replace(kv, block_tables=cross.block_tables, key_centre=None), cross.metadata
            shape = (len(x), call.heads, call.head_dim)
            calls.append(backend.describe(shape, x.dtype, kv, rows, causal=call.causal, window=call.window))
        given = [(self._stream, x)]
        if self._result.buffer != self._stream.buffer:
            out = torch.empty(len(x), self._result.width, dtype=x.dtype)
            given.append((self._result, out))
        else:
            out = x
        self.program.run(given, stored=len(slots), positions=turns, slots=slots, calls=calls)
        return out

    # ---- layers

    def _sequential(self, block: SequentialBlock) -> None:
        self._sublayer(block.attention)
        if block.cross is not None:
            self._sublayer(block.cross)
        self._sublayer(block.ffn)

    def _sublayer(self, part: Sublayer) -> None:
        if part.first is not None:
            self._norm(part.first, self._stream, self._stream, residual=self._take_pending())
        y = self._inner(part.inner, self._normed(part.before), "sublayer")
        if part.after is not None:
            self._norm(part.after, y, y)
        self._pending = y
        if part.outer is not None:
            self._norm(part.outer, self._stream, self._stream, residual=self._take_pending())

    def _parallel(self, block: ParallelBlock) -> None:
        normed = self._normed(block.attention.before)
        attended = self._inner(block.attention.inner, normed, "sublayer")
        if block.ffn.before is not None:
            normed = self._normed(block.ffn.before)
        fed = self._inner(block.ffn.inner, normed, "second sublayer")
        self.program.add(self._stream, attended, self._stream)
        self._pending = fed

    def _take_pending(self) -> Rows | None:
        pending, self._pending = self._pending, None
        return pending

    def _normed(self, norm: nn.Module | None) -> Rows:
        """The norm of the stream, which is complete afterwards; the stream itself without one."""
        pending = self._take_pending()
        if norm is None:
            if pending is not None:
                self.program.add(self._stream, pending, self._stream)
            return self._stream
        out = self._buffer("normed", self._stream.width)
        self._norm(norm, self._stream, out, residual=pending)
        return out

    def _inner(self, module: nn.Module, x: Rows, name: str) -> Rows:
        # Subclasses compute something else.
        if type(module) is SelfAttention:
            return self._self_attention(module, x, name)
        if type(module) is CrossAttention:
            return self._cross_attention(module, x, name)
        if type(module) in (DenseFeedForward, GatedFeedForward):
            return self._feed_forward(module, x, name)
        raise NotLowered(f"{type(module).__name__} has no operation")

    def _self_attention(self, module: SelfAttention, x: Rows, name: str) -> Rows:
        part, pages = module.part, self._pages[-1]
        if part.head_dim > LONGEST_HEAD:
            raise NotLowered(f"a head of {part.head_dim} features has no operation")
        heads = self._linear(module.qkv, x, "heads")
        if part.clip is not None:
            self.program.clip(heads, part.clip)
        queries = heads.part(0, part.heads * part.head_dim)
        keys = heads.part(queries.width, part.kv_heads * part.head_dim)
        if module.qk_norm is not None:
            self._qk_norm(module.qk_norm, queries, keys, part)
        rotary = part.position if isinstance(part.position, Rotary) else None
        self.program.turn(
            heads,
            pages,
            query_heads=part.heads,
            kv_heads=part.kv_heads,
            head_dim=part.head_dim,
            angles=None if rotary is None else self._angles[rotary],
            interleaved=rotary is not None and rotary.interleaved,
        )
        bias = self._shared_bias if part.position is None else self._biases.get(part.position)
        attended = self._attend(module, queries, pages, cross=False, bias=bias)
        return self._linear(module.out, attended, name)

    def _qk_norm(self, norms: QkNorm, queries: Rows, keys: Rows, part: spec.Attention) -> None:
        assert norms.queries is not None
        assert norms.keys is not None
        pieces = (1, 1) if norms.whole else (part.heads, part.kv_heads)
        self._norm(norms.queries, queries, queries, pieces=pieces[0], meet=False)
        self._norm(norms.keys, keys, keys, pieces=pieces[1])

    def _cross_attention(self, module: CrossAttention, x: Rows, name: str) -> Rows:
        queries = self._linear(module.queries, x, "queries")
        attended = self._attend(module, queries, self._pages[-1], cross=True, bias=None)
        return self._linear(module.out, attended, name)

    def _attend(
        self, module: SelfAttention | CrossAttention, queries: Rows, pages: Pages, *, cross: bool, bias: Bias | None
    ) -> Rows:
        part, backend = module.part, module.backend
        if not isinstance(backend, NativeAttention):
            raise NotLowered(f"{backend.name} attention has no operation")
        self._backend = backend
        layer = len(self._pages) - 1
        causal, window = (False, None) if cross else (part.causal, part.window)
        call = _Call(layer, part.heads, part.kv_heads, part.head_dim, causal, window, cross)
        same = next((i for i, other in enumerate(self._calls) if replace(other, layer=layer) == call), None)
        if same is None:
            same = len(self._calls)
            self._calls.append(call)
        out = self._buffer("attended", queries.width)
        self.program.attend(
            queries,
            out,
            pages,
            call=same,
            scale=part.scale,
            softcap=part.softcap or 0.0,
            bias=_added(bias),
            centred=not cross,
        )
        return out

    def _feed_forward(self, module: Any, x: Rows, name: str) -> Rows:
        gated = isinstance(module, GatedFeedForward)
        if module.activation not in FUNCTIONS:
            raise NotLowered(f"{module.activation} has no operation")
        wide = self._linear(module.gate_up if gated else module.up, x, "wide")
        hidden = self._buffer("hidden", wide.width // 2 if gated else wide.width)
        self.program.activate(module.activation, wide, hidden, gated=gated)
        return self._linear(module.down, hidden, name)

    # ---- single operations

    def _buffer(self, name: str, width: int) -> Rows:
        """Memory that all layers use."""
        key = (name, width)
        if key not in self._buffers:
            self._buffers[key] = self.program.buffer(width)
        return self._buffers[key]

    def _linear(self, module: nn.Module, x: Rows, name: str) -> Rows:
        assert isinstance(module, Linear)
        out = self._buffer(name, module.outputs)
        self.program.product(_weight(module), x, out)
        return out

    def _norm(
        self,
        module: nn.Module,
        x: Rows,
        out: Rows,
        *,
        residual: Rows | None = None,
        pieces: int = 1,
        meet: bool = True,
    ) -> None:
        terms: dict[str, Any] = {"residual": residual, "pieces": pieces, "meet": meet}
        match module:
            case RmsNorm():
                terms |= {"unit_offset": module.unit_offset, "in_float32": module.in_float32}
            case LayerNorm():
                terms |= {"bias": module.bias, "centred": True}
            case _:
                raise NotLowered(f"{type(module).__name__} has no operation")
        self.program.norm(x, out, weight=module.weight, eps=module.eps, **terms)


def _weight(module: Linear) -> gemm.Packed:
    packed = None if module.packed is None else module.packed.native
    if packed is None:
        raise NotLowered("a matrix is not laid out for kernels of our own")
    return packed


def _added(bias: Bias | None) -> AddedBias | None:
    match bias:
        case None:
            return None
        case DistanceBias():
            return AddedBias(bias.table.float().contiguous(), 1, bias.zero)
        case PositionBias():
            return AddedBias(bias.table.float().contiguous(), 2, 0)
        case _:
            raise NotLowered(f"{type(bias).__name__} has no operation")
