"""A stand-in for GPUs that compute as late as they may, on a CPU: what host and device do at the same time.

A tensor "on cuda" is a name for one that comes to be when the queue of its stream gets there: at the latest when
the host waits. Until then nothing is read, of the host's memory neither, and nothing is written. So what would race on
a GPU goes wrong here: pinned memory that is written again before its copy is done, results read without a wait. A
CUDA graph is the list of what was asked for while it was recorded, and repeats that on the same tensors; a wait
meanwhile is refused, as by CUDA, and memory that a graph uses and no tensor holds any more is found. Memory that was
never written holds NaN. Kernels of Triton's run by its interpreter, on the current device, as theirs do.

Not modelled: two streams that work at the same time, the amount of memory, and how fast anything is.
"""

from __future__ import annotations

import ctypes
import functools
import random
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from support.late_streams import DEVICES, Cell, Event, Graph, Memory, Stream, Work

_aten = torch.ops.aten
# What the host learns from the device, or what is as large as the device says.
_WAITING = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default)
_BY_INDEX = (_aten.index.Tensor, _aten.index_put_.default)
_BY_CONTENT = (_aten.masked_select.default, _aten._unique2.default, _aten.repeat_interleave.Tensor)
_GARBAGE = -77
# What a CPU has no operation for.
_ON_CPU = {_aten.mm.dtype: lambda x, y, dtype: x.to(dtype) @ y.to(dtype)}


class LateTensor(torch.Tensor):
    """A tensor of the device, of which the host knows the shape."""

    cell: Cell
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, cell: Cell, memory: Memory, device: torch.device) -> LateTensor:
        meta = cell.meta
        made = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype,
            device=device,
        )  # fmt: skip
        made.cell, made.memory = cell, memory
        return made

    def data_ptr(self) -> int:
        return (id(self.memory) << 40) + self.storage_offset() * self.element_size()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert a tensor on {self.device} to numpy")

    def __repr__(self) -> str:
        return f"LateTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DEVICES[-1].operate(func, args, kwargs or {})


