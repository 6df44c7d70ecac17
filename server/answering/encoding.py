"""Texts and pairs of texts, tokenised off the event loop."""

from __future__ import annotations

import asyncio
import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from engine import EngineInfo, InvalidRequestError, PixelInput, TokenInput
from engine.pooled import sides_of, token_input
from engine.text.processor import Encoding, Tokenizer
from server.admission import estimate_tokens
from server.answering.prompt import check_token_ids, count_beyond
from server.api.pooling_schemas import Image
from server.commons import max_queued_tokens
from server.config.settings import ServerSettings
from server.context import Service
from server.errors import ApiError

T = TypeVar("T")
Text = str | tuple[str, str]  # a text, or a pair of texts that forms one input
Boxes = Sequence[list[list[int]] | None]  # boxes of each input's tokens, [left, upper, right, lower]; None for zeros

ADVICE = "send truncate_prompt_tokens"  # advice for a text that is too long
MANY_TOKENS = 2**20  # maximum tokens of all inputs of one request, or `max_queued_tokens` if that is more
_AT_ONCE = 64  # texts between two checks whether the client is still connected
_AT_ONCE_CHARACTERS = 65536  # characters between two checks


def estimate(inputs: Sequence[Text | Image | list[int]], info: EngineInfo) -> int:
    """An estimate of the number of tokens in these inputs. Each text counts as at most the model's limit."""
    positions = 0 if info.signal is None else info.signal.positions
    images = sum(isinstance(item, Image) for item in inputs)
    texts = (item for item in inputs if not isinstance(item, Image))
    return images * positions + sum(min(_estimate(item), info.max_model_len) for item in texts)


def _estimate(item: Text | list[int]) -> int:
    if isinstance(item, str):
        return estimate_tokens(item)
    return sum(map(estimate_tokens, item)) if isinstance(item, tuple) else len(item)


async def read_images(service: Service, inputs: Sequence[object]) -> dict[int, PixelInput]:
    """The images among the inputs, by index, in the engine's form. Raises InvalidRequestError if the model takes no
    images, or an image cannot be read."""
    found = {place: item for place, item in enumerate(inputs) if isinstance(item, Image)}
    if not found:
        return {}
    if service.images is None:
        message = f"{service.model_id} does not read images. Send text or token ids."
        raise InvalidRequestError(message, param="input", code="unsupported_input")
    read = await service.images.read([str(image) for image in found.values()])
    return dict(zip(found, read, strict=True))


async def encode_all(
    service: Service,
    texts: Sequence[Text],
    keep: Callable[[Encoding, Text], T],
    param: str = "input",
    *,
    name: str | None = None,
    places: Sequence[int] | None = None,
    add_special_tokens: bool = True,
    truncate: int | None = None,
    marker: int | None = None,
    may_be_empty: bool = False,
    advice: str = ADVICE,
) -> list[T]:
    """Tokenise texts in a thread, in parts; returns the result of `keep` for each text.

    An `Encoding` takes up to 200 bytes per token. Only one exists at a time, unless `keep` returns it. Raises ApiError
    if there is no tokenizer; a text has more tokens than the model allows and is not to be cut; or the texts together
    have more than one request may have.

    Args:
        param: the request's field with the texts.
        places: the texts' indices in that field, for errors (default: the field has nothing else).
        name: the name of a text in the error about its length (default: its field and index).
        truncate: cut each text or pair to this many tokens (see `engine.pooled.longest`).
        marker: a token after the first token of each text.
        may_be_empty: texts without tokens are allowed.
        advice: what to do about a text that is too long, besides shortening it.
    """
    tokenizer = need_tokenizer(service, param)
    limit = service.client.info.max_model_len
    reader = _Reader(tokenizer, limit, param, name, add_special_tokens, truncate, marker, may_be_empty, advice)
    found: list[T] = []
    named: Sequence[int | None] = places or ([None] if len(texts) == 1 else range(len(texts)))
    most = _most_tokens(service)
    while len(found) < len(texts):
        count = await asyncio.to_thread(_read_some, reader, texts, named, keep, found, most)
        if len(texts) > 1 and count > most:
            raise _too_many(param, len(texts), most)
    return found


def _read_some(
    reader: _Reader,
    texts: Sequence[Text],
    places: Sequence[int | None],
    keep: Callable[[Encoding, Text], T],
    found: list[T],
    most: int,
) -> int:
    """Add the next texts to `found`; returns the tokens that the reader has read in total."""
    last, characters = min(len(found) + _AT_ONCE, len(texts)), 0
    while len(found) < last and characters < _AT_ONCE_CHARACTERS and reader.num_tokens <= most:
        item = texts[len(found)]
        characters += sum(map(len, item)) if isinstance(item, tuple) else len(item)
        found.append(keep(reader.read(item, places[len(found)]), item))
    return reader.num_tokens


