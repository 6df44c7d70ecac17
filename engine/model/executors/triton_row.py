"""The operations for a single token on a GPU, with the fewest launches: the operations around a product are part of it.

They are derived from the operations for any number of tokens (`engine.model.executors.triton`) in three steps. First,
the last product of a sublayer adds its results to the stream in place: each of its programs adds its own results, which
no other program reads. Second, an activation becomes part of the product before it. Third, a product normalises the
stream that it reads. A typical layer is then: product; heads; attention; product; product with its gate; product.

If a part does not allow this (experts, norms after sublayers), its operations do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from engine.backends.native.gemm import Quantised
from engine.backends.rows import Rows
from engine.backends.triton import matvec
from engine.backends.triton.norms import Norm
from engine.model.executors.reference import Handler, Pass
from engine.model.executors.triton_operations import Join
from engine.model.layers import Linear
from engine.model.operations import Activate, Multiply, Operation, operation


@operation(reads="x also joined", writes="out")
class MultiplyRow(Operation):
    """The product of one row, with the operations around it."""

    linear: Linear
    x: Rows
    out: Rows
    norm: Norm | None = None  # the norm of x, which is then the stream
    # function, gated: an activation of the results
    function: str | None = None
    gated: bool = False
    joins: bool = False  # whether the results are added to `out`, the stream, after `also`
    also: Rows | None = None

    @property
    def joined(self) -> Rows | None:
        """The stream, if the results are added to it."""
        return self.out if self.joins else None


def _multiply(operation: MultiplyRow, state: Pass) -> None:
    linear, values = operation.linear, state.values
    values[operation.out] = matvec.product(
        values[operation.x],
        _weight(linear),
        linear.bias,
        norm=operation.norm,
        function=operation.function,
        gated=operation.gated,
        stream=values[operation.out] if operation.joins else None,
        also=None if operation.also is None else values[operation.also],
        overlap=state.inputs.form.overlapping,
    )


HANDLERS: dict[type, Handler] = {MultiplyRow: _multiply}


def row_operations(operations: Sequence[Operation], stream: Rows) -> list[Operation]:
    """The operations for one token, from the operations for any number."""
    made: list[Operation] = [
        MultiplyRow(one.linear, one.x, one.out) if isinstance(one, Multiply) and _served(one.linear) else one
        for one in operations
    ]
    made = _with_joins(made, stream)
    made = _with_activations(made)
    return _with_norms(made, stream)


def _with_joins(operations: list[Operation], stream: Rows) -> list[Operation]:
    """Results that join the stream next, unchanged, are added to it at once."""
    made = list(operations)
    for i, (product, join) in enumerate(pairwise(operations)):
        if not (isinstance(product, MultiplyRow) and isinstance(join, Join)):
            continue
        if join.after is None and join.addends and join.addends[-1] == product.out:
            also = join.addends[0] if len(join.addends) > 1 else None
            made[i] = replace(product, out=stream, joins=True, also=also)
            made[i + 1] = replace(join, addends=())
    return [one for one in made if not (isinstance(one, Join) and not one.addends and one.norm is None)]


def _with_activations(operations: list[Operation]) -> list[Operation]:
    """An activation becomes part of the product if nothing else reads the product's results."""
    made: list[Operation] = []
    for one in operations:
        before = made[-1] if made else None
        match one, before:
            case Activate(function, x, out, gated), MultiplyRow(linear) if before.out == x and _served(
                linear, alone=False
            ):
                made[-1] = replace(before, out=out, function=function, gated=gated)
            case _:
                made.append(one)
    return made


def _with_norms(operations: list[Operation], stream: Rows) -> list[Operation]:
    """The products that read a norm of the stream compute it themselves, if nothing else reads it."""
    made: list[Operation | None] = list(operations)
    for i, one in enumerate(operations):
        if not isinstance(one, Join) or one.addends or one.norm is None or one.out == stream:
            continue
        readers = _readers(made, i, one.out, stream)
        if readers is None:
            continue
        made[i] = None
        for place in readers:
            reader = made[place]
            assert isinstance(reader, MultiplyRow)
            made[place] = replace(reader, x=stream, norm=one.norm)
    return [one for one in made if one is not None]


def _readers(operations: list[Operation | None], start: int, rows: Rows, stream: Rows) -> list[int] | None:
    """The products that read what an operation wrote to these rows; None if something else reads it, or if the stream
    changes before."""
    readers: list[int] = []
    changed = False
    for place in range(start + 1, len(operations)):
        one = operations[place]
        if one is None:
            continue
        if rows in one.reads:
            if changed or not (isinstance(one, MultiplyRow) and _served(one.linear, alone=False)):
                return None
            readers.append(place)
        written = one.writes
        if rows in written:
            return readers or None
        changed = changed or stream in written
    return None  # it is the stack's result


def _served(linear: Linear, *, alone: bool = True) -> bool:
    """Whether a kernel exists for a product of one row, with a norm before it or an activation after it unless
    `alone`."""
    return type(linear) is Linear and matvec.serves(_weight(linear), alone=alone)


def _weight(linear: Linear) -> Tensor | Quantised:
    return linear.weight if linear.few_bits is None else linear.few_bits
