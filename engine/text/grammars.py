"""Compiled formats of answers: the constraints for structured output, with llguidance.

llguidance reads JSON schemas, regular expressions and Lark grammars, and says which tokens may come next: a few
microseconds a token for most grammars. It is imported for the first grammar; the engine runs without it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from engine.errors import InvalidRequestError, OctavoError
from engine.host.resident import give_back
from engine.interface.constraints import Constraint
from engine.interface.sampling_table import MaskRow, Masks
from engine.interface.structured import StructuredOutputsParams
from engine.text.gbnf import gbnf_to_lark, is_gbnf
from engine.text.schemas import MOST_EXACT, narrow, overlapping, place_of, rounded_number
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import Vocabulary

logger = logging.getLogger("octavo.grammar")

# Bytes per token of a vocabulary that the preparation of grammars takes (its tokenizer, llguidance's trees), bytes that
# it may always take at start, and its largest share of the weights and of the free memory.
BYTES_PER_TOKEN, LITTLE_MEMORY = 1000, 64_000_000
SHARE_OF_WEIGHTS, SHARE_OF_FREE = 1 / 4, 1 / 32

MOST_CACHED = 32  # grammars: one may take megabytes, with the states that its answers have reached
DEFAULT_WHITESPACE = r"[\x20\x0A\x09]{1,32}"  # without an end token a model may continue forever
_WALK = 48  # bytes with which a trial of a grammar begins an answer: one with small letters, one with capitals
# The limits on a grammar's cost: a state takes about 2 kB, and a millisecond takes 14,000 units of fuel. Schemas with
# many optional properties need large rows; grammars from clients may be ambiguous, and then take the square of these
# values.
LIMITS = {"max_lexer_states": 25_000, "step_lexer_fuel": 100_000, "verbose_errors": False}
LARK_LIMITS = LIMITS | {"max_items_in_row": 300, "step_max_items": 5_000}
# llguidance's message when one of these is exceeded, and the message for the client.
_EXCEEDED = (
    (
        re.compile(r"Current row has (\d+) items; max is (\d+)"),
        "it allows {0} continuations at one place, and the limit is {1}. Make properties required, or use fewer "
        "properties, tools, alternatives or optional parts there.",
    ),
    (
        re.compile(r"Too many items \(limit (\d+)"),
        "it is too ambiguous: one token takes more than the limit of {0} parser items. Use longer literals, or "
        "fewer alternatives that may begin alike.",
    ),
    (
        re.compile(r"too many states: \d+ >= (\d+)"),
        "its texts and patterns need more than the limit of {0} lexer states. Use shorter patterns, or lower limits of "
        "length.",
    ),
    (
        re.compile(r"too many expressions constructed"),
        f"its texts and patterns take more than the limit of {LIMITS['step_lexer_fuel']} lexer steps for a token. Use "
        "shorter patterns, or lower limits of length.",
    ),
)
# Seconds that a request's masks may take in one step, and in all slow steps together.
STEP_LIMIT, TOTAL_LIMIT = 0.03, 0.25
_FEW = 4  # answers of a request whose masks are filled together with other requests'
_SLOW = 0.005  # seconds from which a mask counts as slow
# With up to this many threads, the caller fills the masks alone: waking others takes longer than they save while the
# threads of the forward pass still look for work.
FEW_THREADS = 2


def _llguidance() -> Any:
    """The library. Raises InvalidRequestError: llguidance is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequestError(
            "structured output needs the package llguidance, which is not installed on the server: pip install "
            "llguidance.",
            param="structured_outputs",
            code="unsupported_parameter",
        ) from error
    return llguidance


def _refused(
    params: StructuredOutputsParams, problem: str, place: tuple[str, str] | None = None
) -> InvalidRequestError:
    name = params.kind
    where = "" if place is None else f' (keyword "{place[0]}" at {place[1]})'
    what = {"json": "the JSON schema", "grammar": "the grammar", "regex": "the regular expression"}.get(name, name)
    message = f"{what} cannot be used{where}: {plain(problem)}"
    return InvalidRequestError(message, param=f"structured_outputs.{name}", code="invalid_grammar")


