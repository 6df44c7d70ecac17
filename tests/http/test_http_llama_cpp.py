"""llama.cpp's routes and fields: /infill, /apply-template, timings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from support.local_client import LocalClient
from support.structured import make_json_checkpoint
from test_http_decisions import ask
from test_http_terms import COMPLETIONS, Api, error

from engine import EngineConfig
from engine.text.processor import Tokenizer
from server.answering.infilling import Infilling
from server.answering.prompt import Room

CHAT, INFILL = "/v1/chat/completions", "/infill"
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]
GAP = {"input_prefix": "the house ", "input_suffix": " pages"}
TIMES = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms",
    "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    model = make_json_checkpoint(tmp_path_factory.mktemp("fim"))
    client = LocalClient(EngineConfig(model=str(model.path), dtype="float32", device="cpu", show_progress=False))
    hf = transformers.PreTrainedTokenizerFast.from_pretrained(model.path)
    hf.add_tokens(MARKS[:1])  # as in Qwen's vocabulary, no special token
    hf.add_special_tokens({"additional_special_tokens": MARKS[1:]})
    made = Api(client, tokenizer=Tokenizer(hf))
    yield made
    asyncio.run(client.close())


def ids(api: Api, *texts: str) -> list[int]:
    """The texts' tokens, each text tokenised alone."""
    tokenizer = api.service.tokenizer
    assert tokenizer is not None
    return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]


def events(call: Any) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in call.text.split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize("stream", [False, True])
def test_infill_puts_the_parts_in_their_order(api: Api, stream: bool) -> None:
    how = {"temperature": 0, "seed": 1}
    files = [{"filename": "a.txt", "text": "red"}]
    body = {**GAP, "input_extra": files, "prompt": "of", "n_predict": 4, "ignore_eos": True, **how}
    before, after = ids(api, "the house of"), ids(api, " pages")
    prefix, suffix, middle, file = (ids(api, mark)[0] for mark in MARKS)
    prompt = [file, *ids(api, "a.txt\nred\n"), prefix, *before, suffix, *after, middle]
    expected = ask(api, COMPLETIONS, prompt=prompt, max_tokens=4, ignore_eos=True, return_token_ids=True, **how)
    (choice,) = expected["choices"]
    if stream:
        call = api.post(INFILL, **body, stream=True)
        assert "[DONE]" not in call.text
        *news, last = events(call)
        assert [event["stop"] for event in (*news, last)] == [False] * len(news) + [True]
        text = "".join(event["content"] for event in news)
        tokens = [token for event in news for token in event["tokens"]]
    else:
        last = ask(api, INFILL, **body)
        text, tokens = last["content"], last["tokens"]
    assert (text, tokens) == (choice["text"], choice["token_ids"])
    assert (last["stop"], last["stop_type"], last["tokens_predicted"]) == (True, "limit", 4)
    assert last["tokens_evaluated"] == len(prompt)
    assert set(last["timings"]) == TIMES


def test_a_stop_word_and_other_ends(api: Api) -> None:
    text = ask(api, INFILL, **GAP, n_predict=6, temperature=0, ignore_eos=True)["content"]
    found = ask(api, INFILL, **GAP, n_predict=6, temperature=0, ignore_eos=True, stop=[text[1:3]])
    assert (found["content"], found["stop_type"], found["stopping_word"]) == (
        text[: text.index(text[1:3])],
        "word",
        text[1:3],
    )
    (mark,) = ids(api, "<|file_sep|>")
    ended = ask(api, INFILL, **GAP, n_predict=6, logit_bias={str(mark): 100})
    assert (ended["content"], ended["stop_type"]) == ("", "eos"), "the next file ends the gap"


def test_completions_take_a_suffix(api: Api) -> None:
    asked = {"temperature": 0, "max_tokens": 4}
    (choice,) = ask(api, COMPLETIONS, prompt="the house ", suffix=" pages", **asked)["choices"]
    assert choice["text"] == ask(api, INFILL, **GAP, temperature=0, n_predict=4)["content"]
    assert error(api.post(COMPLETIONS, prompt=[1], suffix="a"), 400)["param"] == "suffix"


