"""The layers that the parts of `engine.model.spec` become (positions: `rotary`, `bias`; experts: `experts`).

T stands for tokens laid end to end, without a batch dimension. Parameters are allocated and not
initialised: the builder of a module fills them (`engine.model.weights`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.base import AttentionBackend, AttentionMetadata, Bias, DistanceBias, Paged, PositionBias, Ragged
from engine.model import kernels, spec
from engine.model.activations import activate_by_name, gate_by_name
from engine.model.distances import DistanceTable
from engine.model.norms import build_norm
from engine.model.packing import PackedProduct, pack_product
from engine.model.place import Place
from engine.model.positions import AttentionPosition, Rotary
from engine.model.quantisation import Quantization
from engine.model.rotary import rotate
from engine.native import gemm
from engine.native.arguments import FORMATS
from engine.native.gemm import Quantised


@dataclass(frozen=True, slots=True)
class CrossPages:
    """The pages of the encoder's K and V, which a step reads and never writes.

    Rows of the step that read the same may be one row here: their queries have no order among the keys.

    Attributes:
        block_tables: [rows, max blocks] int32.
        metadata: the rows' queries, and as contexts the lengths of their encoder inputs.
    """

    block_tables: Tensor
    metadata: AttentionMetadata

    @staticmethod
    def empty(query_lens: list[int], device: torch.device) -> CrossPages:
        """For rows of a trial step, which have no encoder input."""
        rows = len(query_lens)
        tables = torch.zeros(rows, 1, dtype=torch.int32, device=device)
        return CrossPages(tables, AttentionMetadata.build(query_lens, [0] * rows, device))


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers share in one forward pass.

    Attributes:
        tokens: T of the Tp tokens are real, the others padding.
        metadata: the shape of the ragged batch.
        rotations: for each rotary part, (cos [Tp, 1, head_dim], sin [Tp, 1, dim / 2]).
        biases: for each part that adds a bias to the scores, what a backend is handed.
        shared_bias: the bias that all self-attentions of the stack add.
        distances: the vectors that disentangled attentions of the stack read.
        slots: [T] int64, where the new tokens' K and V go in the flattened pages; None for an encoder, which
            keeps none.
        cross: where each row finds the encoder's K and V, for decoders that attend to one.
        min_rows: fewest rows of a matrix product whose rows do not depend on each other
            (`engine.execution.invariance`).
    """

    tokens: int
    metadata: AttentionMetadata
    rotations: dict[Rotary, tuple[Tensor, Tensor]]
    biases: dict[AttentionPosition, DistanceBias | PositionBias]
    shared_bias: DistanceBias | None = None
    distances: DistanceTable | None = None
    slots: Tensor | None = None
    cross: CrossPages | None = None
    min_rows: int = 1


class Linear(nn.Module):
    """x @ weight.T + bias, weight [out, in].

    Args:
        shared: a weight that another module owns (a tied head); None makes one of its own.

    Attributes:
        by_row: a row alone has a kernel of its own on a GPU, where float32 is wanted (`engine.gpu.matvec`).
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, place: Place, shared: nn.Parameter | None = None):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.shared = shared is not None
        self.weight = place.parameter(outputs, inputs) if shared is None else shared
        self.bias = place.parameter(outputs) if bias else None
        self.packed: PackedProduct | None = None
        self.by_row = False

    def pack(
        self, quantization: Quantization | None = None, quantised: Callable[[int], Quantised] | None = None
    ) -> None:
        """Lay the filled weight out as the CPU's matrix kernels read it, once instead of at every product.

        The plain weight is given up, unless another module needs it.

        Args:
            quantised: gives matrix 0, the only one, as it has been quantised; the plain one need not be filled then.
        """
        weight = self.weight if quantised is None else quantised(0)
        self.packed = pack_product(weight, self.bias, quantization)
        if self.packed is not None and not self.shared:
            self.weight = nn.Parameter(self.weight.new_empty(0, self.inputs), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x)

    def in_float32(self, x: Tensor) -> Tensor:
        """The same as float32, which our own kernels have not rounded to x's format before."""
        packed = None if self.packed is None else self.packed.native
        if self.by_row and self.packed is None:
            row = kernels.logits_of_row(x, self.weight, self.bias)
            if row is not None:
                return row
        if packed is None or x.dtype not in FORMATS:
            return self(x).float()  # type: ignore[no-any-return]
        return gemm.matmul(packed, x, dtype=torch.float32)


class QkNorm(nn.Module):
    """Norms of queries and keys, each over a head's features or over all heads' at once."""

    def __init__(self, part: spec.Attention, norm: spec.PerHead | spec.WholeProjection, place: Place):
        super().__init__()
        self.split = (part.heads,)
        self.whole = isinstance(norm, spec.WholeProjection)
        sizes = [n * part.head_dim if self.whole else part.head_dim for n in (part.heads, part.kv_heads)]
        self.queries, self.keys = (build_norm(norm.norm, size, place) for size in sizes)

    def forward(self, heads: Tensor) -> Tensor:
        """[T, heads + kv_heads, head_dim], queries first, to the same."""
        normed = []
        for norm, x in zip((self.queries, self.keys), heads.tensor_split(self.split, dim=1), strict=True):
            assert norm is not None
            normed.append(norm(x.flatten(1)).view(x.shape) if self.whole else norm(x))
        return torch.cat(normed, dim=1)


