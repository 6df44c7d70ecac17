"""An encoder or a decoder: embedding, blocks, final norm, projection, and the tables of positions that they share."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from engine.attention.base import AttentionBackend, AttentionMetadata, Paged
from engine.model import spec
from engine.model.bias import BiasTable, BucketTable
from engine.model.blocks import build_block
from engine.model.distances import DistanceTable
from engine.model.embedding import TokenEmbedding
from engine.model.layers import CrossPages, Linear, Step
from engine.model.lowering import LoweredStack, NotLowered
from engine.model.norms import build_norm
from engine.model.place import Place
from engine.model.positions import Rotary, RoundedSlopes, Slopes
from engine.model.rotary import RotaryTable
from engine.model.slots import find_slots

if TYPE_CHECKING:
    from engine.model.fused import FusedStack

logger = logging.getLogger("octavo.model")


class TransformerStack(nn.Module):
    """Embedding, blocks, final norm, projection: a decoder over a paged cache, or an encoder without one.

    Args:
        length: positions are below this.
        limits: lengths up to which sequences have rows of their own in rotary tables.
        memory_size: features of the encoder's hidden states, for a decoder that attends to them.
        tokens: a token table that another stack owns.
    """

    def __init__(
        self,
        stack: spec.Stack,
        backend: AttentionBackend,
        length: int,
        place: Place,
        *,
        limits: Sequence[int] = (),
        memory_size: int = 0,
        tokens: nn.Parameter | None = None,
    ):
        super().__init__()
        assert isinstance(stack.embedding, spec.Tokens)  # `unsupported` refused anything else
        self.embedding = TokenEmbedding(stack.embedding, place, shared=tokens)
        self.blocks = nn.ModuleList(
            build_block(block, stack.hidden_size, memory_size, backend, place) for block in stack.blocks
        )
        self.final_norm = build_norm(stack.final_norm, stack.hidden_size, place)
        self.projection = None
        if stack.projection is not None:
            self.projection = Linear(stack.hidden_size, stack.projection, False, place)
        # Layers with the same position part share one table, looked up once per step.
        heads = {b.attention.position: b.attention.head_dim for b in stack.blocks}
        self.rotary_parts = [part for part in heads if isinstance(part, Rotary)]
        self.rotary_tables = nn.ModuleList(
            RotaryTable(part, heads[part], length, place.device, limits) for part in self.rotary_parts
        )
        self.bias_parts = [part for part in heads if isinstance(part, Slopes | RoundedSlopes)]
        self.bias_tables = nn.ModuleList(BiasTable(part, length, place.device) for part in self.bias_parts)
        self.shared_bias = None
        if stack.shared_bias is not None:
            self.shared_bias = BucketTable(stack.shared_bias, stack.blocks[0].attention.heads, place)
        self.distances = None
        if stack.distances is not None:
            self.distances = DistanceTable(stack.distances, stack.hidden_size, length, place)
        self.hidden_size = stack.hidden_size
        self.lowered: LoweredStack | None = None
        self.fused: FusedStack | None = None

    def fuse(self) -> None:
        """Let few kernels compute the layers on a GPU from now on, if there are such for all of them
        (`engine.model.fused`). Weights have been filled, and stay as they are."""
        from engine.model.fused import FusedStack, NotFused

        rotary = zip(self.rotary_parts, cast("Iterable[RotaryTable]", self.rotary_tables), strict=True)
        biases = zip(self.bias_parts, self.bias_tables, strict=True)
        try:
            self.fused = FusedStack(
                self.blocks,
                self.final_norm,
                self.projection,
                dtype=self.embedding.tokens.dtype,
                angles={part: (table.cos, table.sin) for part, table in rotary},
                biases={part: table() for part, table in biases},
                shared_bias=None if self.shared_bias is None else self.shared_bias(),
            )
        except NotFused as reason:
            logger.debug("layers run part by part: %s", reason)

    def lower(self) -> None:
        """Let the library compute all layers in one call from now on, if it can (`engine.model.lowering`). Weights
        have been laid out, and stay as they are."""
        dtype = self.embedding.tokens.dtype
        rotary = zip(self.rotary_parts, self.rotary_tables, strict=True)
        biases = zip(self.bias_parts, self.bias_tables, strict=True)
        try:
            self.lowered = LoweredStack(
                self.blocks,
                self.final_norm,
                self.projection,
                hidden_size=self.hidden_size,
                dtype=dtype,
                angles={part: cast(RotaryTable, table).whole(dtype) for part, table in rotary},
                biases={part: table() for part, table in biases},
                shared_bias=None if self.shared_bias is None else self.shared_bias(),
            )
        except NotLowered as reason:
            logger.debug("layers run part by part: %s", reason)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        *,
        tokens: int,
        min_rows: int,
        caches: Sequence[Paged] | None = None,
        slots: Tensor | None = None,
        cross: CrossPages | None = None,
        types: Tensor | None = None,
        turns: Tensor | None = None,
    ) -> Tensor:
        x: Tensor = self.embedding(token_ids, positions, types)
        turns = positions if turns is None else turns
        if self.lowered is not None and caches is not None:
            if slots is None:
                slots = find_slots(caches[0], metadata, positions, tokens)
            return self.lowered.forward(x, turns, metadata, caches, slots, cross)
        if self.fused is not None and caches is not None:
            if slots is None and turns is not positions:  # kernels that find slots themselves go by one number for both
                slots = find_slots(caches[0], metadata, positions, tokens)
            return self.fused.forward(x, turns, metadata, caches, slots, cross, tokens=tokens, min_rows=min_rows)
        if caches is not None and slots is None:
            slots = find_slots(caches[0], metadata, positions, tokens)
        rotary = zip(self.rotary_parts, self.rotary_tables, strict=True)
        biases = zip(self.bias_parts, self.bias_tables, strict=True)
        step = Step(
            tokens,
            metadata,
            rotations={part: table(turns, x.dtype) for part, table in rotary},
            biases={part: table() for part, table in biases},
            shared_bias=None if self.shared_bias is None else self.shared_bias(),
            distances=self.distances,
            slots=slots,
            cross=cross,
            min_rows=min_rows,
        )
        kept: Sequence[Paged | None] = [None] * len(self.blocks) if caches is None else caches
        for block, cache in zip(self.blocks, kept, strict=True):
            x = block(x, cache, step)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.projection is not None:
            x = self.projection(x)
        return x
