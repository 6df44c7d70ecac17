"""A stack of layers as a list of operations that the library runs in one call; see `src/program.h`.

Activations are in buffers, one row per token. Buffers belong to the program and grow with the largest step; the caller
passes the first one and says which one gets the result.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from engine.backends.native.activations import FUNCTIONS
from engine.backends.native.adapters import AdapterTable
from engine.backends.native.arguments import FORMATS, vector_of
from engine.backends.native.gemm import Kind, Packed, scratch
from engine.backends.native.loading import kernels
from engine.backends.native.ranks import Ranks
from engine.backends.native.rotary import LONGEST_HEAD, PAGES
from engine.backends.native.structures import structure
from engine.backends.rows import Rows

_RUN = kernels("program", "ppi")
_NORM, _PRODUCT, _ROTATE, _ATTEND, _ACTIVATE, _ADD, _CLIP = range(7)
_EXPERTS, _GATHER, _OPEN, _SHRINK, _EXPAND, _CONVOLVE, _DELTA, _SCAN, _REDUCE, _CHANNELS, _RECURRENCE = range(7, 18)
_FORMS = {"silu": 0, "gated": 1, "plain": 2}  # of a convolution, as in states.h
_KINDS = {kind: number for number, kind in enumerate(get_args(Kind))}
_ROUNDED, _EXACT, _OFFSET = range(3)
_THREADS = os.cpu_count() or 1
_TICKET = 64  # bytes of a cache line, as in threads.h
_RANKS = 4  # `Step.outside` if other ranks do not compute the step
_OUTSIDE = (
    "",
    "a row's keys lie outside the pages",
    "a token's slot lies outside the pages",
    "a token's position lies outside the table of angles",
)


_Place = structure("Place", "int buffer offset stride")
_Operation = structure("Operation", "int kind | pointer what | int barrier")
_Step = structure(
    "Step",
    "pointer buffers | int tokens stored | pointer positions slots calls starts | int rows | pointer runs |"
    "int num_runs | pointer workspace | int spare | pointer sources targets snapshots afters tickets times |"
    "int outside met",
)
_Norm = structure(
    "NormWhat", "Place x residual sum out | pointer weight bias | double eps | int centred rounding inner size weights"
)
_Product = structure("ProductWhat", "Place x y | pointer weight bias | int kind tile_rows outputs inputs")
_Pages = structure("Pages", "pointer keys values key_scales value_scales centre | int format slots")
_Turn = structure(
    "RotateWhat",
    "Place heads | pointer cosines sines | int length query_heads kv_heads head_dim dim interleaved in_float32 |"
    "pointer pages",
)
_Attend = structure(
    "AttendWhat",
    "Place q k v out | pointer pages bias sinks distance_keys distance_queries distance_columns |"
    "int call centred bias_kind bias_columns bias_zero distances | double scale softcap",
)
_Activate = structure("ActivateWhat", "Place x out | int width gated function")
_Experts = structure(
    "ExpertsWhat",
    "Place routed x rows wide hidden routes out | pointer up down starts | int up_kind down_kind up_tile_rows"
    " down_tile_rows count active normalize function gated size width",
)
_Gather = structure("GatherWhat", "Place x out | int width taps")
_Add = structure("AddWhat", "Place x y out | int width")
_Open = structure("OpenWhat", "Place opening x | int width pieces function")
_Shrink = structure("ShrinkWhat", "Place x thin | pointer slots | int inputs")
_Expand = structure("ExpandWhat", "Place thin y | pointer slots")
_Clip = structure("ClipWhat", "Place x | int width | double limit")
_Reduce = structure("ReduceWhat", "Place x | int width | pointer ranks")
_StateMemory = structure("StateMemory", "pointer slots | int size")
_Delta = structure(
    "DeltaWhat",
    "Place x rates fading opening out | pointer decay offset norm memory |"
    "int begin key_heads value_heads key_dim value_dim alternate logistic | double eps most",
)
_Scan = structure(
    "ScanWhat",
    "Place x rates opening out | pointer decay offset skip norm memory |"
    "int begin heads head_dim groups size norm_first | double eps",
)
_Channels = structure(
    "ChannelsWhat", "Place x before after steps opening out | pointer decay skip memory | int begin width size"
)
_Recurrence = structure("RecurrenceWhat", "Place x inputs decays out | pointer speed memory | int begin width")
_Convolve = structure("ConvolveWhat", "Place x out | pointer weight bias memory | int width taps form")


# The number of each recurrence, its structure, and the field with the numbers of a state that a kernel keeps at once.
_RECURRENCES: dict[str, tuple[int, type[ctypes.Structure], str | None]] = {
    "delta": (_DELTA, _Delta, "key_dim"),
    "scan": (_SCAN, _Scan, "size"),
    "channels": (_CHANNELS, _Channels, "size"),
    "recurrence": (_RECURRENCE, _Recurrence, None),
}


@dataclass(frozen=True, slots=True)
class PageTensors:
    """A layer's pages for writing and reading: [num_blocks, block_size, kv_heads, head_dim], with scales and centres
    (`engine.backends.attention.base.Paged`)."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    key_centre: Tensor | None = None


