"""The reading of queries and documents that are compared token by token. They get markers and are cut to separate
lengths; queries are padded with masks, and punctuation in documents has no vectors (ColBERT, arXiv:2004.12832, 3.2)."""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.errors import InvalidRequestError, ModelLoadError
from engine.interface.outputs import EngineInfo, SideInfo
from engine.interface.request import PoolingParams, TokenInput
from engine.text.tokenizer import Tokenizer

Side = Literal["query", "document"]
SIDES: tuple[Side, Side] = ("query", "document")


@dataclass(frozen=True, slots=True)
class SideReading:
    """The rules for turning texts of one side into inputs."""

    marker: int | None = None  # the token after an input's first one
    length: int | None = None  # maximum tokens of an input, including special ones
    filler: int | None = None
    attended: bool = False  # whether tokens attend to the fillers
    ignored: frozenset[int] = frozenset()  # tokens without a vector

    def limit(self, truncate: int | None) -> int | None:
        """The number of tokens to cut a text to, including the marker, if a request asks for this number."""
        return min((most for most in (self.length, truncate) if most is not None), default=None)

    def complete(
        self, source: TokenInput, params: PoolingParams, truncate: int | None
    ) -> tuple[TokenInput, PoolingParams]:
        """A text that was read with this marker and limit, filled up, with its parameters."""
        limit, count = self.limit(truncate), len(source.token_ids)
        params = self.without_ignored(source.token_ids, params)
        if self.filler is None or limit is None or count >= limit:
            return source, params
        more = limit - count
        filled = source.filled([self.filler] * more)
        return filled, params if self.attended else replace(params, attended=count)

    def without_ignored(self, ids: Sequence[int], params: PoolingParams) -> PoolingParams:
        """The parameters for given token ids: the ignored ones have no vector."""
        places = tuple(at for at, token in enumerate(ids) if token in self.ignored) if self.ignored else ()
        return replace(params, left_out=places) if places else params


PLAIN = SideReading()  # like any text


def read_side(info: EngineInfo, tokenizer: Tokenizer | None, name: str | None) -> SideReading:
    """The rules for reading texts of this side; like any text if the model has no such side. Raises InvalidRequestError
    if its texts are filled up, but the tokenizer has no token for that."""
    side = None if info.token_vectors is None or name is None else info.token_vectors.sides.get(name)
    return PLAIN if side is None or tokenizer is None else _reading(side, tokenizer, info.max_model_len)


def check_sides(info: EngineInfo, tokenizer: Tokenizer | None) -> None:
    """Refuse a tokenizer that lacks one of the model's markers. Raises ModelLoadError: names the marker."""
    if info.token_vectors is None or tokenizer is None:
        return
    for name, side in info.token_vectors.sides.items():
        if side.marker is not None and tokenizer.token_id(side.marker) is None:
            raise ModelLoadError(
                f"{info.model} marks each {name} with the token {side.marker!r}, which its tokenizer does not have. "
                f"Download the tokenizer again, or choose another one with --tokenizer."
            )


@functools.lru_cache(maxsize=8)
def _reading(side: SideInfo, tokenizer: Tokenizer, longest: int) -> SideReading:
    known = (tokenizer.token_id(word) for word in side.ignored)
    ignored = {tokenizer.unk_token_id if token is None else token for token in known}
    if side.punctuation:
        ignored |= {token for mark in string.punctuation for token in tokenizer.encode(mark, False)[:1]}
    filler = None
    if side.filled:
        # As PyLate chooses it.
        named = (tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        filler = next((token for token in named if token is not None), None)
        if filler is None:
            raise InvalidRequestError(
                "this model pads queries with mask tokens, but its tokenizer has none. Set mask_token in its "
                "tokenizer_config.json.",
                param="input",
                code="no_mask_token",
            )
    return SideReading(
        marker=None if side.marker is None else tokenizer.token_id(side.marker),
        length=min(side.length, longest),
        filler=filler,
        attended=side.attended,
        ignored=frozenset(token for token in ignored if token is not None),
    )
