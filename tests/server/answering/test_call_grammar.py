"""Grammars by which answers hold the calls that they must: what llguidance accepts by them, and what is read again."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from support.conversing import PARSERS, Conversing, saying

from engine import StructuredOutputsParams
from engine.text.grammars import grammar_text
from server.answering import argument_schemas
from server.answering.call_grammar import call_grammar
from server.answering.formats import CALLS, _files, choose_formats
from server.answering.lark_regex import lark_to_regex
from server.answering.parsing import AnswerParser, AnswerReader, Parsing
from server.answering.parts import CallPart, Reasoning
from server.answering.tools import read_tools

llguidance = pytest.importorskip("llguidance")

STRICT = {
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 'y"}</tool_call>']}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": function} for function in (STRICT, {"name": "find-it"})]
ADD, BAD = '{"a": 2, "b": "x"}', '{"a": "2", "b": "x"}'
NAMED = {"type": "function", "function": {"name": "add"}}
MARKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<think>", "</think>",
)  # fmt: skip
SPECIAL = {257 + index: mark for index, mark in enumerate(MARKS)}
# Arguments are one JSON object in these.
WRITTEN = sorted(file.name for file in _files(CALLS) if not {"pair", "quote"} & file.said["writes"].keys())


class Vocabulary:
    """Each byte, the end of answers, and special tokens."""

    eos_token_id, bos_token_id = 256, None

    def __init__(self, special: Mapping[int, str]):
        bytes_ = [*(bytes([value]) for value in range(255)), b"", b"</s>"]
        self.tokens = [*bytes_, *(text.encode() for text in special.values())]
        self.special_token_ids = [self.eos_token_id, *special]
        self.special = special

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def ids(self, text: str) -> list[int]:
        """The text's tokens, special ones as such."""
        for token, mark in self.special.items():
            if mark in text:
                before, after = text.split(mark, 1)
                return [*self.ids(before), token, *self.ids(after)]
        return list(text.encode())


def matcher_of(grammar: str, special: Mapping[int, str]) -> tuple[Any, Vocabulary]:
    vocabulary = Vocabulary(special)
    wrapped = llguidance.TokenizerWrapper(vocabulary)
    tokens = llguidance.LLTokenizer(wrapped, n_vocab=257 + len(special), eos_token=[256])
    text = grammar if grammar.startswith("{") else llguidance.grammar_from("lark", grammar)
    matcher = llguidance.LLMatcher(tokens, text, log_level=0)
    assert not matcher.get_error()
    return matcher, vocabulary