class Pages:
    """The addresses of a layer's pages, passed to the program before its first step and whenever they have moved."""

    def __init__(self) -> None:
        self._structure: Any = _Pages()
        self._tensors: PageTensors | None = None
        self.address = ctypes.addressof(self._structure)

    def bind(self, tensors: PageTensors) -> None:
        """Use these tensors from now on. Raises ValueError if they have gaps, or a format that pages cannot have."""
        every = (tensors.keys, tensors.values, tensors.key_scales, tensors.value_scales, tensors.key_centre)
        if tensors.keys.dtype not in PAGES or any(t is not None and not t.is_contiguous() for t in every):
            raise ValueError(f"pages of {tensors.keys.dtype} and their scales must be contiguous")
        self._tensors = tensors
        for name, tensor in zip(("keys", "values", "key_scales", "value_scales", "centre"), every, strict=True):
            setattr(self._structure, name, None if tensor is None else tensor.data_ptr())
        self._structure.format = PAGES[tensors.keys.dtype]
        self._structure.slots = tensors.keys.shape[0] * tensors.keys.shape[1]


class StateMemory:
    """The address of a layer's state slots, passed to the program before its first step, and again when they have
    moved."""

    def __init__(self) -> None:
        self._structure: Any = _StateMemory()
        self.tensor: Tensor | None = None
        self.address = ctypes.addressof(self._structure)

    def bind(self, tensor: Tensor) -> None:
        """Use [slots + 1, numbers] float32 from now on."""
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        self.tensor = tensor
        self._structure.slots, self._structure.size = tensor.data_ptr(), tensor.shape[1]


@dataclass(frozen=True, slots=True)
class AddedBias:
    """A bias in the form that the attention kernel reads. `fields`: the fields of `Attention` in `src/attention.h` that
    describe it."""

    fields: Mapping[str, int | None]
    kept: tuple[Tensor, ...]


class ExpertsRoom(NamedTuple):
    """Rows for each token and each of its experts: `active` times the features of one row."""

    rows: Rows
    wide: Rows
    hidden: Rows
    routes: Rows


MOST_EXPERTS = 1024
LONGEST_KEY = 256


