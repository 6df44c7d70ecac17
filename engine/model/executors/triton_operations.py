"""The operations that combine groups of a program's operations on a GPU (`engine.model.executors.triton`)."""

from __future__ import annotations

from torch import Tensor

from engine.backends.rows import Rows
from engine.backends.triton import adapters, norms, states
from engine.backends.triton.norms import Norm
from engine.backends.triton.rotary import Angles, HeadNorms, rotate_and_store
from engine.model.attention_operations import PrepareHeads
from engine.model.executors.reference import HANDLERS as TORCH
from engine.model.executors.reference import Handler, Pass
from engine.model.operations import AddAdapters, Operation, operation
from engine.model.state_operations import ApplyDelta, Convolve


@operation(reads="stream addends", writes="stream out")
class Join(Operation):
    """The stream gets after(first addend) plus the second addend, two at most; out is the norm of the sum."""

    stream: Rows
    addends: tuple[Rows, ...]
    after: Norm | None
    norm: Norm | None  # None if the stream itself is read next
    out: Rows  # the stream, if there is no norm or the norm replaces the sum


@operation(reads="heads", writes="heads")
class StoreHeads(Operation):
    """The work of `PrepareHeads`, for a decoder."""

    operation: PrepareHeads
    angles: Angles | None  # None if nothing rotates
    norms: HeadNorms | None  # norms per head
    whole: HeadNorms | None  # norms of all queries at once, and of all keys

    @property
    def heads(self) -> Rows:
        """Queries, keys and values."""
        return self.operation.heads


def _join(operation: Join, state: Pass) -> None:
    stream, norm = state.values[operation.stream], operation.norm
    in_place = operation.out == operation.stream
    if operation.addends:
        first, *others = (state.values[rows] for rows in operation.addends)
        also = others[0] if others else None
        out = norms.add_norm(
            stream, first, norm, after=operation.after, also=also, in_place=in_place and norm is not None
        )
    else:
        assert norm is not None
        out = norms.norm(stream, norm, stream if in_place else None)
    state.values[operation.out] = out


def _store_heads(operation: StoreHeads, state: Pass) -> None:
    prepared, part = operation.operation, operation.operation.part
    heads, clip = state.values[prepared.heads], part.clip
    if operation.whole is not None:
        if clip is not None:
            heads, clip = heads.clamp_(-clip, clip), None
        sizes = (part.heads * part.head_dim, part.kv_heads * part.head_dim)
        queries, keys = heads[:, : sizes[0]], heads[:, sizes[0] : sum(sizes)]
        norms.norm(queries, operation.whole.queries, queries)
        norms.norm(keys, operation.whole.keys, keys)
    heads = heads.view(len(heads), part.heads + 2 * part.kv_heads, part.head_dim)
    turning, values = heads.tensor_split((part.heads + part.kv_heads,), dim=1)
    rotate_and_store(
        turning,
        values,
        state.pages(prepared.layer),
        angles=operation.angles,
        positions=state.inputs.rotary_rows,
        slots=state.inputs.slots,
        norms=operation.norms,
        clip=clip,
        overlap=state.inputs.form.overlapping,
    )
    state.values[prepared.queries] = turning[:, : part.heads]


def _add_adapters(operation: AddAdapters, state: Pass) -> None:
    slots, part = state.inputs.adapters, operation.linear.adapters
    if slots is not None and part is not None:
        adapters.add(state.values[operation.x], state.values[operation.out], slots, part.down, part.up)


def _memory(state: Pass, layer: int) -> Tensor | None:
    held = state.inputs.states
    return None if held is None else held.layers[layer]


def _convolve(operation: Convolve, state: Pass) -> None:
    module, inputs = operation.module, state.inputs
    if operation.form == "plain":
        TORCH[Convolve](operation, state)
        return
    state.values[operation.out] = states.convolve(
        state.values[operation.x], module.weight, module.bias, operation.form == "gated",
        _memory(state, operation.layer), states.slots_of(inputs.metadata, inputs.states), inputs.metadata.query_start,
    )  # fmt: skip


def _apply_delta(operation: ApplyDelta, state: Pass) -> None:
    module, inputs = operation.module, state.inputs
    part = module.part
    if not states.serves(part.key_dim, part.value_dim):
        TORCH[ApplyDelta](operation, state)
        return
    values = state.values
    values[operation.out] = states.apply_delta(
        values[operation.x], values[operation.rates], values[operation.opening],
        (module.decay, module.offset, module.norm),
        (part.key_heads, part.value_heads, part.key_dim, part.value_dim),
        part.eps, _memory(state, operation.layer), (part.kernel - 1) * part.convolved,
        states.slots_of(inputs.metadata, inputs.states), inputs.metadata.query_start, part.alternate, part.most,
    )  # fmt: skip


HANDLERS: dict[type, Handler] = {
    Join: _join,
    StoreHeads: _store_heads,
    AddAdapters: _add_adapters,
    Convolve: _convolve,
    ApplyDelta: _apply_delta,
}
