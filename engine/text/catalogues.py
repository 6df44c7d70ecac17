"""Catalogues: files of titles that answers can be limited to, read when the engine starts, and kept as tries."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, InvalidRequestError
from engine.interface.outputs import CatalogueInfo, EngineInfo
from engine.interface.request import Decoding, SamplingParams
from engine.interface.trie import Member, Trie
from engine.interface.values import brief
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.interface.generation import GenerationDefaults

logger = logging.getLogger("octavo.catalogues")

_BATCH = 8192  # titles tokenised at a time: the tokenizer's result for one takes kilobytes
_SHOWN = 16  # names listed in an error

Title = str | list[int]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Titles to which answers can be limited. `used`: [vocabulary] the tokens that occur in titles."""

    name: str
    trie: Trie
    used: NDArray[np.bool_]

    @property
    def info(self) -> CatalogueInfo:
        """Facts for clients."""
        return CatalogueInfo(self.name, self.trie.num_sequences, self.trie.longest)


class Catalogues:
    """The catalogues of an engine. Raises ConfigError if a file cannot be read, or a line cannot be a title; the
    message names the line.

    Args:
        info: facts about the model.
        defaults: the model's defaults for decoding.
        load_tokenizer: loads the model's tokenizer; called only if titles are texts.
    """

    def __init__(
        self,
        files: Mapping[str, str],
        info: EngineInfo,
        defaults: GenerationDefaults,
        load_tokenizer: Callable[[], Tokenizer | None],
    ):
        self._info, self._defaults = info, defaults
        self._found: dict[str, Catalogue] = {}
        if files and "generate" not in info.tasks:
            raise ConfigError(f"{info.model} does not generate text and cannot use a catalogue. Remove --catalogue.")
        builder = _Builder(info, defaults, load_tokenizer)
        for name, path in files.items():
            self._found[name] = builder.build(name, path)

    @property
    def infos(self) -> tuple[CatalogueInfo, ...]:
        """Facts for clients."""
        return tuple(catalogue.info for catalogue in self._found.values())

    def completed(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """The parameters with room for the longest title, unless they say how long an answer may be. Raises
        InvalidRequestError if the catalogue does not exist."""
        name = _name(params)
        if name is None:
            return params
        catalogue = self._get(name)
        if params.max_tokens is not None:
            return params
        most = max(catalogue.info.most_tokens, params.min_tokens or 0)
        return replace(params, max_tokens=max(min(most, self._info.max_model_len - prompt_len), 1))

    def constrained(self, params: SamplingParams, decoding: Decoding) -> Decoding:
        """The decoding that limits answers to titles, if the parameters ask for that. Raises InvalidRequestError if the
        catalogue does not exist, or the request asks for something that cannot be combined with it."""
        name = _name(params)
        if name is None:
            return decoding
        catalogue = self._get(name)
        trie, used = catalogue.trie, catalogue.used
        if not decoding.stop_ids:
            _refuse(
                "constraint",
                "answers of a catalogue end with an end token, but this model names none (eos_token_id in its "
                "generation_config.json). Send stop_token_ids.",
            )
        within = [token for token in sorted(decoding.stop_ids) if used[token]]
        if within:
            message = f"stop_token_ids holds {within[0]}, which occurs in titles of the catalogue {name}."
            _refuse("stop_token_ids", message)
        if decoding.num_beams > 1 and decoding.n > trie.num_sequences:
            _refuse(
                "n",
                f"n is {decoding.n}, but the catalogue {name} has {trie.num_sequences} titles, and all beams differ. "
                "Ask for fewer.",
            )
        # A title must not be cut off by max_tokens.
        constraint = Member(trie, sorted(decoding.stop_ids))
        return replace(decoding, constraint=constraint, distinct_ends=True, forced_eos_token_ids=())

    def _get(self, name: str) -> Catalogue:
        found = self._found.get(name)
        if found is None:
            names = sorted(self._found)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            there = (
                f"the catalogues are {', '.join(names[:_SHOWN])}{more}"
                if names
                else "there is none (--catalogue NAME=FILE)"
            )
            _refuse("constraint", f"constraint: there is no catalogue {brief(name)}; {there}.", "unknown_catalogue")
        return found


def _name(params: SamplingParams) -> str | None:
    return None if params.constraint is None else params.constraint["catalogue"]


def _refuse(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    raise InvalidRequestError(message, param=param, code=code)


# ------------------------------------------------------------------ files


def read_titles(name: str, path: str) -> Iterator[tuple[int, Title]]:
    """The titles of a file with their line numbers, as texts or as token ids; empty lines are skipped. Raises
    ConfigError if the file cannot be read, or a line is not a title."""
    where = f"catalogue {name}: {path}"
    try:
        with Path(path).expanduser().open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    yield number, _read_title(f"{where}, line {number}", line)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}.") from error


def _read_title(where: str, line: bytes) -> Title:
    try:
        value: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8: byte {error.start} is {line[error.start]:#04x}.") from None
    except (ValueError, RecursionError) as error:
        problem = getattr(error, "msg", str(error))
        raise ConfigError(f"{where} is not JSON ({problem}): {brief(line.decode().strip())}.") from None
    if isinstance(value, dict):
        given = [key for key in ("text", "ids") if value.get(key) is not None]
        if len(given) != 1:
            raise ConfigError(f"{where} must have either text or ids, got {' and '.join(given) or 'none of them'}.")
        ids, value = given == ["ids"], value[given[0]]
        if ids:
            if not isinstance(value, list) or not all(type(token) is int for token in value):
                raise ConfigError(f"{where}: ids must be a list of integers, got {brief(value)}.")
            if not value:
                raise ConfigError(f"{where}: the title is empty.")
            return value
    if not isinstance(value, str):
        raise ConfigError(
            f"{where} must be a JSON string, or an object with text (a string) or ids (a list of integers), got "
            f"{brief(value)}."
        )
    if not value:
        raise ConfigError(f"{where}: the title is empty.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            message = f"character {error.start} is the unpaired surrogate {value[error.start]!a}"
            raise ConfigError(f"{where} is not valid Unicode: {message}.") from None
    return value


@dataclass(slots=True)
class _Flat:
    """All titles' tokens, one title after the other. `ids`: the tokens, as int64, as they may be any size."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]
    lines: NDArray[np.int64]

    def line_of(self, place: int) -> int:
        """The line of the title that contains the token at this position."""
        return int(self.lines[np.searchsorted(np.cumsum(self.lengths), place, side="right")])


class _Builder:
    """Makes catalogues from files."""

    def __init__(
        self, info: EngineInfo, defaults: GenerationDefaults, load_tokenizer: Callable[[], Tokenizer | None]
    ) -> None:
        self._info, self._defaults = info, defaults
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._opening: list[int] = []

    def build(self, name: str, path: str) -> Catalogue:
        started, where = time.monotonic(), f"catalogue {name}: {path}"
        titles = read_titles(name, path)
        parts = []
        while batch := list(islice(titles, _BATCH)):
            parts.append(self._flat(where, batch))
        if not parts:
            raise ConfigError(f"{where} is empty; it must hold at least one title.")
        ids = np.concatenate([part.ids for part in parts])
        lengths = np.concatenate([part.lengths for part in parts])
        lines = np.concatenate([part.lines for part in parts])
        del parts
        starts = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        trie = Trie.of(ids, starts, self._info.vocab_size)
        self._tell(name, path, trie, lines, time.monotonic() - started)
        return Catalogue(name, trie, trie.used())

    def _tell(self, name: str, path: str, trie: Trie, lines: NDArray[np.int64], seconds: float) -> None:
        repeated, original = trie.duplicates
        if len(repeated):
            first = int(np.argmin(repeated))
            logger.warning(
                "Catalogue %s: line %d of %s repeats the title of line %d; %d repeated titles are ignored.",
                name, lines[repeated[first]], path, lines[original[first]], len(repeated),
            )  # fmt: skip
        logger.info(
            "Catalogue %s from %s: %d titles of up to %d tokens, %.1f MB, read in %.1f s.",
            name, path, trie.num_sequences, trie.longest, trie.nbytes / 1e6, seconds,
        )  # fmt: skip

    def _flat(self, where: str, batch: Sequence[tuple[int, Title]]) -> _Flat:
        numbers = [number for number, _ in batch]
        titles = self._encoded(where, batch)
        eos = self._defaults.eos_ids
        # What transformers' tokenizers add to an answer: possibly its end, and the tokens forced before it.
        titles = [ids[:-1] if len(ids) > 1 and ids[-1] in eos else ids for ids in titles]
        forced = self._defaults.values.get("forced_bos_token_id")
        titles = [ids[1:] if len(ids) > 1 and ids[0] == forced else ids for ids in titles]
        lengths = np.fromiter(map(len, titles), dtype=np.int64, count=len(titles))
        if not lengths.all():
            line = numbers[int(np.argmin(lengths))]
            raise ConfigError(f"{where}, line {line}: the title is empty: it has no tokens.")
        longest = int(lengths.argmax())
        room = self._info.max_model_len - 2  # a token before the answer, and the end after it
        if lengths[longest] > room:
            raise ConfigError(
                f"{where}, line {numbers[longest]}: the title has {lengths[longest]} tokens, but at most {room} fit "
                f"(max_model_len is {self._info.max_model_len}). Shorten it, or raise --max-model-len."
            )
        found = [token for ids in titles for token in ids]
        try:
            wide = np.array(found, dtype=np.int64)
        except OverflowError:
            wide = np.array([min(max(token, -1), 2**62) for token in found], dtype=np.int64)
        flat = _Flat(wide.astype(np.int32), lengths, np.array(numbers, dtype=np.int64))
        vocab_size = self._info.vocab_size
        outside = (wide < 0) | (wide >= vocab_size)
        if outside.any():
            place = int(outside.argmax())
            raise ConfigError(
                f"{where}, line {flat.line_of(place)}: token id {brief(found[place])} is outside the vocabulary, "
                f"which has ids 0 to {vocab_size - 1}."
            )
        ends = np.isin(flat.ids, list(eos))
        if ends.any():
            place = int(ends.argmax())
            raise ConfigError(
                f"{where}, line {flat.line_of(place)}: the title contains token {found[place]}, which ends answers; "
                f"it is allowed at the end only."
            )
        return flat

    def _encoded(self, where: str, batch: Sequence[tuple[int, Title]]) -> list[list[int]]:
        texts = [title for _, title in batch if isinstance(title, str)]
        if not texts:
            return [title for _, title in batch if not isinstance(title, str)]
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
            if self._tokenizer is None:
                line = next(number for number, title in batch if isinstance(title, str))
                message = "the title is a text, and the model has no tokenizer (or skip_tokenizer_init is set)"
                raise ConfigError(f"{where}, line {line}: {message}. Use ids instead.")
            self._opening = self._find_opening(self._tokenizer)
        encoded = iter(self._tokenizer.encode_answers(texts))
        opening = self._opening
        return [[*opening, *next(encoded)] if isinstance(title, str) else title for _, title in batch]

    def _find_opening(self, tokenizer: Tokenizer) -> list[int]:
        """The tokens with which a model's answer begins before its text, as BART's begins with <s>: tokens that its
        tokenizer puts before texts, unless they are forced or the decoder's prompt holds them."""
        if self._info.max_encoder_len is None or self._defaults.values.get("forced_bos_token_id") is not None:
            return []
        framed, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
        before = framed[: len(framed) - len(plain)]
        while before and framed[len(before) : len(before) + len(plain)] != plain:
            before.pop()
        start = self._defaults.decoder_start_token_id
        return [token for token in before if token == tokenizer.bos_token_id and token != start]


def check_files(files: Mapping[str, str]) -> None:
    """Refuse files that cannot be read, before a model is loaded. Raises ConfigError: names the first such file."""
    for name, path in files.items():
        next(read_titles(name, path), None)
