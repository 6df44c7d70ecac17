"""Runs a stack's program in torch: the oracle, for every device and format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.attention.base import Bias, DistanceBias, Paged, Ragged
from engine.backends.rows import Rows
from engine.backends.torch.states import apply_delta, apply_scan, convolve, each_row
from engine.model.activations import activate, activate_by_name, gate_by_name
from engine.model.attention_modules import AttentionModule
from engine.model.attention_operations import Attend, PrepareHeads, PrepareLatent, StoreEncoded
from engine.model.convolution import gather_neighbours
from engine.model.inputs import Inputs
from engine.model.latent import by_head
from engine.model.layers import SelfAttention, split_heads
from engine.model.operations import (
    Activate,
    Add,
    AddAdapters,
    AllReduce,
    Apply,
    Embed,
    GatherNeighbours,
    MixExperts,
    Multiply,
    MultiplyPieces,
    Normalize,
    Open,
    Operation,
    Take,
)
from engine.model.positions import AttentionPosition, Disentangled, RelativeBuckets, Rotary
from engine.model.program import Program, last_uses
from engine.model.rotary import rotate
from engine.model.row_kernels import NewHeads, RowKernels
from engine.model.slots import find_slots
from engine.model.state_operations import Advance, ApplyDelta, ApplyScan, Convolve
from engine.model.tables import Tables


class Values(Protocol):
    """The buffers of a pass: [Tp, width] each."""

    def __getitem__(self, rows: Rows) -> Tensor: ...

    def __setitem__(self, rows: Rows, value: Tensor) -> None: ...


class Buffers(dict[Rows, Tensor]):
    """Buffers by their rows; of a buffer that was written as a whole, parts can be read."""

    def __missing__(self, rows: Rows) -> Tensor:
        whole = Rows(rows.buffer, 0, rows.stride, rows.stride)
        if rows == whole:
            raise KeyError(rows)
        return self[whole][:, rows.offset : rows.offset + rows.width]


Biases = dict[
    AttentionPosition | AttentionModule | None,
    Bias | None,
]


class Pass:
    """One pass through a program.

    Attributes:
        inputs: the inputs of the pass, with slots computed.
        values: the rows by name.
        biases: biases of scores, by the part of positions that layers share, or by the layer; missing ones are
            computed.
        kernels: the kernels of single operations that the executor uses; None: torch computes all.
        beside: vectors that pass through the layers beside the tokens, [inputs * count, features], if any.
    """

    def __init__(
        self,
        inputs: Inputs,
        tables: Tables,
        values: Values,
        biases: Biases | None = None,
        kernels: RowKernels | None = None,
    ):
        self.inputs, self.values, self.kernels = inputs, values, kernels
        self._tables = tables
        self._rotations: dict[Rotary, tuple[Tensor, Tensor]] = {}
        self._biases: Biases = {} if biases is None else biases
        self.beside: Tensor | None = None

    def rotation(self, part: Rotary, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the pass's tokens, looked up once for all layers."""
        if part not in self._rotations:
            self._rotations[part] = self._tables.rotation(part, self.inputs.rotary_rows, like.dtype)
        return self._rotations[part]

    def bias(self, operation: Attend) -> Bias | None:
        """The bias of the scores, computed once for all layers."""
        return self.fill_bias(self._biases, operation, self._tables)

    @staticmethod
    def fill_bias(biases: Biases, operation: Attend, tables: Tables) -> Bias | None:
        """Compute the bias of an attention; it is stored with the others if it is the same in every pass."""
        position = operation.part.position
        if operation.is_cross or isinstance(position, Disentangled):
            return tables.bias(operation.module)
        owner = operation.module if isinstance(position, RelativeBuckets) else position
        if owner not in biases:
            biases[owner] = tables.bias(operation.module)
        return biases[owner]

    def block_biases(self, module: SelfAttention) -> tuple[DistanceBias, DistanceBias]:
        """The biases for the scores of tokens and of sums of blocks."""
        bias, of_blocks = self._tables.bias(module), self._tables.block_bias
        assert isinstance(bias, DistanceBias)
        assert of_blocks is not None
        return bias, of_blocks()

    def pages(self, layer: int | None) -> Paged:
        assert self.inputs.caches is not None
        assert layer is not None
        return self.inputs.caches[layer]


Handler = Callable[[Any, Pass], None]