def _most_tokens(service: Service) -> int:
    return max(max_queued_tokens(service.client.info, service.settings), MANY_TOKENS)


def _too_many(param: str, count: int, most: int) -> ApiError:
    message = (
        f"{param}: the {count} inputs have more than {most} tokens together, which is the limit for one request. "
        "Send fewer in one request, or raise --max-num-queued-tokens."
    )
    return ApiError(400, message, param=param, code="too_many_tokens")


def compact(source: TokenInput, settings: ServerSettings) -> TokenInput:
    """The input with 4 bytes per token id, and with its text only if the text is logged."""
    made = source.keeping(array("i", source.token_ids), _packed)
    return made if settings.log_prompts else replace(made, text=None)


def _packed(entries: Sequence[Any]) -> Sequence[Any]:
    return array("i", entries) if entries and isinstance(entries[0], int) else entries


def expanded(source: TokenInput) -> TokenInput:
    """The input with lists, as the engine takes it."""
    return source.keeping(list(source.token_ids), list)


def compact_input(service: Service, encoding: Encoding, text: Text) -> TokenInput:
    """An encoded text or pair of texts in the engine's form, in little memory."""
    whole = text if isinstance(text, str) else "\n".join(text)
    return compact(token_input(encoding, service.client.info, whole), service.settings)


async def read_inputs(
    service: Service,
    given: Sequence[str | list[int]],
    param: str = "input",
    *,
    add_special_tokens: bool = True,
    truncate: int | None = None,
    prompt: str = "",
    marker: int | None = None,
    most: int | None = None,
    boxes: Boxes | None = None,
    advice: str = ADVICE,
) -> list[TokenInput]:
    """Texts or lists of token ids in the engine's form. Raises ApiError: as in `encode_all`; or ids are outside the
    vocabulary, or boxes outside the page.

    Args:
        prompt: a prefix for each text; token ids are unchanged.
        marker: a token after the first token of each text.
        most: texts are also cut to this many tokens.
        boxes: see `check_boxes`.
        advice: see `encode_all`.
    """
    _need_vocabulary(service, param)
    texts = {place: prompt + item for place, item in enumerate(given) if isinstance(item, str)}
    ids = {place: item for place, item in enumerate(given) if not isinstance(item, str)}
    found = await asyncio.to_thread(
        read_ids, service, ids, param, truncate, boxes, alone=len(given) == 1, advice=advice
    )
    if texts:
        read = await encode_all(
            service,
            list(texts.values()),
            functools.partial(compact_input, service),
            param,
            places=list(texts) if ids else None,
            add_special_tokens=add_special_tokens,
            truncate=truncate if most is None else most,
            marker=marker,
            advice=advice,
        )
        found.update(zip(texts, read, strict=True))
    return [found[place] for place in range(len(given))]


def read_ids(
    service: Service,
    given: Mapping[int, list[int]],
    param: str,
    truncate: int | None,
    boxes: Boxes | None = None,
    *,
    alone: bool,
    advice: str = ADVICE,
) -> dict[int, TokenInput]:
    """Token ids in the engine's form, by their indices among the request's inputs. Raises ApiError: ids are outside the
    vocabulary, there are more than the model or one request allows, or their boxes are invalid.

    Args:
        truncate: cut each input to this many tokens.
        boxes: the boxes of all inputs of the request, by index.
    """
    if not alone and sum(map(len, given.values())) > (most := _most_tokens(service)):
        raise _too_many(param, len(given), most)
    info, inputs = service.client.info, dict[int, TokenInput]()
    for place, ids in given.items():
        _check_own(ids, info, param)
        side = "right" if service.tokenizer is None else service.tokenizer.truncation_side
        found = Encoding.of_ids(ids, truncate, side)
        if len(found.ids) > info.max_model_len:
            length, alone_at = f"{len(found.ids)} tokens", None if alone else place
            raise too_long(param, None, alone_at, length, info.max_model_len, advice)
        try:
            own = boxes[place] if boxes else None
            kept = sides_of({} if own is None else {"boxes": own}, len(ids), info, truncate, side)
        except InvalidRequestError as problem:
            where = "" if alone else f"{param}[{place}]: "
            raise ApiError(400, f"{where}{problem}", param=problem.param, code=problem.code) from problem
        inputs[place] = compact(TokenInput.of(found.ids, None, kept), service.settings)
    return inputs


