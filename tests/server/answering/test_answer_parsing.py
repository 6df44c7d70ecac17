# ruff: noqa: E501
"""Answers into text, reasoning and calls: each family's way to write them, however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from engine import ConfigError
from server.answering.formats import CALLS, REASONING, Formats, _files, choose_formats
from server.answering.parsing import AnswerParser, AnswerReader
from server.answering.parts import CallPart, Part, Reasoning, TextPart
from server.answering.tools import Tools, read_tools

TEMPLATES = Path(__file__).resolve().parents[4] / "shared" / "data" / "chat_templates" / "models" / "templates"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "see.it")]
MARKS = "</tool_call><|/tool_call|><｜tool▁call▁end｜>"
ARGUMENTS = f'{{"a": 2, "b": "x}}\\"{{ é{MARKS}"}}'  # what looks like the end of something
VALUES = '{"a": 2, "b": "x y"}'


def tools(**options: Any) -> Tools:
    found = read_tools(FUNCTIONS, **options)
    assert found is not None
    return found


def read(reader: AnswerReader, pieces: list[str], prompt: str = "", final: str | None = None, **options: Any) -> Any:
    """Text, reasoning and (name, arguments) of each call."""
    parsing = reader.parsing(tools(**options), prompt, final)
    assert parsing is not None
    parser = AnswerParser(parsing)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    assert parser.called == any(isinstance(part, CallPart) for part in parts)
    return joined(parts)


def joined(parts: list[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallPart):
            if part.index == len(calls):
                assert part.id is not None
                assert part.id.isalnum()
                assert part.name is not None, "the name comes first"
                calls.append((part.name, ""))
            else:
                assert part.index == len(calls) - 1, "one call after the other"
                assert (part.id, part.name) == (None, None)
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
        else:
            assert part.text
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    return text, "".join(part.text for part in parts if isinstance(part, Reasoning)), calls


def reader(calls: str = "none", reasoning: str = "none") -> AnswerReader:
    return AnswerReader(choose_formats("", calls, reasoning))


TWO = [("add", ARGUMENTS), ("see.it", "{}")]
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ALL, ENDS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DSML = "｜DSML｜"
# By format: what a model writes, and what it says and calls.
WRITTEN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        f'I look.\n<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "see.it"}</tool_call>\n',
        "I look.",
        TWO,
    ),
    ("hermes", '<tool_call>{"type": "function", "name": "add", "arguments": "{\\"a\\": 2}", "x": [1]}}</tool_call>', "", [("add", '{"a": 2}')]),
    ("hermes", '<tool_call>[{"name": "add", "arguments": null}, {"name": "see.it"}]</tool_call>.', ".", [("add", "{}"), ("see.it", "{}")]),
    ("hermes", "I say <tool_call> as I like </tool_call> so.", "I say <tool_call> as I like </tool_call> so.", []),
    ("hermes", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", f'<tool_call>{{"name": "{"x" * 600}"}}', f'<tool_call>{{"name": "{"x" * 600}"}}', []),
    ("hermes", "2 < 3 \n", "2 < 3 \n", []),
    ("llama3_json", f'{{"name": "add", "parameters": {ARGUMENTS}}}', "", [TWO[0]]),
    ("llama3_json", f' <|python_tag|>{{"name": "add", "parameters": {ARGUMENTS}}}; {{"name": "see.it", "parameters": {{}}}}', "", TWO),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3_json", '\n{"age": 3, "name": "add"}', '\n{"age": 3, "name": "add"}', []),
    ("llama3_json", 'So {"name": "add"}', 'So {"name": "add"}', []),
    ("mistral", f"Ok[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]see.it[CALL_ID]123456789[ARGS]{{}}", "Ok", TWO),
    ("mistral", "[TOOL_CALLS]add and so on", "[TOOL_CALLS]add and so on", []),
    ("mistral_list", f'[TOOL_CALLS][{{"name": "add", "arguments": {ARGUMENTS}, "id": "123456789"}}, {{"name": "see.it"}}]', "", TWO),
    ("granite", f'<|tool_call|>[{{"name": "add", "arguments": {ARGUMENTS}}},\n{{"name": "see.it", "arguments": {{}}}}]', "", TWO),
    ("granite", '<|tool_call|>[{"name": "add", "arguments": {}}] Done.', "Done.", [("add", "{}")]),
    ("phi4_mini_json", f'<|tool_call|>[{{"name": "add", "arguments": {ARGUMENTS}}}, {{"name": "see.it"}}]<|/tool_call|>', "", TWO),
    ("phi4_mini_json", 'functools[{"name": "add", "arguments": {"a": 2}}]', "", [("add", '{"a": 2}')]),
    ("phi4_mini_json", "import functools\nfunctools[0]", "import functools\nfunctools[0]", []),
    (
        "deepseek_v3",
        f"Well.{ALL}{BEGIN}function{SEP}add\n```json\n{ARGUMENTS}\n```{END}\n{BEGIN}function{SEP}see.it\n```json\n{{}}\n```{END}{ENDS}",
        "Well.",
        TWO,
    ),
    ("deepseek_v31", f"{ALL}{BEGIN}add{SEP}{ARGUMENTS}{END}{BEGIN}see.it{SEP}{{}}{END}{ENDS}", "", TWO),
    ("deepseek_v31", f"{ALL}{BEGIN}what?{END}{ENDS}", f"{BEGIN}what?{END}", []),
    (
        "deepseek_v32",
        f'Yes.\n\n<{DSML}function_calls>\n<{DSML}invoke name="add">\n<{DSML}parameter name="a" string="false">2</{DSML}parameter>\n'
        f'<{DSML}parameter name="b" string="true">x y</{DSML}parameter>\n</{DSML}invoke>\n<{DSML}invoke name="see.it">\n'
        f"</{DSML}invoke>\n</{DSML}function_calls>",
        "Yes.",
        [("add", VALUES), ("see.it", "{}")],
    ),
    (
        "qwen3_xml",
        "Yes. <tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\nx y\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=see.it>\n</function>\n</tool_call>",
        "Yes.",
        [("add", VALUES), ("see.it", "{}")],
    ),
    ("qwen3_xml", "<tool_call>\n<function=add>\n<parameter=a>\n2", "<tool_call>\n<function=add>\n<parameter=a>\n2", []),
    ("glm45", "Hm\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>", "Hm", [("add", VALUES)]),
    ("gemma4", '<|tool_call>call:add{a:2,b:<|"|>x y<|"|>}<tool_call|>', "", [("add", VALUES)]),
    ("gemma4", "<|tool_call>call:add{a:<tool_call|>", "<|tool_call>call:add{a:<tool_call|>", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "written", "text", "calls"), WRITTEN)
def test_what_each_family_writes(name: str, written: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert read(reader(name), [written]) == (text, "", calls)
    assert read(reader(name), list(written)) == (text, "", calls), "sign by sign"


def test_there_is_an_example_of_every_format() -> None:
    assert {file.name for file in _files(CALLS)} == {name for name, _, _, calls in WRITTEN if calls}


@given(
    st.sampled_from(WRITTEN), st.sampled_from(["think", "none"]), st.lists(st.integers(0, 300), max_size=6), st.data()
)
@example(WRITTEN[0], "think", [3], None)
def test_the_cuts_make_no_difference(
    written: tuple[str, str, str, Any], reasoning: str, cuts: list[int], data: st.DataObject | None
) -> None:
    text = "<think>\n Is it? </think>\n\n" + written[1]
    if data is not None:  # what ends too soon, or is not what a model should write
        text = text[: data.draw(st.integers(0, len(text)))]
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + data.draw(st.sampled_from(["", "\n", "{", '"', "<tool_call>", "\\", "\0", "[TOOL_CALLS]"]))
            + text[at:]
        )
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    found = reader(written[0], reasoning)
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert read(found, pieces) == read(found, [text])


# ---------------------------------------------------------------- against transformers

JSON_FIELD = {"repeats": True, "content": "json", "transform": {"type": "function", "function": "{content}"}}
ORACLES: dict[str, dict[str, Any]] = {
    "hermes": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", **JSON_FIELD},
    "mistral": {
        "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.]+)\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
    "deepseek_v31": {
        "open_pattern": f"(?:{ALL})?{BEGIN}(?P<name>[\\w.]+){SEP}",
        "close_pattern": f"{END}(?:{ENDS})?",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}
ARGUMENT_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('a<>{}[]"\\,: \nté/', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"}', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(sorted(ORACLES)),
    st.lists(st.dictionaries(st.text("abc", min_size=1), ARGUMENT_VALUES, max_size=3), min_size=1, max_size=3),
    st.sampled_from(["", "I see."]),
    st.booleans(),
)
def test_valid_calls_are_what_transformers_reads(
    name: str, given_calls: list[dict[str, Any]], text: str, ascii_only: bool
) -> None:
    written = [json.dumps(arguments, ensure_ascii=ascii_only) for arguments in given_calls]
    said = {
        "hermes": text
        + "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {one}}}\n</tool_call>' for one in written),
        "mistral": text + "".join(f"[TOOL_CALLS]add[ARGS]{one}" for one in written),
        "deepseek_v31": text + ALL + "".join(f"{BEGIN}add{SEP}{one}{END}" for one in written) + ENDS,
    }[name]
    template = {"start_anchor_pattern": r"\A", "fields": {"tool_calls": ORACLES[name], "content": {}}}
    oracle = parse_response(said, template, prefix="")
    found, _, calls = read(reader(name), [said])
    assert found == oracle.get("content", "")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in oracle["tool_calls"]
    ]


# ---------------------------------------------------------------- what ends too soon


def test_a_call_that_is_cut_off() -> None:
    whole = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    seen = set()
    for length in range(len(whole)):
        text, _, calls = read(reader("hermes"), [whole[:length]])
        begun = length > whole.index('{"a"')
        if begun:  # it has been told, as OpenAI's are
            ((name, arguments),) = calls
            assert (text, name) == ("", "add")
            assert '{"a": 2}'.startswith(arguments)
        else:
            assert (text, calls) == (whole[:length].rstrip("\n") if length < 12 else whole[:length], []) or not calls
            assert text.strip() == whole[:length].strip()
        seen.add(begun)
    assert seen == {True, False}


def test_a_call_is_told_while_it_is_written() -> None:
    parsing = reader("hermes").parsing(tools(), "")
    assert parsing is not None
    parser = AnswerParser(parsing)
    said = ['<tool_call>{"na', 'me": "add"', ', "arguments": ', '{"b": "x', " y", '", "a', '": 2}', "}</tool_call>"]
    told = [
        [(part.name, part.arguments) for part in parser.feed(piece) if isinstance(part, CallPart)] for piece in said
    ]
    assert told == [
        [], [], [], [("add", ""), (None, '{"b": "x')], [(None, " y")], [(None, '", "a')], [(None, '": 2}')], []
    ]  # fmt: skip


# ---------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("written", "prompt", "text", "reasoning"),
    [
        ("<think>\nWhy? \n</think>\n\nSo.\n", "", "So.\n", "Why?"),
        ("\n<think>Why?</think>So.", "", "So.", "Why?"),
        ("Why?\n</think>\n\nSo.", "<think>\n", "So.", "Why?"),
        ("Why?", "<think>", "", "Why?"),
        ("Why?\n", "user: <think></think> <think>\n", "", "Why?"),
        ("So.", "<think>\n\n</think>\n\n", "So.", ""),
        ("So.", "a user's <think>, and more", "So.", ""),
        ("<think>\n\n</think>\n\nSo.", "", "So.", ""),
        (" \n So. ", "", " \n So. ", ""),
        ("</think>So.", "", "</think>So.", ""),
        ('<think><tool_call>{"name": "add"}</tool_call></think>', "", "", '<tool_call>{"name": "add"}</tool_call>'),
    ],
)
def test_reasoning(written: str, prompt: str, text: str, reasoning: str) -> None:
    for pieces in ([written], list(written)):
        assert read(reader("hermes", "think"), pieces, prompt) == (text, reasoning, [])


def test_reasoning_goes_on_where_the_continued_message_left_it_open() -> None:
    found = reader("none", "think")
    assert read(found, ["more</think>So."], "<think>some", final="<think>some") == ("So.", "more", [])
    assert read(found, ["more"], "<think>a</think>b", final="<think>a</think>b") == ("more", "", [])


def test_several_calls_only_where_they_may_be() -> None:
    written = WRITTEN[0][1]
    assert len(read(reader("hermes"), [written])[2]) == 2
    assert read(reader("hermes"), list(written), parallel=False) == ("I look.", "", [("add", ARGUMENTS)])


def test_without_tools_calls_are_text() -> None:
    assert reader("hermes").parsing(None, "") is None
    parsing = reader("hermes", "think").parsing(None, "")
    assert parsing is not None
    parser = AnswerParser(parsing)
    assert parser.feed("<think>a</think>" + WRITTEN[0][1]) + parser.finish() == [
        Reasoning("a"),
        TextPart(WRITTEN[0][1].rstrip("\n")),
        TextPart("\n"),
    ]


# ---------------------------------------------------------------- which format


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the checkout")
def test_formats_are_known_by_the_template() -> None:
    expected = {
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
        "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
        "Qwen-Qwen3-0.6B": ("hermes", "think"),
        "Qwen3-Coder": ("qwen3_xml", None),
        "Qwen3.5-4B": ("qwen3_xml", "think"),
        "ibm-granite-granite-3.3-2B-Instruct": ("granite", None),
        "ibm-granite-granite-4.0": ("hermes", None),
        "HuggingFaceTB-SmolLM3-3B": (None, "think"),
        "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
        "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
        "mistralai-Mistral-Nemo-Instruct-2407": ("mistral_list", None),
        "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
        "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "think"),
        "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "think"),
        "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "think"),
        "GLM-4.6": ("glm45", "think"),
        "google-gemma-4-31B-it": ("gemma4", "gemma4"),
        "google-gemma-2-2b-it": (None, None),
        "microsoft-Phi-3.5-mini-instruct": (None, None),
        "openai-gpt-oss-120b": (None, None),
    }
    for name, (calls, reasoning) in expected.items():
        found = choose_formats((TEMPLATES / f"{name}.jinja").read_text())
        assert (found.calls and found.calls.name, found.reasoning and found.reasoning.name) == (calls, reasoning), name
    for path in TEMPLATES.glob("*.jinja"):
        for folder in (CALLS, REASONING):
            assert sum(file.suits(path.read_text()) for file in _files(folder)) <= 1, "no two formats of one template"


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the checkout")
@pytest.mark.parametrize(
    "name",
    [
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B",
        "ibm-granite-granite-4.0", "meta-llama-Llama-3.1-8B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407",
        "unsloth-mistral-Devstral-Small-2507", "mistralai-Ministral-3-14B-Reasoning-2512", "Qwen3-Coder", "GLM-4.6",
        "Qwen3.5-4B", "deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-V3.2", "google-gemma-4-31B-it",
    ],
)  # fmt: skip
def test_what_a_real_template_writes_of_a_call_is_read_again(name: str) -> None:
    """A model was trained to write a call as its template shows it in a history."""
    from test_chat_rendering import ARGUMENTS, CONVERSATION, TOOLS, tokenizer_of

    tokenizer = tokenizer_of(name)
    template = tokenizer.need_chat_template()
    found = AnswerReader(choose_formats(template))
    call = {"id": "abcdef123", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    history = [CONVERSATION[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    after = tokenizer.apply_chat_template(history, add_generation_prompt=False, tools=TOOLS)
    for opens in (True, False):
        before = tokenizer.apply_chat_template(CONVERSATION[:1], add_generation_prompt=opens, tools=TOOLS)
        common = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        if common == len(before):
            break
    parsing = found.parsing(read_tools(TOOLS), before)
    assert parsing is not None
    parser = AnswerParser(parsing)
    _, _, calls = joined(parser.feed(after[common:]) + parser.finish())
    ((function, arguments),) = calls
    assert function == "add"
    assert json.loads(arguments) == ARGUMENTS


def test_names_of_formats() -> None:
    assert choose_formats("<tool_call></tool_call> arguments", "none", "none") == Formats()
    assert choose_formats("", "mistral").calls is not None
    for alias in ("deepseek_r1", "qwen3", "think"):
        assert reader("none", alias).formats.reasoning == reader("none", "think").formats.reasoning
    with pytest.raises(ConfigError, match=r"tool_call_parser must be one of auto, none, .*hermes.*, got 'hermess'"):
        choose_formats("", "hermess")
    with pytest.raises(ConfigError, match=r"reasoning_parser must be one of auto, none, .*think.*, got 'x'"):
        choose_formats("", "none", "x")


def test_a_checkpoints_own_response_template_comes_first() -> None:
    own = {
        "start_anchor": "assistant:",
        "fields": {
            "thinking": {"open": "((", "close": "))"},
            "tool_calls": {
                "open_pattern": r"call (?P<name>\w+)\(",
                "close": ");",
                "content": "kv-lines",
                "content_args": {"line_sep": ",", "kv_sep": "="},
                "repeats": True,
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }
    templates = "<tool_call></tool_call> arguments </think>"
    found = AnswerReader(choose_formats(templates, response_template=own))
    for cut in (str, list):
        pieces = ["((hm)) Ok: call add(a=2,b=x);"] if cut is str else list("((hm)) Ok: call add(a=2,b=x);")
        assert read(found, pieces) == ("Ok:", "hm", [("add", '{"a": 2, "b": "x"}')])
    named = choose_formats(templates, "hermes", "none", response_template=own)
    assert named.calls is not None
    assert (named.calls.name, named.reasoning) == ("hermes", None)
    plain = {"fields": {"tool_calls": {"open": "<c>", "close": "</c>", **JSON_FIELD}}}
    chosen = choose_formats("", response_template=plain).calls
    assert chosen is not None
    assert chosen.field is None, "read while it is written"


def test_special_tokens_that_mark_parts_are_not_hidden() -> None:
    special = {1: "<eos>", 2: "<think>", 3: "</think>", 4: "<|tool_call>", 5: "[ARGS]", 6: "[/INST]"}
    found = AnswerReader(choose_formats("", "mistral", "think"), special)
    for with_tools, ids in ((tools(), {2, 3, 5}), (None, {2, 3})):
        parsing = found.parsing(with_tools, "")
        assert parsing is not None
        assert parsing.shown_special == ids
    gemma = AnswerReader(choose_formats("", "gemma4"), special).parsing(tools(), "")
    assert gemma is not None
    assert gemma.shown_special == {4}, "in a pattern it is escaped"
