"""The beginning of a stack: token ids, an image's patches, or frames of sound, to vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.attention.base import AttentionMetadata
from engine.model import spec
from engine.model.convolution import gather_neighbours
from engine.model.dual_pyramid import DualPyramidEmbedding
from engine.model.inputs import RunningPass
from engine.model.joining import Joining
from engine.model.layers import Linear
from engine.model.norms import build_norm
from engine.model.packing import LookUp
from engine.model.place import Place
from engine.model.positions import Sinusoidal
from engine.model.pyramid import PyramidEmbedding


class TokenEmbedding(nn.Module):
    """Turns token ids [Tp], positions [Tp] and sides into vectors [Tp, hidden]. `shared`: a token table that another
    module owns."""

    def __init__(self, part: spec.Tokens, place: Place, shared: nn.Parameter | None = None):
        super().__init__()
        around = part.neighbours
        hidden = part.projection or (part.width if around is None else around.width)
        added = part.width if part.projects_sum else hidden
        first, last = part.rows or (0, part.vocab_size)
        self.tokens = place.parameter(last - first, part.width) if shared is None else shared
        self.rows = part.rows
        self.ranks = place.ranks
        self.look_up: LookUp | None = None  # reads rows of the table when it is no longer a parameter
        self.stored_bytes: int | None = None  # for a table kept in the checkpoint's format, see `mark_stored`
        self.projection = None if part.projection is None else Linear(part.width, hidden, False, place)
        self.projects_sum = part.projects_sum
        self.taps = 1 if around is None else around.taps
        self.neighbours = None if around is None else Linear(around.taps * part.width, around.width, True, place)
        self.apart, self.own = part.apart, None if part.apart is None else place.parameter(part.width)
        self.masked_out = part.masked_out
        self.types = None if not part.token_types else place.parameter(part.token_types, added)
        self.tasks = None if not part.tasks else place.parameter(part.tasks, added)
        self.boxes = None if not part.boxes else BoxEmbedding(part.boxes, added, place)
        self.positions = None
        self.offset = 0
        self.unplaced = None if isinstance(part.positions, Sinusoidal | None) else part.positions.unplaced
        if part.positions is not None:
            self.positions = place.parameter(part.positions.size, added)
            self.offset = part.positions.offset
        self.token_norm = build_norm(part.token_norm, hidden, place)
        self.norm = build_norm(part.norm, hidden, place)
        self.expansion = None if part.expansion is None else Linear(hidden, part.expansion, True, place)
        self.image = None if part.image is None else DualPyramidEmbedding(part.image, place)
        self.joining = None if part.joined is None else Joining(part.joined, hidden, place)
        # Rounded to the weights' format, as in the checkpoint's training.
        self.scale = torch.tensor(part.scale, dtype=place.dtype, device="cpu").item()

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        tokens: int,
        sides: Mapping[str, Tensor],
        images: Sequence[Tensor] = (),
    ) -> Tensor:
        """The vectors.

        Args:
            metadata: the division of the first `tokens` tokens into inputs; the others are padding.
            sides: see `Inputs`.
            images: those that the inputs begin with, one for each.
        """
        x = self.vectors(token_ids)
        if self.masked_out is not None:
            x = mask_out(x, token_ids, self.masked_out, metadata, tokens)
        if self.neighbours is not None:
            x = self.neighbours(gather_neighbours(x, metadata, self.taps, tokens) if self.taps > 1 else x)
        if self.scale != 1.0:
            x = x * self.scale
        if self.own is not None and self.apart is not None:
            x = torch.where(token_ids.eq(self.apart)[:, None], self.own, x)
        if self.projection is not None and not self.projects_sum:
            x = self.projection(x)
        if self.token_norm is not None:
            x = self.token_norm(x)
        if self.image is not None:
            starts = accumulate(metadata.query_lens, initial=0)
            for start, length, image in zip(starts, metadata.query_lens, images, strict=False):
                vectors = self.image(image)[:length]  # only a trial step may have fewer tokens than an image
                x[start : start + len(vectors)] = vectors
        if self.unplaced is not None:
            positions = positions.masked_fill(token_ids == self.unplaced, -1)
        if self.positions is not None:
            x = x + F.embedding(positions + self.offset if self.offset else positions, self.positions)
        if self.boxes is not None:
            x = self.boxes(x, sides.get("boxes"))
        if self.types is not None:
            types = sides.get("token_types")
            x = x + (self.types[0] if types is None else F.embedding(types, self.types))
        if self.tasks is not None:
            x = x + self.tasks[0]
        if self.projection is not None and self.projects_sum:
            x = self.projection(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.expansion is not None:
            x = self.expansion(x)
        return x

    def vectors(self, token_ids: Tensor) -> Tensor:
        """Rows of the table."""
        if self.rows is None or self.ranks is None:
            return self._look_up(token_ids)
        first, last = self.rows
        own = (token_ids >= first) & (token_ids < last)
        found = self._look_up((token_ids - first).clamp(0, last - first - 1))
        return self.ranks.reduce(found.masked_fill_(~own[:, None], 0.0))  # one rank has the row, the others have zeros

    def _look_up(self, token_ids: Tensor) -> Tensor:
        return (
            F.embedding(token_ids, self.tokens) if self.look_up is None else self.look_up(token_ids, self.tokens.dtype)
        )

    def give_up_table(self, look_up: LookUp) -> None:
        """Release the table, and read its rows from elsewhere."""
        self.look_up = look_up
        self.tokens = nn.Parameter(self.tokens.new_empty(0, self.tokens.shape[1]), requires_grad=False)

    def ahead(self, vectors: Tensor, state: RunningPass) -> Tensor:
        """The vectors [Tp, hidden] of next tokens, of which only the positions are known: those after the tokens'. The
        last of `vectors` replaces a token's vector."""
        assert self.positions is not None
        x = vectors[-1] + F.embedding(state.inputs.positions + (self.offset + 1), self.positions)
        return x if self.norm is None else self.norm(x)

    def beside(self, state: RunningPass) -> Tensor:
        """The norms of tokens' vectors [Tp, hidden], which a layer reads beside the stream."""
        assert self.joining is not None
        normed: Tensor = self.joining.normed(self.vectors(state.inputs.token_ids))
        return normed


