"""The memory needs of a model's sequences, and the facts that make their prefixes equal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.interface.request import Request
from engine.interface.token_sides import Sides, Values, hashed_root
from engine.interface.vision import image_keys, image_positions
from engine.scheduling.block_pool import PageHash, PageHasher
from engine.scheduling.encoder_input import EncoderInput


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceNeeds:
    """The needs of a model kind (`engine.execution.model_kinds`)."""

    # whether keys and values are stored in pages, which later sequences with the same prefix find; else every input is
    # read whole by one step, and stores nothing
    paged: bool = True
    # maximum keys that any layer sees, including the query's own; None if some layer sees all
    window: int | None = None
    # tokens of the longest input that an encoder reads for a decoder, whose keys and values are stored in separate
    # pages; 0 if there is no such encoder
    encoder_length: int = 0
    state_size: int = 0  # number of values in the states of its layers in a state slot; 0 if no layer has one
    # (limit, shift) pairs, limits ascending: sequences that reach at most `limit` tokens are rotated differently from
    # longer ones, and find their angles `shift` rows after their positions
    rotary_shifts: tuple[tuple[int, int], ...] = ()
    # the work of making the vectors of a crop of an image, in tokens; or of each vector, if images have their own sizes
    # (`SeenImage.pieces`)
    crop_work: float = 0.0
    kept_vectors: int = 0  # about as many vectors of images are kept

    def sides_of(self, request: Request) -> Sides:
        """The facts about a request's tokens beside their ids: those that it contains, and those that follow from its
        length."""
        shift = self.rotary_shift(request.reach)
        own = adapter_sides(request)
        if shift:
            own["rotary_offsets"] = np.array([shift], dtype=np.int32)
        if any(image.axes for image in request.images):
            offsets, own["rotary_axes"] = image_positions(request.images, len(request.prompt_token_ids))
            own["rotary_offsets"] = offsets + np.int32(shift)
        if request.images:
            own["image_keys"] = image_keys(request.images, request.prompt_token_ids)
        return {**request.sides, **own} if own else request.sides

    def rotary_shift(self, reach: int) -> int:
        """The number of rows between a token's position and its angles, in a sequence that can reach this many
        tokens."""
        return next((shift for limit, shift in self.rotary_shifts if reach <= limit), 0)

    def crossed_limit(self, request: Request) -> int | None:
        """The first length at which the rotary angles change and which the request may cross: its prompt stays within
        it, but its answer may exceed it. None if there is none."""
        prompt, reach = len(request.prompt_token_ids), request.reach
        return next((limit for limit, _ in self.rotary_shifts if prompt <= limit < reach), None)


def adapter_sides(request: Request) -> dict[str, Values]:
    """The slot of a request's adapter for all its tokens, including those of an encoder's input."""
    return {} if request.adapter is None else {"adapter_slots": np.array([request.adapter.slot], dtype=np.int32)}


def adapters_of(sides: Sides) -> Values | None:
    """[tokens] the slots of tokens' adapters; None if none has one."""
    return sides.get("adapter_slots")


def encoder_root(request: Request, hasher: PageHasher) -> PageHash:
    """Hash before an encoder's input: covers what changes its keys and values besides the input."""
    root = hasher.root(request.cache_salt)
    if request.adapter is None:
        return root
    digest = np.frombuffer(request.adapter.digest, dtype=np.uint8).astype(np.int32)
    # No token is negative, so this equals neither the hash of a page nor the hash after the mark of a side.
    return hasher.extend(root, np.concatenate((np.array([np.iinfo(np.int32).min], dtype=np.int32), digest)))


def sequence_root(request: Request, hasher: PageHasher, encoder_input: EncoderInput | None, sides: Sides) -> PageHash:
    """Hash before the first page of a request's sequences: covers what changes keys and values besides tokens and the
    sides that differ from token to token."""
    root = encoder_root(request, hasher) if encoder_input is None else encoder_input.key
    # No token is negative: this is not a page's hash.
    more = hashed_root(sides) if sides else []
    return hasher.extend(root, np.concatenate(more)) if more else root