class SelfAttention(nn.Module):
    """Attention of the tokens of a row to each other.

    A decoder's new tokens see their sequence's pages, which first receive the tokens' own K and V; an encoder's
    see their own row, which is whole in this step.
    """

    def __init__(self, part: spec.Attention, hidden_size: int, backend: AttentionBackend, place: Place):
        super().__init__()
        self.part = part
        self.backend = backend
        self.qkv = Linear(hidden_size, (part.heads + 2 * part.kv_heads) * part.head_dim, part.qkv_bias, place)
        self.qk_norm = None if part.qk_norm is None else QkNorm(part, part.qk_norm, place)
        self.out = Linear(part.heads * part.head_dim, hidden_size, part.out_bias, place)

    def forward(self, x: Tensor, cache: Paged | None, step: Step) -> Tensor:
        """[Tp, hidden] to [Tp, hidden]; tokens past `step.tokens` are padding: backends give them zeros."""
        part, total, tokens = self.part, x.shape[0], step.tokens
        heads = self.qkv(x).view(total, part.heads + 2 * part.kv_heads, part.head_dim)
        if part.clip is not None:
            heads = heads.clamp_(-part.clip, part.clip)
        turning, values = heads.tensor_split((part.heads + part.kv_heads,), dim=1)
        if self.qk_norm is not None:
            turning = self.qk_norm(turning)
        rotary = part.position if isinstance(part.position, Rotary) else None
        angles = None if rotary is None else step.rotations[rotary]
        done = kernels.rotate_and_store(turning, values, rotary, angles, cache, step.slots)
        if not done and rotary is not None and angles is not None:
            turning = rotate(turning, rotary, *angles)
        queries, keys = turning.tensor_split((part.heads,), dim=1)
        kv: Paged | Ragged
        if cache is None:
            kv = Ragged(keys[:tokens], values[:tokens], step.metadata.query_start[:-1])
        else:
            assert step.slots is not None
            kv = cache
            if not done:
                cache.write(step.slots, keys[:tokens], values[:tokens])
        attended = self.backend.attend(
            queries,
            kv,
            step.metadata,
            causal=part.causal,
            window=part.window,
            scale=part.scale,
            bias=self.bias(step),
            softcap=part.softcap,
        )
        out: Tensor = self.out(attended.reshape(total, part.heads * part.head_dim))
        return out

    def bias(self, step: Step) -> Bias | None:
        """What is added to the scores."""
        position = self.part.position
        return step.shared_bias if position is None else step.biases.get(position)


class CrossAttention(nn.Module):
    """Attention of a decoder's tokens to an encoder's, whose K and V were stored in pages once."""

    def __init__(
        self, part: spec.Attention, hidden_size: int, memory_size: int, backend: AttentionBackend, place: Place
    ):
        super().__init__()
        self.part = part
        self.backend = backend
        self.queries = Linear(hidden_size, part.heads * part.head_dim, part.qkv_bias, place)
        self.kv = Linear(memory_size, 2 * part.kv_heads * part.head_dim, part.qkv_bias, place)
        self.out = Linear(part.heads * part.head_dim, hidden_size, part.out_bias, place)

    def store(self, encoded: Tensor, cache: Paged, slots: Tensor) -> None:
        """Write K and V of an encoder's hidden states [Tp, memory] to slots [T], those past T being padding."""
        heads = self.kv(encoded).view(encoded.shape[0], 2, self.part.kv_heads, self.part.head_dim)[: len(slots)]
        _own(cache).write(slots, heads[:, 0], heads[:, 1])

    def forward(self, x: Tensor, cache: Paged, step: Step) -> Tensor:
        """[Tp, hidden] to [Tp, hidden]."""
        part, total = self.part, x.shape[0]
        assert step.cross is not None
        attended = self.backend.attend(
            self.queries(x).view(total, part.heads, part.head_dim),
            replace(_own(cache), block_tables=step.cross.block_tables),
            step.cross.metadata,
            causal=False,
            scale=part.scale,
            softcap=part.softcap,
        )
        out: Tensor = self.out(attended.reshape(total, part.heads * part.head_dim))
        return out


def _own(cache: Paged) -> Paged:
    """The pages as cross-attention uses them: the centre of keys is that of self-attention's."""
    return replace(cache, key_centre=None)


class DenseFeedForward(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, part: spec.Dense, hidden_size: int, place: Place):
        super().__init__()
        self.up = Linear(hidden_size, part.width, part.bias, place)
        self.down = Linear(part.width, hidden_size, part.bias, place)
        self.activation = part.activation

    def forward(self, x: Tensor, step: Step) -> Tensor:
        out: Tensor = self.down(activate_by_name(self.activation, self.up(x)))
        return out


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)); gate and up are one matrix, gate's rows first."""

    def __init__(self, part: spec.Gated, hidden_size: int, place: Place):
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * part.width, part.bias, place)
        self.down = Linear(part.width, hidden_size, part.bias, place)
        self.activation = part.activation

    def forward(self, x: Tensor, step: Step) -> Tensor:
        out: Tensor = self.down(gate_by_name(self.activation, self.gate_up(x)))
        return out
