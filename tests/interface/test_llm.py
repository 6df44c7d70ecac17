"""`LLM` as vLLM's users call it, with the bundled chat model."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, BeamSearchParams, ConfigError, EngineConfig, InvalidRequestError, SamplingParams
from engine.interface.argument_names import as_arguments, names_arguments
from engine.offline.arguments import engine_config
from server.config.settings import DEMOS
from server.workers.templates import TemplateInput, render

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
STORY = "Once upon a time"
# A template without tools and results.
LETTERS = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant', 'system') %}[{{ m.role }}: {{ m.content }}]"
    "{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMOS["chat"]), show_progress=False, device="cpu") as made:
        yield made
        made.engine.check_integrity()


def test_prompts_come_as_texts_ids_and_dictionaries(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(STORY)
    (expected,) = llm.generate(STORY, GREEDY)
    assert expected.prompt == STORY
    assert expected.outputs[0].text
    for prompts in (
        ids,
        tuple(ids),
        np.array(ids),
        {"prompt": STORY},
        {"prompt": STORY, "multi_modal_data": None},
        {"prompt_token_ids": ids},
        {"prompt": "the ids count", "prompt_token_ids": np.array(ids)},
        [STORY],
        [ids],
        [{"prompt": STORY}],
        (STORY,),
        iter([STORY]),
    ):
        (answer,) = llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
        assert (answer.prompt_token_ids, answer.outputs) == (ids, expected.outputs), prompts
    mixed = llm.generate([{"prompt_token_ids": ids}, "Hello", {"prompt": STORY}], GREEDY)
    assert [answer.outputs[0].text for answer in mixed][::2] == [expected.outputs[0].text] * 2
    assert [answer.prompt for answer in mixed] == [None, "Hello", STORY]
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (3, "must be a text, a list of token ids, or a dictionary .* got int: 3"),
        (None, "got NoneType"),
        (b"bytes", "got bytes"),
        ([None], "got NoneType"),
        ([1, "a"], "got list"),
        ([[1, 2.5]], "got list"),
        ([True], "got bool"),
        ({}, "its keys are: none"),
        ({"prompt": None}, "its keys are: none"),
        ({"prompt": [1, 2]}, "prompt must be a text, .* Token ids go into prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "got str"),
        ({"text": "a"}, "unknown keys: text"),
        ([{"prompt": "a", "multi_modal_data": {"image": 1}}], "reads no images"),
        ({"prompt": "a", "encoder_prompt": "b"}, "its keys are: prompt, encoder_prompt"),
        ({"encoder_prompt": "a"}, "a decoder-only model"),
    ],
)
def test_other_prompts_are_refused(llm: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.param == "prompt"
    assert not llm.engine.has_unfinished_requests()


def test_bad_words_are_not_written(llm: LLM) -> None:
    (free,) = llm.generate(STORY, GREEDY)
    assert free.outputs[0].text.startswith(" there was a")
    (kept,) = llm.generate(STORY, replace(GREEDY, bad_words=["was", "there"]))
    assert not {"was", "there"} & set(kept.outputs[0].text.split())
    assert llm.generate(STORY, replace(GREEDY, bad_words=[]))[0].outputs == free.outputs
    with pytest.raises(InvalidRequestError, match="bad_words works in LLM and over HTTP only"):
        llm.engine.add_request("direct", [5], replace(GREEDY, bad_words=["was"]))


def test_long_prompts_are_cut(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(STORY, add_special_tokens=False)
    special = llm.tokenizer.encode("")
    (answer,) = llm.generate([ids], replace(GREEDY, truncate_prompt_tokens=3))
    assert answer.prompt_token_ids == ids[-3:]
    assert answer.outputs == llm.generate([ids[-3:]], GREEDY)[0].outputs
    (answer,) = llm.generate(STORY, replace(GREEDY, truncate_prompt_tokens=len(special) + 2))
    assert answer.prompt_token_ids == special + ids[-2:], "a text keeps its special tokens"
    longest = llm.engine.info.max_model_len
    (answer,) = llm.generate([ids * longest], replace(GREEDY, truncate_prompt_tokens=-1))
    assert len(answer.prompt_token_ids) == longest - 8
    (answer,) = llm.generate([ids * longest], replace(GREEDY, max_tokens=None, truncate_prompt_tokens=-1))
    assert len(answer.prompt_token_ids) == longest - 16, "there is room for the default length"
    rendered = llm.chat(QUESTION, GREEDY)[0].prompt_token_ids
    assert llm.chat(QUESTION, replace(GREEDY, truncate_prompt_tokens=4))[0].prompt_token_ids == rendered[-4:]
    with pytest.raises(InvalidRequestError, match=f"at most {longest} .max_model_len."):
        llm.generate(STORY, replace(GREEDY, truncate_prompt_tokens=longest + 1))


def test_answers_without_text(llm: LLM) -> None:
    (answer,) = llm.generate(STORY, replace(GREEDY, detokenize=False))
    assert answer.outputs[0].text == ""
    assert answer.outputs[0].token_ids == llm.generate(STORY, GREEDY)[0].outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match="detokenize is false"):
        SamplingParams(stop="a", detokenize=False)


QUESTION = [{"role": "user", "content": "What is a token?"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def test_conversations_are_answered_as_their_rendered_prompts_are(llm: LLM) -> None:
    ends = SamplingParams(temperature=0)
    hf = llm.get_tokenizer()
    talk = [
        *QUESTION,
        {"role": "assistant", "content": "A piece of text."},
        {"role": "user", "content": "Who are you?"},
    ]
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is a token?"}]}]
    answers = llm.chat([QUESTION, talk, parts], sampling_params=ends)
    for messages, answer in zip((QUESTION, talk, QUESTION), answers, strict=True):
        rendered = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert (answer.prompt, answer.prompt_token_ids) == (rendered, ids)
        (direct,) = llm.generate([ids], params=SamplingParams(temperature=0, max_tokens=200))
        assert direct.outputs == answer.outputs, "an answer has room until it ends"
        assert answer.outputs[0].finish_reason == "stop"
    assert answers[0].outputs[0].text == "A token is a piece of text, such as a word or a part of a word."
    (short,) = llm.chat(QUESTION, GREEDY)
    assert len(short.outputs[0].token_ids) == 8


def test_what_a_template_is_given(llm: LLM) -> None:
    template = "{{ mood }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ tools[0].function.name }}"
    (answer,) = llm.chat(
        QUESTION, GREEDY, chat_template=template, tools=[TOOL], chat_template_kwargs={"mood": "Well: "}
    )
    assert answer.prompt == "Well: [What is a token?]add"
    (answer,) = llm.chat(QUESTION, GREEDY, chat_template="chatml")
    assert answer.prompt == "<|im_start|>user\nWhat is a token?<|im_end|>\n<|im_start|>assistant\n"
    begun = [*QUESTION, {"role": "assistant", "content": "A token is a"}]
    (answer,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert (answer.prompt or "").endswith("A token is a")
    assert answer.outputs[0].text.startswith(" piece of text")


def test_tools_are_described_as_the_server_does_where_the_template_supports_none(llm: LLM) -> None:
    """Here, in a worker of the server, and in a template without system messages."""
    call = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1", "content": "3"},
        {"role": "user", "content": "So?"},
    ]
    for template in (
        LETTERS,
        LETTERS.replace("{% if", "{% if m.role == 'system' %}{{ raise_exception('no') }}{% elif"),
    ):
        (answer,) = llm.chat(messages, GREEDY, tools=[TOOL], chat_template=template)
        served = render(TemplateInput(template, messages, {}, {}, True, 10_000, [TOOL], prompted=True))
        assert answer.prompt == served.text
        assert '"name": "add"' in served.text, "the tool"
        assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in served.text
        assert "<tool_response>\n3\n</tool_response>" in served.text
        assert "So?" in served.text


@pytest.mark.parametrize(
    ("messages", "more", "words"),
    [
        ([], {}, "messages must be a conversation"),
        ("hi", {}, "messages must be a conversation"),
        ([QUESTION, []], {}, r"messages\[1\] must be a list of messages"),
        ([{"content": "a"}], {}, r"messages\[0\] must be a dictionary with role and content"),
        ([{"role": "user", "content": 3}], {}, r"messages\[0\].content must be a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "other parts are not read"),
        ([{"role": "assistant", "tool_calls": [1]}], {}, "tool_calls must hold dictionaries"),
        (
            QUESTION,
            {"tools": [TOOL], "chat_template": "{{ bos_token }}", "tool_prompt": "off"},
            'does not support tools. Leave them out, or set tool_prompt="auto"',
        ),
        (QUESTION, {"tool_prompt": False}, 'tool_prompt must be "auto" or "off", got False'),
        (QUESTION, {"tools": [{"name": "add"}]}, r"tools\[0\] must look like"),
        (
            [*QUESTION, {"role": "assistant", "tool_calls": [{"function": {}}]}],
            {"tools": [TOOL], "chat_template": LETTERS},
            "a call of a tool or its result lacks 'name'",
        ),
        (QUESTION, {"chat_template": "{{ raise_exception('no such role') }}"}, "does not accept .*: no such role"),
        (QUESTION, {"continue_final_message": True}, "contradict each other"),
        (QUESTION, {"params": GREEDY, "sampling_params": GREEDY}, "set only one of them"),
    ],
)
def test_other_conversations_are_refused(llm: LLM, messages: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.chat(messages, **more)
    assert not llm.engine.has_unfinished_requests()


def test_log_lines_of_calls_name_arguments(caplog: pytest.LogCaptureFixture) -> None:
    def warn() -> None:
        for name in ("octavo.engine", "another"):
            logging.getLogger(name).warning("threads is 9 (%s). Lower --threads by %d.", "--threads", 7)

    names_arguments(type("Caller", (), {"call": lambda self: warn()}))().call()
    warn()
    plain = "threads is 9 (--threads). Lower --threads by 7."
    assert caplog.messages == ["threads is 9 (threads). Lower threads by 7.", plain, plain, plain]


def test_errors_name_arguments_and_no_flags(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"or raise max_model_len\.") as caught:
        llm.generate("Once " * 1000)
    assert (caught.value.param, "--" in str(caught.value)) == ("prompt", False)
    with pytest.raises(ConfigError, match=r"Raise max_num_batched_tokens or lower max_num_seqs\.") as refused:
        LLM(str(DEMOS["chat"]), max_num_batched_tokens=4, max_num_seqs=8)
    assert "--" not in str(refused.value)
    assert as_arguments("Use --device cpu, or --dtype float32; set --tokenizer (tokenizer of LLM).") == (
        'Use device="cpu", or dtype="float32"; set tokenizer.'
    )
    assert as_arguments("docker run --gpus all") == "docker run --gpus all"
    assert LLM.generate.__doc__, "the wrapped methods keep their help"


def test_beams_under_vllms_names(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (found,) = llm.beam_search([{"prompt": STORY}], BeamSearchParams(beam_width=3, max_tokens=6))
    (direct,) = llm.generate(STORY, SamplingParams(num_beams=3, n=3, max_tokens=6))
    ids = direct.prompt_token_ids
    assert [one.tokens for one in found.sequences] == [ids + output.token_ids for output in direct.outputs]
    assert [one.cum_logprob for one in found.sequences] == [one.cumulative_logprob for one in direct.outputs]
    best = found.sequences[0]
    assert best.text is not None
    assert best.text.endswith(STORY + direct.outputs[0].text)
    scores = [one.score for one in found.sequences]
    assert None not in scores
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    with pytest.raises(InvalidRequestError, match="temperature must be 0 in a beam search, got 1"):
        llm.beam_search(STORY, BeamSearchParams(beam_width=2, max_tokens=3, temperature=1))


def test_what_it_says_of_itself(llm: LLM) -> None:
    own = llm.get_default_sampling_params()
    assert own.temperature == 0.7, "as its generation_config.json has it"
    seeded = SamplingParams(seed=3, max_tokens=12)
    for params in (seeded, SamplingParams(seed=3, max_tokens=12, temperature=own.temperature)):
        assert llm.generate(STORY, params)[0].outputs == llm.generate(STORY, seeded)[0].outputs
    llm.generate(STORY, own)
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["num_running"] == 0
    assert metrics["prompt_tokens_cached"] == llm.stats().prompt_tokens_cached > 0
    cached = llm.generate(STORY * 8, GREEDY)[0].num_cached_tokens
    assert llm.generate(STORY * 8, GREEDY)[0].num_cached_tokens > cached
    assert llm.reset_prefix_cache()
    assert llm.generate(STORY * 8, GREEDY)[0].num_cached_tokens == 0


def test_arguments_of_vllm_that_ask_for_nothing_else() -> None:
    given = {"tensor_parallel_size": 1, "trust_remote_code": False, "enable_chunked_prefill": True, "swap_space": 4}
    given["distributed_executor_backend"] = None  # whose default it is
    config = engine_config("m", {**given, "kv_cache_memory_bytes": 2**30, "dtype": "half", "max_model_len": 64})
    assert config == EngineConfig(
        model="m", kv_cache_memory=2**30, dtype="float16", max_model_len=64, max_step_time=0.0
    )
    for name, value, words in (
        ("pipeline_parallel_size", 2, "pipeline_parallel_size must be 1, got 2: a model runs on one device"),
        ("trust_remote_code", True, "trust_remote_code must be None or False, got True: code of a checkpoint"),
        ("enable_chunked_prefill", False, "enable_chunked_prefill must be None or True, got False"),
        ("max_modle_len", 3, "LLM has no argument max_modle_len; did you mean max_model_len?"),
        ("wholly_unknown", 3, "LLM has no argument wholly_unknown."),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            LLM("there/is/no/model", **{name: value})


def test_a_wrong_template_is_told_before_the_model_loads() -> None:
    with pytest.raises(ConfigError, match="chat_template must be a file or one of"):
        LLM("there/is/no/model", chat_template="nothing")


@pytest.mark.parametrize("where", [".", "octavo"])
def test_a_checkout_is_imported_from_its_parent_folder_too(where: str, tmp_path: Path) -> None:
    (tmp_path / "octavo").symlink_to(ROOT)
    names = "from octavo import *; import octavo; LLM; dir(octavo).index('LLM')"
    code = f"{names}; print(octavo.__file__, SamplingParams.__module__)"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / where, env=environ, capture_output=True, text=True, timeout=120
    )
    assert run.stdout == f"{ROOT / 'octavo' / '__init__.py'} engine.interface.request\n", run.stderr
