"""An encoder or a decoder: embedding, blocks, final norm, projection, and their shared position tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.backends.attention.base import AttentionBackend
from engine.model import spec
from engine.model.bias import BiasTable, BucketTable
from engine.model.blocks import build_block
from engine.model.distances import DistanceTable
from engine.model.embedding import TokenEmbedding, build_embedding
from engine.model.executors.choice import Executor, fastest
from engine.model.executors.reference import TorchExecutor
from engine.model.inputs import Inputs
from engine.model.layer_vectors import LayerEmbedding
from engine.model.layers import EncodedKeys, Linear
from engine.model.norms import build_norm
from engine.model.packing import on_gpu
from engine.model.place import Place
from engine.model.positions import AttentionPosition, Rotary, RoundedSlopes, Slopes, TwoSidedSlopes
from engine.model.program import Program, compile_stack
from engine.model.rotary import RotaryTable
from engine.model.tables import Tables
from engine.model.versions import VersionEnds


class TransformerStack(nn.Module):
    """Embedding, blocks, final norm, projection: a decoder over a paged cache, or an encoder without one.

    Args:
        length: positions are below this.
        limits: lengths up to which sequences have separate rows in rotary tables.
        memory_size: features of the encoder's hidden states, for a decoder that attends to them.
        paged: whether keys and values are in pages.
        readers: the attentions of a decoder's layers that attend to the result of this stack, an encoder.
        tokens: a token table that another stack owns.
        image_layers: so many of the first layers add vectors of images to the tokens' hidden states.
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
        paged: bool = False,
        readers: Sequence[EncodedKeys | None] = (),
        tokens: nn.Parameter | None = None,
        image_layers: int = 0,
    ):
        super().__init__()
        self.embedding = build_embedding(stack.embedding, place, shared=tokens)
        self.blocks = nn.ModuleList(
            build_block(block, stack.hidden_size, memory_size, backend, place, stack.versions) for block in stack.blocks
        )
        self.final_norm = build_norm(stack.final_norm, stack.hidden_size, place)
        self.layer_vectors = None
        if stack.layer_vectors is not None:
            self.layer_vectors = LayerEmbedding(stack.layer_vectors, len(stack.blocks), stack.hidden_size, place)
        self.versions = None if stack.versions is None else VersionEnds(stack.versions, stack.hidden_size, place)
        self.projection = None
        if stack.projection is not None:
            self.projection = Linear(stack.hidden_size, stack.projection, False, place)
        heads = {attention.position: attention.turned for attention in stack.attentions}
        # A GPU's kernels read angles in float32.
        angles = torch.float32 if on_gpu(place.device) else place.dtype
        rotary = {
            part: RotaryTable(part, dim, length, place.device, limits, angles)
            for part, dim in heads.items()
            if isinstance(part, Rotary)
        }
        slopes: dict[AttentionPosition, BiasTable] = {
            part: BiasTable(part, length, place.device)
            for part in heads
            if isinstance(part, Slopes | TwoSidedSlopes | RoundedSlopes)
        }
        self.position_tables = nn.ModuleList([*rotary.values(), *slopes.values()])
        self.shared_bias = None
        if stack.shared_bias is not None:
            self.shared_bias = BucketTable(stack.shared_bias, stack.attentions[0].heads, place)
        self.block_bias = None
        if stack.block_bias is not None:
            self.block_bias = BucketTable(stack.block_bias, stack.attentions[0].heads, place)
        self.global_vectors = None
        if stack.global_vectors:
            self.global_vectors = place.parameter(stack.global_vectors, stack.hidden_size)
        self.predicting = None
        if stack.predicting is not None:
            self.predicting = place.parameter(stack.predicting.vectors, stack.hidden_size)
        self.distances = None
        if stack.distances is not None:
            self.distances = DistanceTable(stack.distances, stack.hidden_size, length, place)
        self.tables = Tables(rotary, slopes, self.shared_bias, self.block_bias, self.distances)
        self.program: Program = compile_stack(
            self.embedding,
            [self.blocks[number] for number in stack.order],
            self.final_norm,
            self.projection,
            hidden_size=stack.hidden_size,
            paged=paged,
            readers=readers,
            beside=self.global_vectors,
            predicting=self.predicting,
            layer_vectors=self.layer_vectors,
            versions=self.versions,
            kept=stack.kept,
            image_layers=image_layers,
            ranks=place.ranks,
        )
        self.executor: Executor = TorchExecutor(self.program, self.tables)

    def make_ready(self) -> None:
        """Let the fastest executor of the device run the program from now on. The weights are loaded, laid out, and do
        not change."""
        first = self.first_parameter
        self.executor = fastest(self.program, self.tables, first.dtype, first.device)

    @property
    def first_parameter(self) -> nn.Parameter:
        """A parameter of the embedding: all have its format and device."""
        return next(self.embedding.parameters())

    @property
    def placed_tables(self) -> list[RotaryTable]:
        """The rotary tables of positions with several axes."""
        return [table for part, table in self.tables.rotary.items() if part.pairs]

    @property
    def tokens(self) -> nn.Parameter | None:
        """The token table, if it reads tokens."""
        return self.embedding.tokens if isinstance(self.embedding, TokenEmbedding) else None

    def forward(self, inputs: Inputs) -> Tensor:
        """Hidden states [Tp, features]."""
        return self.executor.run(inputs)
