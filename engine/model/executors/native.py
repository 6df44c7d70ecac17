"""Runs a stack's program with the CPU's library: successive operations are one call.

Calling each kernel from Python would take longer than a small model's step. So the operations are translated once into
those of `engine.backends.native.program`. torch computes operations without a kernel, on the same buffers, between two
calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.backends import native
from engine.backends.attention.base import AttentionMetadata, ContentBias, Paged, Ragged, Sight
from engine.backends.native import program as programs
from engine.backends.native.activations import FUNCTIONS
from engine.backends.native.adapters import find_runs
from engine.backends.native.arguments import FORMATS
from engine.backends.native.attention import NativeAttention, describe_bias
from engine.backends.native.gemm import Packed
from engine.backends.native.program import LONGEST_KEY, MOST_EXPERTS, ExpertsRoom, Pages, PageTensors, StateMemory
from engine.backends.native.rotary import LONGEST_HEAD, PAGES
from engine.backends.rows import Rows
from engine.model import spec
from engine.model.attention_operations import Attend, PrepareHeads, StoreEncoded
from engine.model.executors.native_rows import NativeRows
from engine.model.executors.reference import HANDLERS, Pass
from engine.model.executors.single import SingleExecutor
from engine.model.experts import ExpertsFeedForward
from engine.model.inputs import Inputs
from engine.model.layers import QkNorm
from engine.model.norms import LayerNorm, RmsNorm
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
from engine.model.positions import DynamicScaling, LongScaling, Rotary
from engine.model.program import Program
from engine.model.recurrences import (
    ChannelScanLayer,
    FadingAttentionLayer,
    FeatureDeltaLayer,
    GatedRecurrenceLayer,
)
from engine.model.slots import find_slots
from engine.model.state_operations import Advance, ApplyDelta, ApplyScan, Convolve
from engine.model.tables import Tables


@dataclass(frozen=True, slots=True)
class _Call:
    """The common part of attentions that can be described to the kernel together. `layer`: one of the layers whose
    pages they read; None if keys are beside the queries."""

    layer: int | None
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: Sight | None
    cross: bool
    content: bool
    in_parts: bool


def unsupported(operation: Operation, dtype: torch.dtype) -> str | None:
    """The reason why an operation on rows of a format has no kernel in the library; None if it has one."""
    if dtype not in FORMATS or not native.available():
        return f"there are no kernels for {dtype}" if native.available() else "there is no library"
    match operation:
        case (
            Normalize(module=RmsNorm() | LayerNorm())
            | GatherNeighbours()
            | Add()
            | AddAdapters()
            | AllReduce()
            | Convolve()
        ):
            return None
        case ApplyDelta():
            size = operation.module.part.key_dim
            return f"the delta rule with keys of {size} features has no kernel" if size > LONGEST_KEY else None
        case ApplyScan():
            size = operation.module.part.size
            return f"a scan with states of {size} features has no kernel" if size > LONGEST_KEY else None
        case Advance():
            size = _longest_state(operation)
            return f"a recurrence with states of {size} numbers has no kernel" if size > LONGEST_KEY else None
        case Open():
            return None if operation.function in FUNCTIONS else f"{operation.function} of openings has no kernel"
        case MultiplyPieces(matrices):
            known = matrices.packed is not None and all(one.native is not None for one in matrices.packed)
            return None if known else "the matrices of a row's pieces are not laid out for our kernels"
        case Multiply():
            return None if _packed(operation) is not None else "a matrix is not laid out for our kernels"
        case PrepareHeads() | StoreEncoded():
            longest = operation.part.head_dim > LONGEST_HEAD
            return f"a head of {operation.part.head_dim} features has no kernel" if longest else None
        case Attend():
            known = isinstance(operation.backend, NativeAttention)
            return None if known else f"{operation.backend.name} attention has no kernel"
        case MixExperts(judged=Rows()):
            return "experts that are chosen by other rows have no kernel"
        case MixExperts() if not isinstance(operation.module.part.routing, spec.Likeliest):
            return f"{type(operation.module.part.routing).__name__} routing has no kernel"
        case MixExperts() if operation.module.part.capacity is not None:
            return "experts of limited capacity have no kernel"
        case MixExperts() if operation.module.up.bias is not None:
            return "experts with biases have no kernel"
        case MixExperts():
            known = all(packed is not None for packed in _experts(operation.module))
            return None if known else "experts' matrices are not laid out for our kernels"
        case Activate():
            return None if operation.function in FUNCTIONS else f"{operation.function} has no kernel"
        case Apply():
            return f"{operation.name} has no kernel"
        case _:
            return f"{type(operation).__name__} has no kernel"


def _longest_state(operation: Advance) -> int:
    """The rows of a head's matrix, or the numbers of a feature's state."""
    match operation.module:
        case ChannelScanLayer(part=scan):
            return scan.size
        case FadingAttentionLayer(part=fading):
            return fading.head_dim
        case FeatureDeltaLayer(part=rule):
            return rule.head_dim
        case GatedRecurrenceLayer():
            return 1


def _misplaced(operation: Operation, tables: Tables) -> str | None:
    """The reason why the library would take a token's row of angles for its position; None if it may."""
    moved = any(part.pairs or isinstance(part.scaling, DynamicScaling | LongScaling) for part in tables.rotary)
    if moved and isinstance(operation, Advance) and isinstance(operation.module, GatedRecurrenceLayer):
        return "a gated recurrence beside angles that are not at a token's position has no kernel"
    return None


