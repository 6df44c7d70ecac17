"""A decoder's layers with few launches on a GPU: what lies between two matrix products is one kernel.

The counterpart of `engine.model.lowering`. The modules of a stack are walked once, and what they compute is written
down as two kinds of operations in turn. A *join* adds what the sublayer before gave to the residual stream and norms
the sum for the next one; an *inner* operation is attention or a feed-forward network. A layer of the usual kind is
then: join; product; norms of heads, rotation and pages; attention; product; join; product; gate; product.

Numbers are rounded where the modules round theirs, so that the two differ in the last bits of float32 alone. The
modules stay what they were: the oracle, and the way on which everything runs that has no operation here.

All of it can be recorded as a CUDA graph: nothing waits for the device, sizes are those of the arguments, and tables
are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engine.attention.base import AttentionMetadata, Bias, Paged
from engine.gpu import norms
from engine.gpu.norms import Norm
from engine.gpu.rotary import LONGEST_HEAD, Angles, HeadNorms, turn_and_store
from engine.model.blocks import ParallelBlock, SequentialBlock, Sublayer
from engine.model.kernels import GPU_FORMATS
from engine.model.layers import (
    CrossAttention,
    CrossPages,
    SelfAttention,
    Step,
)
from engine.model.norms import LayerNorm, RmsNorm
from engine.model.positions import AttentionPosition, Rotary
from engine.model.slots import find_slots


class NotFused(Exception):
    """A part has no operation; the message says which."""


@dataclass(slots=True)
class _Run:
    """One forward pass.

    Attributes:
        stream: [Tp, hidden] the residual stream, which lacks what is pending.
        positions: [Tp].
        step: what the layers share; its slots are None where each row has one token, whose slot is worked out with it.
        input: of the next inner operation.
        pending: results of inner operations that are not in the stream yet, two at most.
    """

    stream: Tensor
    positions: Tensor
    caches: Sequence[Paged]
    step: Step
    input: Tensor
    pending: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Join:
    """The stream receives what is pending; its norm is the next input.

    Attributes:
        after: the norm of what is pending.
        norm: None: the stream itself is the next input.
        in_place: the norm takes the place of the sum in the stream.
    """

    after: Norm | None
    norm: Norm | None
    in_place: bool = False

    def __call__(self, run: _Run) -> None:
        if run.pending:
            first, *others = run.pending
            run.input = norms.add_norm(
                run.stream,
                first,
                self.norm,
                after=self.after,
                also=others[0] if others else None,
                in_place=self.in_place,
            )
            run.pending.clear()
        elif self.norm is None:
            run.input = run.stream
        else:
            run.input = norms.norm(run.stream, self.norm, run.stream if self.in_place else None)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Attention of the new tokens to their rows' pages, which first receive them.

    Attributes:
        layer: whose pages.
        angles: None where nothing turns.
        norms: of each head.
        whole: of all queries at once, and of all keys.
        bias: what is added to the scores.
    """

    module: SelfAttention
    layer: int
    angles: Angles | None
    norms: HeadNorms | None
    whole: HeadNorms | None
    bias: Bias | None

    def __call__(self, run: _Run) -> None:
        part, cache, total = self.module.part, run.caches[self.layer], run.input.shape[0]
        heads, clip = self.module.qkv(run.input), part.clip
        if self.whole is not None:
            if clip is not None:
                heads, clip = heads.clamp_(-clip, clip), None
            sizes = (part.heads * part.head_dim, part.kv_heads * part.head_dim)
            queries, keys = heads[:, : sizes[0]], heads[:, sizes[0] : sum(sizes)]
            norms.norm(queries, self.whole.queries, queries)
            norms.norm(keys, self.whole.keys, keys)
        heads = heads.view(total, part.heads + 2 * part.kv_heads, part.head_dim)
        turning, values = heads.tensor_split((part.heads + part.kv_heads,), dim=1)
        turn_and_store(
            turning,
            values,
            cache,
            angles=self.angles,
            positions=run.positions,
            slots=run.step.slots,
            norms=self.norms,
            clip=clip,
        )
        attended = self.module.backend.attend(
            turning[:, : part.heads],
            cache,
            run.step.metadata,
            causal=part.causal,
            window=part.window,
            scale=part.scale,
            bias=self.bias,
            softcap=part.softcap,
        )
        run.pending.append(self.module.out(attended.reshape(total, part.heads * part.head_dim)))


@dataclass(frozen=True, slots=True)
class _Cross:
    """Attention to the encoder's pages, by its module: nothing lies between its products and attention."""

    module: CrossAttention
    layer: int

    def __call__(self, run: _Run) -> None:
        run.pending.append(self.module(run.input, run.caches[self.layer], run.step))


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """A feed-forward network by its module, whose activation or gate is one kernel."""

    module: nn.Module

    def __call__(self, run: _Run) -> None:
        run.pending.append(self.module(run.input, run.step))