def accepts(grammar: str, special: Mapping[int, str], text: str) -> bool:
    """The text is all of an answer."""
    matcher, vocabulary = matcher_of(grammar, special)
    ids = vocabulary.ids(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def parsing_of(
    name: str, choice: Any = "required", reasoning: str = "none", prompt: str = "", **options: Any
) -> Parsing:
    parsing = AnswerReader(choose_formats("", name, reasoning)).parsing(read_tools(TOOLS, choice, **options), prompt)
    assert parsing is not None
    return parsing


def write(name: str, *calls: tuple[str, str]) -> str:
    format = choose_formats("", name).calls
    assert format is not None
    assert format.writing is not None
    writing = format.writing
    each = [f"{writing.begin}{function}{writing.middle}{arguments}{writing.end}" for function, arguments in calls]
    return writing.first + (writing.between or "").join(each) + writing.last


def grammar_of(parsing: Parsing, special: Mapping[int, str]) -> str:
    grammar = call_grammar(parsing, special)
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["as text", "special"])
@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_must_hold_calls(name: str, special: Mapping[int, str]) -> None:
    one, two = write(name, ("add", ADD)), write(name, ("add", ADD), ("find-it", '{"x": [1]}'))
    several = name != "llama3_json"
    grammar = grammar_of(parsing_of(name), special)
    assert accepts(grammar, special, one)
    assert accepts(grammar, special, two) == several
    for wrong in ("", "Hello", one + " Hello", write(name, ("add", BAD)), write(name, ("other", "{}")), one[:-9]):
        assert not accepts(grammar, special, wrong), wrong
    grammar = grammar_of(parsing_of(name, parallel=False), special)
    assert accepts(grammar, special, write(name, ("find-it", "{}")))
    assert not accepts(grammar, special, two)
    grammar = grammar_of(parsing_of(name, NAMED), special)
    assert accepts(grammar, special, one)
    assert not accepts(grammar, special, two)
    assert not accepts(grammar, special, write(name, ("find-it", "{}")))


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["as text", "special"])
@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_may_hold_calls_of_strict_functions(name: str, special: Mapping[int, str]) -> None:
    grammar = grammar_of(parsing_of(name, "auto"), special)
    alone = name == "llama3_json"
    one = write(name, ("add", ADD))
    for right in ("", "Hello < {", one, write(name, ("find-it", '{"x": {}}'))):
        assert accepts(grammar, special, right), right
    assert accepts(grammar, special, f"Hello{one} Hello") or alone
    assert accepts(grammar, special, f"{one} Hello {one}") != alone
    for wrong in (write(name, ("add", BAD)), write(name, ("other", "{}")), write(name, ("find-it", "[]")), one[:-9]):
        assert not accepts(grammar, special, wrong), wrong
    if not alone:
        assert not accepts(grammar, special, "Hello" + write(name, ("add", BAD)))


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["as text", "special"])
def test_reasoning_may_come_first(special: Mapping[int, str]) -> None:
    one = write("hermes", ("add", ADD))
    for choice in ("required", "auto"):
        grammar = grammar_of(parsing_of("hermes", choice, "think"), special)
        for before in ("", "<think></think>", "\n<think>\nWhy < ?\n</think>\n\n"):
            assert accepts(grammar, special, before + one)
        assert accepts(grammar, special, "<think>Why?</think>So.") == (choice == "auto")
        begun = grammar_of(parsing_of("hermes", choice, "think", prompt="<think>\n"), special)
        assert accepts(begun, special, f"Why?</think>\n{one}")
    assert not accepts(begun, special, "<think>Why?") or not special


def around(parsing: Parsing, special: Mapping[int, str], text: str) -> bool:
    """The text is all of an answer of which JSON of a schema is asked."""
    form = {
        "type": "object",
        "properties": {"c": {"type": "boolean"}},
        "required": ["c"],
        "additionalProperties": False,
    }
    outer = call_grammar(parsing, special, formed=True)
    params = StructuredOutputsParams(json={"type": "object", **form}, disable_any_whitespace=True, around=outer)
    matcher, vocabulary = matcher_of(grammar_text(params), special)
    ids = vocabulary.ids(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["as text", "special"])
@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_is_of_a_form_or_holds_calls(name: str, special: Mapping[int, str]) -> None:
    reasoning = "none" if name == "llama3_json" else "think"
    parsing, form = parsing_of(name, "auto", reasoning), '{"c":true}'
    one, loose = write(name, ("add", ADD)), write(name, ("find-it", '{"x": {}}'))
    for right in (form, one, loose):
        assert around(parsing, special, right), right
    for wrong in ("", "Hello", one[:-9], write(name, ("add", BAD)), form + one, one + form, '{"c":1}'):
        assert not around(parsing, special, wrong), wrong
    if reasoning == "think":
        thought = "<think>\nWhy < ?\n</think>\n\n"
        for right in (form, one):
            assert around(parsing, special, thought + right)
        assert not around(parsing, special, thought)


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["as text", "special"])
def test_reasoning_may_come_before_a_form(special: Mapping[int, str]) -> None:
    reader = AnswerReader(choose_formats("", "none", "think"))
    parsing, begun = reader.parsing(None, ""), reader.parsing(None, "<think>\n")
    assert parsing is not None
    assert begun is not None
    assert around(parsing, special, '{"c":true}')
    assert around(parsing, special, '<think>Yes {</think>\n{"c":true}')
    assert not around(parsing, special, '<think>Yes {</think>\n{"c":1}')
    assert around(begun, special, 'Yes {</think>\n\n{"c":false}')
    assert not around(begun, special, '{"c":false}')