def refusal(program: Program, dtype: torch.dtype) -> str | None:
    """The reason why the library runs a program badly or not at all; None if it runs it well.

    Matrices and pages are laid out for either the library or torch, so torch runs programs in which it must compute
    those.
    """
    for operation in program.operations:
        if isinstance(operation, Multiply | PrepareHeads | StoreEncoded | Attend):
            reason = unsupported(operation, dtype)
            if reason is not None:
                return reason
    return None


def _by_length(inputs: Inputs) -> tuple[Inputs, Tensor]:
    """An encoder's inputs in the order of their length, and the original indices [Tp] of their tokens."""
    rows = inputs.metadata
    order = sorted(range(len(rows.query_lens)), key=rows.query_lens.__getitem__)
    starts = rows.query_start.tolist()
    parts = [torch.arange(starts[row], starts[row + 1]) for row in order]
    places = torch.cat([*parts, torch.arange(inputs.tokens, len(inputs.token_ids))])
    lens, contexts = ([values[row] for row in order] for values in (rows.query_lens, rows.context_lens))
    made = replace(
        inputs,
        token_ids=inputs.token_ids[places],
        positions=inputs.positions[places],
        metadata=AttentionMetadata.build(lens, contexts, places.device),
        sides={name: values[places] for name, values in inputs.sides.items()},
        signals=[inputs.signals[row] for row in order] if inputs.signals else (),
    )
    return made, places