def plain(problem: str) -> str:
    """An error message from llguidance, on one line. Messages about limits say what to change."""
    for pattern, words in _EXCEEDED:
        if found := pattern.search(problem):
            return words.format(*found.groups())
    return " ".join(problem.replace("<non-verbose/>", "").split())


def grammar_text(params: StructuredOutputsParams, *, may_open_with_space: bool = False, may_force: bool = True) -> str:
    """A request's grammar in the form that llguidance reads. Raises InvalidRequestError if the grammar cannot be read,
    or would allow too much.

    Args:
        may_open_with_space: whether an answer may begin with a space that is not part of its text.
        may_force: whether forced text uses the tokenizer's own tokens rather than any tokens.
    """
    parts: dict[str, dict[str, Any]] = {}
    kind = params.kind
    if kind == "json":
        top = _add_schema(parts, "json", json.loads(str(params.json)), params)
    elif kind == "json_object":
        top = _add_schema(parts, "json", {"type": "object"}, params)
    elif kind == "structural_tag":
        top = _add_tags(parts, params)
    elif kind == "regex":
        made = json.loads(_llguidance().LLMatcher.grammar_from_regex(str(params.regex)))
        top = _add_lark(parts, "regex", made["grammars"][0]["lark_grammar"])
    elif kind == "choice":
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice or ())
        top = _add_lark(parts, "choice", f"start: {choices}")
    else:
        text = str(params.grammar)
        if is_gbnf(text):
            try:
                text = gbnf_to_lark(text)
            except ValueError as problem:
                raise _refused(params, f"{problem}.") from problem
        top = _add_lark(parts, "lark", text)
    if params.around is not None:
        _add_lark(parts, "answer", f"start: @{top}")
        top = _add_lark(parts, "around", params.around)
    if may_open_with_space or not may_force:
        header = "" if may_force else '%llguidance {"no_forcing": true}\n'
        opening = '" "? ' if may_open_with_space else ""
        parts["opening"] = {"lark_grammar": f"{header}start: {opening}@{top}"}
        top = "opening"
    ordered = [top, *(name for name in parts if name != top)]
    return json.dumps({"grammars": [{"name": name, **parts[name]} for name in ordered]})


def limits_of(library: Any, params: StructuredOutputsParams) -> Any:
    """The limits on a grammar's cost, in llguidance's form."""
    return library.LLParserLimits(**(LARK_LIMITS if params.kind == "grammar" else LIMITS))


def _add_lark(parts: dict[str, dict[str, Any]], name: str, text: str) -> str:
    parts[name] = {"lark_grammar": text}
    return name


def _add_schema(parts: dict[str, dict[str, Any]], name: str, schema: Any, params: StructuredOutputsParams) -> str:
    if schema is False:
        raise _refused(params, "it allows no value.", ("false", "#"))
    schema = {} if schema is True else {key: value for key, value in schema.items() if key != "x-guidance"}
    if (path := overlapping(schema)) is not None:
        raise _refused(
            params,
            "two of its schemas may match the same value. Use anyOf, or give each schema a required property with a "
            "different const.",
            ("oneOf", path.removesuffix("/oneOf")),
        )
    narrow(schema)
    if (found := rounded_number(schema)) is not None:
        keyword, path, number = found
        raise _refused(
            params,
            f"{number} is beyond {MOST_EXACT} (2**53 - 1), and larger numbers are not exact. Use a string with an "
            f"enum or a pattern.",
            (keyword, path),
        )
    options: dict[str, Any] = {"coerce_one_of": True, "lenient": False}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or DEFAULT_WHITESPACE
    parts[name] = {"json_schema": {**schema, "x-guidance": options}}
    return name