def with_images(x: Tensor, images: Tensor | None, sides: Mapping[str, Tensor]) -> Tensor:
    """Vectors x [Tp, hidden] with those of images [N, hidden] in the places of tokens that have one."""
    if images is None:
        return x
    return torch.where((sides["image_slots"] > 0)[:, None], _image_rows(x, images, sides, 0), x)


def add_images(number: int, state: RunningPass, x: Tensor) -> Tensor:
    """x [Tp, hidden] plus vectors of images, of tokens that have some; `number`: which of a token's vectors, which lie
    side by side."""
    images, sides = state.inputs.images, state.inputs.sides
    if images is None:
        return x
    return torch.where((sides["image_slots"] > 0)[:, None], x + _image_rows(x, images, sides, number), x)


def _image_rows(x: Tensor, images: Tensor, sides: Mapping[str, Tensor], number: int) -> Tensor:
    """[Tp, hidden] the vectors that belong to tokens; any for tokens that have none."""
    width = x.shape[1]
    return images[(sides["image_slots"] - 1).clamp(min=0), number * width : (number + 1) * width].to(x.dtype)


class BoxEmbedding(nn.Module):
    """Adds the vectors of boxes: of their edges, heights and widths. `size`: rows of each table."""

    def __init__(self, size: int, width: int, place: Place):
        super().__init__()
        self.columns = place.parameter(size, width)
        self.rows = place.parameter(size, width)
        self.heights = place.parameter(size, width)
        self.widths = place.parameter(size, width)

    def forward(self, x: Tensor, boxes: Tensor | None) -> Tensor:
        """x [Tp, width] plus the vectors of boxes [Tp, 4]: left, upper, right and lower edge; None: all are zeros."""
        tables = (self.columns, self.rows, self.columns, self.rows, self.heights, self.widths)
        if boxes is None:  # the same sums as beside inputs with boxes
            for table in tables:
                x = x + table[0]
            return x
        left, upper, right, lower = boxes.unbind(1)
        for table, places in zip(tables, (left, upper, right, lower, lower - upper, right - left), strict=True):
            x = x + F.embedding(places, table)
        return x


def mask_out(x: Tensor, token_ids: Tensor, part: spec.MaskedOut, metadata: AttentionMetadata, tokens: int) -> Tensor:
    """Vectors x [Tp, features] with those of masks removed, scaled by the number of masks in their inputs."""
    masks = token_ids == part.id
    lens = torch.tensor(metadata.query_lens, device="cpu").to(x.device)
    rows = torch.repeat_interleave(lens, output_size=tokens)
    counts = torch.zeros(len(lens), dtype=torch.float32, device=x.device)
    counts.index_add_(0, rows, masks[:tokens].float())
    scales = torch.ones(len(x), 1, dtype=torch.float32, device=x.device)
    scales[:tokens, 0] = ((1 - part.usual) / (1 - counts / lens))[rows]
    return (x.masked_fill(masks[:, None], 0.0) * scales).to(x.dtype)


def count_placed(token_ids: Tensor, positions: Tensor, unplaced: int) -> Tensor:
    """Positions [T] in whole inputs that count only tokens with a position; -1 for the others."""
    skipped = token_ids == unplaced
    total = skipped.cumsum(0)
    first = torch.arange(len(positions), device=positions.device) - positions
    before = total[first] - skipped[first].long()
    return (positions - (total - before)).masked_fill(skipped, -1).to(positions.dtype)