def check_boxes(service: Service, boxes: Boxes | None, given: Sequence[object]) -> None:
    """Refuse boxes that do not match their inputs or the model. Raises ApiError if the model takes no boxes, an input
    lacks boxes, or an input with boxes has no tokens."""
    if boxes is None:
        return
    if "boxes" not in service.client.info.sides:
        message = f"{service.model_id} does not read boxes. Remove bbox."
        raise ApiError(400, message, param="bbox", code="unsupported_parameter")
    if len(boxes) != len(given):
        message = (
            f"bbox has boxes for {len(boxes)} inputs, but there are {len(given)} inputs. Send a list of boxes "
            f"for one input, or a list of such lists for several inputs, with null for an input without boxes."
        )
        raise ApiError(400, message, param="bbox", code="invalid_value")
    for place, (item, own) in enumerate(zip(given, boxes, strict=True)):
        if own is not None and not isinstance(item, list):
            message = (
                f"bbox needs token ids, but input {place} is not a list of token ids. Send token ids, or null "
                f"instead of its boxes."
            )
            raise ApiError(400, message, param="bbox", code="invalid_value")


def _check_own(ids: Sequence[int], info: EngineInfo, param: str) -> None:
    """Refuse ids outside the model's vocabulary. The error advises clients that send OpenAI's ids."""
    try:
        check_token_ids(ids, info.vocab_size, param)
    except ApiError as problem:
        message = (
            f"{problem.message} They must come from this model's own tokenizer. Or send texts, as LangChain's "
            "OpenAIEmbeddings does with check_embedding_ctx_length=False."
        )
        raise ApiError(400, message, param=param, code=problem.code) from None


def need_tokenizer(service: Service, param: str) -> Tokenizer:
    """The model's tokenizer. Raises ApiError if there is no tokenizer, or the model takes no texts."""
    _need_vocabulary(service, param)
    if service.tokenizer is None:
        message = f"{service.model_id} has no tokenizer: send {param} as token ids if the endpoint accepts them."
        raise ApiError(400, message, param=param, code="no_tokenizer")
    return service.tokenizer


def _need_vocabulary(service: Service, param: str) -> None:
    if not service.client.info.vocab_size:
        message = f'{service.model_id} reads images only. Send {param} as {{"image": "data:..."}}.'
        raise ApiError(400, message, param=param, code="unsupported_input")


def too_long(
    param: str, name: str | None, place: int | None, length: str, longest: int, advice: str = ADVICE
) -> ApiError:
    """The error for an input that is too long, at index `place` of a list. `name` may name the input, and `advice` an
    alternative to shortening it."""
    called = name or f"the {param}"
    if place is None and called.endswith("s"):
        place = 0  # for a list with one item
    if place is not None:
        called = f"{name or param}[{place}]"
    message = (
        f"{called} is too long: it has {length}, but this model takes at most {longest} (max_model_len). Shorten it, "
        f"or {advice}."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


@dataclass(eq=False)
class _Reader:
    """Tokenises a text. A far too long text costs at most a few times as much as the longest text that the model
    allows."""

    _tokenizer: Tokenizer
    _longest: int
    _param: str
    _name: str | None
    _special: bool
    _truncate: int | None
    _marker: int | None
    _may_be_empty: bool
    _advice: str
    num_tokens: int = 0  # total tokens of all texts

    def read(self, item: Text, place: int | None) -> Encoding:
        """Read a text; `place` is its index in the request, or None if it has none."""
        first, *second = (item,) if isinstance(item, str) else item
        first, second = self._beginning(first, place), [self._beginning(text, place) for text in second]
        found = self._tokenizer.encode_input(
            first, *second, add_special_tokens=self._special, max_length=self._truncate, marker=self._marker
        )
        if len(found.ids) > self._longest:
            raise too_long(self._param, self._name, place, f"{len(found.ids)} tokens", self._longest, self._advice)
        if not found.ids and not self._may_be_empty:
            where = "" if place is None else f"[{place}]"
            message = f"{self._param}{where} has no tokens."
            raise ApiError(400, message, param=self._param, code="invalid_value")
        self.num_tokens += len(found.ids)
        return found

    def _beginning(self, text: str, place: int | None) -> str:
        """A beginning of the text that is long enough to determine its first tokens. The whole text may take
        minutes."""
        wanted = self._truncate or self._longest
        encode = functools.partial(self._tokenizer.encode, add_special_tokens=False)
        left = self._truncate is not None and self._tokenizer.truncation_side == "left"
        beyond = count_beyond(encode, text, wanted, left=left)
        if beyond is None:
            return text
        size, count = beyond
        if count <= 2 * wanted:
            length = f"{len(text)} characters, more than the {size} that can make {wanted} tokens"
            raise too_long(self._param, self._name, place, length, self._longest, self._advice)
        if self._truncate is not None:
            return text[-size:] if left else text[:size]
        length = f"more than {count} tokens in the first {size} of its {len(text)} characters"
        raise too_long(self._param, self._name, place, length, self._longest, self._advice)