def _add_tags(parts: dict[str, dict[str, Any]], params: StructuredOutputsParams) -> str:
    """Free text with tags in it: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    given = json.loads(str(params.structural_tag))
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise _refused(params, 'it must have "structures" and "triggers", both non-empty lists.')
    names = [f"tag_{number}" for number in range(len(structures))]
    lines = [f"start: ({' | '.join(names)})* free", "free: TEXT", r"TEXT: /(.|\n)*/"]
    for name, tag in zip(names, structures, strict=True):
        begin, end, schema = (
            (tag.get(key) for key in ("begin", "end", "schema")) if isinstance(tag, dict) else [None] * 3
        )
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict | bool):
            raise _refused(params, 'each of its structures must have "begin" and "end", texts, and "schema".')
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None:
            raise _refused(params, f"no trigger is a prefix of {begin!r}.")
        _add_schema(parts, f"schema_{name}", schema, params)
        before, after = _quoted(begin.removeprefix(trigger)), _quoted(end)
        lines += [
            f"{name}_trigger[lazy]: TEXT {_quoted(trigger)}",
            f"{name}: {name}_trigger {before} @schema_{name} {after}",
        ]
    return _add_lark(parts, "tags", "\n".join(lines))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _check_compiled(params: StructuredOutputsParams, matcher: Any) -> None:
    problem: str = matcher.get_error()
    if problem:
        place = None
        if params.kind == "json":
            place = place_of(json.loads(str(params.json)), problem)
        raise _refused(params, problem, place)


class Trial:
    """Compiles grammars without a model, for a process that may be ended when this takes too long."""

    def __init__(self) -> None:
        library = _llguidance()
        self._library = library
        self._tokens = single_bytes(library)

    def check(self, params: StructuredOutputsParams) -> None:
        """Compile a grammar, and begin an answer. Raises InvalidRequestError if the grammar cannot be used."""
        text, limits = grammar_text(params), limits_of(self._library, params)
        # Special tokens are not known here; only the model's tokenizer can check a grammar that names some.
        failed, messages = self._library.LLMatcher.validate_grammar_with_warnings(text, limits=limits)
        if failed:
            place = place_of(json.loads(str(params.json)), messages[0]) if params.kind == "json" else None
            raise _refused(params, messages[0], place)
        if any("no tokenizer" in message for message in messages):
            return
        first = self._library.LLMatcher(self._tokens, text, limits=limits, log_level=0)
        _check_compiled(params, first)
        for choose in (min, max):
            matcher = first.deep_copy()
            for _ in range(_WALK):
                mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
                allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:256]).tolist()
                if matcher.is_stopped() or not allowed:
                    break
                matcher.consume_token(choose([byte for byte in allowed if 32 < byte < 127] or allowed))
            _check_compiled(params, matcher)


def single_bytes(library: Any) -> Any:
    """llguidance's view of a vocabulary of single bytes, in which each token is a byte's value and 256 ends answers."""
    return library.LLTokenizer(library.TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=[256])


class _Bytes:
    """A vocabulary of single bytes."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self) -> None:
        self.tokens = [*(bytes([value]) for value in range(255)), b"", b"</s>"]
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class _Watch:
    """Measures the computing time since it was created, in seconds: wall-clock time, but at most the process's
    processor time, so that a grammar is not blamed for the machine's pauses."""

    __slots__ = ("_began", "_worked")

    def __init__(self) -> None:
        self._began, self._worked = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        passed = time.perf_counter() - self._began
        return passed if passed <= _SLOW else min(passed, time.process_time() - self._worked)


class _Meter:
    """Seconds that the answers of a request have taken; only slow ones count.

    Attributes:
        is_slow: whether the last masks took long, or those of another request filled with them.
        takes_long: whether a token has ever taken long, so that others are timed.
    """

    __slots__ = ("is_slow", "seconds", "takes_long")

    def __init__(self) -> None:
        self.is_slow, self.takes_long, self.seconds = False, False, 0.0

    def took_too_long(self, seconds: float) -> bool:
        """Add this time; returns whether the limit is exceeded."""
        if seconds > _SLOW:
            self.seconds += seconds
        return self.seconds > TOTAL_LIMIT


def _compute(rows: Sequence[tuple[GrammarConstraint, int]], masks: Masks) -> None:
    """Fill rows of masks. llguidance's own functions for this require int32."""
    pool, first, size = rows[0][0]._pool, masks.ctypes.data, masks.shape[1] * masks.itemsize
    if pool is None:
        for one, place in rows:
            one._matcher.unsafe_compute_mask_ptr(first + place * size, size)
    else:
        pool.unsafe_compute_mask_ptr([(one._matcher, place) for one, place in rows], first, size, len(masks))
    for one, place in rows:
        if one._matcher.is_error():
            one._note()
            masks[place] = 0  # llguidance would end the answer here


