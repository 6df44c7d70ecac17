"""The modules with the weights of the parts of `engine.model.spec` (positions: `rotary`, `bias`; experts: `experts`).
`engine.model.program` describes the computation.

T is the number of tokens end to end, without a batch dimension. Parameters are allocated and not
initialised: the code that builds a module fills them (`engine.model.weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends import triton as gpu
from engine.backends.attention.base import AttentionBackend, AttentionMetadata
from engine.backends.native import gemm
from engine.backends.native.arguments import FORMATS
from engine.backends.native.gemm import Packed, Quantised, Weight
from engine.model import spec
from engine.model.activations import activate, gate_by_name
from engine.model.adapter_slots import AdapterSlots
from engine.model.bias import BucketTable
from engine.model.normalisation import Norm
from engine.model.norms import build_norm
from engine.model.packing import PackedProduct, pack_parts, pack_product, wide_product
from engine.model.place import Place
from engine.model.positions import RelativeBuckets
from engine.model.quantisation import Held
from engine.model.row_form import LIBRARY, RowForm
from engine.model.row_kernels import RowModule


@dataclass(frozen=True, slots=True)
class CrossPages:
    """The pages of the encoder's K and V, which a step reads and never writes.

    Rows of the step that read the same pages may be one row here, because their queries have no order among the keys.
    """

    block_tables: Tensor  # [rows, max blocks] int32
    metadata: AttentionMetadata  # the rows' queries, with the lengths of their encoder inputs as contexts

    @staticmethod
    def empty(query_lens: list[int], device: torch.device) -> CrossPages:
        """Empty inputs for rows of a trial step without encoder inputs."""
        rows = len(query_lens)
        tables = torch.zeros(rows, 1, dtype=torch.int32, device=device)
        return CrossPages(tables, AttentionMetadata.build(query_lens, [0] * rows, device))


class Linear(nn.Module):
    """x @ weight.T + bias, weight [out, in]. `shared`: a weight that another module owns (a tied head); None for its
    own weight."""

    def __init__(self, inputs: int, outputs: int, bias: bool, place: Place, shared: nn.Parameter | None = None):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.shared = shared is not None
        self.device = place.device
        self.weight = place.matrix(outputs, inputs) if shared is None else shared
        self.bias = place.parameter(outputs) if bias else None
        self.packed: PackedProduct | None = None
        self.stored: Held | None = None  # the nearest form to the checkpoint's, see `mark_stored`
        self.taken = False  # whether the checkpoint has exactly this form
        self.adapters: AdapterSlots | None = None  # if adapters may add to the product

    def pack(
        self,
        quantization: Held | None = None,
        quantised: Callable[[int], Weight | Packed] | None = None,
        amx: bool = False,
        parts: Iterator[Tensor | Weight] | None = None,
    ) -> None:
        """Lay the loaded weight out for matrix kernels, once instead of at every product: for a CPU's, or for a GPU's
        if it is quantised.

        The plain weight is released, or else is on the model's device afterwards. `Transformer.pack_matrix` releases a
        weight that another module owns.

        Args:
            quantised: returns matrix 0, the only one, already quantised or packed; the plain one then need not be
                loaded.
            amx: see `pack_product`.
            parts: yields the weight some rows at a time, see `pack_parts`; it then need not be loaded.
        """
        if parts is not None:
            self.packed = pack_parts(parts, self.outputs, self.bias, quantization, amx or self.shared)
        else:
            weight = self.weight if quantised is None else quantised(0)
            self.packed = pack_product(weight, self.bias, quantization, amx, device=self.device, table=self.shared)
        if self.packed is not None and not self.shared:
            self.give_up_weight()
        elif self.weight.device.type != self.device.type:
            self.weight = nn.Parameter(self.weight.to(self.device), requires_grad=False)

    def give_up_weight(self) -> None:
        """Release the plain weight."""
        self.weight = nn.Parameter(self.weight.new_empty(0, self.inputs, device=self.device), requires_grad=False)

    @property
    def is_packed(self) -> bool:
        """Whether the plain weight is no longer needed."""
        return self.packed is not None

    @property
    def few_bits(self) -> Quantised | None:
        """The weight, if it is quantised and on a GPU."""
        return None if self.packed is None else self.packed.few_bits

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x)

    def warm(self, dtype: torch.dtype) -> None:
        """Compile the kernels of a quantised weight, if any, for any number of rows of a format."""
        weight = self.few_bits
        if weight is None or not gpu.serves(self.device):
            return
        from engine.backends.triton import few_bits

        for rows in few_bits.trial_rows(weight):
            self(weight.scales.new_zeros(rows, self.inputs, dtype=dtype))

    def in_float32(self, x: Tensor, form: RowForm = LIBRARY) -> Tensor:
        """The same in float32, which kernels on a CPU and products on a GPU do not round to x's format first."""
        packed = None if self.packed is None else self.packed.native
        weight = self.weight if self.packed is None else self.few_bits
        if weight is not None:
            product = wide_product(x, weight, self.bias, form)
            if product is not None:
                return product
        if packed is None or x.dtype not in FORMATS:
            return self(x).float()  # type: ignore[no-any-return]
        return gemm.matmul(packed, x, dtype=torch.float32)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[T, heads, head_dim] of rows [T, heads * head_dim]."""
    return x if x.dim() == 3 else x.view(len(x), -1, head_dim)


def heads_of(rows: Iterable[Tensor], head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [T, heads, head_dim] of their rows."""
    queries, keys, values = (split_heads(x, head_dim) for x in rows)
    return queries, keys, values


