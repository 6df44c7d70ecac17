"""A decoder's layers for one token alone on a GPU, with the fewest launches: what lies around a product is part of it.

Derived from the operations for any number of tokens (`engine.model.fused`). A product norms the stream that it reads,
and the last one of a sublayer adds its results to the stream: each program of it adds those that are its own, and no
other reads them, so the stream stays where it is. A layer of the usual kind is then: product; norms of heads, rotation
and pages; attention; product; product with its gate; product.

Where a part does not allow that (experts, attention to an encoder, norms after sublayers, matrices that are not plain),
its operation stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.gpu import matvec
from engine.gpu.norms import Norm
from engine.model.fused_operations import Attend, Feed, Join, NormAgain, Operation, Run
from engine.model.layers import DenseFeedForward, GatedFeedForward, Linear


def _leave(run: Run, x: Tensor, last: Linear, adds: bool) -> None:
    """The last product of a sublayer: its results join the stream, after those that are pending, or are pending."""
    if not adds:
        run.pending.append(matvec.product(x, last.weight, last.bias))
        return
    also = run.pending.pop() if run.pending else None
    matvec.product(x, last.weight, last.bias, stream=run.stream, also=also)


@dataclass(frozen=True, slots=True)
class AttendRow:
    """Attention of one new token.

    Attributes:
        norm: of the stream, which is the input then.
        adds: the results join the stream.
    """

    attend: Attend
    norm: Norm | None
    adds: bool

    def __call__(self, run: Run) -> None:
        module = self.attend.module
        x = run.input if self.norm is None else run.stream
        heads = matvec.product(x, module.qkv.weight, module.qkv.bias, norm=self.norm)
        _leave(run, self.attend.attend(run, heads), module.out, self.adds)


@dataclass(frozen=True, slots=True)
class FeedRow:
    """A feed-forward network of one token; attributes as `AttendRow`'s."""

    module: DenseFeedForward | GatedFeedForward
    norm: Norm | None
    adds: bool

    def __call__(self, run: Run) -> None:
        module, gated = self.module, isinstance(self.module, GatedFeedForward)
        up = module.gate_up if isinstance(module, GatedFeedForward) else module.up
        x = run.input if self.norm is None else run.stream
        hidden = matvec.product(x, up.weight, up.bias, norm=self.norm, function=module.activation, gated=gated)
        _leave(run, hidden, module.down, self.adds)


def row_operations(operations: Sequence[Operation]) -> list[Operation]:
    """The operations for one token of those for any number."""
    made: list[Operation] = []
    pending = 0  # results that are not in the stream
    norm: Norm | None = None  # of the stream, which the next product makes itself
    for number, operation in enumerate(operations):
        rest = operations[number + 1 :]
        match operation:
            case Join() | NormAgain():
                norm = None
                alone = isinstance(operation, NormAgain) or not (pending or operation.in_place)
                if alone and operation.norm is not None and _norm_themselves(rest):
                    norm = operation.norm
                else:
                    made.append(operation)
                pending = 0 if isinstance(operation, Join) else pending
                continue
            case Attend() if _served(operation):
                adds = _joins(rest, pending)
                made.append(AttendRow(operation, norm, adds))
            case Feed(DenseFeedForward() | GatedFeedForward() as module) if _served(operation):
                adds = _joins(rest, pending)
                made.append(FeedRow(module, norm, adds))
            case _:
                adds = False
                made.append(operation)
        pending = 0 if adds else pending + 1
    return made


def _joins(rest: Sequence[Operation], pending: int) -> bool:
    """Results can be added to the stream at once: that comes next, and there is no norm of what is added."""
    return pending < 2 and isinstance(rest[0], Join) and rest[0].after is None


def _norm_themselves(rest: Sequence[Operation]) -> bool:
    """All operations that read a norm, up to the next one, can make it themselves."""
    readers = []
    for operation in rest:
        if isinstance(operation, Join | NormAgain):
            break
        readers.append(operation)
    return bool(readers) and all(_served(reader) for reader in readers)


def _served(operation: Operation) -> bool:
    """There are kernels for an operation's products, with a norm before the first."""
    match operation:
        case Attend():
            first, last = operation.module.qkv, operation.module.out
        case Feed(GatedFeedForward() as module):
            first, last = module.gate_up, module.down
        case Feed(DenseFeedForward() as module):
            first, last = module.up, module.down
        case _:
            return False
    plain = all(type(one) is Linear and one.packed is None for one in (first, last))
    return plain and matvec.serves(first.weight, alone=False) and matvec.serves(last.weight)