class Calls:
    """Operations with their functions, in order; rows are released after their last use."""

    def __init__(self, operations: Sequence[Operation], handlers: Mapping[type, Handler], result: Rows):
        self._result = result
        uses = last_uses(operations, result)
        self._calls = [(handlers[type(one)], one, dead) for one, dead in zip(operations, uses, strict=True)]

    def run(self, state: Pass, values: dict[Rows, Tensor]) -> Tensor:
        """The result's rows."""
        for handler, operation, dead in self._calls:
            handler(operation, state)
            for buffer in dead:
                for rows in [rows for rows in values if rows.buffer == buffer]:
                    del values[rows]
        return values[self._result]


class TorchExecutor:
    """Runs a program operation by operation in torch, with modules for whose rows no kernels were chosen."""

    missing = ()  # torch computes everything here, so nothing is reported as missing
    kernels: RowKernels | None = None

    def __init__(self, program: Program, tables: Tables):
        self._tables = tables
        self._calls = Calls(program.operations, HANDLERS, program.result)

    def run(self, inputs: Inputs) -> Tensor:
        """Hidden states [Tp, features]."""
        if inputs.caches is not None and inputs.slots is None:
            found = find_slots(inputs.caches[0], inputs.metadata, inputs.positions, inputs.tokens)
            inputs = replace(inputs, slots=found)
        values = Buffers()
        return self._calls.run(Pass(inputs, self._tables, values, kernels=self.kernels), values)


def _embed(operation: Embed, state: Pass) -> None:
    state.values[operation.out] = operation.vectors(state.inputs)


def _apply(operation: Apply, state: Pass) -> None:
    found = operation.compute(state, *(state.values[rows] for rows in operation.given))
    results = (found,) if isinstance(found, Tensor) else found or ()
    for rows, value in zip(operation.made, results, strict=True):
        state.values[rows] = value


def _take(operation: Take, state: Pass) -> None:
    assert state.inputs.given is not None
    state.values[operation.out] = state.inputs.given


def _normalize(operation: Normalize, state: Pass) -> None:
    x = state.values[operation.x]
    if operation.residual is not None:
        x = state.values[operation.x] = x + state.values[operation.residual]
    state.values[operation.out] = operation.module(x)


def _multiply(operation: Multiply, state: Pass) -> None:
    state.values[operation.out] = operation.linear(state.values[operation.x])


def _add_adapters(operation: AddAdapters, state: Pass) -> None:
    adapters, slots = operation.linear.adapters, state.inputs.adapters
    if adapters is not None and slots is not None:
        x, out = state.values[operation.x], state.values[operation.out]
        state.values[operation.out] = adapters.add(x, out, slots)


def _all_reduce(operation: AllReduce, state: Pass) -> None:
    state.values[operation.x] = operation.ranks.reduce(state.values[operation.x])


def _prepare_heads(operation: PrepareHeads, state: Pass) -> None:
    part, inputs, kernels = operation.part, state.inputs, state.kernels
    heads = state.values[operation.heads]
    heads = heads.view(len(heads), part.heads + 2 * part.kv_heads, part.head_dim)
    if part.clip is not None:
        heads = heads.clamp_(-part.clip, part.clip)
    turning, values = heads.tensor_split((part.heads + part.kv_heads,), dim=1)
    rotary = part.position if isinstance(part.position, Rotary) else None
    angles = None if rotary is None else state.rotation(rotary, turning)
    if operation.qk_norm is not None:
        if operation.qk_norm.after_rotation and rotary is not None and angles is not None:
            if kernels is None or not kernels.rotate_and_store(NewHeads(turning, values, rotary, angles)):
                turning = rotate(turning, rotary, *angles)
            rotary, angles = None, None
        turning = operation.qk_norm(turning)
        values = values if operation.qk_norm.values is None else operation.qk_norm.values(values)
    cache = None if operation.layer is None else state.pages(operation.layer)
    slots = inputs.slots if cache is not None else None
    done = kernels is not None and kernels.rotate_and_store(NewHeads(turning, values, rotary, angles, cache, slots))
    if not done and rotary is not None and angles is not None:
        turning = rotate(turning, rotary, *angles)
    queries, keys = turning.tensor_split((part.heads,), dim=1)
    if cache is not None and not done:
        assert slots is not None
        cache.write(slots, keys[: inputs.tokens], values[: inputs.tokens])
    state.values[operation.queries] = queries
    state.values[operation.keys], state.values[operation.values] = keys, values


def _prepare_latent(operation: PrepareLatent, state: Pass) -> None:
    inputs, cache = state.inputs, state.pages(operation.layer)
    position = operation.module.part.position
    queries = state.values[operation.queries]
    angles = state.rotation(position, queries) if isinstance(position, Rotary) else None
    queries, keys = operation.module.prepare(queries, state.values[operation.latent], angles)
    assert inputs.slots is not None
    cache.write(inputs.slots, keys[: inputs.tokens], keys[: inputs.tokens])
    state.values[operation.out] = queries.flatten(1)