class PatchEmbedding(nn.Module):
    """Turns images [channels, height, width], or their patches, into vectors [positions, hidden] each, end to end."""

    def __init__(self, part: spec.Patches, place: Place):
        super().__init__()
        self.part = part
        size = part.channels * part.frames * part.patch[0] * part.patch[1]
        self.patches = Linear(size, part.width, part.bias, place)
        self.first = place.parameter(part.first, part.width) if part.first else None
        self.positions = None
        self.offset = 0
        if part.positions is not None:
            self.positions = place.parameter(part.positions.size, part.width)
            self.offset = part.positions.offset
        self.norm = build_norm(part.norm, part.width, place)

    def forward(
        self, images: Sequence[Tensor], min_rows: int = 1, blend: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Args:
        min_rows: minimum rows of a matrix product.
        blend: see `Inputs`.
        """
        whole = torch.cat([self._pixels(image) for image in images]) if len(images) > 1 else self._pixels(images[0])
        pixels, lacking = whole.to(self.patches.weight.dtype), min_rows - len(whole)
        x: Tensor = self.patches(F.pad(pixels, (0, 0, 0, lacking)) if lacking > 0 else pixels)[: len(whole)]
        x = x.view(len(images), -1, self.part.width)
        if self.first is not None:
            x = torch.cat((self.first.expand(len(x), -1, -1), x), dim=1)
        if self.positions is not None and blend is not None:
            rows, shares = blend
            taps = zip(rows.unbind(1), shares.unbind(1), strict=True)
            added = (F.embedding(row, self.positions) * share[:, None] for row, share in taps)
            x = x + sum(added, start=torch.zeros((), device=x.device)).to(x.dtype)
        elif self.positions is not None:
            order, first = self.part.order, self.offset
            x = x + self.positions[slice(first, first + x.shape[1]) if order is None else list(order)]
        x = x.flatten(0, 1)
        return x if self.norm is None else self.norm(x)

    def _pixels(self, image: Tensor) -> Tensor:
        """[patches, channels * height * width of a patch], row by row; `image` may be that already."""
        if image.dim() == 2:
            return image
        height, width = self.part.patch
        rows, columns = image.shape[1] // height, image.shape[2] // width
        whole = image[:, : rows * height, : columns * width]
        split = whole.reshape(len(image), rows, height, columns, width)
        return split.permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)


class SpectrumEmbedding(nn.Module):
    """Turns spectra [bins, frames] into vectors [positions, hidden] each, end to end. A convolution is a matrix product
    over its window at each position."""

    def __init__(self, part: spec.Spectrum, place: Place):
        super().__init__()
        self.part = part
        self.first = Linear(part.bins * part.kernel, part.width, True, place)
        self.second = Linear(part.width * part.kernel, part.width, True, place)
        self.positions = None
        self.offset = 0
        if part.positions is not None:
            self.positions = place.parameter(part.positions.size, part.width)
            self.offset = part.positions.offset

    def forward(self, spectra: Sequence[Tensor], min_rows: int = 1) -> Tensor:
        """Args:
        min_rows: minimum rows of a matrix product.
        """
        # One after the other, because copying a convolution's windows takes several times a spectrum's memory.
        return torch.cat([self._vectors(spectrum, min_rows) for spectrum in spectra])

    def _vectors(self, spectrum: Tensor, min_rows: int) -> Tensor:
        x = self._convolved(spectrum.to(self.first.weight.dtype).T, self.first, 1, min_rows)
        x = self._convolved(x, self.second, self.part.stride, min_rows)
        return x if self.positions is None else x + self.positions[self.offset : self.offset + len(x)]

    def _convolved(self, x: Tensor, kernel: Linear, stride: int, min_rows: int) -> Tensor:
        """[positions, features] of x [frames, channels]."""
        taps, reach = self.part.kernel, self.part.kernel // 2
        padded = F.pad(x, (0, 0, reach, reach)).contiguous()
        frames, channels = padded.shape
        # The window at a position is contiguous and shares frames with its neighbours.
        rows = padded.as_strided(((frames - taps) // stride + 1, taps * channels), (stride * channels, 1))
        lacking = min_rows - len(rows)
        y: Tensor = kernel(F.pad(rows, (0, 0, 0, lacking)) if lacking > 0 else rows)[: len(rows)]
        return F.gelu(y)


Embedding = TokenEmbedding | PatchEmbedding | SpectrumEmbedding | PyramidEmbedding


def build_embedding(part: spec.Embedding, place: Place, shared: nn.Parameter | None = None) -> Embedding:
    """The module of a stack's embedding. `shared`: a token table that another module owns."""
    match part:
        case spec.Tokens():
            return TokenEmbedding(part, place, shared)
        case spec.Patches():
            return PatchEmbedding(part, place)
        case spec.Spectrum():
            return SpectrumEmbedding(part, place)
        case spec.Pyramid():
            return PyramidEmbedding(part, place)
