"""The pooling inputs of `LLM`'s callers (texts, pairs of texts, token ids, images), and their conversion for the
model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import InvalidRequestError
from engine.images.reader import ImageReader, is_image
from engine.interface.outputs import EngineInfo
from engine.interface.request import PixelInput, TokenInput
from engine.interface.values import brief
from engine.pooled import sides_of, token_input
from engine.text.encoding import Encoding
from engine.text.tokenizer import Tokenizer

# One input: a text, its tokens, a pair of texts (see `LLM.classify`), or an image: a PIL image, a uint8 array [height,
# width, 3], or pixels from a preprocessor.
Input = str | Sequence[int] | TokenInput | PixelInput | tuple[str, str] | Mapping[str, str] | Any


@dataclass(frozen=True, slots=True)
class Source:
    """One input as given: a text, perhaps with a second one; ids, perhaps with sides; or an image."""

    text: str | None = None
    pair: str | None = None
    ids: tuple[int, ...] = ()
    sides: Mapping[str, Sequence[Any]] = field(default_factory=dict, hash=False)
    image: Any = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One input as the model reads it."""

    encoding: Encoding  # its tokens; none for an image
    text: str | None  # the first text as it was tokenised; None if there was no text
    input: TokenInput | PixelInput  # the same for the engine


def read_sources(inputs: Any, *, pairs: bool = False, images: bool = False) -> list[Source]:
    """One input or a list of them; a tuple of two texts is a pair if `pairs` are allowed. `images`: whether images are
    allowed too. Raises InvalidRequestError if the input has an unsupported type."""
    single = isinstance(inputs, (str, TokenInput, Mapping)) or is_image(inputs) or (pairs and _is_pair(inputs))
    if not single and not isinstance(inputs, Sequence):
        raise _refused(inputs, pairs)
    if not single and inputs and all(_is_id(item) for item in inputs):
        single = True
    return [_source(item, pairs, images) for item in ([inputs] if single else inputs)]


def _source(item: Any, pairs: bool, images: bool) -> Source:
    if isinstance(item, str):
        return Source(text=item)
    if images and is_image(item):
        return Source(image=item)
    if isinstance(item, TokenInput):
        return Source(ids=tuple(item.token_ids), sides=item.given)
    if isinstance(item, Mapping) and set(item) in ({"prompt"}, {"prompt_token_ids"}):  # vLLM's form
        (value,) = item.values()
        if isinstance(value, str if "prompt" in item else list | tuple):
            return _source(value, pairs=False, images=False)
    elif isinstance(item, Mapping) and pairs:
        known = set(item) <= {"text", "text_pair"} and "text" in item
        if known and all(isinstance(text, str) for text in item.values()):
            return Source(text=item["text"], pair=item.get("text_pair"))
    elif isinstance(item, Sequence) and not isinstance(item, bytes):
        if pairs and len(item) == 2 and all(isinstance(text, str) for text in item):
            return Source(text=item[0], pair=item[1])
        if all(_is_id(token) for token in item):
            return Source(ids=tuple(item))
    raise _refused(item, pairs)


def _is_pair(inputs: Any) -> bool:
    return isinstance(inputs, tuple) and len(inputs) == 2 and all(isinstance(text, str) for text in inputs)


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _refused(item: Any, pairs: bool) -> InvalidRequestError:
    kinds = 'a TokenInput or a pair of texts (a tuple, or {"text": ..., "text_pair": ...})' if pairs else "a TokenInput"
    rest = "; pairs of texts are only for classifiers of whole inputs" if not pairs and _is_pair(item) else ""
    return InvalidRequestError(
        f"an input must be a text, a list of token ids{',' if pairs else ' or'} {kinds}, got {brief(item)}{rest}.",
        param="inputs",
        code="invalid_value",
    )


class Reader:
    """Turns sources into inputs of the engine."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        info: EngineInfo,
        max_length: int | None,
        prompt: str = "",
        marker: int | None = None,
    ) -> None:
        self._marker = marker  # a token after the first one of every text
        self._tokenizer = tokenizer  # None if the model has none; then only ids can be read
        self._info = info
        self._max_length = max_length  # cut inputs to this many tokens; None: do not cut them
        self._prompt = prompt  # a prefix for every text
        self._images: ImageReader | None = None

    def read(self, source: Source) -> Reading:
        """One input as the model reads it. Raises InvalidRequestError if the input is a text and there is no tokenizer,
        if the text cannot be read (see `Tokenizer.encode_input`), or if sides do not match their tokens."""
        tokenizer, info = self._tokenizer, self._info
        if source.image is not None:
            self._images = self._images or ImageReader(info)
            return Reading(Encoding.of_ids(()), None, self._images.read(source.image))
        if source.text is None:
            side, added = (
                ("right", frozenset()) if tokenizer is None else (tokenizer.truncation_side, tokenizer.frame_ids)
            )
            types = source.sides.get("token_types")
            kept = sides_of(source.sides, len(source.ids), info, self._max_length, side)
            found = Encoding.of_ids(source.ids, self._max_length, side, type_ids=types, added=added)
            return Reading(found, None, TokenInput.of(found.ids, None, kept))
        text = self._prompt + source.text
        found = need_tokenizer(tokenizer, info).encode_input(
            text, source.pair, max_length=self._max_length, marker=self._marker
        )
        return Reading(found, text, token_input(found, info, text))


def need_tokenizer(tokenizer: Tokenizer | None, info: EngineInfo) -> Tokenizer:
    """The model's tokenizer. Raises InvalidRequestError if the model has no tokenizer."""
    if tokenizer is None:
        raise InvalidRequestError(
            f"{info.model} has no tokenizer, so inputs must be token ids. Set --tokenizer to a folder with a "
            f"tokenizer.",
            param="inputs",
            code="no_tokenizer",
        )
    return tokenizer