def test_where_nothing_must_be_there_is_no_grammar() -> None:
    loose = [{"type": "function", "function": {"name": "f"}}]
    reader = AnswerReader(choose_formats("", "hermes", "think"))
    for tools in (read_tools(loose), None):
        parsing = reader.parsing(tools, "")
        assert parsing is not None
        assert call_grammar(parsing, {}) is None
    own = {"fields": {"tool_calls": {"open": "<c>", "close": "</c>", "content": "json"}}}
    parsing = AnswerReader(choose_formats("", response_template=own)).parsing(read_tools(loose, "required"), "")
    assert parsing is not None
    with pytest.raises(ValueError, match=r"calls in the format of .*\(response_template\) cannot be enforced"):
        call_grammar(parsing, {})


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("name", WRITTEN)
def test_whatever_the_grammar_allows_is_read_as_calls(name: str, choice: str) -> None:
    """Walks through the mask at random, inclined to the signs by which calls go on and end."""
    rng = random.Random(f"{name} {choice}")
    # Llama's calls begin an answer, and no model of that form thinks.
    parsing = parsing_of(name, choice, "none" if name == "llama3_json" else "think")
    grammar, complete, called = grammar_of(parsing, SPECIAL), 0, 0
    for _ in range(20):
        matcher, vocabulary = matcher_of(grammar, SPECIAL)
        written = b""
        for step in range(900):
            if matcher.is_stopped() or (matcher.is_accepting() and step > 40 and rng.random() < 0.3):
                break
            mask = matcher.compute_bitmask()
            allowed = [
                token for token in range(257 + len(SPECIAL)) if mask[token // 8] >> token % 8 & 1 and token != 256
            ]
            if not allowed:
                break
            liked = [token for token in allowed if token > 256 or token in b'"{}],:1x']
            token = rng.choice(liked if liked and rng.random() < 0.8 else allowed)
            assert matcher.consume_token(token)
            written += vocabulary.tokens[token]
        if not matcher.is_accepting():
            continue
        complete += 1
        parser = AnswerParser(parsing)
        parts = parser.feed(written.decode()) + parser.finish()
        calls: dict[int, list[str]] = {}
        for part in parts:
            if isinstance(part, CallPart):
                call = calls.setdefault(part.index, ["", ""])
                call[0] += part.name or ""
                call[1] += part.arguments
            else:
                assert choice == "auto" or isinstance(part, Reasoning), written
        for function, text in calls.values():
            arguments = json.loads(text)
            assert function in ("add", "find-it")
            if function == "add":
                assert set(arguments) == {"a", "b"}
                assert type(arguments["a"]) is int
                assert arguments["b"] in ("x", 'y"}</tool_call>')
        called += bool(calls)
        assert calls or choice == "auto", written
    assert complete >= 4
    assert called


def test_arguments_have_no_names_that_the_schema_lacks() -> None:
    text = {"type": "string"}
    inner = {"type": "object", "properties": {"c": text}}
    schema = {
        "type": "object",
        "properties": {
            "a": inner,
            "b": {"type": "array", "items": inner},
            "d": {"type": "object"},
            "e": {"anyOf": [inner, {"type": "null"}]},
            "f": {"allOf": [inner, {"type": "object", "properties": {"g": text}}]},
            "h": {"$ref": "#/$defs/h"},
            "i": {"type": "object", "properties": {"c": text}, "additionalProperties": text},
        },
        "$defs": {"h": inner},
    }
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    tools += [{"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}]
    parsing = AnswerReader(choose_formats("", "hermes", "none")).parsing(read_tools(tools, "required"), "")
    assert parsing is not None
    grammar = grammar_of(parsing, {})
    known, other = {"c": "x"}, {"c": "x", "z": "x"}
    for name in ("a", "b", "d", "e", "f", "h", "i"):
        for value, fits in ((known, True), (other, name in "dfi")):
            arguments = json.dumps({name: [value] if name == "b" else value})
            assert accepts(grammar, {}, write("hermes", ("add", arguments))) == fits, arguments
    assert not accepts(grammar, {}, write("hermes", ("add", '{"z": 1}')))
    assert accepts(grammar, {}, write("hermes", ("stop", "{}")))
    assert not accepts(grammar, {}, write("hermes", ("stop", '{"z": 1}')))


@pytest.mark.parametrize(
    ("schema", "dropped"),
    [
        ({"type": "integer", "enum": ["a", "b"]}, True), ({"type": ["integer", "null"], "enum": ["a"]}, True),
        ({"type": "integer", "enum": [True]}, True), ({"type": "integer", "enum": ["a", 1]}, False),
        ({"type": ["integer", "null"], "enum": [None]}, False), ({"type": "string", "enum": []}, False),
        ({"enum": ["a"]}, False), ({"type": "colour", "enum": [1]}, False),
    ],
)  # fmt: skip
def test_values_that_no_argument_can_have_are_dropped(schema: dict[str, Any], dropped: bool) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "items": schema}}, "required": ["a"]}
    tool = {"name": "add", "input_schema": parameters}
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    api = Conversing(saying("ok"), **PARSERS)
    answer = api.post("/v1/messages", asked)
    assert answer.headers.get("x-octavo-ignored-fields") == ("tools.add.enum" if dropped else None)
    if dropped:
        forced = api.post("/v1/messages", {**asked, "tool_choice": {"type": "any"}})
        assert forced.status_code == 200, forced.text
        assert accepts(api.params.structured_outputs.grammar, {}, write("hermes", ("add", '{"a": [5]}')))


