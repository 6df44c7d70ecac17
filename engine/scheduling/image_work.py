"""The images of prompts in steps: how many of a prompt's tokens fit a step with the images among them."""

from __future__ import annotations

from collections import OrderedDict

from engine.scheduling.sequence import SequenceGroup
from engine.scheduling.step import NextStep


class ImageWork:
    """The work of making vectors of images. It counts against the steps that do it.

    The executor keeps the vectors that it has made. This is an estimate. A wrong one makes a step longer or shorter
    than planned, but changes no answer.

    Args:
        crop_work: the work of each of an image's `pieces`, in tokens.
        kept_vectors: about as many are kept.
    """

    def __init__(self, crop_work: float, kept_vectors: int):
        self._crop_work, self._most = crop_work, kept_vectors
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._count = 0

    def fitting(self, step: NextStep, group: SequenceGroup, start: int, count: int) -> int:
        """The number of a prompt's next `count` tokens, from `start` on, that may run in a step: as many as come before
        the first image that does not fit. The step is charged for the images before that."""
        for image in group.request.images:
            first, end = image.part(start, count)
            if first == end:
                continue
            if image.key in self._known:
                self._known.move_to_end(image.key)
            elif step.see(self._crop_work * image.pieces):
                self._keep(image.key, len(image.places))
            else:
                return max(int(image.places[first]) - start, 0)
        return count

    def apart(self, step: NextStep, group: SequenceGroup, start: int, count: int, hard: int) -> int:
        """The number of a prompt's next `count` tokens that one row may have. If tokens see each other in both
        directions, a row ends before them or has all of them that are missing. `hard`: the step's room in tokens,
        regardless of time. It is the limit for the first prompt of a step."""
        for image in group.request.images:
            first, end = image.two_way or (0, 0)
            if end <= start:
                continue
            if start < first:
                return min(count, first - start)
            missing = end - start
            return missing if missing <= (hard if not step.num_prompts else min(count, hard)) else 0
        return count

    def _keep(self, key: bytes, vectors: int) -> None:
        self._known[key] = vectors
        self._count += vectors
        while self._count > self._most and len(self._known) > 1:
            self._count -= self._known.popitem(last=False)[1]
