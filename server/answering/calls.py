"""Parses function calls in an answer while it is written."""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from server.answering.parts import CallPart, Part, TextPart

_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9  # the form that Mistral's templates require; others take any
_MAX_HEAD = 512  # maximum characters before a call's arguments
_SPACE = " \t\r\n"
_STRUCTURE = re.compile(r'["{}\[\],\s]|[^\w:.+-]')  # or characters that occur in JSON only within strings
_STRING_END = re.compile(r'["\\]')


def new_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))


class ToolCalls:
    """The calls of one answer: numbers and reports them."""

    def __init__(self, names: frozenset[str] | None = None, most: int | None = None):
        self._names = names  # functions that may be called; None for any
        self._most = most  # further calls are dropped
        self.count = 0

    @property
    def strict(self) -> bool:
        """strict: text counts as a call only if it clearly is one."""
        return self._names is not None

    def knows(self, name: str) -> bool:
        """Whether a call of that name is accepted."""
        return self._names is None or name in self._names

    def begin(self, name: str) -> ToolCalls.Open:
        index = self.count
        if self._most is not None and index >= self._most:
            return ToolCalls.Open(None, name)
        self.count += 1
        return ToolCalls.Open(index, name)

    class Open:
        """A call whose arguments are being written."""

        def __init__(self, index: int | None, name: str):
            self._index = index
            self._name: str | None = name
            self._has_arguments = False

        def told(self) -> Iterable[Part]:
            """Report the name, unless it has been reported."""
            if self._name is not None and self._index is not None:
                yield CallPart(self._index, new_id(), self._name)
            self._name = None

        def more(self, arguments: str) -> Iterable[Part]:
            if arguments and self._index is not None:
                self._has_arguments = True
                yield CallPart(self._index, arguments=arguments)

        def end(self) -> Iterable[Part]:
            """The call is complete; without arguments it gets an empty object."""
            yield from self.told()
            if not self._has_arguments:
                yield from self.more("{}")


def _beginning(text: str, mark: str) -> int:
    """The number of characters at the end of the text that may begin a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


class _MalformedError(Exception):
    """The text is not a call."""


class _Value:
    """Follows one JSON value to its end without interpreting it."""

    def __init__(self) -> None:
        self.broken = False
        self._depth = 0
        self._in_string = self._escaped = self._began = False

    def end(self, text: str, at: int) -> int | None:
        """The end index of the value that begins at `at`; None if the text ends within it."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_STRING_END if self._in_string else _STRUCTURE).search(text, at)
            if found is None:
                self._began = True
                return None
            place, sign = found.start(), found.group()
            self._began = self._began or place > at
            if self._in_string:
                at = place + 1
                self._escaped = sign == "\\"
                self._in_string = self._escaped
                if sign == '"' and not self._depth:
                    return at
                continue
            if not self._depth and self._began and sign not in '"{[':
                return place  # a number or a word ends before the next character
            if sign not in '"{}[],' and not sign.isspace():
                self.broken = True
                return place
            at = place + 1
            if sign == '"':
                self._in_string = self._began = True
            elif sign in "{[":
                self._depth += 1
                self._began = True
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return None