def test_a_value_is_compared_with_each_type_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(argument_schemas, "_is", lambda value, kind: compared.append(kind))
    assert argument_schemas.possible({"type": ["string", "null"] * 50, "enum": [1]}) == (
        {"type": ["string", "null"] * 50},
        True,
    )
    assert sorted(compared) == ["null", "string"]


def in_xml(name: str, **values: str) -> str:
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["as text", "special"])
def test_calls_in_xml_are_held_to_their_schemas_and_read(special: Mapping[int, str]) -> None:
    properties = {
        "path": {"type": "string"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        "mode": {"type": "string", "enum": ["r", "w"]},
        "all": {"type": "boolean"},
    }
    shared = {"line": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["path", "mode"], "$defs": shared}
    functions = [{"name": "open", "parameters": parameters, "strict": True}, {"name": "stop", "parameters": None}]
    tools = [{"type": "function", "function": function} for function in functions]
    reader = AnswerReader(choose_formats("", "qwen3_xml", "think"), special)
    text = 'a <b> {"c"}\n</param\n'
    one, stop = in_xml("open", path=text, mode="r"), in_xml("stop")
    whole = in_xml("open", path=text, lines="[1, 2]", mode="w", all="true")
    wrong = [
        in_xml("open", mode="r"), in_xml("open", path="a", mode="x"), in_xml("open", mode="r", path="a"),
        in_xml("open", path="a", lines='["b"]', mode="r"), in_xml("shut"), one[:-5],
    ]  # fmt: skip
    for choice in ("required", "auto", {"type": "function", "function": {"name": "open"}}):
        parsing = reader.parsing(read_tools(tools, choice), "")
        assert parsing is not None
        grammar = grammar_of(parsing, special)
        for right in (one, whole, *((f"{one}\n{stop}", in_xml("stop", any="x")) if isinstance(choice, str) else ())):
            assert accepts(grammar, special, right), (choice, right)
        for text_ in wrong:
            assert not accepts(grammar, special, text_), (choice, text_)
        assert accepts(grammar, special, "Hello <tool") == (choice == "auto")
        parser = AnswerParser(parsing)
        read = [part for part in (*parser.feed(whole), *parser.finish()) if isinstance(part, CallPart)]
        arguments = json.loads("".join(part.arguments for part in read))
        assert arguments == {"path": text, "lines": [1, 2], "mode": "w", "all": True}
    free = reader.parsing(read_tools(tools, "auto"), "")
    assert free is not None
    for answer, fits in (('{"c":true}', True), (one, True), (wrong[0], False), ("Hello", False)):
        assert around(free, special, answer) == fits, answer


DSML, QUOTE = "｜DSML｜", '<|"|>'
OTHERS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", DSML, "<|tool_call>", "<tool_call|>", QUOTE)
MORE_SPECIAL = {**SPECIAL, **{257 + len(SPECIAL) + index: mark for index, mark in enumerate(OTHERS)}}


def in_glm(*calls: tuple[str, dict[str, str]]) -> str:
    def one(name: str, values: dict[str, str]) -> str:
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{value.strip(QUOTE)}</arg_value>\n" for key, value in values.items()
        )
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def in_dsml(*calls: tuple[str, dict[str, str]]) -> str:
    def pair(key: str, value: str) -> str:
        is_text = str(value.startswith(QUOTE)).lower()
        return f'<{DSML}parameter name="{key}" string="{is_text}">{value.strip(QUOTE)}</{DSML}parameter>\n'

    def one(name: str, values: dict[str, str]) -> str:
        return f'<{DSML}invoke name="{name}">\n{"".join(pair(*item) for item in values.items())}</{DSML}invoke>\n'

    return f"<{DSML}function_calls>\n{''.join(one(*call) for call in calls)}</{DSML}function_calls>"


