"""Packs matrices while a checkpoint loads: it may quantise them first, or read them from the cache instead."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self, get_args

import torch
from torch import Tensor

from engine.backends.native.gemm import PART_ROWS, BlockKind, Blocks, Form, Joined, Packed, Quantised, Weight
from engine.model.embedding import TokenEmbedding
from engine.model.experts import ExpertMatrices
from engine.model.layers import Linear
from engine.model.packing import Pieces, on_gpu, pieces_of, takes_parts
from engine.model.quantisation import ON_GPUS, Held, Parts, Quantization, Wanted, form_on, quantise
from engine.model.quantised_cache import Cache, Entry, Matrix, Writer
from engine.model.table import Destination, Same, Transform, WeightTable, keeps_rows
from engine.model.table import Joined as JoinedRows
from engine.model.transformer import Transformer
from engine.model.weight_files import Checkpoint

logger = logging.getLogger("octavo.model")

_PART_BYTES = 1 << 24  # bytes of a matrix in 16 bits that are read at a time


class MatrixLoading:
    """Packs each matrix when the last of its tensors has been read, so that memory never contains the whole model in
    its plain format: parameters that are not filled yet take none. A context manager.

    Matrices in the cache are not read from the checkpoint. Other matrices are written to the cache as they are made; if
    that fails, loading continues without it. Matrices that the checkpoint stores in the wanted format are used
    unchanged, and are written to the cache only if `shared`.

    Args:
        quantization: None keeps the matrices' format.
        destinations: the destination of each stored tensor; tensors that need not be read are removed.
        folder: the cache's folder; None for none.
        shared: cache all matrices that our own kernels pack, even those that are quickly made from the checkpoint.
        advance: called with the number of `kept_bytes` that are done: half of a cached matrix when it is verified and
            half when it is packed; a negative number if a verified matrix is not used after all.
    """

    def __init__(
        self,
        model: Transformer,
        quantization: Wanted | None,
        checkpoint: Checkpoint,
        destinations: dict[str, list[Destination]],
        folder: Path | None,
        shared: bool = False,
        advance: Callable[[int], object] = lambda count: None,
    ):
        sources: dict[int, list[tuple[str, Destination]]] = defaultdict(list)
        for name, found in destinations.items():
            for destination in found:
                sources[destination.parameter.data_ptr()].append((name, destination))
        self._model, self._kind, self._shared = model, quantization, shared
        self._names = {module: name for name, module in model.named_modules()}
        self._modules = dict(model.matrices(quantization))
        self._matrices: dict[Linear | ExpertMatrices, Matrix] = {}
        self._stored: dict[str, Linear | ExpertMatrices] = {}
        self._direct: dict[Linear, str] = {}
        self._checkpoint = checkpoint
        self._assembled: dict[Linear | ExpertMatrices, Quantised | Blocks] = {}
        self._parts: dict[Linear | ExpertMatrices, dict[int, Quantised | Blocks]] = defaultdict(dict)
        for module, kind in self._modules.items():
            filling = sources[module.weight.data_ptr()]
            stored = {checkpoint.kind(name) for name, _ in filling}
            alone = all(len(destinations[name]) == 1 for name, _ in filling) and not _stays_plain(module)
            kept = all(keeps_rows(destination.transform) for _, destination in filling)
            own = _is_own(kind) or (kind is not None and stored == {kind} and alone and kept)
            form: Form = "plain"
            # If rotated, stored 8 bits in these groups would be rounded a second time.
            if kind in ("int8", "int8-fast", "int4") and not own and not (kept and stored == {"int8"}):
                form = form_on(module.device, kind)
            pieces = self._pieces(module, kind, form)
            if (
                isinstance(module, Linear)
                and alone
                and [destination.transform for _, destination in filling] == [Same()]
                and checkpoint.has_rows(filling[0][0])
                and _goes_directly(module, kind, own)
            ):
                self._direct[module] = filling[0][0]
            elif own:
                self._stored |= {name: module for name, _ in filling}
            if (kind is not None and not own) or (shared and pieces):
                self._matrices[module] = Matrix(
                    name=self._names[module],
                    kind=kind,
                    form=form,
                    count=module.weight.shape[0] if isinstance(module, ExpertMatrices) else 1,
                    outputs=module.outputs,
                    inputs=module.inputs,
                    sources=tuple(_described(name, checkpoint, destination) for name, destination in filling),
                    pieces=pieces,
                )
        tables = (each for each in model.modules() if isinstance(each, TokenEmbedding) and each.stored_bytes)
        self._tables = {each.tokens.data_ptr(): each.tokens for each in tables if quantization == "stored"}
        self._read_later = set(self._direct.values())
        self._count = len({*self._stored.values(), *(module for module in self._direct if self._modules[module])})
        self._stack = ExitStack()
        self._problem: object = ""
        self._cache: Cache | None = None
        self._entry: Entry | None = None
        self._writer: Writer | None = None
        self._advance = advance
        self._half_done = 0
        self._sizes = {
            next(iter(matrix.stored)): module.weight.nbytes
            for module, matrix in self._matrices.items()
            if not _stays_plain(module)  # it is read too
        }
        if folder is not None and self._matrices:
            self._open(folder, checkpoint, model)
        # bytes that the cached matrices would take in the model's format
        self.kept_bytes = 0 if self._entry is None else sum(self._sizes.values())
        if self._entry is not None:
            for module in self._matrices:
                if not _stays_plain(module):
                    for name, destination in sources[module.weight.data_ptr()]:
                        destinations[name].remove(destination)
                        if not destinations[name]:
                            del destinations[name]
        self._missing = Counter(each.parameter.data_ptr() for found in destinations.values() for each in found)
        self._waiting = defaultdict(list)
        for module in self._modules:
            for parameter in module.parameters(recurse=False):
                self._waiting[parameter.data_ptr()].append(module)

    def _pieces(self, module: Linear | ExpertMatrices, kind: Held | None, form: Form) -> Pieces:
        """The form that a CPU's own kernels give the matrix, if they use it."""
        if on_gpu(module.device):
            return ()
        amx, table = False, False
        if isinstance(module, Linear):
            amx, table = self._model.reads_many(module), module.shared
        dtype, rotated = module.weight.dtype, form == "rotated"
        return pieces_of(module.outputs, module.inputs, dtype, kind, rotated, amx, table)

    def _open(self, folder: Path, checkpoint: Checkpoint, model: Transformer) -> None:
        try:
            matrices = list(self._matrices.values())
            self._cache = Cache(folder, checkpoint.files, model.dtype, matrices, self._kind or "plain")
            self._entry = self._cache.open(self._verified)
            if self._entry is None:
                self._advance(-self._half_done)
                self._writer = self._stack.enter_context(self._cache.write())
        except OSError as error:
            self._problem = error

    def _verified(self, name: str) -> None:
        half = self._sizes.get(name, 0) // 2
        self._half_done += half
        self._advance(half)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def keeps_table(self, name: str, destination: Destination) -> bool:
        """Whether this tensor is a token table that keeps its stored format: its rows are looked up there from now
        on."""
        table = self._tables.get(destination.parameter.data_ptr())
        if table is None:
            return False
        self._model.look_up_elsewhere(table, self._checkpoint.stored_rows(name))
        return True

    def reads_itself(self, name: str) -> bool:
        """Whether this tensor of the checkpoint need not be read, because the matrix is packed from the file."""
        return name in self._read_later

    def stores(self, name: str) -> bool:
        """Whether this tensor of the checkpoint must be passed to `take` instead of being copied to its parameter."""
        return name in self._stored

    def keeps_own(self, name: str) -> bool:
        """Whether this tensor, which is passed to `take`, is wanted in its stored format, not in one of ours."""
        return _is_own(self._modules[self._stored[name]])

    def take(self, name: str, stored: Quantised | Blocks, destination: Destination) -> None:
        """Put a matrix that is already in the wanted format where a plain one would go."""
        module = self._stored[name]
        if isinstance(self._modules[module], Parts):
            assert isinstance(destination.transform, JoinedRows)
            place, form = destination.place, destination.transform
            self._parts[module][place] = _arranged(stored, form.of(place), form.lengths[place])
            return
        if isinstance(module, Linear) and destination.transform == Same():
            self._assembled[module] = stored
            return
        axes = len(self._checkpoint.shape(name)) - 1  # all axes except the inputs
        if module not in self._assembled:
            self._assembled[module] = _room_for(module, stored, axes)
        whole, place = self._assembled[module], destination.place
        lead = whole.values.shape[: destination.parameter.dim() - 1]
        for to, part in zip(whole.tensors(), stored.tensors(), strict=True):
            destination.transform.fill(to.view(*lead, -1), place, part.reshape(*part.shape[:axes], -1))

    def filled(self, pointer: int) -> None:
        """A tensor has been copied to the parameter at this address."""
        self._missing[pointer] -= 1
        if self._missing[pointer] == 0:
            for module in self._waiting.pop(pointer, ()):
                if not any(self._missing[parameter.data_ptr()] for parameter in module.parameters(recurse=False)):
                    self._pack(module)

    def finish(self) -> None:
        """All tensors have been read: pack the remaining matrices, and store the results."""
        for module in self._modules:
            if not module.is_packed and module in self._matrices:
                self._pack(module)
        if self._writer is not None and self._cache is not None:
            try:
                self._writer.keep()
            except OSError as error:
                self._problem = error

    def _pack(self, module: Linear | ExpertMatrices) -> None:
        kind, matrix = self._modules[module], self._matrices.get(module)
        if self._entry is not None and matrix is not None:
            self._model.pack_matrix(module, kind, partial(self._entry.take, matrix))
            size = self._sizes.get(next(iter(matrix.stored)), 0)
            self._advance(size - size // 2)
        elif module in self._direct:
            assert isinstance(module, Linear)
            self._model.pack_matrix(module, kind, parts=self._rows(module, kind))
        elif kind is None:
            if not on_gpu(module.device):  # there all are packed together
                self._model.pack_matrix(module, None)
        else:
            self._model.pack_matrix(module, kind, partial(self._quantised, module))
            self._assembled.pop(module, None)
            self._parts.pop(module, None)
        if matrix is not None and matrix.pieces:
            products = [module.packed] if isinstance(module, Linear) else module.packed or []
            for index, product in enumerate(products):
                if product is not None and product.native is not None:
                    self._keep(matrix, index, product.native)

    def _keep(self, matrix: Matrix, index: int, made: Quantised | Packed) -> None:
        """Write a matrix to the cache, if it is missing there and the cache is usable."""
        if self._writer is None:
            return
        try:
            self._writer.put(matrix, index, made)
        except OSError as error:
            self._problem, self._writer = error, None
            self._stack.close()

    def _rows(self, module: Linear, kind: Held | None) -> Iterator[Tensor | Weight]:
        """A matrix, some rows at a time, so that no second copy of it is made."""
        name, start = self._direct[module], 0
        step = max(_PART_BYTES // (module.inputs * 2 * PART_ROWS), 1) * PART_ROWS
        while start < module.outputs:
            stop = start + (step if start else PART_ROWS)
            if kind is None:
                yield self._checkpoint.rows(name, start, stop).to(module.weight.dtype)
            else:
                yield self._checkpoint.quantised(name, _is_own(kind), start, stop)
            self._checkpoint.release()
            start = stop

    def _quantised(self, module: Linear | ExpertMatrices, index: int) -> Weight:
        if (parts := self._parts.get(module)) is not None:
            return Joined(tuple(parts[place] for place in sorted(parts)))
        if (stored := self._assembled.get(module)) is not None:
            if isinstance(module, Linear):
                return stored
            return stored.changed(lambda tensor: tensor[index])
        matrix = self._matrices[module]
        weight = module.weight[index] if isinstance(module, ExpertMatrices) else module.weight
        assert matrix.kind in ("int8", "int8-fast", "int4")
        made = quantise(weight, matrix.kind, matrix.form)
        if not matrix.pieces:
            self._keep(matrix, index, made)
        return made

    def report(self) -> None:
        """Log a summary."""
        what = "Packed weights" if self._shared else f"Quantized weights ({self._kind})"
        if self._count and not self._shared:
            logger.debug("%s of %d matrices are used in their stored format", what, self._count)
        if not self._matrices:
            if self._shared:
                logger.info("%s are not kept for the next start: that needs a CPU and Octavo's own kernels.", what)
            return
        if self._problem:
            message = "%s cannot be kept for the next start: %s. See --quantization-cache."
            logger.warning(message, what, self._problem)
        elif self._cache is None:
            logger.info(
                "%s are not kept for the next start: --quantization-cache is off, or there is no home folder.", what
            )
        else:
            done = "are kept for the next start in"
            if self._entry is not None:
                mapped = any(matrix.pieces for matrix in self._matrices.values())
                done = "are mapped from" if mapped else "were read from"
            logger.info("%s %s %s (%.1f MiB).", what, done, self._cache.path, self._cache.layout.size / 2**20)


def mark_stored(model: Transformer, checkpoint: Checkpoint, table: WeightTable, device: torch.device) -> None:
    """Record for each matrix the kind nearest to its stored format: its own if it can be used unchanged, int8 if it is
    quantised in another way, none if it is plain. The log names formats that become larger. `device`: the future
    model's device, which may not support every kind."""
    entries = {entry.target: entry for entry in table.chosen(checkpoint.names)}
    uses = Counter(name for entry in entries.values() for name in entry.sources)
    filled = {id(parameter): entries.get(target) for target, parameter in model.named_parameters()}
    wider: Counter[str] = Counter()
    for module, _ in model.matrices(None):
        entry = filled[id(module.weight)]
        names = [] if entry is None else [name for name in entry.sources if name in checkpoint.names]
        module.stored = None
        if entry is None or not names or not all(map(checkpoint.few_bits, names)):
            continue
        apart = isinstance(module, Linear) and module.shared and on_gpu(device)
        alone = keeps_rows(entry.transform) and not apart and all(uses[name] == 1 for name in names)
        if on_gpu(device):
            kinds: list[Quantization | BlockKind | None] = [checkpoint.kind_on_gpu(name) for name in names]
            found = _held_as(module, kinds) if alone else None
            module.stored = found if found in (*ON_GPUS, "e4m3") else "int8"
        else:
            kinds = [checkpoint.own_kind(name) for name in names]
            lengths = entry.transform.lengths if isinstance(entry.transform, JoinedRows) else None
            found = _held_as(module, kinds, lengths) if alone else None
            module.stored = found or "int8"
            if found is None:
                wider.update(str(kind) for kind in kinds if kind not in (None, "int8"))
        module.taken = found is not None
    if wider:
        counts = ", ".join(f"{count} of {kind.upper()}" for kind, count in wider.items())
        logger.debug("tensors that share a matrix with others become int8: %s", counts)
    heads = {id(module.weight) for module, _ in model.matrices(None)}
    for embedding in (module for module in model.modules() if isinstance(module, TokenEmbedding)):
        entry = filled[id(embedding.tokens)]
        if entry is not None and entry.transform == Same() and uses[entry.sources[0]] == 1 and not on_gpu(device):
            name = entry.sources[0]
            alone = id(embedding.tokens) not in heads and name in checkpoint.names
            embedding.stored_bytes = checkpoint.table_bytes(name) if alone else None


def _held_as(
    module: Linear | ExpertMatrices,
    kinds: Sequence[Quantization | BlockKind | None],
    lengths: tuple[int, ...] | None = None,
) -> Held | None:
    """The form for a matrix with these stored parts; None if their format cannot be kept. `lengths`: outputs of each,
    if they follow each other."""
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        return None
    if len(set(known)) == 1:
        return known[0]
    return None if lengths is None or isinstance(module, ExpertMatrices) else Parts(tuple(known), lengths)


def _is_own(kind: Held | None) -> bool:
    return isinstance(kind, Parts) or kind in get_args(BlockKind)


def _goes_directly(module: Linear, kind: Held | None, own: bool) -> bool:
    """Pack a matrix from the file's bytes, row by row. `own`: whether it is stored in its own kind."""
    return not on_gpu(module.device) and (kind is None or own) and takes_parts(module.weight.dtype, kind, module.shared)


def _stays_plain(module: Linear | ExpertMatrices) -> bool:
    """Whether this is a token table that is also looked up unpacked, beside its packed form."""
    return isinstance(module, Linear) and module.shared and on_gpu(module.device)


def _room_for(module: Linear | ExpertMatrices, part: Quantised | Blocks, axes: int) -> Quantised | Blocks:
    """Memory for a module's matrix or its experts' matrices; `part` is some of its rows, with this many axes."""
    lead = (*module.weight.shape[:-2], module.outputs)
    return part.changed(lambda tensor: tensor.new_empty(*lead, *tensor.shape[axes:]))


def _arranged(part: Quantised | Blocks, transform: Transform, rows: int) -> Quantised | Blocks:
    """The `rows` that a transform takes, in its order."""

    def arrange(tensor: Tensor) -> Tensor:
        filled = tensor.new_empty(rows, *tensor.shape[1:])
        transform.fill(filled.view(rows, -1), 0, tensor.reshape(len(tensor), -1))
        return filled

    return part if transform == Same() else part.changed(arrange)


def _described(name: str, checkpoint: Checkpoint, destination: Destination) -> str:
    file, stored = checkpoint.names[name]
    scheme = "" if checkpoint.scheme is None else f", {checkpoint.scheme}"
    return f"{destination.place} of {destination.transform}: {stored} in {file.name}{scheme}"
