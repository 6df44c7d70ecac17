"""Vectors of images for the decoder: made once for each image, and kept for later steps and requests."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.backends import triton as gpu
from engine.backends.attention.base import AttentionMetadata
from engine.interface.vision import VisionInfo, normalised
from engine.model.grids import blend_of, grid_of, patches_of
from engine.model.inputs import Inputs
from engine.model.layers import Linear
from engine.model.spec import Patches, Projector
from engine.model.transformer import Transformer
from engine.scheduling.plan import ImageRows

MOST_BYTES = 128 * 2**20
"""Bytes of all kept vectors. Those that were used least recently are given up; a larger image is kept alone."""
_FREED = 64 * 2**20  # about the bytes of freed blocks that the C library keeps; it returns larger blocks at once


def crop_work(model: Transformer) -> float:
    """The work of a crop, or of a vector if images have their own sizes, in tokens of the model: by the numbers that a
    position of the tower and a token of the decoder are multiplied by."""
    assert model.tower is not None
    assert model.vision is not None
    assert model.decoder is not None
    seen = _products(model.tower) + _products(model.vision)
    squares = model.vision.part.squares
    return (squares**2 or _positions(model.tower)) * seen / max(_products(model.decoder), 1)


def _products(part: nn.Module) -> int:
    return sum(one.inputs * one.outputs for one in part.modules() if isinstance(one, Linear))


def _positions(tower: Transformer) -> int:
    assert tower.spec.signal is not None
    return tower.spec.signal.positions


def image_bytes(model: Transformer, info: VisionInfo | None, max_tokens: int) -> int:
    """The memory that images take at most: their kept vectors, and what making them takes. 0 without images."""
    return 0 if info is None else MOST_BYTES + tower_bytes(model, info, max_tokens)


def reserved_for_images(needed: int, free: int) -> int:
    """The memory that pages leave for images. `needed`: see `image_bytes`. Beside the kept vectors that is at most half
    of what is `free`: an image of a smaller size than the largest then still has room."""
    return min(needed, MOST_BYTES + max(free - MOST_BYTES, 0) // 2) if needed else 0


def tower_bytes(model: Transformer, info: VisionInfo, max_tokens: int) -> int:
    """The memory that making the vectors of an image takes at most, beside the vectors. The tower reads one crop at a
    time. `max_tokens`: of a prompt; no image has more vectors."""
    assert model.tower is not None
    assert model.vision is not None
    part, tower = model.vision.part, model.tower.encoder
    assert tower is not None
    embedding, number = part.tower.embedding, tower.first_parameter.dtype.itemsize
    assert isinstance(embedding, Patches)
    if info.fitted is None:
        positions, pixels = _positions(model.tower), math.prod(info.crop)
    else:
        vectors = min(info.fitted.most_vectors, max_tokens)
        positions, pixels = vectors * part.squares**2, vectors * info.fitted.unit**2
    image = info.channels * pixels * 4  # as float32
    patches = image * embedding.frames
    program, width, kept = tower.program, part.tower.hidden_size, 1 + len(part.tower.kept)
    given = {program.stream.buffer, program.result.buffer}
    rows = sum(wide for buffer, wide in enumerate(program.widths) if buffer not in given)
    # Products lay their rows out anew before they read them.
    rows += max(one.inputs for one in tower.modules() if isinstance(one, Linear))
    # Numbers of a position while the program runs, while its results are joined, and while they are projected.
    running, joined = width * (len(given) + kept - 1), width * (2 * kept + 1) if part.squares else 0
    projected = width * (kept + 2 * (kept > 1))  # several are copied apart, and normed
    if isinstance(part.projector, Projector):
        projected += 2 * model.vision.projector.second.inputs // part.projector.merge
    rows += max(running, joined, projected)
    embedded = (0 if number == 4 else patches * number // 4) + positions * width * number * 2
    held = image + (patches if part.squares else 0)  # throughout
    first, then = image + embedded, positions * rows * number
    return held + max(first, then) + min(first, _FREED)


class ImageVectors:
    """Makes and keeps the vectors of images. `min_rows`: fewest rows of a matrix product
    (`engine.execution.invariance`). `num_made`: how often vectors of an image were made."""

    def __init__(self, model: Transformer, info: VisionInfo, min_rows: int, most_bytes: int = MOST_BYTES):
        assert model.vision is not None
        assert model.tower is not None
        self._embedding, self._tower, self._info, self._min_rows = model.vision, model.tower, info, min_rows
        self._device, self._dtype, self._most = model.device, model.dtype, most_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_made = self.num_bytes = 0

    @property
    def most_vectors(self) -> int:
        """About as many vectors are kept."""
        numbers = self._embedding.projector.second.outputs * (1 + len(self._embedding.deep))
        return max(self._most // (numbers * self._dtype.itemsize), 1)

    def of(self, images: Sequence[ImageRows]) -> Tensor:
        """[N, hidden] the vectors that tokens of a step have, in the order of the images."""
        parts = [self._whole(image)[image.first : image.first + image.count] for image in images]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _whole(self, image: ImageRows) -> Tensor:
        found = self._kept.get(image.key)
        if found is not None:
            self._kept.move_to_end(image.key)
            return found
        crops = (gpu.upload(normalised(crop[None], self._info), self._device)[0] for crop in image.pixels)
        made: Tensor = self._embedding(crops, image.size, self._states, self._info)
        self.num_made += 1
        self._kept[image.key] = made = made.contiguous()
        self.num_bytes += made.nbytes
        while self.num_bytes > self._most and len(self._kept) > 1:
            self.num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return made

    def _states(self, crop: Tensor) -> Tensor:
        """[positions, features] of the tower for one crop, or for an image of any size, square by square."""
        part = self._embedding.part
        if not part.squares:
            return self._run(crop, _positions(self._tower))
        stack = self._tower.encoder
        assert stack is not None
        assert isinstance(part.tower.embedding, Patches)
        height, width = part.tower.embedding.patch
        grid = grid_of((crop.shape[1] // height, crop.shape[2] // width), part.squares, part.window)
        for table in stack.placed_tables:
            table.place(grid.places)
        patches, blend = patches_of(crop, part.tower.embedding, grid), None
        embedding = part.tower.embedding
        if embedding.positions is not None:
            blend = blend_of(grid, math.isqrt(embedding.positions.size), self._device, cells=embedding.cells)
        parts = AttentionMetadata.build(grid.windows, grid.windows, self._device)
        states = self._run(patches, len(patches), parts, blend)
        squares = states.view(len(grid.original), part.squares**2, -1)
        return squares[grid.original.to(self._device)].view_as(states)

    def _run(
        self,
        signal: Tensor,
        count: int,
        parts: AttentionMetadata | None = None,
        blend: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[count, features] the tower's vectors for a signal of `count` positions."""
        padded = max(count, self._min_rows)
        places = torch.arange(padded, device=self._device)
        inputs = Inputs(
            token_ids=torch.zeros_like(places),
            positions=places.clamp(max=count - 1),
            metadata=AttentionMetadata.build([count], [count], self._device),
            tokens=count,
            min_rows=self._min_rows,
            signals=[signal],
            parts=parts,
            blend=blend,
        )
        states: Tensor = self._tower(inputs)
        return states[:count] if not inputs.kept else torch.cat([states, *inputs.kept], dim=1)[:count]
