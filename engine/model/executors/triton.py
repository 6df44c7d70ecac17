"""Runs a stack's program with few launches on a GPU: the work between two matrix products is one kernel.

Two groups of operations become one kernel each. A *join* adds a sublayer's result to the residual stream and normalises
the sum for the next sublayer. *Store heads* is all work between the product of queries, keys and values and attention.
A typical layer is then: join; product; heads; attention; product; join; product; gate; product.

Numbers are rounded at the same points as by torch's operations, so the two differ only in the last bits of float32.
torch computes operations without a kernel. A single token has another list with even fewer launches:
`engine.model.executors.triton_row`.

Everything can be recorded as a CUDA graph: nothing waits for the device, sizes follow from the inputs, and tables are
made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.backends.rows import Rows
from engine.backends.triton import FORMATS, norms, states
from engine.backends.triton.norms import Norm
from engine.backends.triton.rotary import LONGEST_HEAD, Angles, HeadNorms
from engine.model.attention_operations import Attend, PrepareHeads, PrepareLatent
from engine.model.executors import triton_operations, triton_row
from engine.model.executors.reference import Biases, Buffers, Calls, Pass
from engine.model.executors.single import SingleExecutor, handlers_of
from engine.model.executors.triton_operations import Join, StoreHeads
from engine.model.executors.triton_rows import TritonRows
from engine.model.inputs import Inputs
from engine.model.layers import QkNorm
from engine.model.norms import LayerNorm, RmsNorm
from engine.model.operations import Add, AddAdapters, AllReduce, Apply, Normalize, Operation
from engine.model.positions import Rotary
from engine.model.program import Program
from engine.model.slots import find_slots
from engine.model.state_operations import ApplyDelta, ApplyScan
from engine.model.tables import Tables


def unsupported(operation: Operation, dtype: torch.dtype) -> str | None:
    """The reason why torch computes an operation on rows of a format; None if a kernel does."""
    match operation:
        case Normalize(module=RmsNorm() | LayerNorm() as module):
            return _unsupported_norm(module, dtype)
        case Normalize(module=module):
            return f"{type(module).__name__} has no kernel"
        case PrepareHeads(part=part, layer=int()) if part.head_dim > LONGEST_HEAD or dtype not in FORMATS:
            return f"a head of {part.head_dim} features of {dtype} has no kernel"
        case PrepareHeads(qk_norm=QkNorm() as both, layer=int()):
            if both.after_rotation:
                return "norms of queries and keys after rotation have no kernel"
            if both.values is not None:
                return "norms of values have no kernel"
            return _unsupported_norm(both.queries, dtype) or _unsupported_norm(both.keys, dtype)
        case ApplyDelta(module=module) if not states.serves(module.part.key_dim, module.part.value_dim):
            return f"the delta rule with keys of {module.part.key_dim} features has no kernel"
        case ApplyScan():
            return "a scan with states has no kernel"
        case Apply():
            return f"{operation.name} has no kernel"
        case _:
            return None


def _unsupported_norm(module: nn.Module | None, dtype: torch.dtype) -> str | None:
    if not isinstance(module, RmsNorm | LayerNorm) or (module.shape[0] <= norms.WIDEST and dtype in FORMATS):
        return None
    return f"a norm of {module.shape[0]} features of {dtype} has no kernel"


class TritonExecutor:
    """Runs a program on a device that `engine.backends.triton` serves; the weights are loaded and do not change.
    `operations`: the list for several tokens; row_operations: the list for a single token in a fused form
    (`Inputs.form`)."""

    def __init__(self, program: Program, tables: Tables, dtype: torch.dtype):
        self._tables = tables
        self._single = SingleExecutor(program, tables, TritonRows())
        fusing = _Fusing(program, tables, dtype)
        self.operations: Sequence[Operation] = fusing.operations
        reasons = (unsupported(operation, dtype) for operation in program.operations)
        self.missing = dict.fromkeys(reason for reason in reasons if reason is not None)
        self.row_operations = triton_row.row_operations(self.operations, program.stream)
        handlers = dict(handlers_of(TritonRows())) | triton_operations.HANDLERS | triton_row.HANDLERS
        self._calls = Calls(self.operations, handlers, program.result)
        self._row_calls = Calls(self.row_operations, handlers, program.result)
        # For rows with one token each, kernels find the slots themselves; torch does not.
        self._finds_slots = not any(isinstance(one, PrepareHeads | PrepareLatent) for one in self.operations)
        self._biases: Biases = {}
        for one in program.operations:
            if isinstance(one, Attend):
                Pass.fill_bias(self._biases, one, tables)

    def run(self, inputs: Inputs) -> Tensor:
        """Hidden states [Tp, features].

        Rows outside the angles give NaN; data for slots outside the pages, or in block 0, is not written.
        """
        if inputs.needs_torch:
            return self._single.run(inputs)
        if inputs.caches is not None and inputs.slots is None and not self._finds(inputs):
            found = find_slots(inputs.caches[0], inputs.metadata, inputs.positions, inputs.tokens)
            inputs = replace(inputs, slots=found)
        values = Buffers()
        calls = self._row_calls if inputs.form.fused and len(inputs.token_ids) == 1 else self._calls
        return calls.run(Pass(inputs, self._tables, values, self._biases), values)

    def _finds(self, inputs: Inputs) -> bool:
        """Whether kernels compute the slots: each row has one token, whose position is also its row in rotary
        tables."""
        lens = inputs.metadata.query_lens
        one_each = len(lens) == inputs.tokens and max(lens, default=1) == 1
        return self._finds_slots and one_each and inputs.rotary_rows is inputs.positions


class _Fusing:
    """A program's operations, with joins and heads in place of the operations that they combine."""

    def __init__(self, program: Program, tables: Tables, dtype: torch.dtype):
        self._stream, self._tables, self._dtype = program.stream, tables, dtype
        self._after: dict[Rows, Norm] = {}  # norms of rows that are about to join the stream
        self.operations: list[Operation] = []
        for operation in program.operations:
            self._add(operation)

    def _add(self, operation: Operation) -> None:
        match operation:
            case AddAdapters(linear) if linear.adapters is not None:
                self.operations.append(operation)
            case AddAdapters() | AllReduce():
                return  # nothing to add without adapters, and on one device
            case Normalize(module, x, out, None) if x == out != self._stream and self._norm(module) is not None:
                self._after[x] = self._known(module)
            case Normalize(module, x, out, residual) if x == self._stream and self._norm(module) is not None:
                self._join(residual, self._known(module), out)
            case Add(x, y, out) if x == out == self._stream and self._joins:
                self._join(y, None, out)
            case PrepareHeads(layer=int()) if self._heads(operation) is not None:
                self.operations.append(self._heads(operation) or operation)
            case _:
                self.operations.append(operation)

    @property
    def _joins(self) -> bool:
        return self._dtype in FORMATS and self._stream.width <= norms.WIDEST

    def _join(self, addend: Rows | None, norm: Norm | None, out: Rows) -> None:
        after = None if addend is None else self._after.pop(addend, None)
        addends: tuple[Rows, ...] = () if addend is None else (addend,)
        before = self.operations[-1]
        if isinstance(before, Join) and before.norm is None and len(before.addends) == 1 and addends and after is None:
            self.operations.pop()  # two sublayers in parallel
            addends, after = (*before.addends, *addends), before.after
        self.operations.append(Join(self._stream, addends, after, norm, out))

    def _heads(self, operation: PrepareHeads) -> StoreHeads | None:
        part, angles, heads, whole = operation.part, None, None, None
        if unsupported(operation, self._dtype) is not None:
            return None
        if isinstance(part.position, Rotary):
            table = self._tables.rotary[part.position]
            angles = Angles(table.cos, table.sin, part.position.interleaved, part.position.in_float32)
        if operation.qk_norm is not None:
            queries, keys = self._norm(operation.qk_norm.queries), self._norm(operation.qk_norm.keys)
            if queries is None or keys is None:
                return None
            both = HeadNorms(queries, keys, operation.qk_norm.own)
            heads, whole = (None, both) if operation.qk_norm.whole else (both, None)
        return StoreHeads(operation, angles, heads, whole)

    def _known(self, module: nn.Module) -> Norm:
        norm = self._norm(module)
        assert norm is not None
        return norm

    def _norm(self, module: nn.Module | None) -> Norm | None:
        """A norm in the kernels' form; None if torch computes it."""
        match module:
            case RmsNorm():
                norm = Norm(module.weight, module.eps, unit_offset=module.unit_offset, in_float32=module.in_float32)
            case LayerNorm():
                norm = Norm(module.weight, module.eps, centred=True, bias=module.bias)
            case _:
                return None
        if _unsupported_norm(module, self._dtype) is not None:
            return None
        own = all(part is None or part.dtype == self._dtype for part in (norm.weight, norm.bias))
        return norm if own else None