def in_gemma(*calls: tuple[str, dict[str, str]]) -> str:
    def one(name: str, values: dict[str, str]) -> str:
        return f"<|tool_call>call:{name}{{{','.join(f'{key}:{value}' for key, value in values.items())}}}<tool_call|>"

    return "".join(one(*call) for call in calls)


def text_of(value: str) -> str:
    return f"{QUOTE}{value}{QUOTE}"


@pytest.mark.parametrize("special", [{}, MORE_SPECIAL], ids=["as text", "special"])
@pytest.mark.parametrize(("name", "write"), [("glm45", in_glm), ("deepseek_v32", in_dsml), ("gemma4", in_gemma)])
def test_calls_in_other_forms_are_held_to_their_schemas_and_read(
    name: str, write: Any, special: Mapping[int, str]
) -> None:
    line = {"$ref": "#/$defs/line"}
    properties = {
        "path": {"type": "string"},
        "line": line,
        "lines": {"type": "array", "items": line, "minItems": 1, "maxItems": 3},
        "mode": {"enum": ["r", "w"]},
        "all": {"type": ["boolean", "null"]},
    }
    parameters = {"type": "object", "properties": properties, "required": ["path", "mode"]}
    parameters["$defs"] = {"line": {"type": "integer"}}
    functions = [{"name": "open", "parameters": parameters, "strict": True}, {"name": "stop", "parameters": None}]
    tools = [{"type": "function", "function": function} for function in functions]
    reader = AnswerReader(choose_formats("", name, "think"), special)
    text = 'a <b> {"c"}\n</p </arg'
    first = {"path": text_of(text), "mode": text_of("r")}
    whole = {"path": text_of(""), "line": "-5", "lines": "[1,2]", "mode": text_of("w"), "all": "true"}
    rights = [
        ([("open", first)], [{"path": text, "mode": "r"}]),
        ([("open", whole)], [{"path": "", "line": -5, "lines": [1, 2], "mode": "w", "all": True}]),
        ([("stop", {}), ("open", first), ("stop", {})], [{}, {"path": text, "mode": "r"}, {}]),
    ]
    wrongs = [
        write(("open", {"mode": text_of("r")})), write(("open", {**first, "mode": text_of("x")})),
        write(("open", {"path": text_of(""), "line": text_of("b"), "mode": text_of("r")})), write(("shut", {})),
        write(("open", {"path": text_of(""), "lines": '["b"]', "mode": text_of("r")})), write(("open", first))[:-5],
    ]  # fmt: skip
    for choice in ("required", "auto"):
        parsing = reader.parsing(read_tools(tools, choice), "")
        assert parsing is not None
        if choice == "auto" and name == "deepseek_v32" and special:
            with pytest.raises(ValueError, match="only if a call is required"):
                call_grammar(parsing, special)
            continue
        grammar = grammar_of(parsing, special)
        for calls, arguments in rights:
            written = write(*calls)
            for before in ("", "<think>Why?</think>\n"):
                assert accepts(grammar, special, before + written), written
            parser = AnswerParser(parsing)
            read: dict[int, str] = {}
            for part in (*parser.feed(written), *parser.finish()):
                assert isinstance(part, CallPart)
                read[part.index] = read.get(part.index, "") + part.arguments
            assert [json.loads(one) for one in read.values()] == arguments
        for wrong in wrongs:
            assert not accepts(grammar, special, wrong), wrong
        assert accepts(grammar, special, "Hello <tool") == (choice == "auto")
    named = reader.parsing(read_tools(tools, {"type": "function", "function": {"name": "open"}}), "")
    assert named is not None
    assert not accepts(grammar_of(named, special), special, write(("stop", {})))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "string"}}, "required": ["y"]},
         ["{x:-1.5e3,y:''}", "{y:'a{,'}"], ["{}", "{x:1}", "{y:'',x:1}", "{y:5}", "{y:'',}", "{,y:''}", "{y:'',z:1}"]),
        ({"type": "object", "properties": {"x": {}}, "additionalProperties": True},
         ["{}", "{x:[1,{k:null}]}", "{z:'',w:{}}", "{x:1,z:2}"], ["{x:1,}", "{'x':1}"]),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2}, ["[null,null]", "[null,null,null]"],
         ["[]", "[null]", "[null,null,]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, ["[]", "[1]", "[1,2]"], ["[1,2,3]", "[1.5]"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["'a'", "null"], ["1"]),
        ({"enum": ["a", 1, None, True, {"k": ["b"]}]}, ["'a'", "1", "null", "true", "{k:['b']}"], ["'b'", "2", "{}"]),
        ({"$ref": "#/$defs/tree"}, ["{}", "{sub:{sub:{}}}"], ["{sub:1}"]),
        ({"const": ""}, ["''"], ["'a'"]),
        ({}, ["1", "'a'", "{k:'v'}", "[]", "false"], ["{1}", "a"]),
    ],
)  # fmt: skip
def test_objects_without_quotes_follow_schemas(schema: Any, right: list[str], wrong: list[str]) -> None:
    tree = {"type": "object", "properties": {"sub": {"$ref": "#/$defs/tree"}}}
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": {"tree": tree}}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required")
    parsing = AnswerReader(choose_formats("", "gemma4", "none"), MORE_SPECIAL).parsing(tools, "")
    assert parsing is not None
    grammar = grammar_of(parsing, MORE_SPECIAL)
    for texts, fits in ((right, True), (wrong, False)):
        for text in texts:
            assert accepts(grammar, MORE_SPECIAL, in_gemma(("f", {"a": text.replace("'", QUOTE)}))) == fits, text


