"""llama.cpp's grammars, translated: the same texts are accepted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import InvalidRequestError, StructuredOutputsParams
from engine.text.gbnf import gbnf_to_lark, is_gbnf
from engine.text.grammars import LARK_LIMITS, Trial, grammar_text, single_bytes

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value
    ("," ws value)* )? "]" ws   # goes on over lines
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
_TOKENS = single_bytes(llguidance)
_WORDS = [w for n in range(4) for w in itertools.product(b"abc", repeat=n)]


def accepted(grammar: str, words: list[str]) -> list[str]:
    """The words that the translation accepts."""
    text = grammar_text(StructuredOutputsParams(grammar=grammar))
    limits = llguidance.LLParserLimits(**LARK_LIMITS)
    first = llguidance.LLMatcher(_TOKENS, text, limits=limits, log_level=0)
    assert not first.get_error()
    found = []
    for word in words:
        matcher = first.deep_copy()
        if matcher.try_consume_tokens(list(word.encode())) == len(word.encode()) and matcher.is_accepting():
            found.append(word)
    return found


# Grammars as tuples: ("lit", text), ("set", characters), ("ref", rule), ("seq" | "alt", parts), ("rep", part, n, m).
_LEAVES = st.one_of(
    st.tuples(st.just("lit"), st.text("abc", min_size=1, max_size=3)),
    st.tuples(st.just("set"), st.sampled_from(["a", "ab", "bc", "abc"])),
    st.tuples(st.just("ref"), st.sampled_from(["x", "y"])),
)
_BODIES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["seq", "alt"]), st.lists(inner, min_size=2, max_size=3)),
        st.tuples(st.just("rep"), inner, st.sampled_from([(0, None), (1, None), (0, 1), (2, 2), (1, 3)])),
    ),
    max_leaves=6,
)


def _written(node: tuple) -> str:
    kind = node[0]
    if kind in ("lit", "set"):
        return f'"{node[1]}"' if kind == "lit" else f"[{node[1]}]"
    if kind == "ref":
        return node[1]
    if kind == "rep":
        least, most = node[2]
        return f"({_written(node[1])}){{{least},{'' if most is None else most}}}"
    return "(" + (" " if kind == "seq" else " | ").join(map(_written, node[1])) + ")"


def _ends(rules: dict, node: tuple, word: str, at: int, known: dict) -> set[int]:
    """The places where a match that begins at `at` may end, from the matches known so far."""
    kind = node[0]
    if kind == "lit":
        return {at + len(node[1])} if word.startswith(node[1], at) else set()
    if kind == "set":
        return {at + 1} if at < len(word) and word[at] in node[1] else set()
    if kind == "ref":
        return known.setdefault((node[1], at), set())
    if kind == "alt":
        return set().union(*(_ends(rules, part, word, at, known) for part in node[1]))
    if kind == "seq":
        ends = {at}
        for part in node[1]:
            ends = set().union(*(_ends(rules, part, word, end, known) for end in ends))
        return ends
    least, most = node[2]
    ends, reached = {at}, {at} if least == 0 else set()
    for number in range(1, (most or len(word) + least + 1) + 1):
        ends = set().union(*(_ends(rules, node[1], word, end, known) for end in ends))
        if number >= least:
            reached |= ends
    return reached


def _matches(rules: dict, word: str) -> bool:
    known: dict = {(name, at): set() for name in rules for at in range(len(word) + 1)}
    while True:
        before = {key: set(ends) for key, ends in known.items()}
        for name, at in list(known):
            known[name, at] |= _ends(rules, rules[name], word, at, known)
        if known == before:
            return len(word) in known["root", 0]


@given(root=_BODIES, x=_BODIES, y=_BODIES)
@settings(max_examples=40, deadline=None)
def test_a_translation_accepts_the_same_texts(root: tuple, x: tuple, y: tuple) -> None:
    rules = {"root": root, "x": x, "y": y}
    words = ["".join(map(chr, word)) for word in _WORDS]
    expected = [word for word in words if _matches(rules, word)]
    if not expected:
        return  # a grammar without words may be refused
    grammar = "\n".join(f"{name} ::= {_written(body)}" for name, body in rules.items())
    assert accepted(grammar, words) == expected, grammar


def test_llama_cpps_grammar_of_json_keeps_whole_strings_as_lexemes() -> None:
    texts = ['{"a": [1, -2.5e3, {"b":"\\u00e9 é"}], "c":null }', "{}", '{"a":1', '{"a": tru}', '{"a":01}', "[1]"]
    assert accepted(JSON, texts) == texts[:2]
    assert max(map(len, gbnf_to_lark(JSON).split())) > 80  # a string is not divided into characters


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= "yes" | "no"', "no", "none"),
        (r'root ::= "\x41\u00e9\n" [^\]a-c\-] .', "Aé\nx\n", "Aé\n-x"),
        ("root ::= one\n  | two\none ::= [0-9]{2}\ntwo ::= [a-z]{1,}", "abc", "1"),
        ('root ::= a # a comment ::= "x"\na ::= "/" root? "\\\\"', "//\\\\", "/"),
        ('root ::= "a"{0}', "", "a"),
        ('root ::= "(" root ")" | x\nx ::= "a"{0}', "()", "(a)"),
        ("root ::= with-hyphen+\nwith-hyphen ::= [日本]", "日日", "日a"),
    ],
)
def test_the_syntax_of_gbnf(grammar: str, right: str, wrong: str) -> None:
    assert accepted(grammar, [right, wrong]) == [right]


def _errors() -> Iterator[tuple[str, str]]:
    yield 'x ::= "a"', "no rule root"
    yield "root ::= y", "no rule y"
    yield 'root ::= ("a"', "a ( without its )"
    yield 'root ::= "a" }', "cannot be read"
    yield 'root ::= "a"{3,1}', "allows nothing"
    yield 'root ::= "a"\nroot ::= "b"', "two rules root"
    yield "root ::= [z-a]", "ends before it begins"
    yield r'root ::= "\ud800"', "is not a character"
    yield "root ::= ::= ", "'::=' is out of place"
    yield f'root ::= "{"a" * 40_000}"', "too large: a string of 40000 characters takes 40000 as a regular expression"
    yield 'root ::= "(" root ")"' + ' "a" root "b"' * 800 + ' | "x"', "too large: it has more than 1500 lexemes"
    yield "root ::= a\na ::= b\nb ::= a", "without an end (a, b, root)"
    yield 'root ::= "a" root', "without an end (root)"
    yield 'root ::= "(" root ")" | ' + " | ".join(f'"{"a" * n}" root' for n in range(1, 99)) + ' | "b"', "too ambiguous"


@pytest.mark.parametrize(("grammar", "problem"), list(_errors()))
def test_a_grammar_that_cannot_be_used_is_refused(grammar: str, problem: str) -> None:
    assert is_gbnf(grammar)
    with pytest.raises(InvalidRequestError, match="the grammar cannot be used") as refused:
        Trial().check(StructuredOutputsParams(grammar=grammar))
    assert problem in str(refused.value)


def test_larks_form_is_told_apart() -> None:
    assert not is_gbnf('start: "a ::= b"')
    assert not is_gbnf('start: "a"')
