"""Loading of the part of a parameter that a rank has (`engine.model.sharding`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Size, Tensor

from engine.backends.native.gemm import Blocks, Quantised
from engine.model.sharding import ABSENT, Cut, Cuts, Range
from engine.model.table import Affine, Destination, Entry, Joined, Same, Stacked, Transform, keeps_rows

BLOCK = 256
"""The largest number of inputs that a stored block has."""


def divided(entry: Entry, cuts: Cuts) -> Entry:
    """The entry of a table that fills a rank's part of a parameter from the whole tensors of a checkpoint."""
    cut = cuts.get(entry.target)
    if cut is None:
        return entry
    transform = Absent(entry.transform) if isinstance(cut, str) else divide(entry.transform, cut)
    default = entry.default
    if cut == ABSENT and default is not None:
        default = 0.0
    elif callable(default):
        raise TypeError(f"the default of {entry.target} cannot be divided")
    return replace(entry, transform=transform, default=default)


def stored_columns(stored: Quantised | Blocks, destination: Destination) -> tuple[Quantised | Blocks, Destination]:
    """The columns of a stored matrix that a rank has, and a destination for them; the same if it has all."""
    transform = destination.transform
    own = transform.inner if isinstance(transform, Stacked) else transform
    if not isinstance(own, Divided) or not own.cut.inputs:
        return stored, destination
    (size,), ((begin, end),) = own.cut.sizes, own.cut.ranges

    def take(tensor: Tensor) -> Tensor:
        if tensor.dim() == 1:  # one scale for each row
            return tensor
        length = tensor.shape[1]
        return tensor[:, length * begin // size : length * end // size].contiguous()

    whole = Stacked(own.inner, transform.count) if isinstance(transform, Stacked) else own.inner
    return replace(stored.changed(take), inputs=end - begin), replace(destination, transform=whole)


def first_row(transform: Transform) -> int | None:
    """The first of a stored matrix's rows, of which a parameter has some in their order; None if it has other parts."""
    if transform == Same():
        return 0
    if isinstance(transform, Divided) and transform.inner == Same() and transform.cut.axis == 0:
        return transform.cut.ranges[0][0] if len(transform.cut.ranges) == 1 else None
    return None


def divide(transform: Transform, cut: Cut) -> Transform:
    """The layout of whole tensors in a rank's part of a parameter. Parts of the parameter that come from separate
    tensors are divided one by one, so that no whole parameter is made."""
    match transform:
        case Affine(factor, offset, inner):
            return Affine(factor, offset, divide(inner, cut))
        case Joined(lengths) if cut.axis == 0 and lengths == cut.sizes:
            parts = (divide(transform.of(place), cut.piece(place)) for place in range(len(lengths)))
            return Joined(tuple(cut.own_sizes), tuple(parts))
        case Stacked(inner, count):
            return Stacked(divide(inner, replace(cut, axis=cut.axis - 1)), count)
    return Divided(transform, cut)


def cut_of(transform: Transform) -> Cut | None:
    """The cut of a parameter that is divided as a whole; None if it is not."""
    if isinstance(transform, Affine):
        return cut_of(transform.inner)
    return transform.cut if isinstance(transform, Divided) else None


@dataclass(frozen=True, slots=True)
class Absent:
    """Zeros in place of a parameter that another rank has. `inner`: how that is stored."""

    inner: Transform

    def shapes(self, target: Size) -> list[Size]:
        return self.inner.shapes(target)

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        target.zero_()


@dataclass(frozen=True, slots=True)
class Divided:
    """A rank's part of the parameter that `inner` fills."""

    inner: Transform
    cut: Cut

    @property
    def keeps_rows(self) -> bool:
        """As the function of this name: whether whole rows are taken, or columns in whole blocks (`stored_columns`)."""
        ends = {end for piece in self.cut.ranges for end in piece}
        return keeps_rows(self.inner) and not (self.cut.inputs and any(end % BLOCK for end in ends))

    def shapes(self, target: Size) -> list[Size]:
        return self.inner.shapes(self._whole(target))

    def fill(self, target: Tensor, place: int, source: Tensor) -> None:
        if self.inner == Same():
            self.take(target, source)
        else:
            self._fill_whole(target, place, source)

    def _fill_whole(self, target: Tensor, place: int, source: Tensor) -> None:
        """Make the whole parameter, as far as it comes from this source, and take the part of it. Elements that come
        from no source are zeros."""
        whole = torch.zeros(self._whole(target.shape), dtype=target.dtype)
        self.inner.fill(whole, place, source)
        shapes = self.inner.shapes(whole.shape)
        if len(shapes) == 1:
            self.take(target, whole)
            return
        others = torch.zeros(whole.shape, dtype=torch.bool)
        for other, shape in enumerate(shapes):
            if other != place:
                filled = torch.zeros(whole.shape, dtype=torch.bool)
                self.inner.fill(filled, other, torch.ones(shape, dtype=torch.bool))
                others |= filled
        taken, kept = torch.empty_like(target), torch.empty(target.shape, dtype=torch.bool)
        self.take(taken, whole)
        self.take(kept, others)
        target.copy_(torch.where(kept, target, taken))

    def take(self, target: Tensor, whole: Tensor) -> None:
        """Copy the rank's part of a whole parameter."""
        begins = [sum(self.cut.sizes[:number]) for number in range(len(self.cut.sizes))]
        ranges = [(start + begin, start + end) for start, (begin, end) in zip(begins, self.cut.ranges, strict=True)]
        for own, (begin, end) in self._pieces(target, ranges):
            own.copy_(whole.narrow(self.cut.axis, begin, end - begin))

    def _pieces(self, target: Tensor, ranges: Sequence[Range]) -> Iterator[tuple[Tensor, Range]]:
        return zip(torch.split(target, self.cut.own_sizes, dim=self.cut.axis), ranges, strict=True)

    def _whole(self, target: Size) -> Size:
        sizes = list(target)
        sizes[self.cut.axis] = sum(self.cut.sizes)
        return Size(sizes)