class GrammarConstraint:
    """The state of one answer within a grammar.

    Args:
        matcher: the llguidance matcher, which only this constraint uses.
        vocab_size: number of tokens of the model.
        pool: fills masks of several answers at a time; None: they are filled one after the other.
        meter: measures the request's answers; None: a new meter.

    Attributes:
        problem: why the answer cannot continue, because the grammar takes too much; None while it can.
    """

    __slots__ = ("_matcher", "_meter", "_pool", "problem", "vocab_size")

    def __init__(
        self, matcher: Any, vocab_size: int, pool: Any, meter: _Meter | None = None, problem: str | None = None
    ):
        self._matcher, self.vocab_size, self._pool = matcher, vocab_size, pool
        self._meter, self.problem = meter or _Meter(), problem

    @property
    def is_complete(self) -> bool:
        """Whether only the end of the answer may follow."""
        return self.problem is None and bool(self._matcher.is_stopped())

    def accept(self, token: int) -> None:
        """Advance the answer by this token."""
        if self.problem is not None:
            return
        meter, began = self._meter, time.perf_counter()
        watch = _Watch() if meter.takes_long else None  # reading the clock takes as long as most tokens
        if not self._matcher.consume_token(token):
            self._note()
        elif watch is not None and meter.took_too_long(watch.seconds()):
            self._give_up()
        elif time.perf_counter() - began > _SLOW:
            meter.takes_long = True

    def fill(self, mask_row: MaskRow) -> None:
        """Write which tokens may come next."""
        self.fill_together([self], [0], mask_row[None])

    @staticmethod
    def fill_together(constraints: Sequence[Constraint], places: Sequence[int], masks: Masks) -> None:
        """`fill` for several constraints at once. Requests with many answers, or whose masks were slow before, are
        filled one after the other, so that none takes more than its share of time."""
        alone: dict[_Meter, list[tuple[GrammarConstraint, int]]] = {}
        for one, place in zip(constraints, places, strict=True):
            if isinstance(one, GrammarConstraint) and one.problem is None:
                alone.setdefault(one._meter, []).append((one, place))
        together: list[tuple[GrammarConstraint, int]] = []
        for meter, rows in list(alone.items()):
            if len(rows) <= _FEW and not meter.is_slow:
                together += alone.pop(meter)
        watch = _Watch()
        if together:
            _compute(together, masks)
        if watch.seconds() > 2 * _SLOW:
            for one, _ in together:
                one._meter.is_slow = True
        for meter, rows in alone.items():
            watch = _Watch()
            for start in range(0, len(rows), _FEW):
                if watch.seconds() > STEP_LIMIT:
                    for one, _ in rows[start:]:
                        one._give_up()
                    break
                _compute(rows[start : start + _FEW], masks)
            meter.is_slow = (taken := watch.seconds()) > _SLOW
            if meter.took_too_long(taken):
                for one, place in rows:
                    one._give_up()
                    masks[place] = 0

    def forced(self) -> Sequence[int]:
        """The next tokens, as long as only one token is possible."""
        if self.problem is not None or self._matcher.is_stopped():
            return ()
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def fork(self) -> GrammarConstraint:
        """A copy of the state that advances independently."""
        return GrammarConstraint(self._matcher.deep_copy(), self.vocab_size, self._pool, self._meter, self.problem)

    def begun(self) -> GrammarConstraint:
        """The same state for another request."""
        return GrammarConstraint(self._matcher.deep_copy(), self.vocab_size, self._pool)

    def _give_up(self) -> None:
        self.problem = "the grammar takes too long to apply; simplify it"
        logger.warning("%s", self.problem)

    def _note(self) -> None:
        self.problem = f"the grammar cannot be applied any further: {plain(self._matcher.get_error())}"
        logger.warning("%s", self.problem)


def prepared_bytes(vocab_size: int) -> int:
    """About the memory that the preparation of grammars takes."""
    return vocab_size * BYTES_PER_TOKEN