class FusedStack:
    """The layers of a decoder, its final norm and projection, on a device that `engine.gpu` serves.

    Args:
        blocks, final_norm, projection: the modules, weights filled.
        angles: for each rotary part cosines [length, head_dim] and sines [length, dim / 2], float32.
        biases: for each part that adds a bias to the scores, what a backend is handed.
        shared_bias: the bias of self-attentions without a part of their own.

    Raises:
        NotFused: something has no operation.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        final_norm: nn.Module | None,
        projection: nn.Module | None,
        *,
        dtype: torch.dtype,
        angles: Mapping[Rotary, tuple[Tensor, Tensor]],
        biases: Mapping[AttentionPosition, Bias],
        shared_bias: Bias | None,
    ):
        if dtype not in GPU_FORMATS:
            raise NotFused(f"there are no kernels for {dtype}")
        self._dtype = dtype
        self._angles, self._biases, self._shared_bias = angles, biases, shared_bias
        self._operations: list[Callable[[_Run], None]] = []
        self._after: Norm | None = None  # the norm of what is pending
        for layer, block in enumerate(blocks):
            match block:
                case SequentialBlock():
                    for sublayer in (block.attention, block.cross, block.ffn):
                        if sublayer is not None:
                            self._sublayer(sublayer, layer)
                case ParallelBlock():
                    self._parallel(block, layer)
                case _:
                    raise NotFused(f"{type(block).__name__} has no operation")
        self._join(final_norm)
        self._projection = projection

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        caches: Sequence[Paged],
        slots: Tensor | None,
        cross: CrossPages | None,
        *,
        tokens: int,
        min_rows: int,
    ) -> Tensor:
        """Hidden states [Tp, features] of embedded tokens x [Tp, hidden], which are overwritten; the other arguments
        are those of `Transformer.forward`, T being `tokens`.

        Positions outside the angles give NaN; slots outside the pages, or in block 0, are not written.
        """
        one_each = len(metadata.query_lens) == tokens and max(metadata.query_lens, default=1) == 1
        if slots is None and not one_each:
            slots = find_slots(caches[0], metadata, positions, tokens)
        step = Step(tokens, metadata, rotations={}, biases={}, slots=slots, cross=cross, min_rows=min_rows)
        x = x.contiguous()
        run = _Run(x, positions.contiguous(), caches, step, x)
        for operation in self._operations:
            operation(run)
        out: Tensor = run.input if self._projection is None else self._projection(run.input)
        return out

    # ---- layers

    def _sublayer(self, part: Sublayer, layer: int) -> None:
        if part.first is not None:
            self._join(part.first, in_place=True)
        if part.first is None or part.before is not None:
            self._join(part.before)
        self._inner(part.inner, layer)
        self._after = self._norm(part.after)
        if part.outer is not None:
            self._join(part.outer, in_place=True)

    def _parallel(self, block: ParallelBlock, layer: int) -> None:
        self._join(block.attention.before)
        self._inner(block.attention.inner, layer)
        if block.ffn.before is not None:
            own = self._norm(block.ffn.before)

            def norm_again(run: _Run) -> None:
                assert own is not None
                run.input = norms.norm(run.stream, own)

            self._operations.append(norm_again)
        self._inner(block.ffn.inner, layer)

    def _join(self, norm: nn.Module | None, in_place: bool = False) -> None:
        self._operations.append(_Join(self._after, self._norm(norm), in_place))
        self._after = None

    def _inner(self, module: nn.Module, layer: int) -> None:
        match module:
            case SelfAttention():
                self._operations.append(self._attention(module, layer))
            case CrossAttention():
                self._operations.append(_Cross(module, layer))
            case _:
                self._operations.append(_FeedForward(module))

    def _attention(self, module: SelfAttention, layer: int) -> _Attention:
        part, angles, heads, whole = module.part, None, None, None
        if type(module) is not SelfAttention:  # what is derived from it computes something else
            raise NotFused(f"{type(module).__name__} has no operation")
        if part.head_dim > LONGEST_HEAD:
            raise NotFused(f"a head of {part.head_dim} features has no operation")
        if isinstance(part.position, Rotary):
            cos, sin = self._angles[part.position]
            angles = Angles(cos, sin, part.position.interleaved, part.position.in_float32)
        if module.qk_norm is not None:
            queries, keys = self._norm(module.qk_norm.queries), self._norm(module.qk_norm.keys)
            assert queries is not None
            assert keys is not None
            both = HeadNorms(queries, keys)
            heads, whole = (None, both) if module.qk_norm.whole else (both, None)
        bias = self._shared_bias if part.position is None else self._biases.get(part.position)
        return _Attention(module, layer, angles, heads, whole, bias)

    def _norm(self, module: nn.Module | None) -> Norm | None:
        match module:
            case None:
                return None
            case RmsNorm():
                norm = Norm(module.weight, module.eps, unit_offset=module.unit_offset, in_float32=module.in_float32)
            case LayerNorm():
                norm = Norm(module.weight, module.eps, centred=True, bias=module.bias)
            case _:
                raise NotFused(f"{type(module).__name__} has no operation")
        if module.shape[0] > norms.WIDEST:
            raise NotFused(f"a norm of {module.shape[0]} features has no operation")
        if any(part is not None and part.dtype != self._dtype for part in (norm.weight, norm.bias)):
            raise NotFused(f"a norm's weights are not {self._dtype}")
        return norm