def test_render_takes_a_suffix(api: Api) -> None:
    asked = {"prompt": "the house ", "suffix": " pages", "temperature": 0, "max_tokens": 4}
    (whole,) = ask(api, COMPLETIONS, **asked, return_token_ids=True)["choices"]
    (half,) = ask(api, f"{COMPLETIONS}/render", **asked)
    (made,) = ask(api, "/inference/v1/generate", **half)["choices"]
    assert made["token_ids"] == whole["token_ids"]
    assert ids(api, "<|file_sep|>")[0] in half["sampling_params"]["stop_token_ids"]


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"n_predict": 0}, "n_predict"),
        ({"n_predict": 10**12}, "n_predict"),
        ({"n_predict": 5000}, "n_predict"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"input_prefix": "x" * 200_000}, "input_prefix"),
        ({"input_suffix": None}, "input_suffix"),
    ],
)
def test_what_infill_refuses(api: Api, changed: dict[str, Any], param: str) -> None:
    refused = error(api.post(INFILL, **{**GAP, **changed}), 400)
    assert refused["param"] == param
    assert "max_tokens" not in refused["message"]


def test_infill_names_what_it_has_no_place_for(api: Api) -> None:
    unused = {
        "logprobs": 1, "prompt_logprobs": 1, "logprob_token_ids": [3], "truncate_prompt_tokens": 5,
        "timings_per_token": True,
    }  # fmt: skip
    call = api.post(INFILL, **GAP, n_predict=1, **unused)
    assert call.headers["x-octavo-ignored-fields"] == ", ".join(sorted(unused))


def test_marks_in_texts_are_text(api: Api) -> None:
    infilling = Infilling.of(api.service.tokenizer)
    assert infilling is not None
    text = f"a{MARKS[2]}b{MARKS[3]}{MARKS[0]}</s><|fim_<|fim_suffix|>|>c"
    made = infilling.prompt(text, text, Room(1000, "prompt"), [("a.txt", text)]).token_ids
    marks = [ids(api, mark)[0] for mark in (*MARKS, "</s>")]
    prefix, suffix, middle, file, _ = marks
    assert [token for token in made if token in marks] == [file, prefix, suffix, middle]
    tokenizer = api.service.tokenizer
    assert tokenizer is not None
    before = made[made.index(prefix) + 1 : made.index(suffix)]
    assert tokenizer.decode(before, skip_special_tokens=False) == text


def test_apply_template(api: Api) -> None:
    asked = {"messages": [{"role": "user", "content": "ab"}], "temperature": 0.5}
    call = api.post("/apply-template", **asked)
    assert json.loads(call.text) == {"prompt": "ab"}
    assert call.headers["x-octavo-ignored-fields"] == "temperature"
    assert error(api.post("/apply-template", messages=[]), 400)["param"] == "messages"
    assert error(api.post("/apply-template", **asked, chat_template="x"), 400)["param"] == "chat_template"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_timings(api: Api, path: str) -> None:
    given = {"prompt": "the house"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "the house"}]}
    asked = {**given, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    assert "timings" not in ask(api, path, **asked)
    found = ask(api, path, **asked, timings=True)
    assert set(found["timings"]) == TIMES
    assert found["timings"]["predicted_n"] == 4
    assert found["timings"]["cache_n"] + found["timings"]["prompt_n"] == found["usage"]["prompt_tokens"]
    assert found["timings"]["predicted_ms"] > 0
    ends = [event.get("timings") for event in events(api.post(path, **asked, timings=True, stream=True))]
    assert ends[-1]["predicted_n"] == 4
    assert not any(ends[:-1])
    each = [event["timings"] for event in events(api.post(path, **asked, timings_per_token=True, stream=True))]
    assert [times["predicted_n"] for times in each] == sorted(times["predicted_n"] for times in each)
    assert len({times["predicted_n"] for times in each}) > 1