class Program:
    """Operations on rows of one format, in the order in which they were added. `dtype`: float32 or bfloat16."""

    CAPACITY: ClassVar[int] = 32
    """Minimum number of tokens that buffers have room for."""

    def __init__(self, dtype: torch.dtype):
        if dtype not in FORMATS:
            raise ValueError(f"a program's rows must be float32 or bfloat16, got {dtype}")
        self.dtype = dtype
        self._widths: list[int] = []
        self._buffers: list[Tensor | None] = []
        self._given: set[int] = set()
        self._capacity = 0
        self._operations: list[tuple[int, ctypes.Structure, bool]] = []
        self._kept: list[object] = []
        self._tiles: set[tuple[int, int]] = set()
        self._thins: dict[int, Rows] = {}
        self._ranks: Ranks | None = None
        self._list: ctypes.Array[ctypes.Structure] | None = None
        self._pointers = (ctypes.c_void_p * 0)()
        self.watch: Callable[[list[tuple[str, int, int]]], None] | None = None
        """Called after each step with each operation's name and the nanoseconds that the first thread worked and
        waited."""
        self._step: Any = _Step(spare=_THREADS)
        self._in_use: tuple[object, ...] = ()
        self._times: list[tuple[str, int, int]] = []

    # ---- building it

    def buffer(self, width: int) -> Rows:
        """A row of `width` features for each token."""
        self._widths.append(width)
        self._buffers.append(None)
        self._list = None
        return Rows(len(self._widths) - 1, 0, width, width)

    def give(self, rows: Rows) -> None:
        """Use this buffer's memory as an argument of the program."""
        self._given.add(rows.buffer)

    def norm(
        self,
        x: Rows,
        out: Rows,
        *,
        weight: Tensor | None,
        bias: Tensor | None = None,
        eps: float,
        centred: bool = False,
        unit_offset: bool = False,
        in_float32: bool = False,
        residual: Rows | None = None,
        pieces: int = 1,
        weights: int = 1,
        barrier: bool = True,
    ) -> None:
        """out = norm of x, or of x + residual, which then becomes x.

        Args:
            centred: LayerNorm instead of RMSNorm; other arguments as in `engine.backends.native.norms`.
            pieces: a row consists of this many pieces, each normalised separately.
            weights: in a LayerNorm, this many pieces have their own weights and biases.
            barrier: whether the next operation reads what this one writes.
        """
        size = x.width // pieces
        self._add(
            _NORM,
            _Norm(
                x=_place(x), residual=_place(residual), sum=_place(x), out=_place(out),
                weight=vector_of(weight, weights * size, self.dtype),
                bias=vector_of(bias, weights * size, self.dtype), eps=eps,
                centred=centred, rounding=_OFFSET if unit_offset else _EXACT if in_float32 else _ROUNDED,
                inner=pieces, size=size, weights=weights,
            ),
            weight, bias, barrier=barrier,
        )  # fmt: skip

    def product(self, packed: Packed, x: Rows, y: Rows) -> None:
        """y = x @ weight.T + bias."""
        if (x.width, y.width) != (packed.inputs, packed.outputs):
            raise ValueError(f"rows of {x.width} and {y.width} do not go with {packed.inputs} to {packed.outputs}")
        self._tiles.add((packed.tile_rows, packed.tile_bytes))
        self._add(
            _PRODUCT,
            _Product(
                x=_place(x), y=_place(y), weight=packed.data.data_ptr(),
                bias=None if packed.bias is None else packed.bias.data_ptr(), kind=_KINDS[packed.kind],
                tile_rows=packed.tile_rows, outputs=packed.outputs, inputs=packed.inputs,
            ),
            packed,
        )  # fmt: skip

    def shrink(self, table: AdapterTable, x: Rows) -> Rows:
        """thin = down @ x for tokens with an adapter; the next operation must not read it.

        Returns:
            thin: the input of `expand`, which must come before the next `shrink`.
        """
        thin = self._thin(table.rank)
        what = _Shrink(x=_place(x), thin=_place(thin), slots=table.address, inputs=table.inputs)
        self._add(_SHRINK, what, table, barrier=False)
        return thin

    def expand(self, table: AdapterTable, thin: Rows, y: Rows) -> None:
        """y += up @ thin."""
        self._add(_EXPAND, _Expand(thin=_place(thin), y=_place(y), slots=table.address), table)

    def _thin(self, rank: int) -> Rows:
        """A buffer of `rank` float32 numbers for each token."""
        width = rank * (torch.float32.itemsize // self.dtype.itemsize)
        if width not in self._thins:
            self._thins[width] = self.buffer(width)
        return self._thins[width]

    def rotate(
        self,
        heads: Rows,
        pages: Pages | None,
        *,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        angles: tuple[Tensor, Tensor] | None,
        interleaved: bool = False,
    ) -> None:
        """Rotate queries in place, and store rotated keys and values in pages; without pages, keys are rotated in place
        too. `angles`: cosines [length, head_dim] and sines [length, dim / 2] by position, in the format of the
        rotation: float32, or the program's."""
        if head_dim > LONGEST_HEAD:
            raise ValueError(f"a head may have at most {LONGEST_HEAD} features, got {head_dim}")
        cosines, sines = angles or (None, None)
        if cosines is not None and sines is not None:
            assert cosines.is_contiguous()
            assert sines.is_contiguous()
            assert cosines.dtype == sines.dtype
            assert cosines.dtype in (torch.float32, self.dtype)
        self._add(
            _ROTATE,
            _Turn(
                heads=_place(heads), cosines=None if cosines is None else cosines.data_ptr(),
                sines=None if sines is None else sines.data_ptr(), length=0 if cosines is None else len(cosines),
                query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim,
                dim=0 if sines is None else 2 * sines.shape[1], interleaved=interleaved,
                in_float32=cosines is not None and cosines.dtype == torch.float32,
                pages=None if pages is None else pages.address,
            ),
            cosines, sines, pages,
        )  # fmt: skip

    def attend(
        self,
        q: Rows,
        out: Rows,
        kv: Pages | tuple[Rows, Rows],
        *,
        call: int,
        scale: float,
        softcap: float = 0.0,
        bias: AddedBias | None = None,
        sinks: Tensor | None = None,
        centred: bool = True,
    ) -> None:
        """Attention of queries to keys and values, which are in pages or beside them.

        Args:
            call: the index of the step's call that describes the batch.
            sinks: [heads] float32, one more score for each query.
            centred: whether the pages' key centre belongs to these keys.
        """
        pages = kv if isinstance(kv, Pages) else None
        keys, values = (None, None) if isinstance(kv, Pages) else kv
        self._add(
            _ATTEND,
            _Attend(
                q=_place(q), k=_place(keys), v=_place(values), out=_place(out),
                pages=None if pages is None else pages.address, call=call, scale=scale, softcap=softcap,
                centred=centred, sinks=None if sinks is None else sinks.data_ptr(),
                **({} if bias is None else bias.fields),
            ),
            pages, bias, sinks,
        )  # fmt: skip

    def activate(self, function: str, x: Rows, out: Rows, *, gated: bool) -> None:
        """out = function(x), or function(a) * b of x = [a | b]."""
        what = _Activate(x=_place(x), out=_place(out), width=out.width, gated=gated, function=FUNCTIONS[function])
        self._add(_ACTIVATE, what)

    def experts(
        self,
        routed: Rows,
        x: Rows,
        out: Rows,
        *,
        up: Sequence[Packed],
        down: Sequence[Packed],
        active: int,
        normalize: bool,
        function: str,
        gated: bool,
        room: ExpertsRoom,
    ) -> None:
        """out = the result of each token's likeliest experts for x.

        Args:
            routed: the router's logits of each token, one per expert.
            active: experts per token.
            normalize: whether the weights of a token's experts are scaled to sum to 1.
            room: rows for intermediate results; layers of one shape share it.
        """
        if len(up) != routed.width or len(up) != len(down) or len(up) > MOST_EXPERTS:
            raise ValueError(f"{len(up)} and {len(down)} experts do not match the router's {routed.width} numbers")
        if any(one.kind != which[0].kind for which in (up, down) for one in which):
            raise ValueError("the matrices of a layer's experts are of several kinds")
        addresses = [(ctypes.c_void_p * len(up))(*(one.data.data_ptr() for one in which)) for which in (up, down)]
        starts = (ctypes.c_int64 * (len(up) + 1))()
        for packed in (up[0], down[0]):
            self._tiles.add((packed.tile_rows, packed.tile_bytes))
        self._add(
            _EXPERTS,
            _Experts(
                routed=_place(routed), x=_place(x), rows=_place(room.rows), wide=_place(room.wide),
                hidden=_place(room.hidden), routes=_place(room.routes),
                out=_place(out), up=ctypes.addressof(addresses[0]), down=ctypes.addressof(addresses[1]),
                starts=ctypes.addressof(starts), up_kind=_KINDS[up[0].kind], down_kind=_KINDS[down[0].kind],
                up_tile_rows=up[0].tile_rows, down_tile_rows=down[0].tile_rows, count=len(up), active=active,
                normalize=normalize, function=FUNCTIONS[function], gated=gated, size=x.width, width=down[0].inputs,
            ),
            *up, *down, *addresses, starts,
        )  # fmt: skip

    def gather(self, x: Rows, out: Rows, taps: int) -> None:
        """out = the `taps` tokens around each token, side by side; zeros beyond the ends of its row."""
        self._add(_GATHER, _Gather(x=_place(x), out=_place(out), width=x.width, taps=taps))

    def add(self, x: Rows, y: Rows, out: Rows) -> None:
        """out = x + y."""
        self._add(_ADD, _Add(x=_place(x), y=_place(y), out=_place(out), width=out.width))

    def reduce(self, x: Rows, ranks: Ranks) -> None:
        """x = the sum of all ranks' x. All ranks run the same list of operations on as many rows."""
        if x.width * self.dtype.itemsize > ranks.capacity:
            raise ValueError(f"a row of {x.width} features exceeds the ranks' buffers of {ranks.capacity} bytes")
        self._ranks = ranks
        self._add(_REDUCE, _Reduce(x=_place(x), width=x.width, ranks=ranks.address), ranks)

    def open(self, opening: Rows, x: Rows, function: str) -> None:
        """x = function(opening) * x. An opening has a number for each of as many pieces of a row."""
        what = _Open(
            opening=_place(opening), x=_place(x), width=x.width, pieces=opening.width, function=FUNCTIONS[function]
        )
        self._add(_OPEN, what)

    def clip(self, x: Rows, limit: float) -> None:
        """Limit x to [-limit, limit]."""
        self._add(_CLIP, _Clip(x=_place(x), width=x.width, limit=limit))

    def convolve(
        self, x: Rows, out: Rows, memory: StateMemory, *, weight: Tensor, bias: Tensor | None, form: str
    ) -> None:
        """out = what `form` says (`engine.model.state_operations.Form`).

        Args:
            weight: [features, taps].
            bias: [features].
        """
        taps = weight.float().t().contiguous()
        added = None if bias is None else bias.float().contiguous()
        self._add(
            _CONVOLVE,
            _Convolve(
                x=_place(x), out=_place(out), weight=taps.data_ptr(), bias=None if added is None else added.data_ptr(),
                memory=memory.address, width=out.width, taps=len(taps), form=_FORMS[form],
            ),
            taps, added, memory,
        )  # fmt: skip

    def advance(
        self,
        kind: Literal["delta", "scan", "channels", "recurrence"],
        rows: Mapping[str, Rows | None],
        memory: StateMemory,
        weights: Mapping[str, Tensor | None],
        **numbers: float,
    ) -> None:
        """A recurrence: the gated delta rule, the selective scan, Mamba's scan, RG-LRU (`src/states.h`, `scan.h`,
        `channels.h`).

        Args:
            rows: the structure's places; None: it has none.
            weights: its vectors and matrices; None: it has none.
            numbers: its other fields; `begin` numbers of a state are before those of the recurrence.
        """
        number, what, size = _RECURRENCES[kind]
        if size is not None and numbers[size] > LONGEST_KEY:
            raise ValueError(f"keys of a state may have at most {LONGEST_KEY} features, got {numbers[size]}")
        kept = {name: weight.float().contiguous() for name, weight in weights.items() if weight is not None}
        addresses = {name: tensor.data_ptr() for name, tensor in kept.items()}
        places = {name: _place(each) for name, each in rows.items()}
        self._add(number, what(**places, memory=memory.address, **addresses, **numbers), *kept.values(), memory)

    def _add(self, kind: int, what: ctypes.Structure, *kept: object, barrier: bool = True) -> None:
        self._operations.append((kind, what, barrier))
        self._kept.extend(kept)
        self._list = None

    # ---- running it

    def __len__(self) -> int:
        return len(self._operations)

    def begin(
        self,
        given: Sequence[tuple[Rows, Tensor]],
        *,
        positions: Tensor,
        slots: Tensor | None,
        calls: Sequence[int],
        starts: Tensor,
        runs: Tensor | None = None,
        states: Sequence[Tensor] = (),
    ) -> None:
        """Prepare a step.

        Args:
            given: memory [T, width] of the buffers that the caller provides.
            positions: [T] int64.
            slots: [S] int64: keys and values of the first S tokens go to pages; None without pages.
            calls: addresses of the calls that `attend` refers to, in order.
            starts: [rows + 1] int32 first token of each row, and the end of the last.
            states: [rows] int32 each, the rows' state slots: sources, targets and snapshots, and the tokens before the
                snapshots (`engine.model.inputs.States`); () if states begin as zeros and are not kept.
            runs: [runs, 3] int64 runs of tokens with an adapter (`engine.backends.native.adapters.find_runs`).
        """
        tokens = len(positions)
        self._reserve(tokens)
        for rows, memory in given:
            assert memory.shape == (tokens, rows.stride)
            assert memory.is_contiguous()
            assert memory.dtype == self.dtype
            self._pointers[rows.buffer] = memory.data_ptr()
            self._buffers[rows.buffer] = memory.view(-1)
        assert positions.dtype == torch.int64
        assert positions.is_contiguous()
        step = self._step
        step.tokens, step.stored, step.slots = tokens, 0, None
        if slots is not None:
            assert slots.dtype == torch.int64
            assert slots.is_contiguous()
            step.stored, step.slots = len(slots), slots.data_ptr()
        step.positions = positions.data_ptr()
        addresses = (ctypes.c_void_p * len(calls))(*calls)
        step.calls = ctypes.addressof(addresses)
        starts = starts.contiguous()
        assert starts.dtype == torch.int32
        step.starts, step.rows = starts.data_ptr(), len(starts) - 1
        step.num_runs, step.runs = 0, None
        if runs is not None:
            assert runs.dtype == torch.int64
            assert runs.is_contiguous()
            step.num_runs, step.runs = len(runs), runs.data_ptr()
        step.sources = step.targets = step.snapshots = step.afters = None
        for name, numbers in zip(("sources", "targets", "snapshots", "afters") if states else (), states, strict=True):
            assert numbers.dtype == torch.int32
            assert numbers.is_contiguous()
            assert len(numbers) == step.rows
            setattr(step, name, numbers.data_ptr())
        self._in_use = (positions, slots, addresses, starts, runs, states)
        self._times.clear()

    def run(self, first: int, last: int) -> None:
        """Run the operations [first, last) of the step. Raises IndexError if a position has no angles, or a slot or a
        row's page does not exist. In the first two cases, nothing was written. RankError: another rank failed."""
        assert self._list is not None
        step, count = self._step, last - first
        times = (ctypes.c_int64 * (2 * count))() if self.watch is not None else None
        step.times = None if times is None else ctypes.addressof(times)
        step.outside = 0
        step.workspace = scratch(self._workspace(step.tokens))  # which may have moved during the operations before
        _RUN[self.dtype].call(
            ctypes.addressof(step), ctypes.addressof(self._list) + first * ctypes.sizeof(_Operation), count
        )
        if step.outside == _RANKS:
            assert self._ranks is not None
            self._ranks.check(step.met)
        if step.outside:
            raise IndexError(_OUTSIDE[step.outside])
        if times is not None:
            named = (_named(kind, what) for kind, what, _ in self._operations[first:last])
            self._times += [(name, times[2 * i], times[2 * i + 1]) for i, name in enumerate(named)]

    def end(self) -> None:
        """The step is over: release the caller's memory."""
        self._in_use = ()
        for number in self._given:
            self._buffers[number] = None
        if self.watch is not None:
            self.watch(self._times)
            self._times = []

    def view(self, rows: Rows) -> Tensor:
        """[T, width] of a step's rows, without a copy."""
        memory, tokens = self._buffers[rows.buffer], self._step.tokens
        assert memory is not None
        whole = memory[: tokens * rows.stride].view(tokens, rows.stride)
        return whole[:, rows.offset : rows.offset + rows.width]

    def _reserve(self, tokens: int) -> None:
        """Build the list, with room for this many tokens."""
        if self._list is None:
            self._list = (_Operation * len(self._operations))(
                *(_Operation(kind, ctypes.addressof(what), barrier) for kind, what, barrier in self._operations)
            )
            # Times of each operation and thread, far enough apart that threads do not slow each other down.
            self._tickets = torch.zeros((len(self._operations) * _THREADS + 1) * _TICKET, dtype=torch.uint8)
            self._step.tickets = -(-self._tickets.data_ptr() // _TICKET) * _TICKET
            self._pointers = (ctypes.c_void_p * len(self._widths))()
            self._step.buffers = ctypes.addressof(self._pointers)
            self._capacity = 0
        if self._capacity and tokens <= self._capacity:
            return
        self._capacity, wanted = 0, max(tokens, self.CAPACITY)  # 0 while there may not be enough memory
        for number, width in enumerate(self._widths):
            if number not in self._given:
                memory = self._buffers[number] = torch.empty(wanted * width, dtype=self.dtype)
                self._pointers[number] = memory.data_ptr()
        self._capacity = wanted

    def _workspace(self, tokens: int) -> int:
        """Bytes of working memory for the products of a step."""
        return max(((-(-tokens // rows) + _THREADS) * size for rows, size in self._tiles), default=0)


def _named(kind: int, what: Any) -> str:
    if kind == _PRODUCT:
        return f"product {what.inputs} to {what.outputs}"
    return (
        "norm",
        "product",
        "rotation and pages",
        "attention",
        "activation",
        "sum",
        "clip",
        "experts",
        "gather",
        "opening",
        "adapters, down",
        "adapters, up",
        "convolution",
        "delta rule",
        "scan",
        "sum over ranks",
        "scan of features",
        "recurrence",
    )[kind]


def _place(rows: Rows | None) -> ctypes.Structure:
    return _Place(-1, 0, 0) if rows is None else _Place(rows.buffer, rows.offset, rows.stride)