class QkNorm(nn.Module):
    """Norms of queries and keys, each over a head's features or over all heads' at once, before or after rotation; and
    of values, over a head's features."""

    def __init__(self, part: spec.Attention, norm: spec.QkNorm, place: Place):
        super().__init__()
        self.split = (part.heads,)
        self.whole = isinstance(norm, spec.WholeProjection)
        self.after_rotation = isinstance(norm, spec.AfterRotation)
        self.own = isinstance(norm, spec.EachHead)
        counts = (part.heads, part.kv_heads)
        sizes = [n * part.head_dim if self.whole else part.head_dim for n in counts]
        self.queries, self.keys = (
            build_norm(norm.norm if n else None, size, place, rows=n if self.own else 1)
            for n, size in zip(counts, sizes, strict=True)
        )
        self.values = build_norm(part.value_norm, part.head_dim, place)

    def forward(self, heads: Tensor) -> Tensor:
        """[T, heads + kv_heads, head_dim], queries first, to the same."""
        normed = []
        for norm, x in zip((self.queries, self.keys), heads.tensor_split(self.split, dim=1), strict=True):
            if norm is not None:
                normed.append(norm(x.flatten(1)).view(x.shape) if self.whole else norm(x))
        return torch.cat(normed, dim=1)


class SpanConvolution(nn.Module):
    """The weights of convolution heads with a separate kernel for each token.

    Neighbours are gathered per feature, multiplied by `neighbours` [features, taps], and mapped by `mix`. Multiplied by
    the query, they become the scores of the taps of each head (`scores`), whose softmax weighs the neighbours'
    `values`.
    """

    def __init__(self, part: spec.Attention, spans: spec.Spans, hidden_size: int, place: Place):
        super().__init__()
        width = part.heads * part.head_dim
        self.taps, self.heads = spans.kernel, part.heads
        self.neighbours = place.parameter(hidden_size, spans.kernel)
        self.mix = Linear(hidden_size, width, True, place)
        self.scores = Linear(width, part.heads * spans.kernel, True, place)
        self.values = Linear(hidden_size, width, True, place)

    def weigh(self, windows: Tensor) -> Tensor:
        """[Tp, features] of windows [Tp, taps * features]: the sum of the taps, each feature with its own weights."""
        taps = windows.view(len(windows), self.taps, -1).unbind(1)
        total = taps[0] * self.neighbours[:, 0]
        for tap, weight in zip(taps[1:], self.neighbours.unbind(1)[1:], strict=True):
            total = total + tap * weight
        return total

    def mix_windows(self, windows: Tensor, scores: Tensor) -> Tensor:
        """[Tp, features] of windows [Tp, taps * features]: the sum of the taps, each head's weighted by the softmax of
        its scores [Tp, heads * taps]."""
        shares = F.softmax(scores.reshape(len(scores), self.heads, self.taps), dim=-1)
        of_taps = windows.view(len(windows), self.taps, self.heads, -1).unbind(1)
        total = of_taps[0] * shares[..., :1]
        for i, tap in enumerate(of_taps[1:], 1):
            total = total + tap * shares[..., i : i + 1]
        return total.flatten(1)


class SelfAttention(nn.Module):
    """The weights of self-attention within a row; queries, keys and values are one matrix. `values_size`: features from
    which a separate matrix makes values; None: values are made like queries and keys."""

    def __init__(
        self,
        part: spec.Attention,
        hidden_size: int,
        backend: AttentionBackend,
        place: Place,
        values_size: int | None = None,
    ):
        super().__init__()
        self.part = part
        self.backend = backend
        width, values = (part.heads + 2 * part.kv_heads) * part.head_dim, part.kv_heads * part.head_dim
        own = values_size is not None
        self.qkv = Linear(hidden_size, width - values if own else width, part.qkv_bias, place)
        self.values = None if values_size is None else Linear(values_size, values, part.qkv_bias, place)
        self.qk_norm = None if part.qk_norm is None else QkNorm(part, part.qk_norm, place)
        attended = part.heads * part.head_dim
        self.spans = None if part.spans is None else SpanConvolution(part, part.spans, hidden_size, place)
        self.out = Linear(attended if self.spans is None else 2 * attended, hidden_size, part.out_bias, place)
        self.gate = None
        if part.gate is not None:
            openings = part.heads if part.gate.per_head else attended
            self.gate = Linear(hidden_size, openings, False, place)
        self.sinks = None if part.sinks is None else replace(place, dtype=torch.float32).parameter(part.heads)
        self.distance_bias = None
        if isinstance(part.position, RelativeBuckets):
            self.distance_bias = BucketTable(part.position, part.heads, place)