def are_prepared_early(vocab_size: int, weights: int, free: int) -> bool:
    """Whether grammars are prepared at start, because they take little beside the bytes of the weights or the free
    ones."""
    return prepared_bytes(vocab_size) <= max(LITTLE_MEMORY, weights * SHARE_OF_WEIGHTS, free * SHARE_OF_FREE)


class Grammars:
    """The grammars of a model's requests, each compiled once.

    Args:
        tokenizer: returns the model's tokenizer, or None if there is none; called when the first grammar arrives.
        vocab_size: number of tokens of the model.
        eos_ids: tokens that end its answers.
        opens_texts: whether answers are separate texts and do not continue one (encoder-decoder models).
        threads: number of threads that fill masks.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer | None],
        vocab_size: int,
        eos_ids: frozenset[int],
        *,
        opens_texts: bool,
        threads: int,
    ):
        self._load, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)
        self._opens_texts, self._threads = opens_texts, threads
        self._ready: _Ready | None = None
        self._warmed = False
        self._compiled: OrderedDict[StructuredOutputsParams, GrammarConstraint] = OrderedDict()
        self._pending: dict[StructuredOutputsParams, Future[GrammarConstraint]] = {}
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None

    def get(self, params: StructuredOutputsParams) -> GrammarConstraint:
        """The initial state of a grammar for a request; compiles the grammar if necessary. Raises InvalidRequestError
        if the grammar cannot be used, or this model cannot use grammars."""
        with self._lock:
            found = self._compiled.get(params)
            if found is not None:
                self._compiled.move_to_end(params)
                return found.begun()
        made = self._compile(params)
        with self._lock:
            self._compiled[params] = made
            while len(self._compiled) > MOST_CACHED:
                self._compiled.popitem(last=False)
        return made.begun()

    def begin(self, params: StructuredOutputsParams) -> Future[GrammarConstraint] | None:
        """Compile a grammar on a thread; None if it is compiled already."""
        with self._lock:
            return None if params in self._compiled else self._thread().submit(self.get, params)

    def warm(self) -> None:
        """Prepare on a thread what all grammars share, unless this is done or has been tried."""
        with self._lock:
            if not self._warmed:
                self._warmed = True
                self._thread().submit(self._warm)

    def _warm(self) -> None:
        try:
            if self._ready is None:
                self._prepare(_llguidance())
        except OctavoError as problem:  # a request with a grammar reports this error
            logger.debug("no grammars: %s", problem)

    def _thread(self) -> ThreadPoolExecutor:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar")
        return self._worker

    def _compile(self, params: StructuredOutputsParams) -> GrammarConstraint:
        library = _llguidance()
        ready = self._ready or self._prepare(library)
        text = grammar_text(params, may_open_with_space=ready.may_open_with_space, may_force=ready.may_force)
        matcher = library.LLMatcher(ready.tokens, text, limits=limits_of(library, params), log_level=0)
        _check_compiled(params, matcher)
        return GrammarConstraint(matcher, self._vocab_size, ready.pool)

    def _prepare(self, library: Any) -> _Ready:
        """Prepare what all grammars of the model share. Large vocabularies take a second or two."""
        tokenizer = self._load()
        if tokenizer is None or not self._eos_ids:
            lack = "tokenizer" if tokenizer is None else "token that ends answers (eos_token_id)"
            raise InvalidRequestError(
                f"structured output needs a {lack}, but this model has none.",
                param="structured_outputs",
                code="unsupported_parameter",
            )
        vocabulary = Vocabulary(tokenizer, self._vocab_size, self._eos_ids)
        self._ready = _Ready(
            tokens=library.LLTokenizer(
                library.TokenizerWrapper(vocabulary), n_vocab=self._vocab_size, eos_token=self._eos_ids
            ),
            pool=library.LLExecutor(self._threads) if self._threads > FEW_THREADS else None,
            may_open_with_space=self._opens_texts and vocabulary.opens_without_space,
            may_force=vocabulary.writes_all,
        )
        vocabulary.tokens.clear()
        give_back()
        return self._ready


class _Ready:
    """The facts about a model that llguidance needs."""

    def __init__(self, tokens: Any, pool: Any, *, may_open_with_space: bool, may_force: bool):
        self.tokens, self.pool = tokens, pool
        self.may_open_with_space, self.may_force = may_open_with_space, may_force