class Region(ABC):
    """A part of an answer that should contain calls, parsed while it is written.

    It ends with its closing mark, unless the mark is within a string. If no call has begun in it, everything is text,
    including the marks. Within or after a reported call, anything that is neither call nor text is dropped. `closing`:
    the mark that ends it; None if it extends to the end of the answer and anything after calls is text.
    """

    def __init__(self, calls: ToolCalls, opening: str, closing: str | None):
        self._calls = calls
        self._closing = closing
        self._raw = opening  # all text since the last call; shown if it turns out to be no call
        self._failed = self._left_out = False  # the rest is text or dropped
        self._told = False  # the call being written
        self.ended = False  # whether the closing mark was read
        self.rest = ""

    def feed(self, text: str) -> Iterable[Part]:
        if not self._told and not self._failed:
            self._raw += text
        self.rest += text
        if not self._failed:
            try:
                yield from self._read()
            except _MalformedError:
                yield from self._fail()
        if self._failed or self._is_between():
            yield from self._look_for_end()

    def close(self) -> Iterable[Part]:
        """The answer ended within this part."""
        if self._failed:
            if self.rest and not self._left_out:
                yield TextPart(self.rest)
        elif self._told:
            yield from self._cut()
        elif not self._is_between():
            if not self._calls.count:  # after calls, it begins another one
                yield TextPart(self._raw)
        elif self._closing is None and self.rest.strip():
            yield TextPart(self.rest)

    def _fail(self) -> Iterable[Part]:
        """Treat the rest as text, or drop it."""
        self._failed = True
        self._left_out = self._told or (self._closing is not None and self._is_between())
        if self._told:
            yield from self._cut()
        elif not self._left_out:
            self.rest = self._raw
        self._raw = ""

    def _look_for_end(self) -> Iterable[Part]:
        shown, at = self._failed and not self._left_out, -1
        if self._closing is not None:
            at = self.rest.find(self._closing)
            self.ended = at >= 0
        if self.ended:
            end = at + len(self._closing or "")
            said, self.rest = self.rest[:end], self.rest[end:]
        elif self._failed:
            kept = _beginning(self.rest, self._closing or "")
            said, self.rest = self.rest[: len(self.rest) - kept], self.rest[len(self.rest) - kept :]
        else:
            said = ""
        if shown and said:
            yield TextPart(said)

    def _call_ended(self) -> None:
        self._raw, self._told = self.rest, False

    @abstractmethod
    def _read(self) -> Iterable[Part]:
        """Consume the unambiguous part of `rest`."""

    @abstractmethod
    def _is_between(self) -> bool:
        """Whether a call has been read and no other has begun since."""

    @abstractmethod
    def _cut(self) -> Iterable[Part]:
        """The answer ended within a reported call."""


class ObjectCalls(Region):
    """JSON objects with a name and arguments: one, several, or a list."""

    def __init__(self, calls: ToolCalls, opening: str, closing: str | None):
        super().__init__(calls, opening, closing)
        self._step: Callable[[], Iterable[Part] | None] = self._separators
        self._one = False  # a call has been read

    def _is_between(self) -> bool:
        return self._one and self._step == self._separators

    def _cut(self) -> Iterable[Part]:
        return self._open.end() if self._open is not None and not self._has_arguments else ()

    def _read(self) -> Iterable[Part]:
        while (parts := self._step()) is not None:
            yield from parts

    def _skip(self, signs: str) -> bool:
        self.rest = self.rest.lstrip(signs)
        return bool(self.rest)

    def _take(self, sign: str) -> None:
        if not self.rest.startswith(sign):
            raise _MalformedError
        self.rest = self.rest[1:]

    # Each step returns its parts, or None if it needs more text.

    def _separators(self) -> Iterable[Part] | None:
        # Small models write one brace too many.
        if not self._skip(_SPACE + ("[],;}" if self._one else "[")):
            return None
        if self._one:
            self._raw = self.rest
        self._take("{")
        self._name: str | None = None
        self._early = ""  # arguments that came before the name
        self._open: ToolCalls.Open | None = None
        self._has_arguments = self._complete = False
        self._step = self._key
        return ()

    def _key(self) -> Iterable[Part] | None:
        if not self._skip(_SPACE + ","):
            return None
        if self.rest.startswith("}"):
            return self._end_object()
        key = self._string()
        if key is None:
            return None
        self._current = key
        self._step = self._colon
        return ()

    def _colon(self) -> Iterable[Part] | None:
        if not self._skip(_SPACE):
            return None
        self._take(":")
        self._step = self._value
        return ()

    def _value(self) -> Iterable[Part] | None:
        if not self._skip(_SPACE):
            return None
        if self._current == "name":
            name = self._string()
            if name is None:
                return None
            if not name or not self._calls.knows(name):
                raise _MalformedError
            self._name, self._step = name, self._key
            return self._tell(self._early) if self._has_arguments else ()
        self._span_reader, self._seen = _Value(), 0
        if self._current in ("arguments", "parameters") and not self._has_arguments:
            self._step = self._arguments if self.rest[0] in "{[" else self._scalar
            self._has_arguments = self._step == self._arguments
        elif self._current in ("type", "id", "arguments", "parameters") or not self._calls.strict:
            self._step = self._other
        else:
            raise _MalformedError
        return ()

    def _other(self) -> Iterable[Part] | None:
        """A value without meaning here."""
        return None if self._span() is None else ()

    def _scalar(self) -> Iterable[Part] | None:
        """Take arguments that are null or a string that contains JSON, as some models write them."""
        end = self._span_reader.end(self.rest, self._seen)
        if self._span_reader.broken:
            raise _MalformedError
        if end is None:
            self._seen = len(self.rest)
            return None
        text, self.rest = self.rest[:end], self.rest[end:]
        if text.startswith('"'):
            text = _decoded(text)
        self._has_arguments, self._step = True, self._key
        return self._more("{}" if text.strip() in ("", "null") else text)

    def _arguments(self) -> Iterable[Part] | None:
        before = len(self.rest)
        text = self._span()
        if text is not None:
            return self._more(text)
        if not before:
            return None
        text, self.rest = self.rest, ""
        return self._more(text)

    def _span(self) -> str | None:
        """The rest of the value, if it ends here. Otherwise nothing is consumed, and the state is kept for the next
        call."""
        end = self._span_reader.end(self.rest, 0)
        if end is None:
            if self._step == self._other:
                self.rest = ""
            return None
        text, self.rest = self.rest[:end], self.rest[end:]
        self._step = self._malformed if self._span_reader.broken else self._key
        return text

    def _malformed(self) -> Iterable[Part] | None:
        raise _MalformedError

    def _string(self) -> str | None:
        if not self.rest.startswith('"'):
            raise _MalformedError
        end = _Value().end(self.rest, 0)
        if (len(self.rest) if end is None else end) > _MAX_HEAD:
            raise _MalformedError  # names are shorter than this
        if end is None:
            return None
        text, self.rest = self.rest[:end], self.rest[end:]
        return _decoded(text)

    def _more(self, arguments: str) -> Iterable[Part]:
        if self._name is None:
            self._early += arguments
            return ()
        return self._tell(arguments)

    def _tell(self, arguments: str) -> Iterable[Part]:
        assert self._name is not None
        if self._open is None:
            self._open = self._calls.begin(self._name)
        self._told = True
        return [*self._open.told(), *self._open.more(arguments)]

    def _end_object(self) -> Iterable[Part]:
        if self._name is None:
            raise _MalformedError
        self.rest = self.rest[1:]
        parts = [*self._tell("")]
        assert self._open is not None
        parts += self._open.end()
        self._step, self._one = self._separators, True
        self._call_ended()
        return parts


