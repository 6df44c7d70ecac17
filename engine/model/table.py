"""Weight tables: which tensors of a checkpoint fill which parameter, and how.

A transform says in what shape each source tensor is stored, so that shapes are checked before any data is read, and
where a source goes in its parameter, so that nothing is assembled in memory first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Size, Tensor

from engine.interface.outputs import RepeatedInput
from engine.model.spec import ModelSpec


class Transform(Protocol):
    """The layout of source tensors in a parameter."""

    def shapes(self, target: Size) -> list[Size]:
        """The stored shape of each source, for a parameter with this shape."""

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        """Copy source `place` to its part of the parameter."""


@dataclass(frozen=True, slots=True)
class Same:
    """The tensor as stored."""

    def shapes(self, target: Size) -> list[Size]:
        return [target]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        target.copy_(source)


@dataclass(frozen=True, slots=True)
class Transposed:
    """A matrix stored [in, out]."""

    def shapes(self, target: Size) -> list[Size]:
        return [Size(reversed(target))]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        target.copy_(source.t())


@dataclass(frozen=True, slots=True)
class Conv1d(Transposed):
    """The matrix of transformers' Conv1D: stored [in, out] if it is plain, but [out, in] if quantised (because
    quantisation libraries turn it into a linear layer) and in GGUF files."""


@dataclass(frozen=True, slots=True)
class Affine:
    """The result of `inner`, times `factor`, plus `offset`: constants that multiply a matrix's results or are added to
    a norm's weight."""

    factor: float = 1.0
    offset: float = 0.0
    inner: Transform = Same()

    def shapes(self, target: Size) -> list[Size]:
        return self.inner.shapes(target)

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        self.inner.fill(target, place, source.float() * self.factor + self.offset)


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Some `rows` multiplied by each of the `factors`, one after the other."""

    rows: tuple[int, ...]
    factors: tuple[float, ...]

    def shapes(self, target: Size) -> list[Size]:
        return [target]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        ours_and_theirs = (torch.split(whole, list(self.rows)) for whole in (target, source))
        for ours, theirs, factor in zip(*ours_and_theirs, self.factors, strict=True):
            ours.copy_(theirs.float() * factor)


@dataclass(frozen=True, slots=True)
class Row:
    """A vector stored as a matrix with one row."""

    def shapes(self, target: Size) -> list[Size]:
        return [Size((1, *target))]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        target.copy_(source[0])


@dataclass(frozen=True, slots=True)
class Reshaped:
    """Tensors of these shapes, whose elements have the same order as in the parameter: kernels, or single vectors."""

    stored: tuple[tuple[int, ...], ...]

    def shapes(self, target: Size) -> list[Size]:
        return [Size(shape) for shape in self.stored]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        sizes = [math.prod(shape) for shape in self.stored]
        torch.split(target.view(-1), sizes)[place].copy_(source.reshape(-1))


@dataclass(frozen=True, slots=True)
class Sparse:
    """Several tensors of these lengths, one after the other along the first axis. Tensors that are not `stored` are
    zeros."""

    lengths: tuple[int, ...]
    stored: tuple[int, ...]

    def shapes(self, target: Size) -> list[Size]:
        return [Size((self.lengths[part], *target[1:])) for part in self.stored]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        parts = torch.split(target, list(self.lengths))
        parts[self.stored[place]].copy_(source)
        for number, part in enumerate(parts):
            if number not in self.stored:
                part.zero_()


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix whose groups of outputs each see one group of inputs, stored [groups, in / groups, out / groups]; other
    elements are zeros."""

    groups: int

    def shapes(self, target: Size) -> list[Size]:
        return [Size((self.groups, target[1] // self.groups, target[0] // self.groups))]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        target.zero_()
        inputs, outputs = source.shape[1:]
        for group, part in enumerate(source):
            target[group * outputs : (group + 1) * outputs, group * inputs : (group + 1) * inputs].copy_(part.t())


@dataclass(frozen=True, slots=True)
class Reversed:
    """`parts` parts of the second axis in reverse order."""

    parts: int

    def shapes(self, target: Size) -> list[Size]:
        return [target]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        target.copy_(torch.cat(source.chunk(self.parts, dim=1)[::-1], dim=1))


@dataclass(frozen=True, slots=True)
class Joined:
    """Several tensors, one after the other along the first axis, of these lengths. `inner`: the layout of each in its
    part; empty: as stored."""

    lengths: tuple[int, ...]
    inner: tuple[Transform, ...] = ()

    def shapes(self, target: Size) -> list[Size]:
        parts = [Size((length, *target[1:])) for length in self.lengths]
        return [self.of(place).shapes(part)[0] for place, part in enumerate(parts)]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        self.of(place).fill(torch.split(target, list(self.lengths))[place], 0, source)

    def of(self, place: int) -> Transform:
        """The layout of a source in its part."""
        return self.inner[place] if self.inner else Same()


@dataclass(frozen=True, slots=True)
class Unfolded:
    """A matrix whose inputs are `parts` vectors, one after the other, stored with the parts of each feature side by
    side, as `torch.nn.functional.unfold` makes them. `axes`: it is a convolution's kernel, with these axes of inputs;
    () for a matrix."""

    parts: int
    axes: tuple[int, ...] = ()

    def shapes(self, target: Size) -> list[Size]:
        return [Size((target[0], *self.axes)) if self.axes else target]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        target.copy_(source.reshape(len(source), -1, self.parts).transpose(1, 2).reshape(target.shape))


@dataclass(frozen=True, slots=True)
class Swapped:
    """The two halves of each of `pieces` along the first axis in reverse order."""

    pieces: int = 1

    def shapes(self, target: Size) -> list[Size]:
        return [target]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        halves = source.reshape(self.pieces, 2, -1, *source.shape[1:])
        target.copy_(halves.flip(1).reshape(source.shape))


@dataclass(frozen=True, slots=True)
class Alternating:
    """Two halves of the second axis, whose elements are stored alternately."""

    def shapes(self, target: Size) -> list[Size]:
        return [target]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        half = target.shape[1] // 2
        target[:, :half].copy_(source[:, 0::2])
        target[:, half:].copy_(source[:, 1::2])


@dataclass(frozen=True, slots=True)
class Turned:
    """The result of `inner`, where each matrix of a stack is stored [in, out]."""

    inner: Transform = Same()

    def shapes(self, target: Size) -> list[Size]:
        return [Size((*shape[:-2], shape[-1], shape[-2])) for shape in self.inner.shapes(target)]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        self.inner.fill(target, place, source.transpose(-1, -2))


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Queries, keys and values stored group by group: `queries` query heads, then one key and one value head.

    In the parameter all queries come first, then all keys, then all values.
    """

    groups: int
    queries: int
    head_dim: int
    order: tuple[int, int, int] = (0, 1, 2)

    def shapes(self, target: Size) -> list[Size]:
        return [target]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        rest = source.shape[1:]
        stored = source.view(self.groups, self.queries + 2, self.head_dim, *rest)
        heads = (self.queries, 1, 1)
        parts = torch.split(target, [self.groups * count * self.head_dim for count in heads])
        for kind, part in zip(
            self.order, torch.split(stored, [heads[kind] for kind in self.order], dim=1), strict=True
        ):
            parts[kind].view(part.shape).copy_(part)


@dataclass(frozen=True, slots=True)
class OfHeads:
    """A matrix [n, in] for each head: the `rows` rows of each head are stored head by head, and these n begin at row
    `begin` of each. In the parameter, they are axis `axis`: 1 or, if each matrix is transposed, 2."""

    rows: int
    begin: int
    axis: int = 1

    def shapes(self, target: Size) -> list[Size]:
        return [Size((target[0] * self.rows, target[3 - self.axis]))]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        own = source.view(len(target), self.rows, -1)[:, self.begin : self.begin + target.shape[self.axis]]
        target.copy_(own if self.axis == 1 else own.transpose(1, 2))


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of each of `heads` heads, from `begin` on: as many as the parameter has for one head. A head has `rows`;
    other parameters use the others."""

    heads: int
    rows: int
    begin: int

    def shapes(self, target: Size) -> list[Size]:
        return [Size((self.heads * self.rows, *target[1:]))]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        taken = len(target) // self.heads
        own = source.view(self.heads, self.rows, *source.shape[1:])[:, self.begin : self.begin + taken]
        target.copy_(own.reshape(target.shape))


@dataclass(frozen=True, slots=True)
class Stacked:
    """`count` parameters of one shape in a single one. `inner` fills each. The sources of the first come first."""

    inner: Transform
    count: int

    def shapes(self, target: Size) -> list[Size]:
        return self.inner.shapes(Size(target[1:])) * self.count

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        one, place = divmod(place, len(self.inner.shapes(Size(target.shape[1:]))))
        self.inner.fill(target[one], place, source)


@dataclass(frozen=True, slots=True)
class Flattened:
    """A stack's matrices stored as one, with the rows of each after those of the previous one."""

    inner: Transform = Same()  # how each matrix is stored
    parts: int = 1  # this many tensors contain a share of each matrix's rows, the first rows first

    def shapes(self, target: Size) -> list[Size]:
        count, rows, features = target
        stored = self.inner.shapes(Size((count, rows // self.parts, features)))[0]
        return [Size((stored[0] * stored[1], stored[2]))] * self.parts

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        own = target.chunk(self.parts, dim=1)[place]
        self.inner.fill(own, 0, source.view(self.inner.shapes(own.shape)[0]))


@dataclass(frozen=True, slots=True)
class Taps:
    """A convolution's kernel, stored [out, in / groups, taps].

    The parameter is a matrix [out, taps * in], the first tap's features first; elements between different groups are
    zeros.
    """

    taps: int
    groups: int = 1

    def shapes(self, target: Size) -> list[Size]:
        outputs, inputs = target[0], target[1] // self.taps
        return [Size((outputs, inputs // self.groups, self.taps))]

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        outputs, inputs = target.shape[0] // self.groups, source.shape[1]
        target.zero_()
        for group in range(self.groups):
            rows = slice(group * outputs, (group + 1) * outputs)
            own = slice(group * inputs, (group + 1) * inputs)
            target[rows].view(outputs, self.taps, -1)[:, :, own].copy_(source[rows].transpose(1, 2))


def keeps_rows(transform: Transform) -> bool:
    """Whether a transform only moves whole rows, so that it can be applied to stored integers and scales of each row
    too."""
    match transform:
        case Same() | Swapped() | Interleaved() | Alternating() | HeadRows():
            return True
        case Joined(inner=several):
            return all(map(keeps_rows, several))
        case Stacked(inner=inner) | Flattened(inner=inner):
            return keeps_rows(inner)
    return bool(getattr(transform, "keeps_rows", False))  # of a divided parameter


@dataclass(frozen=True, slots=True)
class Destination:
    """The destination of a stored tensor with this shape: source `place` of a parameter."""

    parameter: Tensor
    transform: Transform
    place: int
    shape: Size


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter."""

    target: str  # the parameter's name in the Transformer
    sources: tuple[str, ...]  # names in the checkpoint, in the transform's order
    transform: Transform = Same()
    # value of all elements if the checkpoint has none of the sources, or a function that fills the parameter; None if
    # they are required
    default: float | Callable[[Tensor], None] | None = None

    def fill_by_default(self, parameter: Tensor) -> None:
        """Fill a parameter that has a default and no stored source."""
        assert self.default is not None
        if callable(self.default):
            self.default(parameter)
        else:
            parameter.fill_(self.default)


@dataclass(frozen=True, slots=True)
class WeightTable:
    """All parameters of a model."""

    # one per parameter; several for the same one are alternative stored forms, the usual one first
    entries: tuple[Entry, ...]
    prefix: str = ""  # a prefix that a checkpoint of the headless model omits
    # patterns of whole names that a checkpoint may contain and no answer depends on, according to the reference as
    # well: buffers that it makes itself, heads of other tasks
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()  # (pattern, replacement) of names in older checkpoints, applied first
    head: str | None = None  # name under which an output matrix may be stored although it is tied to the embedding
    expects_head: bool = False  # whether a separately stored output matrix with its own values needs no warning
    # names under which encoder and decoder may each store a token table although they share one
    copies: tuple[str, ...] = ()

    def current(self, name: str) -> str:
        """The current name of a checkpoint tensor with this name."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name, count=1)
        return name

    def chosen(self, stored: Container[str]) -> list[Entry]:
        """One entry per parameter: the first whose sources are all stored, or else the first."""
        found: dict[str, Entry] = {}
        complete: set[str] = set()
        for entry in self.entries:
            if entry.target not in complete and all(source in stored for source in entry.sources):
                complete.add(entry.target)
                found[entry.target] = entry
            found.setdefault(entry.target, entry)
        return list(found.values())

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor with this name may stay unused."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The facts about one family of checkpoints."""

    name: str  # the name in messages and in the table of families
    architectures: tuple[str, ...]  # names in a config under which its models are stored
    brings: str  # its characteristic parts, in a few words
    # makes the parts from a transformers config; raises UnsupportedModelError for settings that no part expresses
    spec: Callable[[Any], ModelSpec]
    # makes the table of weight names from the parts; None for a family whose parts are described but not implemented
    # yet (`engine.model.missing` names them)
    weights: Callable[[ModelSpec], WeightTable] | None = None
    # those of them without a head: such a model can generate if the embedding's table is the head
    headless: tuple[str, ...] = ()
    reads_mxfp4: bool = False  # whether its table has entries for the blocks of MXFP4
    # for an encoder-decoder family with text classifiers, how their decoders read the input, from a config; raises
    # UnsupportedModelError if that is unknown
    repeats: Callable[[Any], RepeatedInput] | None = None
