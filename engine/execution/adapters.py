"""Loading adapters into the slots of a model."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from engine.backends.native.memory import Arena
from engine.errors import AdapterError
from engine.interface.adapters import AdapterInfo
from engine.model import spec
from engine.model.adapters import Adapter, LaidOut, LowRank
from engine.model.heads import Head
from engine.model.layers import Linear
from engine.model.lora.reading import read_adapter
from engine.model.transformer import Transformer

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read and checked, in the form of its model's slots."""

    info: AdapterInfo  # without a slot
    products: list[tuple[Linear, LaidOut]]  # in the order in which a step reads them
    head: Head | None


class LoadedAdapters:
    """The adapters of a model.

    Args:
        max_loras: number of slots; 0: the model does not support adapters.
        max_rank: the maximum rank of an adapter.
        model_type: the type of the model in its config.
        of_gguf: whether the model was read from a GGUF file.
        model_name: the model's hub id, folder or file.
        dtype: the format of adapters' numbers on a CPU; None: the model's, except for matrices that a format of 16 bits
            represents exactly.
    """

    def __init__(
        self,
        model: Transformer,
        max_loras: int,
        max_rank: int,
        model_type: str = "",
        *,
        of_gguf: bool = False,
        model_name: str = "",
        dtype: torch.dtype | None = None,
    ):
        self._model, self._max_loras, self.max_rank = model, max_loras, max_rank
        self._dtype = dtype
        self._read_files = partial(
            read_adapter, model=model, max_rank=max_rank, model_type=model_type, of_gguf=of_gguf, model_name=model_name
        )
        self._filled: dict[int, list[Linear]] = {}
        self._reader: ThreadPoolExecutor | None = None
        self.heads: dict[int, Head] = {}  # adapters' own heads, by slot

    def read(self, name: str, source: Adapter | str) -> Future[ReadAdapter]:
        """Read and check an adapter, or the one in a folder or file, on another thread. The result raises AdapterError
        if the adapter does not fit the model."""
        if self._reader is None:  # one thread, so that adapters read at the same time do not take all cores
            self._reader = ThreadPoolExecutor(1, "octavo-adapters")
        return self._reader.submit(self._read, name, source)

    def load(self, adapter: ReadAdapter, slot: int) -> AdapterInfo:
        """Put an adapter into an empty slot, between two steps. If that fails, nothing was changed."""
        if not 1 <= slot <= self._max_loras:
            raise AdapterError(f"slot {slot} must be from 1 to {self._max_loras} (max_loras).")
        linears = [linear for linear, _ in adapter.products]
        try:
            for linear, addition in adapter.products:
                assert linear.adapters is not None
                linear.adapters.put(slot, addition)
        except BaseException:
            self._empty(linears, slot)
            raise
        self._filled[slot] = linears
        if adapter.head is not None:
            self.heads[slot] = adapter.head
        return replace(adapter.info, slot=slot)

    def unload(self, slot: int) -> None:
        self._empty(self._filled.pop(slot, []), slot)
        self.heads.pop(slot, None)

    @staticmethod
    def _empty(linears: list[Linear], slot: int) -> None:
        for linear in linears:
            assert linear.adapters is not None
            linear.adapters.clear(slot)

    def _read(self, name: str, source: Adapter | str) -> ReadAdapter:
        try:
            adapter = self._read_files(name, source) if isinstance(source, str) else replace(source, name=name)
        except AdapterError as error:
            raise AdapterError(f"adapter {name!r} cannot be loaded: {error}") from error
        linears, head, arena = self._check(adapter), self._head(adapter), Arena()
        products: list[tuple[Linear, LaidOut]] = []
        for path, linear in linears.items():
            assert linear.adapters is not None
            part = self._in_format(adapter.products[path], on_cpu=linear.adapters.table is not None)
            if not _is_finite(part):
                raise AdapterError(
                    f"adapter {adapter.name!r} has numbers for {path} above {torch.finfo(torch.float16).max:.0f}, "
                    "which float16 cannot represent. Set --lora-dtype to float32 or bfloat16; on a GPU, --dtype."
                )
            products.append((linear, linear.adapters.lay_out(part, arena)))
        held = [half for _, laid in products for part in (laid if isinstance(laid, list) else [laid])
                for half in (part.down, part.up)]  # fmt: skip
        info = AdapterInfo(
            name=name, path=adapter.path, rank=adapter.rank, digest=adapter.digest,
            num_bytes=sum(tensor.nbytes for tensor in (*held, *adapter.replaced.values())),
        )  # fmt: skip
        return ReadAdapter(info, products, head)

    def _in_format(self, part: LowRank, *, on_cpu: bool) -> LowRank:
        """An addition, rounded to the format in which it is computed."""
        return LowRank(*(half.to(self._format(half, on_cpu)) for half in (part.down, part.up)))

    def _format(self, numbers: Tensor, on_cpu: bool) -> torch.dtype:
        if not on_cpu:
            return self._model.dtype
        if self._dtype is not None:
            return self._dtype
        exact = (half for half in _HALVES if torch.equal(numbers.to(half).float(), numbers))
        return next(exact, self._model.dtype)

    def _head(self, adapter: Adapter) -> Head | None:
        if not adapter.replaced:
            return None
        head, prefix = self._model.head, "head."
        if not isinstance(head, Head) or not isinstance(self._model.spec.head, spec.Classifier | spec.AnswerSpan):
            names = ", ".join(adapter.replaced)
            raise AdapterError(
                f"adapter {adapter.name!r} replaces {names}; only heads that classify or find answers can be replaced."
            )
        given = {path.removeprefix(prefix): values for path, values in adapter.replaced.items()}
        if not all(path.startswith(prefix) for path in adapter.replaced):
            other = next(path for path in adapter.replaced if not path.startswith(prefix))
            raise AdapterError(f"adapter {adapter.name!r} replaces {other}, which is not part of the head.")
        try:
            return head.with_own(given)
        except KeyError as error:
            raise AdapterError(f"adapter {adapter.name!r} lacks or cannot replace head.{error.args[0]}.") from error
        except ValueError as error:
            raise AdapterError(f"adapter {adapter.name!r} does not fit: head.{error}.") from error

    def _check(self, adapter: Adapter) -> dict[str, Linear]:
        if not adapter.products and not adapter.replaced:
            raise AdapterError(f"adapter {adapter.name!r} adds to no product.")
        modules = dict(self._model.named_modules())
        found = {}
        for path, part in adapter.products.items():
            linear = modules.get(path)
            if not isinstance(linear, Linear):
                raise AdapterError(f"adapter {adapter.name!r} adds to {path}, but the model has no such product.")
            if linear.adapters is None:
                raise AdapterError(f"adapter {adapter.name!r} adds to {path}, which does not support adapters.")
            rank = len(part.down)
            if part.down.shape != (rank, linear.inputs) or part.up.shape != (linear.outputs, rank) or not rank:
                raise AdapterError(
                    f"adapter {adapter.name!r} has matrices of {list(part.down.shape)} and {list(part.up.shape)} for "
                    f"{path}, which maps {linear.inputs} features to {linear.outputs}."
                )
            if rank > linear.adapters.rank:
                raise AdapterError(
                    f"adapter {adapter.name!r} has rank {rank} for {path}, but at most {linear.adapters.rank} are "
                    f"allowed (max_lora_rank is {self.max_rank}). Raise --max-lora-rank."
                )
            if not _is_finite(part):
                raise AdapterError(f"adapter {adapter.name!r} has infinite numbers or NaN for {path}.")
            found[path] = linear
        # In the order in which a step reads them.
        return {path: found[path] for path in modules if path in found}


def _is_finite(part: LowRank) -> bool:
    return all(math.isfinite(tensor.abs().max().item()) for tensor in (part.down, part.up))
