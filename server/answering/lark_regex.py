"""Converts a Lark grammar without recursive rules to one regular expression.

A custom tool's input is in a JSON string, as an argument of a function. llguidance can constrain such a string by a
regular expression but not by a grammar, because it would need each terminal's form within the string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.text.grammar_tokens import grammar_tokens

_MOST_CHARACTERS = 50_000  # maximum characters of the grammar, and of an expanded rule
_MOST_IN_ALL = 1_000_000  # maximum total characters of all expanded rules, each counted as often as its name occurs
_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f]+ | //[^\n]* | \n(?=[ \t\r\f]*(?:\||//|\n)))   # a rule goes on where a line begins with |
    | (?P<line>\n)
    | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
    | (?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imslux]*)
    | (?P<range>\.\.)
    | (?P<name>[?!]?[_a-zA-Z]\w*)
    | (?P<number>-?[0-9]+)
    | (?P<sign>->|[:|()\[\]?*+~.%])
    """,
    re.VERBOSE,
)
_COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)", "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[a-zA-Z]", "WORD": "[a-zA-Z]+",
    "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*", "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}  # fmt: skip

Token = tuple[str, str]  # its kind and text


def lark_to_regex(grammar: str) -> str:
    """The regular expression that matches the same texts as the grammar's rule `start`. Raises ValueError: names the
    part of the grammar that cannot be converted."""
    if len(grammar) > _MOST_CHARACTERS:
        raise ValueError(f"the grammar has {len(grammar)} characters; at most {_MOST_CHARACTERS} are allowed")
    return _Expander(_rules(grammar)).expanded("start")


def _rules(grammar: str) -> dict[str, list[Token]]:
    rules: dict[str, list[Token]] = {}
    line: list[Token] = []
    for token in [*grammar_tokens(_TOKEN, grammar), ("line", "\n")]:
        if token[0] != "line":
            line.append(token)
            continue
        if line and line[0][1] == "%":
            _read_import(line, rules)
        elif line:
            name, body = _head(line)
            rules[name] = body
        line = []
    return rules


def _read_import(line: list[Token], rules: dict[str, list[Token]]) -> None:
    """Read `%import common.NAME -> OTHER`."""
    words = [text for _, text in line[1:]]
    if words[:3] != ["import", "common", "."] or len(words) not in (4, 6) or words[3] not in _COMMON:
        raise ValueError(f"%{' '.join(words)[:80]} is not supported")
    rules[words[-1]] = [("regex", f"/{_COMMON[words[3]]}/")]


def _head(line: list[Token]) -> tuple[str, list[Token]]:
    colon = next((place for place, (_, text) in enumerate(line) if text == ":"), 0)
    if line[0][0] != "name" or colon not in (1, 3):  # the third is a priority
        raise ValueError(f"the grammar has no rule in {' '.join(text for _, text in line)[:80]!r}")
    return line[0][1].lstrip("?!"), line[colon + 1 :]


@dataclass(slots=True)
class _Expander:
    rules: Mapping[str, list[Token]]
    done: dict[str, str] = field(default_factory=dict)
    within: list[str] = field(default_factory=list)
    written: int = 0  # total characters, each rule counted as often as its name occurs

    def expanded(self, name: str) -> str:
        """The expression of a rule."""
        if name not in self.done:
            if name not in self.rules:
                raise ValueError(f"the grammar has no rule {name}")
            if name in self.within:
                raise ValueError(f"its rule {name} is recursive")
            self.within.append(name)
            body = _Body(self, self.rules[name])
            self.done[name] = body.whole()
            self.within.pop()
        self.written += len(self.done[name])
        if len(self.done[name]) > _MOST_CHARACTERS:
            raise ValueError(f"written out, its rule {name} has more than {_MOST_CHARACTERS} characters")
        if self.written > _MOST_IN_ALL:
            raise ValueError(f"written out, its rules have more than {_MOST_IN_ALL} characters together")
        return self.done[name]


@dataclass(slots=True)
class _Body:
    expander: _Expander
    tokens: list[Token]
    at: int = 0

    def whole(self) -> str:
        made = self._choice()
        if self.at < len(self.tokens):
            raise ValueError(f"{self.tokens[self.at][1]!r} is unexpected in the grammar")
        return made

    @property
    def _next(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def _take(self, text: str) -> bool:
        if self._next != text or self.tokens[self.at][0] == "string":
            return False
        self.at += 1
        return True

    def _choice(self) -> str:
        made = [self._sequence()]
        while self._take("|"):
            made.append(self._sequence())
        return made[0] if len(made) == 1 else f"(?:{'|'.join(made)})"

    def _sequence(self) -> str:
        made = []
        while self._next not in ("", "|", ")", "]", "->"):
            made.append(self._repeated())
        if self._take("->"):
            self.at += 1  # a name for the syntax tree
        return "".join(made)

    def _repeated(self) -> str:
        made = self._atom()
        if (sign := self._next) in ("?", "*", "+"):
            self.at += 1
            return f"(?:{made}){sign}"
        if self._take("~"):
            least = most = self._number()
            if self._take(".."):
                most = self._number()
            return f"(?:{made}){{{least},{most}}}"
        return made

    def _number(self) -> int:
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        if kind != "number":
            raise ValueError(f"{text!r} was found in the grammar where a number is expected")
        self.at += 1
        return int(text)

    def _atom(self) -> str:
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "string":
            return self._string(text)
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            body = body.replace("\\/", "/")
            return f"(?{flags}:{body})" if flags else f"(?:{body})"
        if kind == "name":
            return f"(?:{self.expander.expanded(text)})"
        if text in ("(", "["):
            made = self._choice()
            if not self._take(")" if text == "(" else "]"):
                raise ValueError(f"{text!r} is not closed in the grammar")
            return f"(?:{made})" if text == "(" else f"(?:{made})?"
        raise ValueError(f"{text!r} is unexpected in the grammar")

    def _string(self, text: str) -> str:
        if self._take(".."):
            last = self.tokens[self.at][1] if self.at < len(self.tokens) else ""
            self.at += 1
            return f"[{_escaped(_plain(text))}-{_escaped(_plain(last))}]"
        plain = _escaped(_plain(text.removesuffix("i")))
        return f"(?i:{plain})" if text.endswith("i") else plain


def _plain(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        raise ValueError(f"{text[:80]} is not a valid string in the grammar") from None


def _escaped(text: str) -> str:
    return "".join(f"\\{sign}" if sign in r"\.+*?()|[]{}^$#&-~" else sign for sign in text)
