"""DRY's breakers as tokens, including texts that begin or end within a token."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from engine.errors import InvalidRequestError
from engine.interface.dry import DEFAULT_BREAKERS, Breakers
from engine.text.tokenizer import Tokenizer

MOST_CACHED = 32  # sets of breakers, each with up to some thousand tokens
MOST_FOLLOWING = 20  # tokens of a breaker after the one in which it begins, as in llama.cpp
# Placed in front of a text that is to be tokenised as a continuation.
_BEFORE = "\x02"


class BreakerTokens:
    """The breakers of a model's requests; each set is looked up once. `tokenizer`: returns the model's tokenizer, or
    None if there is none; called when the first set arrives."""

    def __init__(self, tokenizer: Callable[[], Tokenizer | None], vocab_size: int):
        self._load, self._vocab_size = tokenizer, vocab_size
        self._vocabulary: _Pieces | None = None
        self._known: OrderedDict[frozenset[str], Breakers] = OrderedDict()
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None

    def get(self, texts: Sequence[str] | None) -> Breakers:
        """Texts, or the default breakers, as tokens. Raises InvalidRequestError if the model has no tokenizer."""
        wanted = frozenset(DEFAULT_BREAKERS if texts is None else texts)
        with self._lock:
            found = self._known.get(wanted)
            if found is not None:
                self._known.move_to_end(wanted)
                return found
        found = self._look_up(wanted)
        with self._lock:
            self._known[wanted] = found
            while len(self._known) > MOST_CACHED:
                self._known.popitem(last=False)
        return found

    def begin(self, texts: Sequence[str] | None) -> Future[Breakers] | None:
        """Look texts up on a thread; None if that is done already."""
        wanted = frozenset(DEFAULT_BREAKERS if texts is None else texts)
        with self._lock:
            if wanted in self._known:
                return None
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="octavo-breakers")
            return self._worker.submit(self.get, texts)

    def _look_up(self, texts: frozenset[str]) -> Breakers:
        if not texts:
            return Breakers()
        if self._vocabulary is None:
            tokenizer = self._load()
            if tokenizer is None:
                raise InvalidRequestError(
                    "dry_multiplier needs a tokenizer for dry_sequence_breakers, but this model has none. Send "
                    "dry_sequence_breakers: [] to use none.",
                    param="dry_sequence_breakers",
                    code="unsupported_parameter",
                )
            self._vocabulary = _Pieces(tokenizer, self._vocab_size)
        return self._vocabulary.breakers(texts)


class _Pieces:
    """The text that each token adds. Special tokens add the text that stands for them."""

    def __init__(self, tokenizer: Tokenizer, size: int):
        self._tokenizer = tokenizer
        self._of = [piece or b"" for piece in tokenizer.all_token_bytes(size)]
        for token, text in tokenizer.special_texts().items():
            if token < size:
                self._of[token] = text.encode()
        self._by_end: defaultdict[int, list[int]] = defaultdict(list)
        for token, piece in enumerate(self._of):
            if piece:
                self._by_end[piece[-1]].append(token)

    def breakers(self, texts: Iterable[str]) -> Breakers:
        """The breakers of some texts, as in llama.cpp. Two kinds of tokens break a sequence: a token that contains a
        text, and a token that ends with the text's beginning, if the tokens of the rest follow."""
        tails: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
        for text in sorted(texts):
            whole = text.encode()
            for token, piece in enumerate(self._of):
                if whole in piece:
                    tails[token].add(())
            for cut in range(1, len(text)):
                begun = text[:cut].encode()
                ending = [token for token in self._by_end[begun[-1]] if self._of[token].endswith(begun)]
                if ending:
                    rest = tuple(self._going_on(text[cut:])[:MOST_FOLLOWING])
                    for token in ending:
                        tails[token].add(rest)
        return Breakers(
            {token: tuple(sorted(rests)) for token, rests in tails.items()},
            max((len(rest) for rests in tails.values() for rest in rests), default=0),
        )

    def _going_on(self, text: str) -> list[int]:
        """The tokens of a text in the middle of another text."""
        before = self._tokenizer.encode(_BEFORE, add_special_tokens=False)
        ids = self._tokenizer.encode(_BEFORE + text, add_special_tokens=False)
        if ids[: len(before)] == before:
            return ids[len(before) :]
        return self._tokenizer.encode(text, add_special_tokens=False)