class LateDevice(TorchDispatchMode):
    """The devices, while this is entered.

    Attributes:
        recording: the graph that is.
        filling: the pools of memory that a recording fills.
        waited: the places that waited for a device, or copied from memory that is not pinned.
    """

    def __init__(self, seed: int, eagerness: float):
        super().__init__()
        self._random, self._eagerness = random.Random(seed), eagerness
        self.current = 0
        self.recording: Graph | None = None
        self.filling: set[Any] = set()
        self.pools = 0
        self.waited: list[str] = []
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._allocated = self._peak = 0

    def start(self) -> None:
        self._streams = [Stream(index, ordinary=False) for index in range(2)]

    # ------------------------------------------------------------ what torch.cuda asks

    def index_of(self, device: Any = None, optional: bool = False, allow_cpu: bool = False) -> int:
        index = torch.device(device).index if isinstance(device, str | torch.device) else device
        return self.current if index is None else index

    def exchange(self, index: int) -> int:
        before, self.current = self.current, index if index >= 0 else self.current
        return before

    def new_pool(self) -> tuple[int, int]:
        self.pools += 1
        return 0, self.pools

    def end_pool(self, index: int, pool: Any) -> None:
        if pool not in self.filling:
            raise RuntimeError(f"endAllocatePool: not currently recording to mempool_id {pool}")
        self.filling.remove(pool)

    def stream(self, device: Any = None) -> Stream:
        return self._streams[self.index_of(device)]

    def set_stream(self, stream: Stream) -> None:
        self.current = stream.device.index
        self._streams[self.current] = stream

    def synchronize(self, device: Any = None) -> None:
        self.wait("the device")
        for stream in self._streams:
            stream.drain()

    def reset_peak(self, device: Any = None) -> None:
        self._peak = self._allocated

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, LateTensor) and tensor.untyped_storage()._cdata in self._pinned

    # ------------------------------------------------------------ work and waiting

    def refuse(self, what: str) -> None:
        if self.recording is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: waiting for {what}")

    def wait(self, what: str) -> None:
        self.refuse(what)
        ours = [one for one in traceback.extract_stack() if "/engine/" in one.filename]
        self.waited.append(f"{what}: " + " > ".join(f"{one.filename}:{one.lineno}" for one in ours[-3:]))

    def advance(self, stream: Stream | None) -> None:
        """The device may work a little."""
        if stream is not None and self._random.random() < self._eagerness:
            left = iter(range(self._random.randrange(30)))
            stream.drain(lambda: next(left, None) is None)

    def enqueue(self, work: Work, stream: Stream) -> None:
        if self.recording is not None and stream is self.recording.stream:
            self.recording.work.append(work)
        else:
            stream.work.append(work)
            self.advance(stream)

    def use(self, tensors: list[LateTensor], what: object) -> None:
        """Tensors are used by what is asked for now."""
        graph = self.recording
        for tensor in tensors:
            if graph is not None and tensor.memory.owner is not graph:
                graph.others[id(tensor.memory)] = weakref.ref(tensor.memory), f"{what}, {tensor!r}"

    def make(self, meta: Tensor, device: torch.device, memory: Memory | None = None) -> LateTensor:
        if memory is None:
            memory, size = Memory(self.recording), meta.untyped_storage().nbytes()
            self._allocated += size
            self._peak = max(self._peak, self._allocated)
            weakref.finalize(memory, self._free, size)
        cell = Cell(meta)
        if memory.owner is not None and memory.owner is self.recording:
            memory.owner.own.append((weakref.ref(memory), cell))
        with torch.inference_mode(False):  # an inference tensor could not be a view of another one
            return LateTensor(cell, memory, device)

    def _free(self, size: int) -> None:
        self._allocated -= size

    def launch(self, kernel: Work, arguments: Any) -> None:
        """A kernel of Triton's."""
        late = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, LateTensor)]
        stream = self.stream()
        for tensor in late:
            if tensor.device != stream.device:
                raise RuntimeError(f"a kernel on {stream.device} is given {tensor!r}")
        self.use(late, "a kernel")
        self.enqueue(kernel, stream)

    # ------------------------------------------------------------ torch's operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.operate(func, args, kwargs or {})

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        late = [tensor for tensor in tensors if isinstance(tensor, LateTensor)]
        target = kwargs.get("device")
        if not late and (target is None or torch.device(target).type == "cpu"):
            pinned = kwargs.pop("pin_memory", None)
            made = func(*args, **kwargs)
            return self.pin(made) if pinned else made
        with self:  # in inference mode, operations that consist of others come as they are
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        device = late[0].device if late else torch.device("cuda", self.index_of(target))
        if func is _aten._to_copy.default and (not late or (target is not None and torch.device(target).type == "cpu")):
            return self._moved(args[0], device, kwargs)
        if func is _aten.copy_.default and len(late) == 1 and all(tensor.dim() for tensor in tensors):
            self._copy(args[0], args[1], len(args) > 2 and args[2])
            return args[0]
        for tensor in tensors:
            if not isinstance(tensor, LateTensor) and tensor.dim() and func in _BY_INDEX:
                self.wait("a copy of an index")
            elif tensor.device != device and tensor.dim():
                raise RuntimeError(f"{func} of tensors on {device} and {tensor.device}")
        masks = func in _BY_INDEX and any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
        if masks or func in _WAITING or func in _BY_CONTENT:
            return self._now(func, args, kwargs, device)
        return self._later(func, args, kwargs, device, late)

    def _later(self, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device, late: list[LateTensor]) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        of = {id(tensor.cell.meta): tensor for tensor in late}
        memories = {tensor.cell.meta.untyped_storage()._cdata: tensor.memory for tensor in late}

        def placed(place: str, tensor: Callable[[Any], Any]) -> Any:
            found = tree_map_only(torch.device, lambda _: torch.device(place), (args, kwargs))
            return tree_map_only(Tensor, lambda t: tensor(t) if isinstance(t, LateTensor) else t.clone(), found)

        shapes = placed("meta", lambda tensor: tensor.cell.meta)
        with torch.inference_mode(False), torch.no_grad():
            metas, form = tree_flatten(func(*shapes[0], **shapes[1]))
        outputs = [
            of[id(meta)] if id(meta) in of else self.make(meta, device, memories.get(meta.untyped_storage()._cdata))
            for meta in metas
        ]
        self.use(late, func)
        given, cells = placed("cpu", lambda tensor: tensor.cell), [output.cell for output in outputs]

        def work() -> None:
            now = tree_map_only(Cell, Cell.get, given)
            for cell, value in zip(cells, tree_leaves(_ON_CPU.get(func, func)(*now[0], **now[1])), strict=True):
                cell.value = value
                if "empty" in str(func):
                    _spoil(value)

        self.enqueue(work, self.stream(device))
        return tree_unflatten(outputs, form)

    def _now(self, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
        self.wait(str(func))
        self.stream(device).drain()
        given = tree_map_only(LateTensor, lambda tensor: tensor.cell.get(), (args, kwargs))

        def here(value: Tensor) -> Tensor:
            made = self.make(value.to("meta"), device)
            made.cell.value = value
            return made

        return tree_map_only(Tensor, here, func(*given[0], **given[1]))

    # ------------------------------------------------------------ copies

    def _moved(self, source: Tensor, device: torch.device, settings: dict[str, Any]) -> Tensor:
        dtype = settings.get("dtype") or source.dtype
        there = torch.device("cpu") if isinstance(source, LateTensor) else device
        with self:
            made = torch.empty(source.shape, dtype=source.dtype, device=there)
            self._copy(made, source, settings.get("non_blocking"))
            return made.to(dtype)

    def _copy(self, target: Tensor, source: Tensor, free: Any) -> None:
        up = isinstance(target, LateTensor)
        late, host = (target, source.detach()) if up else (source, target.detach())
        assert isinstance(late, LateTensor)
        if self.recording is not None:
            raise RuntimeError("a copy between host and device is recorded")
        cell, stream = late.cell, self.stream(late.device)
        before = host.clone()
        if not up:
            _spoil(host)

        def work() -> None:
            if up:
                same = host.equal(before) or bool(host.isnan().any())
                assert same, "memory of the host was written again before its copy was done"
                cell.get().copy_(host)
            else:
                host.copy_(cell.get())

        self.enqueue(work, stream)
        if not (free and self.pinned(host)):
            self.wait("a copy")
            stream.drain()


def _spoil(memory: Tensor) -> None:
    memory.fill_(float("nan") if memory.is_floating_point() else _GARBAGE if memory.dtype.is_signed else True)


@functools.cache
def _know_cuda() -> None:
    """Let torch take "cuda" for devices that it may switch between, by a guard that does nothing: that of "meta"."""
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[14]  # by c10::DeviceType


@contextmanager
def late_device(seed: int = 0, eagerness: float = 0.0) -> Iterator[LateDevice]:
    """Two GPUs that compute late; cuda:0 is the current one.

    Args:
        eagerness: how likely a device works a little when it is asked for something.
    """
    from triton.runtime.interpreter import GridExecutor

    from engine.backends import triton as gpu
    from engine.backends.triton import attention, experts

    device = LateDevice(seed, eagerness)
    interpret = GridExecutor.__call__

    def launch(grid: Any, *args: Any, **kwargs: Any) -> None:
        given = tree_map_only(LateTensor, lambda tensor: tensor.cell, (args, kwargs))

        def work() -> None:
            now = tree_map_only(Cell, Cell.get, given)
            interpret(grid, *now[0], **now[1])

        device.launch(work, (args, kwargs))

    properties = SimpleNamespace(name="Late", major=9, minor=0, multi_processor_count=2, total_memory=2**36)
    torch_cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 2,
        "current_device": lambda: device.current,
        "_get_device_index": device.index_of,
        "_exchange_device": device.exchange,
        "_maybe_exchange_device": device.exchange,
        "get_device_properties": lambda _=None: properties,
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_name": lambda _=None: properties.name,
        "mem_get_info": lambda _=None: (properties.total_memory - device._allocated, properties.total_memory),
        "memory_allocated": lambda _=None: device._allocated,
        "max_memory_allocated": lambda _=None: device._peak,
        "reset_peak_memory_stats": device.reset_peak,
        "empty_cache": lambda: None,
        "synchronize": device.synchronize,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph_pool_handle": device.new_pool,
        "current_stream": device.stream,
        "set_stream": device.set_stream,
        "is_current_stream_capturing": lambda: device.recording is not None,
    }
    fakes: dict[str, Any] = {f"torch.cuda.{name}": fake for name, fake in torch_cuda.items()} | {
        "torch._C._host_emptyCache": lambda: None,
        "torch._C._cuda_endAllocateToPool": device.end_pool,
        "torch.Tensor.pin_memory": lambda tensor: device.pin(tensor.clone()),
        "torch.Tensor.is_pinned": device.pinned,
        "triton.runtime.interpreter.GridExecutor.__call__": launch,
        "engine.backends.triton._computes": lambda index: True,
    }
    _know_cuda()
    patches = [mock.patch(name, fake, create=name.startswith("torch._C.")) for name, fake in fakes.items()]
    DEVICES.append(device)
    device.start()
    try:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            stack.enter_context(gpu.interpreted())
            yield stack.enter_context(device)
    finally:
        DEVICES.pop()
        attention._facts.cache_clear()
        experts.capability_of.cache_clear()