def _decoded(text: str) -> str:
    try:
        decoded = json.loads(text, strict=False)
    except ValueError:
        raise _MalformedError from None
    assert isinstance(decoded, str)
    return decoded


class NamedCalls(Region):
    """A name between marks, then the arguments as a JSON value; one such call or several. `head`: the pattern before
    the arguments, with the group `name`."""

    def __init__(self, calls: ToolCalls, opening: str, closing: str | None, head: re.Pattern[str]):
        super().__init__(calls, opening, closing)
        self._head = head
        self._open: ToolCalls.Open | None = None
        self._began = self._one = False

    def _is_between(self) -> bool:
        return self._one and self._open is None

    def _cut(self) -> Iterable[Part]:
        assert self._open is not None
        return () if self._began else self._open.end()

    def _read(self) -> Iterable[Part]:
        while True:
            if self._open is None and not self._find_name():
                return
            assert self._open is not None
            yield from self._open.told()
            if not self._began:
                self.rest = self.rest.lstrip()
            if not self.rest:
                return
            self._began = True
            end = self._value.end(self.rest, 0)
            yield from self._open.more(self.rest[:end])
            self.rest = "" if end is None else self.rest[end:]
            if self._value.broken:
                raise _MalformedError
            if end is None:
                return
            self._open, self._one = None, True
            self._call_ended()

    def _find_name(self) -> bool:
        text = self.rest.lstrip()
        found = self._head.match(text)
        if found is None:
            if len(text) > _MAX_HEAD or (not self._one and self._closing and self._closing in text):
                raise _MalformedError
            return False
        if not self._calls.knows(found["name"]):
            raise _MalformedError
        self.rest = text[found.end() :]
        self._open, self._value, self._began, self._told = self._calls.begin(found["name"]), _Value(), False, True
        return True
