"""Text between two others, for models trained to fill in the middle."""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine import SamplingParams
from engine.text.processor import Tokenizer
from server.answering.prompt import Prompt, Room, encode_fitting
from server.context import Service
from server.errors import ApiError

# Names that vocabularies give to the tokens before prefix, suffix and middle.
_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|fim▁begin|>", "<|fim▁hole|>", "<|fim▁end|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
_FILES = ("<|file_sep|>", "<file_sep>")
# Tokens besides the end of text with which a model ends the middle.
_ENDS = (
    *_FILES,
    "<|fim_pad|>",
    "<fim_pad>",
    "<|repo_name|>",
    "<repo_name>",
    "<reponame>",
    "▁<EOT>",
    "<EOT>",
    "<|cursor|>",
)


@dataclass(frozen=True, slots=True)
class Infilling:
    """The prompt format of a fill-in-the-middle model."""

    tokenizer: Tokenizer
    # prefix, suffix, middle: the tokens that open these parts
    prefix: int
    suffix: int
    middle: int
    file: int | None  # the token that opens another file; None if there is none
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> Infilling | None:
        """The format for a model with this tokenizer; None if the tokenizer lacks such tokens."""
        if tokenizer is None:
            return None
        for names in _TOKENS:
            prefix, suffix, middle = map(tokenizer.token_id, names)
            if prefix is not None and suffix is not None and middle is not None:
                files, ends = (
                    [found for found in map(tokenizer.token_id, some) if found is not None] for some in (_FILES, _ENDS)
                )
                return cls(tokenizer, prefix, suffix, middle, next(iter(files), None), tuple(ends))
        return None

    @classmethod
    def need(cls, service: Service, param: str) -> Infilling:
        """The format of the served model. Raises ApiError if the model has no such tokens."""
        found = cls.of(service.tokenizer)
        if found is None:
            message = (
                f"{service.model_id} cannot fill in the middle of a text: its tokenizer has no tokens for that, such "
                f"as {_TOKENS[0][0]}. Leave {param} out."
            )
            raise ApiError(400, message, param=param, code="unsupported_parameter")
        return found

    def ending(self, params: SamplingParams) -> SamplingParams:
        """The parameters for an answer that ends where the middle does."""
        return replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *self.ends])

    async def prompt_in_thread(
        self, before: str, after: str, room: Room, others: Sequence[tuple[str, str]] = ()
    ) -> Prompt:
        """Run `prompt` in a thread."""
        return await asyncio.to_thread(self.prompt, before, after, room, others)

    def prompt(self, before: str, after: str, room: Room, others: Sequence[tuple[str, str]] = ()) -> Prompt:
        """The prompt whose answer belongs between two texts. The texts are plain: a mark in them is text too. `others`:
        further files, by name. Raises ApiError if a text is too long."""

        def encode(text: str) -> list[int]:
            encoded = (self.tokenizer.encode(piece, add_special_tokens=False) for piece in self._pieces(text))
            return list(itertools.chain.from_iterable(encoded))

        opening = [token for token in self.tokenizer.encode("") if token != self.tokenizer.eos_token_id]
        ids = opening
        for name, text in others:
            head = f"{name}\n" if self.file is not None else f"\n\n--- {name} ---\n\n"
            ids += [*(() if self.file is None else (self.file,)), *encode_fitting(encode, f"{head}{text}\n", room)]
        ids += [self.prefix, *encode_fitting(encode, before, room)]
        ids += [self.suffix, *encode_fitting(encode, after, room), self.middle]
        return Prompt(ids)

    def _pieces(self, text: str) -> Iterator[str]:
        """The text, cut within each mark, so that no mark is read as a token. The tokenizers library can encode special
        tokens as text, but Qwen's marks are not special tokens."""
        begin = 0
        for found in _marks(self).finditer(text):
            middle = (found.start() + found.end()) // 2
            yield text[begin:middle]
            begin = middle
        yield text[begin:]


@functools.lru_cache(maxsize=4)
def _marks(infilling: Infilling) -> re.Pattern[str]:
    """A pattern for the texts that the tokenizer reads as an infilling mark or as a special token."""
    tokenizer = infilling.tokenizer
    ids = (infilling.prefix, infilling.suffix, infilling.middle, *infilling.ends)
    texts = {*map(tokenizer.written, ids), *tokenizer.special_texts().values()}
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))