@pytest.mark.parametrize("properties", [{"a-b": {}}, {"a": {"type": "text"}}, {"a": {"$ref": "#/$defs/x"}}])
def test_objects_without_quotes_that_cannot_be_enforced(properties: Any) -> None:
    parameters = {"type": "object", "properties": properties}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required")
    parsing = AnswerReader(choose_formats("", "gemma4", "none")).parsing(tools, "")
    assert parsing is not None
    with pytest.raises(ValueError, match="cannot be enforced"):
        call_grammar(parsing, {})


MODES = {"Mode": {"type": "string", "enum": ["r", "w"]}, "Line": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}
QUOTED = '"hello"'


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, {QUOTED: QUOTED, "": ""}, []),
        ({"type": ["string", "null"]}, {"hello": "hello", QUOTED: QUOTED, "null": None}, []),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"hello": "hello", "null": None}, []),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, {"hello": "hello", "5": 5}, []),
        ({"type": "string", "enum": None}, {"hello": "hello"}, []),
        ({"enum": ["r", "w", ""]}, {"r": "r", "": ""}, ['"r"', "x"]),
        ({"const": "r"}, {"r": "r"}, ['"r"', "w"]),
        ({"type": ["string", "null"], "enum": ["r", None]}, {"r": "r", "null": None}, ['"r"', "w", "None"]),
        ({"type": ["integer", "null"], "enum": [1, None]}, {"1": 1, "null": None}, ["2", '"1"']),
        ({"type": "string", "enum": ["r", 5]}, {"r": "r"}, ["5"]),
        ({"$ref": "#/$defs/Mode"}, {"r": "r"}, ['"r"', "x"]),
        ({"$ref": "#/$defs/Line"}, {"5": 5}, ["x", '"5"']),
        ({"allOf": [{"$ref": "#/$defs/Line"}]}, {"5": 5}, ["x"]),
        ({"allOf": [{"$ref": "#/$defs/Mode"}], "default": "r"}, {"r": "r"}, ['"r"', "x"]),
        ({"anyOf": [{"$ref": "#/$defs/Mode"}, {"type": "null"}]}, {"r": "r", "null": None}, ['"r"', "x"]),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/Line"}}]}, {"[1]": [1]}, ['["r"]']),
        (True, {"hello": "hello", QUOTED: QUOTED}, []),
        ({}, {"hello": "hello"}, []),
    ],
)  # fmt: skip
def test_texts_in_xml_are_written_as_they_are(schema: Any, right: dict[str, Any], wrong: list[str]) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": MODES}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required")
    parsing = AnswerReader(choose_formats("", "qwen3_xml", "none")).parsing(tools, "")
    assert parsing is not None
    grammar = grammar_of(parsing, {})
    for text, value in right.items():
        assert accepts(grammar, {}, in_xml("f", a=text)), text
        parser = AnswerParser(parsing)
        read = [part for part in (*parser.feed(in_xml("f", a=text)), *parser.finish()) if isinstance(part, CallPart)]
        assert json.loads("".join(part.arguments for part in read)) == {"a": value}
    for text in wrong:
        assert not accepts(grammar, {}, in_xml("f", a=text)), text