class NativeExecutor:
    """Runs a program that `refusal` accepts; the weights are already laid out and do not change. `dtype`: format of the
    rows."""

    def __init__(self, program: Program, tables: Tables, dtype: torch.dtype):
        self._program, self._tables, self._dtype = program, tables, dtype
        self._single = SingleExecutor(program, tables, NativeRows())
        self._angles = {part: table.whole(dtype) for part, table in tables.rotary.items()}
        self.native = programs.Program(dtype)
        for width in program.widths:
            self.native.buffer(width)
        self.native.give(program.stream)
        # The result is a copy, because the next step overwrites the program's memory.
        self.native.give(program.result)
        self._pages: dict[tuple[int, bool], Pages] = {}  # by layer, with the centre of keys or without
        self._states: dict[int, StateMemory] = {}  # by layer, among those with a state
        self._bound: dict[tuple[int, bool], Tensor] = {}  # the keys of the calls that the library knows
        self._calls: list[_Call] = []
        self._own: dict[tuple[str, int], Rows] = {}
        self._backend: NativeAttention | None = None
        self._thin: Rows | None = None  # of the last product with adapters
        multiplied = (_packed(operation) for operation in program.operations if isinstance(operation, Multiply))
        # Short and long rows are multiplied separately.
        self._sorts = any(packed is not None and packed.kind == "amx_float32" for packed in multiplied)
        ranks = next((operation.ranks for operation in program.operations if isinstance(operation, AllReduce)), None)
        if ranks is not None:  # their rows must be in one order
            self._sorts = bool(ranks.largest(self._sorts))
        first_of_all, *operations = program.operations
        assert isinstance(first_of_all, Embed | Take)
        self._first = first_of_all
        self._stages: list[tuple[int, int] | Operation] = []
        self.missing: dict[str, None] = {}
        for operation in operations:
            reason = unsupported(operation, dtype) or _misplaced(operation, tables)
            if reason is not None:
                self.missing[reason] = None
                self._stages.append(operation)
                continue
            first = len(self.native)
            self._emit(operation)
            if self._stages and isinstance(self._stages[-1], tuple):
                first = self._stages.pop()[0]  # type: ignore[index]
            if len(self.native) > first:
                self._stages.append((first, len(self.native)))

    def run(self, inputs: Inputs) -> Tensor:
        """Hidden states [Tp, features]. Raises IndexError if a row's pages or a token's slot are outside the cache, or
        its position outside the tables of angles."""
        if inputs.needs_torch or self._unreadable(inputs):
            return self._single.run(inputs)
        if self._sorts and inputs.metadata.query_lens != sorted(inputs.metadata.query_lens):
            by_length, places = _by_length(inputs)
            out = self._run(by_length)
            for number, kept in enumerate(inputs.kept):
                inputs.kept[number] = torch.empty_like(kept).index_copy_(0, places, kept)
            return torch.empty_like(out).index_copy_(0, places, out)
        return self._run(inputs)

    def _unreadable(self, inputs: Inputs) -> bool:
        """Whether the library has no code for the format of the pages. Attention's backend is then another, and
        `refusal` keeps the program from here, unless torch computes its attention anyway."""
        return inputs.caches is not None and bool(self._pages) and inputs.caches[0].keys.dtype not in PAGES

    def _run(self, inputs: Inputs) -> Tensor:
        if inputs.caches is not None and inputs.slots is None:
            found = find_slots(inputs.caches[0], inputs.metadata, inputs.positions, inputs.tokens)
            inputs = replace(inputs, slots=found)
        self._bind(inputs)
        stream, result = self._program.stream, self._program.result
        if isinstance(self._first, Embed):
            x = self._first.vectors(inputs).contiguous()
        else:
            assert inputs.given is not None
            x = inputs.given.contiguous()
        out = x if result.buffer == stream.buffer else torch.empty(len(x), result.width, dtype=x.dtype)
        calls, states = [self._describe(call, x, inputs) for call in self._calls], inputs.states
        try:
            self.native.begin(
                [(stream, x), (result, out)],
                positions=inputs.rotary_rows.long().contiguous(),
                slots=inputs.slots,
                calls=calls,
                starts=inputs.metadata.query_start,
                runs=None if inputs.adapters is None else find_runs(inputs.adapters),
                states=() if states is None else (states.sources, states.targets, states.snapshots, states.afters),
            )
            state = Pass(inputs, self._tables, _Buffers(self.native), kernels=self._single.kernels)
            for stage in self._stages:
                if isinstance(stage, tuple):
                    self.native.run(*stage)
                else:
                    HANDLERS[type(stage)](stage, state)
        finally:
            self.native.end()
        return out

    def _bind(self, inputs: Inputs) -> None:
        """Tell the library where the pages are, if they have moved."""
        for key, pages in self._pages.items():
            layer, centred = key
            assert inputs.caches is not None
            cache = inputs.caches[layer]
            if self._bound.get(key) is not cache.keys:
                self._bound[key] = cache.keys
                centre = cache.key_centre if centred else None
                pages.bind(PageTensors(cache.keys, cache.values, cache.key_scales, cache.value_scales, centre))

        for layer, memory in self._states.items():
            if inputs.states is None:
                break
            slots = inputs.states.layers[layer]
            if memory.tensor is not slots:
                memory.bind(slots)

    def _describe(self, call: _Call, x: Tensor, inputs: Inputs) -> int:
        """The address of the data that attentions of a kind share in this pass."""
        assert self._backend is not None
        rows = inputs.metadata
        kv: Paged | Ragged
        if call.in_parts:
            assert inputs.parts is not None
            rows = inputs.parts
        if call.layer is None:
            keys = torch.empty((), dtype=x.dtype).expand(inputs.tokens, call.kv_heads, call.head_dim)
            kv = Ragged(keys, keys, rows.query_start[:-1])
        else:
            assert inputs.caches is not None
            kv = inputs.caches[call.layer]
            if call.cross:
                assert inputs.cross is not None
                kv, rows = replace(kv, block_tables=inputs.cross.block_tables, key_centre=None), inputs.cross.metadata
        shape = (len(x), call.heads, call.head_dim)
        return self._backend.describe(
            shape, x.dtype, kv, rows, causal=call.causal, window=call.window, content=call.content
        )

    # ---- translating the program, once

    def _emit(self, operation: Operation) -> None:
        match operation:
            case Normalize(module, x, out, residual):
                self._norm(module, x, out, residual=residual)
            case Multiply(linear, x, out):
                packed = _packed(operation)
                assert packed is not None
                if linear.adapters is not None:
                    assert linear.adapters.table is not None
                    self._thin = self.native.shrink(linear.adapters.table, x)  # the product does not wait for it
                self.native.product(packed, x, out)
            case AddAdapters(linear, _, out) if linear.adapters is not None:
                assert linear.adapters.table is not None
                assert self._thin is not None
                self.native.expand(linear.adapters.table, self._thin, out)
            case PrepareHeads():
                self._prepare_heads(operation)
            case StoreEncoded(part, kv, layer):
                self.native.rotate(
                    kv, self._pages_of(layer, False), query_heads=0, kv_heads=part.kv_heads, head_dim=part.head_dim,
                    angles=None,
                )  # fmt: skip
            case Attend():
                self._attend(operation)
            case GatherNeighbours(x, out, taps):
                self.native.gather(x, out, taps)
            case Activate(function, x, out, gated):
                self.native.activate(function, x, out, gated=gated)
            case Open(opening, x, function):
                self.native.open(opening, x, function)
            case MultiplyPieces(matrices, x, out):
                assert matrices.packed is not None
                for piece, one in enumerate(matrices.packed):
                    assert one.native is not None
                    read, made = matrices.inputs, matrices.outputs
                    self.native.product(one.native, x.part(piece * read, read), out.part(piece * made, made))
            case Add(x, y, out):
                self.native.add(x, y, out)
            case MixExperts(module, x, out):
                self._mix_experts(module, x, out)
            case Convolve(module, x, out, form, layer):
                memory = self._states.setdefault(layer, StateMemory())
                self.native.convolve(x, out, memory, weight=module.weight, bias=module.bias, form=form)
            case ApplyDelta(module, x, rates, opening, out, layer):
                memory = self._states.setdefault(layer, StateMemory())
                rule = module.part
                self.native.advance(
                    "delta", {"x": x, "rates": rates, "fading": None, "opening": opening, "out": out}, memory,
                    {"decay": module.decay.float().exp(), "offset": module.offset, "norm": module.norm},
                    begin=(rule.kernel - 1) * rule.convolved, eps=rule.eps, key_heads=rule.key_heads,
                    value_heads=rule.value_heads, key_dim=rule.key_dim, value_dim=rule.value_dim,
                    alternate=rule.alternate, most=rule.most,
                )  # fmt: skip
            case ApplyScan(module, x, rates, opening, out, layer):
                memory = self._states.setdefault(layer, StateMemory())
                scan = module.part
                self.native.advance(
                    "scan", {"x": x, "rates": rates, "opening": opening, "out": out}, memory,
                    {
                        "decay": module.decay.float().exp(), "offset": module.offset, "skip": module.skip,
                        "norm": module.norm,
                    },
                    begin=(scan.kernel - 1) * scan.convolved, eps=scan.eps or 0.0, heads=scan.heads,
                    head_dim=scan.head_dim, groups=scan.groups, size=scan.size, norm_first=scan.norm_first,
                )  # fmt: skip
            case Advance():
                self._advance(operation)
            case AllReduce(ranks, x):
                self.native.reduce(x, ranks)
            case AddAdapters():
                pass  # nothing to add without adapters

    def _advance(self, operation: Advance) -> None:
        memory = self._states.setdefault(operation.layer, StateMemory())
        module, given, out = operation.module, operation.given, operation.out
        match module:
            case ChannelScanLayer(part=scan):
                rows = dict(zip(("x", "before", "after", "steps", "opening"), given, strict=True), out=out)
                self.native.advance(
                    "channels", rows, memory, {"decay": module.decay.float().exp().t(), "skip": module.skip},
                    begin=(scan.kernel - 1) * scan.width, width=scan.width, size=scan.size,
                )  # fmt: skip
            case GatedRecurrenceLayer(part=gated):
                rows = dict(zip(("x", "inputs", "decays"), given, strict=True), out=out)
                speed = torch.nn.functional.softplus(module.speed.float()) * -8.0
                begin = (gated.kernel - 1) * gated.width
                self.native.advance("recurrence", rows, memory, {"speed": speed}, begin=begin, width=gated.width)
            case FadingAttentionLayer(part=fading):
                places = {"x": given[0], "rates": None, "opening": None, "out": out}
                decay = torch.tensor(fading.slopes)
                self.native.advance(
                    "scan", places, memory, {"decay": decay, "skip": torch.zeros_like(decay)}, begin=0,
                    heads=fading.heads, head_dim=fading.head_dim, groups=fading.heads, size=fading.head_dim,
                )  # fmt: skip
            case FeatureDeltaLayer(part=rule):
                rows = dict(zip(("x", "rates", "fading", "opening"), given, strict=True), out=out)
                self.native.advance(
                    "delta", rows, memory,
                    {"decay": module.decay.float().exp(), "offset": module.offset, "norm": module.norm},
                    begin=(rule.kernel - 1) * 3 * rule.width, eps=rule.eps, key_heads=rule.heads,
                    value_heads=rule.heads, key_dim=rule.head_dim, value_dim=rule.head_dim, logistic=True, most=1.0,
                )  # fmt: skip

    def _prepare_heads(self, operation: PrepareHeads) -> None:
        part = operation.part
        if part.clip is not None:
            self.native.clip(operation.heads, part.clip)
        rotary = part.position if isinstance(part.position, Rotary) else None
        pages = None if operation.layer is None else self._pages_of(operation.layer, True)
        if operation.qk_norm is not None:
            if operation.qk_norm.after_rotation:
                self._rotate(operation, rotary, None)
                rotary = None
            self._qk_norm(operation.qk_norm, operation, part)
        self._rotate(operation, rotary, pages)

    def _rotate(self, operation: PrepareHeads, rotary: Rotary | None, pages: Pages | None) -> None:
        part = operation.part
        if rotary is None and pages is None:
            return
        self.native.rotate(
            operation.heads,
            pages,
            query_heads=part.heads,
            kv_heads=part.kv_heads,
            head_dim=part.head_dim,
            angles=None if rotary is None else self._angles[rotary],
            interleaved=rotary is not None and rotary.interleaved,
        )

    def _qk_norm(self, norms: QkNorm, operation: PrepareHeads, part: spec.Attention) -> None:
        rows = (operation.queries, operation.keys, operation.values)
        pieces = (1, 1, part.kv_heads) if norms.whole else (part.heads, part.kv_heads, part.kv_heads)
        found = [
            (norm, own, count)
            for norm, own, count in zip((norms.queries, norms.keys, norms.values), rows, pieces, strict=True)
            if norm is not None
        ]
        for place, (norm, own, count) in enumerate(found, 1):
            self._norm(norm, own, own, pieces=count, barrier=place == len(found))

    def _attend(self, operation: Attend) -> None:
        part, layer = operation.part, operation.layer
        assert isinstance(operation.backend, NativeAttention)
        self._backend = operation.backend
        bias = self._tables.bias(operation.module)
        call = _Call(
            layer,
            part.heads,
            part.kv_heads,
            part.head_dim,
            operation.causal,
            operation.window,
            operation.is_cross,
            isinstance(bias, ContentBias),
            part.in_parts,
        )
        same = next((i for i, other in enumerate(self._calls) if _alike(other, call)), None)
        if same is None:
            same = len(self._calls)
            self._calls.append(call)
        kv = operation.kv
        if kv is None:
            assert layer is not None
            pages = self._pages_of(layer, True)
        self.native.attend(
            operation.queries,
            operation.out,
            pages if kv is None else kv,
            call=same,
            scale=part.scale,
            softcap=part.softcap or 0.0,
            bias=None if bias is None else describe_bias(bias, self._dtype),
            sinks=operation.sinks,
            centred=not operation.is_cross,
        )

    def _mix_experts(self, module: ExpertsFeedForward, x: Rows, out: Rows) -> None:
        part = module.part
        routed = self._room("routed", part.count)
        packed = [one for one in _experts(module) if one is not None]
        router, up, down = packed[0], packed[1 : 1 + part.count], packed[1 + part.count :]
        self.native.product(router, x, routed)
        rows = {"rows": x.width, "wide": up[0].outputs, "hidden": down[0].inputs}
        room = ExpertsRoom(
            **{name: self._room(f"experts' {name}", part.active * width) for name, width in rows.items()},
            routes=self._room("routes", 3 * part.active * 4 // self._dtype.itemsize),
        )
        self.native.experts(
            routed,
            x,
            out,
            up=up,
            down=down,
            active=part.active,
            normalize=part.normalize,
            function=module.activation,
            gated=module.gated,
            room=room,
        )

    def _room(self, name: str, width: int) -> Rows:
        if (name, width) not in self._own:
            self._own[name, width] = self.native.buffer(width)
        return self._own[name, width]

    def _pages_of(self, layer: int, centred: bool) -> Pages:
        return self._pages.setdefault((layer, centred), Pages())

    def _norm(
        self,
        module: torch.nn.Module,
        x: Rows,
        out: Rows,
        *,
        residual: Rows | None = None,
        pieces: int = 1,
        barrier: bool = True,
    ) -> None:
        how: dict[str, Any]
        match module:
            case RmsNorm():
                how = {"unit_offset": module.unit_offset, "in_float32": module.in_float32}
            case LayerNorm():
                how = {"bias": module.bias, "centred": True, "weights": module.rows}
            case _:
                raise TypeError(f"{type(module).__name__} has no kernel")
        how |= {"residual": residual, "pieces": pieces, "barrier": barrier}
        self.native.norm(x, out, weight=module.weight, eps=module.eps, **how)


class _Buffers:
    """The library's rows, as torch reads and writes them."""

    def __init__(self, program: programs.Program):
        self._program = program

    def __getitem__(self, rows: Rows) -> Tensor:
        return self._program.view(rows)

    def __setitem__(self, rows: Rows, value: Tensor) -> None:
        self._program.view(rows).copy_(value.reshape(len(value), rows.width))


def _alike(one: _Call, other: _Call) -> bool:
    return (one.layer is None) == (other.layer is None) and replace(one, layer=other.layer) == other


def _experts(module: ExpertsFeedForward) -> list[Packed | None]:
    """The router's matrix and the matrices of all experts; None if one is not laid out or cannot be used."""
    known = module.activation in FUNCTIONS and module.part.count <= MOST_EXPERTS and module.up.bias is None
    if not known or module.up.packed is None or module.down.packed is None:
        return [None]
    packed = [module.router.packed, *module.up.packed, *module.down.packed]
    return [None if one is None else one.native for one in packed]


def _packed(operation: Multiply) -> Packed | None:
    return None if operation.linear.packed is None else operation.linear.packed.native