def _store_encoded(operation: StoreEncoded, state: Pass) -> None:
    part, slots = operation.part, state.inputs.slots
    assert slots is not None
    kv = state.values[operation.kv]
    heads = kv.view(len(kv), 2, part.kv_heads, part.head_dim)[: len(slots)]
    pages = replace(state.pages(operation.layer), key_centre=None)  # the centre belongs to self-attention's keys
    pages.write(slots, heads[:, 0], heads[:, 1])


def _attend(operation: Attend, state: Pass) -> None:
    part, inputs, metadata = operation.part, state.inputs, state.inputs.metadata
    kv: Paged | Ragged
    if part.in_parts:
        assert inputs.parts is not None
        metadata = inputs.parts
    if operation.kv is not None:
        keys, values = (split_heads(state.values[rows], part.head_dim)[: inputs.tokens] for rows in operation.kv)
        kv = Ragged(keys, values, metadata.query_start[:-1])
    elif operation.is_cross:
        assert inputs.cross is not None
        metadata = inputs.cross.metadata
        kv = replace(state.pages(operation.layer), block_tables=inputs.cross.block_tables, key_centre=None)
        if inputs.keeper is not None:
            assert operation.layer is not None
            inputs.keeper(operation.layer, split_heads(state.values[operation.queries], part.head_dim))
    else:
        kv = state.pages(operation.layer)
    attended = operation.backend.attend(
        split_heads(state.values[operation.queries], part.head_dim),
        kv,
        metadata,
        causal=operation.causal,
        window=operation.window,
        scale=part.scale,
        bias=state.bias(operation),
        softcap=part.softcap,
        sinks=operation.sinks,
    )
    state.values[operation.out] = attended.reshape(len(attended), operation.out.width)


def _activate(operation: Activate, state: Pass) -> None:
    by_name = gate_by_name if operation.gated else activate_by_name
    state.values[operation.out] = by_name(operation.function, state.values[operation.x], state.kernels)


def _open(operation: Open, state: Pass) -> None:
    opening, x = state.values[operation.opening].flatten(1), state.values[operation.x]
    match operation.function:
        case "sigmoid":
            opened = activate(torch.sigmoid, opening.float()).to(x.dtype)
        case "softplus":
            opened = activate(F.softplus, opening.float()).to(x.dtype)
        case function:
            opened = activate_by_name(function, opening, state.kernels)
    pieces = x.reshape(len(x), opened.shape[1], -1)
    state.values[operation.x] = (pieces * opened.unsqueeze(-1)).view(len(x), -1)


def _mix_experts(operation: MixExperts, state: Pass) -> None:
    inputs = state.inputs
    x, starts = state.values[operation.x], inputs.metadata.query_start
    judged = x if operation.judged is None else state.values[operation.judged]
    state.values[operation.out] = operation.module(x, inputs.tokens, inputs.min_rows, starts, judged)


def _multiply_pieces(operation: MultiplyPieces, state: Pass) -> None:
    pieces = split_heads(state.values[operation.x], operation.matrices.inputs)
    state.values[operation.out] = by_head(operation.matrices, pieces).flatten(1)


def _gather_neighbours(operation: GatherNeighbours, state: Pass) -> None:
    inputs = state.inputs
    x = state.values[operation.x]
    state.values[operation.out] = gather_neighbours(x, inputs.metadata, operation.taps, inputs.tokens)


def _add(operation: Add, state: Pass) -> None:
    state.values[operation.out] = state.values[operation.x] + state.values[operation.y]


def _convolve(operation: Convolve, state: Pass) -> None:
    module, entered = operation.module, state.values[operation.x]
    if operation.form == "gated":
        before, after, features = entered.chunk(3, dim=1)
        entered = before * features
    out = torch.zeros_like(entered)
    weight, bias = module.weight.float(), None if module.bias is None else module.bias.float()

    def step(known: Tensor, tokens: slice) -> Tensor:
        total, left = convolve(entered[tokens].float(), known.view(-1, module.width), weight, bias)
        total = total.to(out.dtype)
        match operation.form:
            case "silu":
                out[tokens] = activate_by_name("silu", total, state.kernels)
            case "gated":
                out[tokens] = total * after[tokens]
            case "plain":
                out[tokens] = total
        return left.flatten()

    inputs = state.inputs
    size = (module.taps - 1) * module.width
    each_row(inputs.metadata.query_lens, inputs.states, operation.layer, step, size, device=out.device)
    state.values[operation.out] = out


