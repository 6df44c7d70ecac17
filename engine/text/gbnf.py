"""Translating llama.cpp's grammars (GBNF) to Lark as llguidance reads it.

GBNF describes characters. llguidance first splits a text into lexemes, always the longest that match, and then parses
these. So a part of a grammar becomes a lexeme only if the longest match is always the right one. This is the case if no
character that may follow a match of the part can also extend this match, or a match of another lexeme that may stand at
the same position. A part that fails this test is divided, down to single characters, which always pass. So the
translation accepts exactly the same texts as the original.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from engine.text.grammar_tokens import grammar_tokens

MAX_LEXEME = 20_000  # characters of a regular expression; larger parts are divided
MAX_PLACES = 1_500  # lexemes in the whole grammar, each occurrence counted
MAX_PAIRS = 3_000_000  # comparisons of positions and of their characters: about a second
_SIMPLIFY = "simplify it, or write it in Lark"
_MAX_COPIES = 64  # characters of a bounded repetition that the conflict test expands
_MAX_NAMES = 8  # rules listed in an error
_LAST = 0x10FFFF
_TOKEN = re.compile(
    r"""
    (?P<space>(?:\s|\#[^\n]*(?![^\n]))+)
    | (?P<rule>[a-zA-Z_][\w-]*(?=(?:\s|\#[^\n]*(?![^\n]))*::=))
    | (?P<name>[a-zA-Z_][\w-]*)
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<set>\[(?:[^\]\\]|\\.)*\])
    | (?P<count>\{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\})
    | (?P<sign>::=|[|()*+?.])
    """,
    re.VERBOSE | re.ASCII,
)
_CHARACTER = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}

Ranges = tuple[tuple[int, int], ...]  # ranges of code points, sorted and disjoint


@dataclass(eq=False, slots=True)
class _Node:
    """A part of a grammar."""

    kind: str  # chars, seq, alt, repeat or ref
    parts: list[_Node] = field(default_factory=list)  # the parts of seq and alt; the one part of repeat
    ranges: Ranges = ()  # the code points of chars
    least: int = 0  # the minimum number of repetitions; most, the maximum, is None if there is no limit
    most: int | None = None
    name: str = ""  # the rule that a ref names


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF rather than Lark."""
    return "::=" in text and not re.search(r"^\s*\??\w+\s*:(?!:=)", text, re.MULTILINE)


def gbnf_to_lark(text: str) -> str:
    """The Lark grammar that accepts the same texts. Raises ValueError: names the part that cannot be read or
    translated."""
    rules = _Reader(grammar_tokens(_TOKEN, text)).rules()
    if "root" not in rules:
        raise ValueError("the grammar has no rule root")
    return _Translation(rules).lark()


class _Reader:
    """Reads rules. Reads the rules; a rule ends where the next one begins."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._at = [*tokens, ("end", "")], 0

    def rules(self) -> dict[str, _Node]:
        """Each rule's body by name."""
        rules: dict[str, _Node] = {}
        while self._next[0] != "end":
            kind, name = self._take()
            if kind != "rule":
                raise ValueError(f"{name!r} is not the start of a rule (name ::= ...)")
            self._take()
            if name in rules:
                raise ValueError(f"the grammar has two rules {name}")
            rules[name] = self._alternatives()
        return rules

    @property
    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at]

    def _take(self) -> tuple[str, str]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _alternatives(self) -> _Node:
        made = [self._sequence()]
        while self._next == ("sign", "|"):
            self._take()
            made.append(self._sequence())
        return made[0] if len(made) == 1 else _Node("alt", made)

    def _sequence(self) -> _Node:
        made: list[_Node] = []
        while self._next[0] not in ("end", "rule") and self._next not in (("sign", "|"), ("sign", ")")):
            made.append(self._repeated())
        return made[0] if len(made) == 1 else _Node("seq", made)

    def _repeated(self) -> _Node:
        node = self._atom()
        while True:
            kind, text = self._next
            if kind == "count":
                low, comma, high = text[1:-1].replace(" ", "").partition(",")
                least, most = int(low), (int(high) if high.strip() else None) if comma else int(low)
                if most is not None and most < least:
                    raise ValueError(f"the repetition {text} allows nothing")
            elif kind == "sign" and text in "*+?":
                least, most = int(text == "+"), 1 if text == "?" else None
            else:
                return node
            self._take()
            node = _Node("repeat", [node], least=least, most=most)

    def _atom(self) -> _Node:
        kind, text = self._take()
        if kind == "name":
            return _Node("ref", name=text)
        if kind == "string":
            codes = list(_codes(text[1:-1]))
            characters = [_Node("chars", ranges=((code, code),)) for code, _ in codes]
            size = sum(len(_written_chars(character.ranges)) for character in characters)
            if size > MAX_LEXEME:
                written = f"a string of {len(characters)} characters takes {size} as a regular expression"
                raise ValueError(
                    f"the grammar is too large: {written}, and at most {MAX_LEXEME} are allowed; divide it"
                )
            return characters[0] if len(characters) == 1 else _Node("seq", characters)
        if kind == "set":
            return _Node("chars", ranges=_ranges_of(text))
        if text == ".":
            return _Node("chars", ranges=((0, _LAST),))
        if text == "(":
            node = self._alternatives()
            if self._take() != ("sign", ")"):
                raise ValueError("the grammar has a ( without its )")
            return node
        raise ValueError(f"{text!r} is out of place in the grammar")


def _codes(text: str) -> Iterator[tuple[int, bool]]:
    """Each character's code point, and whether it was escaped."""
    for found in _CHARACTER.finditer(text):
        short, middle, long, escaped, plain = found.groups()
        code = int(short or middle or long, 16) if short or middle or long else 0
        if not code and (escaped or plain):
            code = ord(_ESCAPES.get(escaped, escaped) if escaped else plain)
        if code > _LAST or 0xD800 <= code <= 0xDFFF:
            raise ValueError(f"{found.group()} is not a character")
        yield code, plain is None


def _ranges_of(text: str) -> Ranges:
    inside = text[1:-1]
    negative = inside.startswith("^")
    codes = list(_codes(inside[1:] if negative else inside))
    ranges, at = [], 0
    while at < len(codes):
        low = high = codes[at][0]
        if at + 2 < len(codes) and codes[at + 1] == (ord("-"), False):
            high = codes[at + 2][0]
            at += 2
        if high < low:
            raise ValueError(f"{text} contains a range that ends before it begins")
        ranges.append((low, high))
        at += 1
    merged = _union(tuple(ranges))
    if negative:
        edges = [-1, *(edge for low, high in merged for edge in (low, high)), _LAST + 1]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        merged = tuple((low + 1, high - 1) for low, high in pairs if low + 1 <= high - 1)
    if not merged:
        raise ValueError(f"{text} allows no character")
    return merged


def _union(ranges: Ranges) -> Ranges:
    made: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return tuple(made)


def _meet(first: Ranges, second: Ranges) -> bool:
    return any(low <= top and bottom <= high for low, high in first for bottom, top in second)


@dataclass(frozen=True, slots=True)
class _Flow:
    """The order of a part's positions, which are its characters or its lexemes."""

    empty: bool
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Lexeme:
    """A regular expression as an automaton over character positions."""

    text: str
    chars: list[Ranges] = field(default_factory=list)
    after: list[set[int]] = field(default_factory=list)
    flow: _Flow = field(default_factory=lambda: _Flow(True))

    def extended_by(self, other: _Lexeme, follow: Ranges) -> tuple[bool, int]:
        """Whether a match of this lexeme followed by a character of `follow` can begin a match of the other one, and
        how many pairs were compared."""
        seen: set[tuple[int, int]] = set()
        work = [(one, two) for one in self.flow.first for two in other.flow.first]
        count = len(work)
        while work and count <= MAX_PAIRS:
            pair = work.pop()
            one, two = pair
            if pair in seen or not _meet(self.chars[one], other.chars[two]):
                continue
            seen.add(pair)
            if one in self.flow.last and any(_meet(other.chars[to], follow) for to in other.after[two]):
                return True, count
            work += [(to, on) for to in self.after[one] for on in other.after[two]]
            count += len(self.after[one]) * len(other.after[two])
        return False, count


@dataclass(slots=True)
class _Translation:
    """Divides a grammar into lexemes until no two conflict."""

    rules: dict[str, _Node]
    regular: dict[str, str | None] = field(default_factory=dict)  # each rule's expression, or None if it has none
    broken: set[_Node] = field(default_factory=set)
    num_pairs: int = 0  # comparisons so far
    lexemes: dict[str, _Lexeme] = field(default_factory=dict)
    # State of one attempt: each position's node and lexeme, the positions that may follow, and the rules' flows.
    places: list[tuple[_Node, _Lexeme]] = field(default_factory=list)
    after: list[set[int]] = field(default_factory=list)
    flows: dict[str, _Flow] = field(default_factory=dict)

    def lark(self) -> str:
        self._find_regular()
        self._find_endless()
        while conflicts := self._conflicts():
            self.broken |= conflicts
        names = {name: f"r{number}" for number, name in enumerate(self._divided())}
        rules = [f"{short}: {self._written(self.rules[name], names)}" for name, short in names.items()]
        return "\n".join(["start: r0", *rules])

    def _find_regular(self) -> None:
        """Find the rules that are regular expressions: no rule in them leads back to itself."""
        open_rules: list[str] = []

        def visit(name: str) -> None:
            if name not in self.rules:
                raise ValueError(f"the grammar has no rule {name}")
            if name in open_rules:
                for each in open_rules[open_rules.index(name) :]:
                    self.regular[each] = None
                return
            if name in self.regular:
                return
            if len(open_rules) > 500:
                raise ValueError("its rules call each other more than 500 levels deep")
            open_rules.append(name)
            for called in _called(self.rules[name]):
                visit(called)
            open_rules.pop()
            if name not in self.regular:
                self.regular[name] = self._expression(self.rules[name])

        visit("root")

    def _find_endless(self) -> None:
        """Refuse a grammar with a rule whose every alternative leads back to itself."""
        ending: set[str] = set()

        def ends(node: _Node) -> bool:
            if node.kind == "ref":
                return node.name in ending
            if node.kind == "repeat" and node.least == 0:
                return True
            found = map(ends, node.parts)
            return any(found) if node.kind == "alt" else all(found)

        before = -1
        while before < len(ending):
            before = len(ending)
            ending.update(name for name in self.regular if name not in ending and ends(self.rules[name]))
        if "root" not in ending:
            endless = ", ".join([name for name in self.regular if name not in ending][:_MAX_NAMES])
            raise ValueError(f"the grammar allows no text: rules lead back to themselves without an end ({endless})")

    def _expression(self, node: _Node) -> str | None:
        """The regular expression of a part; None if there is none, or if it is too long."""
        if node.kind == "ref":
            return self.regular.get(node.name)
        if node.kind == "chars":
            return _written_chars(node.ranges)
        if node.kind == "repeat" and node.most == 0:
            return ""
        parts = [self._expression(part) for part in node.parts]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or sum(map(len, known)) > MAX_LEXEME:
            return None
        if node.kind == "seq":
            return "".join(known)
        return f"(?:{'|'.join(known)})" if node.kind == "alt" else f"(?:{known[0]}){_times(node)}"

    def _lexeme(self, node: _Node) -> _Lexeme | None:
        text = None if node in self.broken else self._expression(node)
        if not text:
            return None
        if text not in self.lexemes:
            lexeme = _Lexeme(text)
            lexeme.flow = self._flow(node, lexeme)
            self.lexemes[text] = lexeme
        return self.lexemes[text]

    def _flow(self, node: _Node, lexeme: _Lexeme | None) -> _Flow:
        """The flow of a part, over its characters within a lexeme or over the grammar's lexemes."""
        after = self.after if lexeme is None else lexeme.after
        if lexeme is None and (found := self._lexeme(node)) is not None:
            if len(self.places) >= MAX_PLACES:
                raise ValueError(f"the grammar is too large: it has more than {MAX_PLACES} lexemes; {_SIMPLIFY}")
            self.places.append((node, found))
            if len(after) < len(self.places):
                after.append(set())
            here = frozenset([len(self.places) - 1])
            return _Flow(found.flow.empty, here, here)
        if node.kind == "chars":
            assert lexeme is not None
            lexeme.chars.append(node.ranges)
            after.append(set())
            here = frozenset([len(after) - 1])
            return _Flow(False, here, here)
        if node.kind == "ref":
            return self._flow(self.rules[node.name], lexeme) if lexeme is not None else self.flows[node.name]
        if node.kind == "alt":
            made = [self._flow(part, lexeme) for part in node.parts]
            return _Flow(
                any(flow.empty for flow in made),
                frozenset().union(*(flow.first for flow in made)),
                frozenset().union(*(flow.last for flow in made)),
            )
        if node.kind == "seq":
            flow = _Flow(True)
            for part in node.parts:
                flow = _joined(flow, self._flow(part, lexeme), after)
            return flow
        return self._repeated_flow(node, lexeme, after)

    def _repeated_flow(self, node: _Node, lexeme: _Lexeme | None, after: list[set[int]]) -> _Flow:
        if node.most == 0:
            return _Flow(True)
        before = len(after)
        flow = self._flow(node.parts[0], lexeme)
        if lexeme is not None and node.most is not None and node.most * (len(after) - before) <= _MAX_COPIES:
            flow = replace(flow, empty=flow.empty or node.least == 0)
            for number in range(1, node.most):
                more = self._flow(node.parts[0], lexeme)
                more = replace(more, empty=more.empty or number >= node.least)
                flow = _joined(flow, more, after)
            return flow
        if node.most != 1:
            for place in flow.last:
                after[place] |= flow.first
        return _Flow(flow.empty or node.least == 0, flow.first, flow.last)

    def _conflicts(self) -> set[_Node]:
        """The lexemes to divide, because their longest match may be wrong."""
        flow = self._all_flows()
        together, work = set[tuple[int, int]](), [(one, two) for one in flow.first for two in flow.first]
        follow = [_union(tuple(r for to in after for start in self._starts(to) for r in start)) for after in self.after]
        known: dict[tuple[str, str, Ranges], bool] = {}
        found: set[_Node] = set()
        while work:
            pair = work.pop()
            if pair in together:
                continue
            together.add(pair)
            one, two = pair
            (node, first), (other, second) = self.places[one], self.places[two]
            key = first.text, second.text, follow[one]
            if key not in known:
                known[key], pairs = first.extended_by(second, follow[one])
                self.num_pairs += pairs
            if self.num_pairs > MAX_PAIRS:
                raise ValueError(f"the grammar is too ambiguous to be translated; {_SIMPLIFY}")
            if known[key]:
                found.add(node if node.kind != "chars" else other)
            if one == two or _overlap(first, second):
                work += [(to, on) for to in self.after[one] for on in self.after[two]]
                self.num_pairs += len(self.after[one]) * len(self.after[two])
        return found

    def _starts(self, place: int) -> list[Ranges]:
        lexeme = self.places[place][1]
        return [lexeme.chars[position] for position in lexeme.flow.first]

    def _all_flows(self) -> _Flow:
        """Compute the flow of the grammar. Rules may lead back to themselves, so their flows are extended until they
        are complete."""
        reached = self._divided()
        self.after, self.flows = [], {name: _Flow(False) for name in reached}
        while True:
            self.places, before = [], dict(self.flows)
            for name in reached:
                self.flows[name] = self._flow(self.rules[name], None)
            if self.flows == before:
                return self.flows["root"]

    def _divided(self) -> list[str]:
        """The rules that are used outside of lexemes."""
        found, work = ["root"], [self.rules["root"]]
        while work:
            node = work.pop()
            if self._lexeme(node) is not None:
                continue
            work += node.parts
            if node.kind == "ref" and node.name not in found:
                found.append(node.name)
                work.append(self.rules[node.name])
        return found

    def _written(self, node: _Node, names: dict[str, str]) -> str:
        lexeme = self._lexeme(node)
        if lexeme is not None:
            return f"/{lexeme.text}/{'?' if lexeme.flow.empty else ''}"
        if node.kind == "ref":
            return names[node.name]
        if node.kind == "repeat" and node.most == 0:
            return '""'
        parts = [self._written(part, names) for part in node.parts]
        if node.kind == "repeat":
            return f"({parts[0]}){_times(node)}"
        return (" ".join(parts) or '""') if node.kind == "seq" else f"({' | '.join(parts)})"


def _called(node: _Node) -> Iterator[str]:
    work = [node]
    while work:
        node = work.pop()
        if node.kind == "ref":
            yield node.name
        work += node.parts


def _joined(flow: _Flow, more: _Flow, after: list[set[int]]) -> _Flow:
    for place in flow.last:
        after[place] |= more.first
    return _Flow(
        flow.empty and more.empty,
        flow.first | more.first if flow.empty else flow.first,
        flow.last | more.last if more.empty else more.last,
    )


def _overlap(one: _Lexeme, two: _Lexeme) -> bool:
    """Whether the two may begin with the same character."""
    return any(_meet(one.chars[a], two.chars[b]) for a in one.flow.first for b in two.flow.first)


def _times(node: _Node) -> str:
    if (node.least, node.most) in ((0, None), (1, None), (0, 1)):
        return "?" if node.most == 1 else "+" if node.least else "*"
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _written_chars(ranges: Ranges) -> str:
    def one(code: int) -> str:
        plain = chr(code)
        return plain if plain.isascii() and (plain.isalnum() or plain in " _") else f"\\x{{{code:x}}}"

    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return one(ranges[0][0])
    return f"[{''.join(one(low) if low == high else f'{one(low)}-{one(high)}' for low, high in ranges)}]"