def test_odd_schemas_in_xml_get_an_answer_or_a_400() -> None:
    api = Conversing(saying("ok"), **{**PARSERS, "tool_call_parser": "qwen3_xml"})

    def asked(parameters: dict[str, Any]) -> tuple[int, str]:
        function = {"name": "f", "parameters": {"type": "object", "$defs": MODES, **parameters}}
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": function}]}
        answer = api.post("/v1/chat/completions", {**body, "tool_choice": "required"})
        return answer.status_code, answer.text

    text = {"type": "string"}
    for right in (
        {"properties": {"a": True, "b": False}},
        {"properties": {"a": {"type": "string", "enum": 5}}, "required": 5},
        {"properties": {"a": text}, "required": [{}, "a"]},
    ):
        assert asked(right)[0] == 200, right
    many = {f"a{index}": {"anyOf": [{"$ref": "#/$defs/Long"}, {"type": "null"}]} for index in range(200)}
    long = {"Long": {"enum": [f"{index:0100}" for index in range(200)]}}
    for wrong, words in (
        ({"properties": {"a": 5}}, "tools: "),
        ({"properties": {"a": {"type": 5}}}, "tools: "),
        ({"properties": {"a": {"$ref": "#/$defs/Loop"}}}, "tools: "),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "tools: "),
        ({"properties": many, "$defs": long}, "more than 1000000 characters cannot be enforced"),
    ):
        status, answer = asked(wrong)
        assert status == 400, (wrong, answer)
        assert words in answer


# A custom tool's grammar, with one of each thing that is read.
EDITS = r"""
// Edits of a file.
start: head edit+ tail?
head: "[edit \"a\"]" NL
?edit.2: (add | drop) NL -> change
    | "=" DIGIT ~ 1..2 NL
add: "+" /[^\n\/]*/ | "++" "a".."c"
drop: "drop"i [" all"]
tail: "[end]"
NL: LF
%import common.LF
%import common.DIGIT
"""
HEAD = '[edit "a"]\n'
FITTING = (f"{HEAD}+a\\b\n", f"{HEAD}+\n=1\n=23\n[end]", f"{HEAD}++c\n", f"{HEAD}DROP all\ndrop\n")
UNFITTING = (
    "",
    HEAD,
    f"{HEAD}+a",
    f"{HEAD}+a/b\n",
    f"{HEAD}=\n",
    f"{HEAD}=123\n",
    f"{HEAD}+a\n[end]\n",
    f"{HEAD}drops\n",
)