def _apply_delta(operation: ApplyDelta, state: Pass) -> None:
    module, part, inputs = operation.module, operation.module.part, state.inputs
    x, opening = state.values[operation.x], state.values[operation.opening]
    keys_width = part.key_heads * part.key_dim
    pieces = torch.split(x.float(), [keys_width, keys_width, part.value_heads * part.value_dim], dim=1)
    dims = (part.key_dim, part.key_dim, part.value_dim)
    queries, keys, values = (split_heads(piece, dim) for piece, dim in zip(pieces, dims, strict=True))
    each = part.value_heads // part.key_heads
    queries, keys = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (queries, keys))
    queries, keys = (
        one.repeat(1, each, 1) if part.alternate else one.repeat_interleave(each, dim=1) for one in (queries, keys)
    )
    queries = queries * part.key_dim**-0.5
    shares, speeds = state.values[operation.rates].float().chunk(2, dim=1)
    steps = activate(F.softplus, speeds + module.offset.float())
    decays = (-module.decay.float().exp() * steps).exp()
    shares = activate(torch.sigmoid, shares) * part.most
    attended = torch.zeros_like(values)

    def step(known: Tensor, tokens: slice) -> Tensor:
        matrices = known.view(part.value_heads, part.key_dim, part.value_dim)
        given = (queries[tokens], keys[tokens], values[tokens])
        attended[tokens], left = apply_delta(given, decays[tokens, :, None], shares[tokens], matrices)
        return left.flatten()

    begin = (part.kernel - 1) * part.convolved
    size = part.state_size - begin
    each_row(inputs.metadata.query_lens, inputs.states, operation.layer, step, size, begin, device=x.device)
    heads = attended.to(x.dtype).float()
    normed = (heads * (heads.square().mean(-1, keepdim=True) + part.eps).rsqrt()).to(x.dtype) * module.norm
    gates = split_heads(activate(F.silu, opening.float()), part.value_dim)
    state.values[operation.out] = (normed * gates).to(x.dtype).flatten(1)


def _apply_scan(operation: ApplyScan, state: Pass) -> None:
    module, part, inputs = operation.module, operation.module.part, state.inputs
    x, opening = state.values[operation.x], state.values[operation.opening]
    shared = part.groups * part.size
    values, *both = torch.split(x.float(), [part.width, shared, shared], dim=1)
    values = split_heads(values, part.head_dim)
    before, after = (split_heads(one, part.size).repeat_interleave(part.heads // part.groups, dim=1) for one in both)
    steps = activate(F.softplus, state.values[operation.rates].float() + module.offset.float())
    decays = (-module.decay.float().exp() * steps).exp()
    added, kept = values * steps[:, :, None], values * module.skip.float()[:, None]
    scanned = torch.zeros_like(values)

    def step(known: Tensor, tokens: slice) -> Tensor:
        matrices = known.view(part.heads, part.size, part.head_dim)
        given = (added[tokens], before[tokens], after[tokens])
        found, left = apply_scan(given, decays[tokens], matrices)
        scanned[tokens] = found + kept[tokens]
        return left.flatten()

    begin = (part.kernel - 1) * part.convolved
    size = part.state_size - begin
    each_row(inputs.metadata.query_lens, inputs.states, operation.layer, step, size, begin, device=x.device)
    found, gates = scanned.to(x.dtype).float().flatten(1), activate(F.silu, opening.float())
    if part.eps is None or not part.norm_first:
        found = found * gates
    if part.eps is not None and module.norm is not None:
        groups = found.view(len(found), part.groups, -1)
        normed = groups * (groups.square().mean(-1, keepdim=True) + part.eps).rsqrt()
        found = (normed.flatten(1).to(x.dtype) * module.norm).float()
        found = found * gates if part.norm_first else found
    state.values[operation.out] = found.to(x.dtype)


def _advance(operation: Advance, state: Pass) -> None:
    given = (state.values[rows] for rows in operation.given)
    state.values[operation.out] = operation.module.advance(operation.layer, state, *given)


HANDLERS: dict[type, Handler] = {
    Embed: _embed,
    Take: _take,
    Normalize: _normalize,
    Multiply: _multiply,
    AddAdapters: _add_adapters,
    AllReduce: _all_reduce,
    Apply: _apply,
    PrepareHeads: _prepare_heads,
    PrepareLatent: _prepare_latent,
    StoreEncoded: _store_encoded,
    Attend: _attend,
    Activate: _activate,
    Open: _open,
    MixExperts: _mix_experts,
    MultiplyPieces: _multiply_pieces,
    GatherNeighbours: _gather_neighbours,
    Add: _add,
    Convolve: _convolve,
    ApplyDelta: _apply_delta,
    ApplyScan: _apply_scan,
    Advance: _advance,
}