class EncodedKeys(nn.Module):
    """The weights that make keys and values of an encoder's tokens. These are stored in pages once. `norm`: the norm of
    each key."""

    def __init__(self, part: spec.Attention, memory_size: int, place: Place, norm: Norm | None = None):
        super().__init__()
        self.part = part
        self.kv = Linear(memory_size, 2 * part.kv_heads * part.head_dim, part.qkv_bias, place)
        self.norm = build_norm(norm, part.head_dim, place)

    def normalise(self, rows: Tensor) -> Tensor:
        """The rows [keys | values] with normed keys."""
        assert self.norm is not None
        keys, values = rows.view(len(rows), 2, -1).unbind(1)
        return torch.cat((self.norm(split_heads(keys, self.part.head_dim)).flatten(1), values), dim=1)


class CrossAttention(EncodedKeys):
    """The weights of attention from a decoder's tokens to an encoder's."""

    def __init__(
        self, part: spec.Attention, hidden_size: int, memory_size: int, backend: AttentionBackend, place: Place
    ):
        super().__init__(part, memory_size, place)
        self.backend = backend
        self.queries = Linear(hidden_size, part.heads * part.head_dim, part.qkv_bias, place)
        self.out = Linear(part.heads * part.head_dim, hidden_size, part.out_bias, place)


class DenseFeedForward(RowModule):
    """The weights of down(activation(up(x)))."""

    def __init__(self, part: spec.Dense, hidden_size: int, place: Place):
        super().__init__()
        self.up = Linear(hidden_size, part.width, part.bias, place)
        self.down = Linear(part.width, hidden_size, part.bias, place)
        self.activation = part.activation


class XieluFeedForward(nn.Module):
    """The weights of down(xielu(up(x))): two matrices, and the numbers that softplus turns into slopes."""

    def __init__(self, part: spec.Xielu, hidden_size: int, place: Place):
        super().__init__()
        self.up = Linear(hidden_size, part.width, part.bias, place)
        self.down = Linear(part.width, hidden_size, part.bias, place)
        exact = replace(place, dtype=torch.float32)
        self.positive, self.negative = exact.parameter(1), exact.parameter(1)
        self.linear, self.least = exact.parameter(), exact.parameter()

    def activate(self, x: Tensor) -> Tensor:
        """The function of rows [T, width], computed in float32; a row's bits do not depend on the others."""
        positive = F.softplus(self.positive)
        negative = self.linear + F.softplus(self.negative)
        return activate(lambda rows: self._xielu(rows, positive, negative), x)

    def _xielu(self, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        wide = x.float()
        below = (torch.expm1(wide.minimum(self.least)) - wide) * negative
        return (torch.where(wide > 0, positive * wide * wide, below) + self.linear * wide).to(x.dtype)


class GatedFeedForward(nn.Module):
    """The weights of down(activation(gate(x)) * up(x)); gate and up are one matrix, with the gate's rows first."""

    def __init__(self, part: spec.Gated, hidden_size: int, place: Place):
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * part.width, part.bias, place)
        self.down = Linear(part.width, hidden_size, part.bias, place)
        self.activation = part.activation


class SparseFeedForward(RowModule):
    """The weights of a gated network that keeps its largest gates; gate and up are one matrix, gate's rows first."""

    def __init__(self, part: spec.SparselyGated, hidden_size: int, place: Place):
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * part.width, False, place)
        self.down = Linear(part.width, hidden_size, False, place)
        self.part = part

    def activate(self, x: Tensor) -> Tensor:
        """function(relu(a - m - cutoff * s)) * b of rows [a | b] of x, m and s being the mean and the deviation of
        a."""
        gates, values = x.chunk(2, dim=-1)
        least = gates.mean(dim=-1, keepdim=True) + gates.std(dim=-1, keepdim=True, unbiased=False) * self.part.cutoff
        return gate_by_name(self.part.activation, torch.cat((F.relu(gates - least), values), dim=-1), self.kernels)


class OpenedFeedForward(nn.Module):
    """The weights of sigmoid(opening(x)) * inner(x)."""

    def __init__(self, part: spec.Opened, hidden_size: int, place: Place):
        super().__init__()
        self.opening = Linear(hidden_size, 1, False, place)
        self.inner = GatedFeedForward(part.inner, hidden_size, place)