def test_a_grammar_without_recursion_is_an_expression() -> None:
    expression, known = lark_to_regex(EDITS), EDITS.replace("edit.2", "edit")  # llguidance knows no priorities
    for text in (*FITTING, *UNFITTING):
        expected = text in FITTING
        assert accepts(llguidance.grammar_from("lark", known), {}, text) == expected, text
        assert accepts(llguidance.grammar_from("regex", expression), {}, text) == expected, text


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: "(" start? ")"', "rule start is recursive"), ("start: a", "no rule a"), ("", "no rule start"),
        ('start: ("a"', "not closed"), ('start: "a" )', "unexpected"), ('start: "a" ~ b', "where a number"),
        ('%ignore " "\nstart: "a"', "not supported"), ("start: $", "cannot be read"), ('"a"', "no rule in"),
        ('start: a a\na: b b\nb: c c\nc: "' + "x" * 20_000 + '"', "more than 50000 characters"),
        ("start: a a a\na:" + " b" * 100 + '\nb: "' + "x" * 20_000 + '"', "rules have more than 1000000 characters"),
        ("//" + "x" * 50_000, "at most 50000 are allowed"),
    ],
)  # fmt: skip
def test_other_grammars_are_refused_with_a_reason(grammar: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lark_to_regex(grammar)


def test_a_rule_goes_on_behind_blank_lines_and_comments() -> None:
    gap = "\n" + "\n \t// no rule\n\r\n" * 1000
    assert lark_to_regex(f'start: "a"{gap}  | b{gap}b: "c"{gap}') == "(?:a|(?:c))"


def test_the_grammars_of_a_request_are_bounded_together() -> None:
    def tool(name: str, length: int) -> dict[str, Any]:
        definition = f'start: "{name}{"x" * length}"'
        return {
            "type": "custom",
            "name": name,
            "format": {"type": "grammar", "syntax": "lark", "definition": definition},
        }

    api = Conversing(saying("ok"), **PARSERS)
    tools = [tool(name, 40_000) for name in "abc"]
    answer = api.post("/v1/responses", {"input": "a", "tools": [*tools, tool("d", 9)]})
    assert answer.headers["x-octavo-ignored-fields"] == "tools.c.format"
    again = [{"type": "additional_tools", "tools": tools[:1]}, {"role": "user", "content": "a"}]
    answer = api.post("/v1/responses", {"input": again * 9, "tools": tools[:2]})
    assert (answer.status_code, answer.headers.get("x-octavo-ignored-fields")) == (200, None), (
        "the same ones count once"
    )


@pytest.mark.parametrize("choice", ["auto", {"type": "custom", "name": "edit"}], ids=["auto", "forced"])
def test_a_custom_tool_s_input_is_held_to_its_format(choice: Any) -> None:
    format: dict[str, Any] = {"type": "grammar", "syntax": "lark", "definition": EDITS}
    api = Conversing(saying("ok"), **PARSERS)
    tool = {"type": "custom", "name": "edit", "description": "Edits.", "format": format}
    assert api.post("/v1/responses", {"input": "a", "tools": [tool], "tool_choice": choice}).status_code == 200
    grammar = api.params.structured_outputs.grammar
    for text in (*FITTING, *UNFITTING):
        call = write("hermes", ("edit", json.dumps({"input": text})))
        assert accepts(grammar, {}, call) == (text in FITTING), text
    endless = {**tool, "format": {**format, "definition": 'start: "(" start? ")"'}}
    answer = api.post("/v1/responses", {"input": "a", "tools": [endless]})
    assert answer.headers["x-octavo-ignored-fields"] == "tools.edit.format"
    digits = {**format, "syntax": "regex", "definition": "[0-9]{2}"}
    number = {**tool, "format": digits}
    assert api.post("/v1/responses", {"input": "a", "tools": [number]}).status_code == 200
    for text, fits in (("12", True), ("123", False)):
        call = write("hermes", ("edit", json.dumps({"input": text})))
        assert accepts(api.params.structured_outputs.grammar, {}, call) == fits
    broken = {**tool, "format": {**digits, "definition": "("}}
    assert api.post("/v1/responses", {"input": "a", "tools": [broken]}).status_code == 400
