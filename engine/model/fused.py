"""A decoder's layers with few launches on a GPU: what lies between two matrix products is one kernel.

The counterpart of `engine.model.lowering`. The modules of a stack are walked once, and what they compute is written
down as two kinds of operations in turn. A *join* adds what the sublayer before gave to the residual stream and norms
the sum for the next one; an *inner* operation is attention or a feed-forward network. A layer of the usual kind is
then: join; product; norms of heads, rotation and pages; attention; product; join; product; gate; product.

Numbers are rounded where the modules round theirs, so that the two differ in the last bits of float32 alone. The
modules stay what they were: the oracle, and the way on which everything runs that has no operation here. A token alone
has another, with fewer launches still: `engine.model.fused_row`.

All of it can be recorded as a CUDA graph: nothing waits for the device, sizes are those of the arguments, and tables
are made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.attention.base import AttentionMetadata, Bias, Paged
from engine.gpu import norms
from engine.gpu.norms import Norm
from engine.gpu.rotary import LONGEST_HEAD, Angles, HeadNorms
from engine.model.blocks import ParallelBlock, SequentialBlock, Sublayer
from engine.model.fused_operations import Attend, AttendAcross, Feed, Join, NormAgain, Operation, Run
from engine.model.fused_row import row_operations
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


class FusedStack:
    """The layers of a decoder, its final norm and projection, on a device that `engine.gpu` serves.

    Args:
        blocks, final_norm, projection: the modules, weights filled.
        angles: for each rotary part cosines [length, head_dim] and sines [length, dim / 2], float32.
        biases: for each part that adds a bias to the scores, what a backend is handed.
        shared_bias: the bias of self-attentions without a part of their own.

    Attributes:
        by_row: a token alone is computed with the fewest launches (`engine.model.fused_row`); else as many tokens are.

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
        self._operations: list[Operation] = []
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
        self._row_operations = row_operations(self._operations)
        self.by_row = False

    def forward(
        self,
        x: Tensor,
        turns: Tensor,
        metadata: AttentionMetadata,
        caches: Sequence[Paged],
        slots: Tensor | None,
        cross: CrossPages | None,
        *,
        tokens: int,
        min_rows: int,
    ) -> Tensor:
        """Hidden states [Tp, features] of embedded tokens x [Tp, hidden], which are overwritten; the other arguments
        are those of `Transformer.forward`, T being `tokens`. Without slots, turns
        are positions, too.

        Rows outside the angles give NaN; slots outside the pages, or in block 0, are not written.
        """
        one_each = len(metadata.query_lens) == tokens and max(metadata.query_lens, default=1) == 1
        if slots is None and not one_each:
            slots = find_slots(caches[0], metadata, turns, tokens)
        step = Step(tokens, metadata, rotations={}, biases={}, slots=slots, cross=cross, min_rows=min_rows)
        x = x.contiguous()
        run = Run(x, turns.contiguous(), caches, step, x)
        for operation in self._row_operations if self.by_row and x.shape[0] == 1 else self._operations:
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
            assert own is not None
            self._operations.append(NormAgain(own))
        self._inner(block.ffn.inner, layer)

    def _join(self, norm: nn.Module | None, in_place: bool = False) -> None:
        self._operations.append(Join(self._after, self._norm(norm), in_place))
        self._after = None

    def _inner(self, module: nn.Module, layer: int) -> None:
        match module:
            case SelfAttention():
                self._operations.append(self._attention(module, layer))
            case CrossAttention():
                self._operations.append(AttendAcross(module, layer))
            case _:
                self._operations.append(Feed(module))

    def _attention(self, module: SelfAttention, layer: int) -> Attend:
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
        return Attend(module, layer, angles, heads, whole, bias)

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
