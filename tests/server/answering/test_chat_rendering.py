"""Conversations with tools, calls and results, rendered by real templates: the same as transformers makes of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_client import hf_byte_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from engine import ConfigError, EngineConfig
from engine.text.chat_templates import NAMES, read_template
from engine.text.fitting import Roles, mark, probe, shows_all
from engine.text.processor import Tokenizer
from engine.text.writing import Writing
from server.answering.messages import read_messages
from server.answering.prompt import Room
from server.answering.rendering import ChatRenderer, Rendering
from server.answering.tools import read_tools
from server.config.settings import DEMO_MODEL, ServerSettings
from server.early import read_early
from server.errors import ApiError
from server.workers.pool import WorkerPool
from server.workers.templates import TemplateInput
from server.workers.templates import render as render_job

TEMPLATES = Path(__file__).resolve().parents[4] / "shared" / "data" / "chat_templates" / "models" / "templates"
ROOM = Room(100_000, "messages")
ARGUMENTS = {"a": 2, "b": "drei é"}
FUNCTION = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "one"},
            "b": {"type": "string", "description": "two"},
        },
        "required": ["a", "b"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CONVERSATION = [
    {"role": "user", "content": "What is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abcdef123", "type": "function", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}
        ],
    },
    {"role": "tool", "tool_call_id": "abcdef123", "content": "five"},
]
# What transformers' sandbox or its own arguments do not allow.
REFUSED = {"fireworks-ai-llama-3-firefunction-v2", "llama-cpp-deepseek-r1"}
# These show no call, or fail on one: it is written into the assistant's text.
WITHOUT_CALLS = {
    "ibm-granite-granite-3.3-2B-Instruct", "LFM2-8B-A1B", "LFM2.5-Instruct", "Kimi-K2-Instruct", "Kimi-K2-Thinking",
}  # fmt: skip

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "Why?"},
]
# The templates that have names: what they make of `TALK`, as the models' cards have it, and a model's own file.
NAMED = {
    "chatml": (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        "Qwen-Qwen2.5-7B-Instruct",
    ),
    "gemma": (
        "<s><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\nHo<end_of_turn>\n"
        "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
        "google-gemma-2-2b-it",
    ),
    "llama2": ("<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST] Ho </s><s>[INST] Why? [/INST]", None),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHo<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        None,
    ),
    "mistral": ("<s>[INST]Hi[/INST]Ho</s>[INST]Be kind.\n\nWhy?[/INST]", "mistralai-Mistral-Nemo-Instruct-2407"),
    "plain": ("Be kind.HiHoWhy?", None),
    "phi3": (
        "<|system|>\nBe kind.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHo<|end|>\n<|user|>\nWhy?<|end|>\n"
        "<|assistant|>\n",
        "microsoft-Phi-3.5-mini-instruct",
    ),
    "vicuna": ("Be kind.\n\nUSER: Hi\nASSISTANT: Ho</s>\nUSER: Why?\nASSISTANT:", None),
    "zephyr": (
        "<|system|>\nBe kind.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHo</s>\n<|user|>\nWhy?</s>\n<|assistant|>\n",
        None,
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_named_templates_write_what_their_models_were_trained_with(name: str) -> None:
    def rendered(template: str, messages: list[dict[str, str]]) -> str:
        made, _ = render_jinja_template(
            conversations=[messages], chat_template=template, add_generation_prompt=True, bos_token="<s>",
            eos_token="</s>",
        )  # fmt: skip
        return str(made[0])

    expected, file = NAMED[name]
    ours = read_template(name)
    assert rendered(ours, TALK) == expected
    if file is not None and TEMPLATES.is_dir():
        theirs = (TEMPLATES / f"{file}.jinja").read_text()
        talk = TALK[name == "gemma" :]  # Gemma's own takes no system message
        for messages in (talk, talk[:-2]):
            assert rendered(ours, messages) == rendered(theirs, messages)


def test_templates_come_from_files_and_texts(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert read_template(str(file)) == read_template(file.read_text()) == file.read_text()
    assert read_template("{{ raise_exception('no') }}")
    for given, words in (
        ("chatlm", "must be a file or one of chatml, .*, got 'chatlm'. Did you mean chatml?"),
        (str(tmp_path), "must be a file or one of"),
        ("{% for m %}", "is not a valid Jinja template: line 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_template(given)
    file.write_text("")
    with pytest.raises(ConfigError, match=r"own\.jinja is empty"):
        read_template(str(file))


def tokenizer_of(name: str) -> Tokenizer:
    hf = hf_byte_tokenizer()
    hf.chat_template, hf.bos_token = (TEMPLATES / f"{name}.jinja").read_text(), "<eos>"
    return Tokenizer(hf)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


def render(pool: WorkerPool, tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    renderer = ChatRenderer(workers=pool)
    prompt = asyncio.run(renderer.prompt(tokenizer, read_messages(messages), ROOM, Rendering(**options)))
    assert prompt.text is not None
    return prompt.text


def as_documented(messages: list[dict[str, Any]], content: str | None, arguments: Any) -> list[dict[str, Any]]:
    """In a form that templates take: transformers' documentation has arguments as objects."""
    function = {"name": "add", "arguments": arguments}
    call = {"id": "abcdef123", "type": "function", "function": function}
    return [{**item, "content": content, "tool_calls": [call]} if "tool_calls" in item else item for item in messages]


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the checkout")
@pytest.mark.slow
def test_real_templates_render_calls_as_transformers_does(pool: WorkerPool) -> None:
    rendered, ignorant, refused = set(), set(), set()
    tools = read_tools(TOOLS)
    assert tools is not None
    for path in sorted(TEMPLATES.glob("*.jinja")):
        tokenizer = tokenizer_of(path.stem)
        try:
            text = render(pool, tokenizer, CONVERSATION, tools=tools.shown)
        except ApiError as problem:
            (ignorant if problem.param == "tools" else refused).add(path.stem)
            continue
        expected = []
        for content, arguments in itertools.product(("", None), (ARGUMENTS, json.dumps(ARGUMENTS))):
            messages = as_documented(CONVERSATION, content, arguments)
            with contextlib.suppress(Exception):  # a template may fail in any way on a form that it does not know
                theirs = tokenizer._hf.apply_chat_template  # transformers' own
                expected.append(theirs(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False))
        assert (text in expected[:1]) == (path.stem not in WITHOUT_CALLS), f"{path.stem}: not the documented form"
        assert "five" in text, path.stem
        assert "drei" in text, path.stem
        rendered.add(path.stem)
    assert refused == REFUSED
    assert all("tools" not in (TEMPLATES / f"{name}.jinja").read_text() for name in ignorant)
    assert len(rendered) >= 40


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the checkout")
def test_a_template_that_tells_missing_from_empty_content_shows_the_call(pool: WorkerPool) -> None:
    text = render(pool, tokenizer_of("deepseek-ai-DeepSeek-R1-Distill-Llama-8B"), CONVERSATION)
    call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{json.dumps(ARGUMENTS)}\n```<｜tool▁call▁end｜>"
    assert call in text, "its arguments are text"


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the checkout")
def test_ids_of_other_services_suit_mistrals_template(pool: WorkerPool) -> None:
    foreign = json.loads(json.dumps(CONVERSATION).replace("abcdef123", "call_F00fK8qb2bGnXzYwVuTs"))
    text = render(pool, tokenizer_of("mistralai-Mistral-Nemo-Instruct-2407"), foreign)
    (call_id,) = {part[:9] for part in text.split('id": "')[1:]}
    assert call_id.isalnum()
    assert "abcdef123" in render(pool, tokenizer_of("mistralai-Mistral-Nemo-Instruct-2407"), CONVERSATION)


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the checkout")
def test_variables_reach_a_real_template(pool: WorkerPool) -> None:
    qwen, hello = tokenizer_of("Qwen-Qwen3-0.6B"), [{"role": "user", "content": "hi"}]
    assert render(pool, qwen, hello).endswith("<|im_start|>assistant\n")
    without = render(pool, qwen, hello, variables={"enable_thinking": False})
    assert without.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


# Orders of roles that agents send: Codex, Claude Code, both after a call, and a conversation that was resumed.
ORDERS: list[Roles] = [
    ("developer", "system", "user", "user"),
    ("system", "user", "system"),
    ("system", "user", "assistant", "system", "user"),
    ("user", "user", "assistant", "assistant", "user"),
    ("system", "user", "call", "tool"),
    ("system", "user", "assistant"),
    ("system", "user", "call", "tool", "user", "assistant", "user"),
    ("user", "said call", "tool", "system", "call", "tool", "assistant", "user"),
]
ONLY_WITH_TOOLS = {
    "CohereForAI-c4ai-command-r-plus-tool_use", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
}  # fmt: skip
# These show no text beside a call: Mistral's nowhere, gpt-oss's not in past turns, as reasoning.
NO_TEXT_BESIDE_CALLS = {
    "mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506", "openai-gpt-oss-120b",
}  # fmt: skip
ONE_CALL_A_MESSAGE = {
    "GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct", "openai-gpt-oss-120b",
}  # fmt: skip
MOVED = "mistralai-Mistral-Nemo-Instruct-2407"  # shows the system's message before the last one of the user


def rendered(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """As a worker does it, in this process."""
    asked = TemplateInput(template, messages, {"bos_token": "<s>", "eos_token": "</s>"}, {}, True, 1 << 20, **options)
    text = render_job(asked).text
    assert text is not None
    return text


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the checkout")
def test_no_real_template_loses_a_message() -> None:
    shown, summing = 0, [{"type": "function", "function": {**FUNCTION, "name": "sum_up"}}]
    for path in sorted(TEMPLATES.glob("*.jinja")):
        template = path.read_text()
        ignorant = "tools" not in template
        for roles, tools in itertools.product(ORDERS, (None, summing)):
            if path.stem in REFUSED or (tools is None and (path.stem in ONLY_WITH_TOOLS or "tool" in roles)):
                continue
            text = rendered(template, probe(roles), tools=tools, prompted=ignorant)
            if path.stem in NO_TEXT_BESIDE_CALLS:
                roles = tuple(role.removeprefix("said ") for role in roles)
            assert shows_all(text, roles) or path.stem == MOVED, f"{path.stem}: {roles}\n{text}"
            assert all(mark(index) in text for index in range(len(roles))), f"{path.stem}: {roles}\n{text}"
            assert (tools is not None) == ("sum_up" in text), path.stem
            shown += 1
    assert shown > 400


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the checkout")
def test_no_real_template_loses_one_of_parallel_calls() -> None:
    turns: list[Roles] = [("user", "calls", "tool", "tool"), ("user", "calls", "tool", "tool", "assistant", "user")]
    for path, roles in itertools.product(sorted(TEMPLATES.glob("*.jinja")), turns):
        if path.stem in REFUSED:
            continue
        template, messages = path.read_text(), probe(roles)
        messages[2:4] = reversed(messages[2:4])  # the second call's result came first
        text = rendered(template, messages, tools=TOOLS, prompted="tools" not in template)
        calls, results = ("mark1x-", "mark1x."), (mark(2), mark(3))
        for mark_ in (*calls, *results, *(mark(index) for index in (0, *range(4, len(roles))))):
            assert text.count(mark_) == 1, f"{path.stem}: {mark_} of {roles}\n{text}"
        apart = text.index(results[0]) < text.index(calls[1])
        assert apart == (path.stem in ONE_CALL_A_MESSAGE), f"{path.stem}: {text}"
        order = (calls[0], results[0], calls[1], results[1]) if apart else (*calls, *sorted(results, reverse=True))
        assert [*order] == sorted(order, key=text.index), f"{path.stem}: {text}"


MOVES_BEFORE_THE_CALL = {"MiniMax-M2", "google-gemma-4-31B-it", "openai-gpt-oss-120b"}


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the checkout")
def test_no_real_template_loses_text_behind_a_call() -> None:
    roles = ("system", "user", "call", "assistant", "tool")
    for path in sorted(TEMPLATES.glob("*.jinja")):
        template = path.read_text()
        if path.stem in REFUSED:
            continue
        text = rendered(template, probe(roles), tools=TOOLS, prompted="tools" not in template)
        assert all(mark(index) in text for index in (0, 1, 3, 4)), f"{path.stem}:\n{text}"
        stays = text.index(f"{mark(2)}-") < text.index(mark(3))
        assert stays == (path.stem not in MOVES_BEFORE_THE_CALL), f"{path.stem}:\n{text}"


RESULT_BEHIND_CALL = (
    "{% set ns = namespace(called=false) %}{% for m in messages %}"
    "{% if ns.called and m.role != 'tool' %}{{ raise_exception('a result must follow') }}{% endif %}"
    "{% set ns.called = m.tool_calls is defined %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %};{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
STRICT = (
    "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') or m.role == ns.last %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "{% set ns.last = m.role %}{{ m.role }}:{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "roles", "wanted"),
    [
        (PLAIN, ("system", "system", "user", "user", "system"), "s:0;s:1;u:2;u:3;s:4;"),  # as it is
        (PLAIN, ("user", "said call", "tool"), 'u:0;a:1\n<find {"text": "1-"}>;t:2;'),
        (RESULT_BEHIND_CALL, ("user", "call", "assistant", "tool"), 'u:0;a:2<find {"text": "1-"}>;t:3;'),
        (RESULT_BEHIND_CALL, ("user", "said call", "assistant", "tool"), 'u:0;a:1\n\n2<find {"text": "1-"}>;t:3;'),
        (STRICT, ("user", "assistant", "user"), "u:0;a:1;u:2;"),
        (STRICT, ("system", "user"), "u:0\n\n1;"),
        (STRICT, ("system", "developer", "user", "user", "assistant", "assistant"), "u:0\n\n1\n\n2\n\n3;a:4\n\n5;"),
        (STRICT, ("user", "system", "assistant", "system"), "u:0\n\n1;a:2;u:3;"),
        (
            STRICT,
            ("user", "call", "tool", "tool", "user"),
            'u:0;a:<find {"text": "1-"}>;'
            "u:<tool_response>\n2\n</tool_response>\n\n<tool_response>\n3\n</tool_response>\n\n4;",
        ),
    ],
)
def test_messages_change_as_little_as_a_template_needs(template: str, roles: Roles, wanted: str) -> None:
    text = rendered(
        template, probe(roles), writing=Writing(first="<", begin="", middle=" ", end=">", between=", ", last="")
    )
    short = re.sub(r"mark(\d+)x", r"\1", text)
    for role in ("system", "user", "assistant", "tool"):
        short = short.replace(f"{role}:", f"{role[0]}:")
    assert short == wanted


def test_calls_that_a_template_shows_one_by_one_meet_their_results() -> None:
    single = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.content }}<{{ m.tool_calls[0].function.arguments.text }}>"
        "{% else %}{{ m.content }};{% endif %}{% endfor %}"
    )
    messages = probe(("user", "calls", "tool", "tool", "tool", "tool", "user"))
    messages[1]["content"] = "So "
    for message, id_ in zip(messages[2:6], ("abcdef124", "other", "abcdef123", "abcdef124"), strict=True):
        message["tool_call_id"] = id_
    wanted = "0;So <1->4;<1.>2;5;3;6;"
    assert re.sub(r"mark(\d)x", r"\1", rendered(single, messages)) == wanted
    twins = probe(("user", "calls", "tool", "tool"))
    for place in (2, 3):
        twins[place]["tool_call_id"] = twins[1]["tool_calls"][place - 2]["id"] = "same"
    assert re.sub(r"mark(\d)x", r"\1", rendered(single, twins)) == "0;<1->2;<1.>3;"


def test_joined_messages_keep_all_reasoning() -> None:
    thinking = STRICT.replace(
        "{{ m.role }}:", "{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    )
    messages = probe(("user", "assistant", "assistant", "assistant", "user"))
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "why", "so"
    assert "assistant:(why\n\nso)mark1x\n\nmark2x\n\nmark3x;" in rendered(thinking, messages)
    del messages[1]["reasoning_content"]
    assert "assistant:(so)mark1x" in rendered(thinking, messages)


def test_a_template_without_tools_is_told_of_them() -> None:
    for first in ("system", "user"):
        text = rendered(PLAIN, probe((first, "assistant")), tools=TOOLS, prompted=True)
        assert text.startswith("system:"), first
        system = text.split(";")[0]
        assert json.dumps(FUNCTION) in system
        assert '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>' in system
        assert (mark(0) in system) == (first == "system")
    assert rendered(PLAIN, probe(("user",)), prompted=True) == f"user:{mark(0)};"


def test_a_template_that_is_set_outweighs_the_model_s() -> None:
    """Also where the tokenizer is read while the engine loads."""
    for template in (None, "chatml"):
        config = EngineConfig(model=str(DEMO_MODEL), chat_template=template)
        early = read_early(config, ServerSettings())
        assert early is not None
        assert early.tokenizer is not None
        assert (early.tokenizer.chat_template == read_template("chatml")) == (template == "chatml")


def test_a_model_may_have_a_template_of_its_own_for_tools(pool: WorkerPool) -> None:
    hf = hf_byte_tokenizer()
    hf.chat_template = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    tokenizer = Tokenizer(hf)
    assert render(pool, tokenizer, CONVERSATION) == "plain"
    assert render(pool, tokenizer, CONVERSATION, tools=TOOLS) == "1 tools"
    hf.chat_template = {"default": "tools plain"}
    assert render(pool, tokenizer, CONVERSATION, tools=TOOLS) == "tools plain"
