"""Text over HTTP for every tokenizer in the shared data: streamed and whole, cut anyhow, with stop strings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_client import FakeClient, Step
from support.asgi import events, request
from support.structured import tokenizer_of
from test_detokenizer import DATA, REAL, TEXTS, _data, _folder, in_context

from engine import ChoiceDelta, Logprob, RequestDelta, SamplingParams, TokenInput
from engine.text.processor import Tokenizer
from server.app import create_app

pytestmark = [
    pytest.mark.skipif(not DATA.is_dir(), reason="no shared data beside the checkout"),
    pytest.mark.slow,
]
INDIC = "नमस्ते दुनिया। தமிழ் எழுத்து ಕನ್ನಡ বাংলা ക്ഷ"
FLAGS = "🇫🇷👩🏽\u200d🚀 ok🙂🙂 ﷽ \u200b\ufeff e\u0301"
PROMPT = [5, 6, 7]


def _mistral_v3(tmp: Path) -> Tokenizer:
    pytest.importorskip("sentencepiece")
    files = {"tokenizer.model": _data("tokenizers/mistral") / "mistral_instruct_tokenizer_240323.model.v3"}
    return tokenizer_of(_folder(tmp / "mistral-v3", files, {"tokenizer_class": "LlamaTokenizer"}))


LOADERS = {**REAL, "mistral-v3": _mistral_v3}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    @cache
    def get(name: str) -> Tokenizer:
        return LOADERS[name](tmp_path_factory.mktemp(name))

    return get


class Api:
    """An app whose engine says given ids, one list per choice, in deltas that are cut at random."""

    def __init__(self, tokenizer: Tokenizer, said: Sequence[Sequence[int]], seed: int):
        def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
            return deltas(request_id, said[: params.n], params, random.Random(seed))

        client = FakeClient(script)
        client.info = replace(client.info, vocab_size=tokenizer.vocab_size + 4, max_model_len=10_000)
        tokenizer._hf.chat_template = "{{ messages[0].content }}"
        self.app = create_app(client, tokenizer, "fake")

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        answer = request(self.app, "POST", path, json=body, strict=True)
        assert answer.status_code == 200, answer.text
        return answer

    def whole(self, path: str, **body: Any) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = self.post(path, body).json()["choices"]
        return choices

    def streamed(self, path: str, **body: Any) -> dict[int, list[dict[str, Any]]]:
        """The events' choices by index; each event holds one, and each choice ends once."""
        found: dict[int, list[dict[str, Any]]] = {}
        for event in events(self.post(path, {**body, "stream": True}).text):
            (choice,) = event["choices"]
            found.setdefault(choice["index"], []).append(choice)
        for choices in found.values():
            ends = [choice["finish_reason"] is not None for choice in choices]
            assert sum(ends) == 1
            assert ends[-1]
        return found


def deltas(
    request_id: str, said: Sequence[Sequence[int]], params: SamplingParams, rng: random.Random
) -> Iterator[RequestDelta]:
    """One to four tokens a choice and step."""
    places = [0] * len(said)
    known: list[Any] = [None, *({token: Logprob(-0.25, 1)} for token in PROMPT[1:])]
    while any(place < len(ids) for place, ids in zip(places, said, strict=True)):
        choices = []
        for index, ids in enumerate(said):
            start = places[index]
            if start == len(ids):
                continue
            part = ids[start : start + rng.choice((1, 1, 1, 2, 4))]
            places[index] += len(part)
            choices.append(
                ChoiceDelta(
                    index=index,
                    token_ids=part,
                    logprobs=None if params.logprobs is None else [{token: Logprob(-0.5, 1)} for token in part],
                    finish_reason="length" if places[index] == len(ids) else None,
                )
            )
        finished = all(place == len(ids) for place, ids in zip(places, said, strict=True))
        prompt_logprobs = None if params.prompt_logprobs is None else known
        yield RequestDelta(request_id=request_id, choices=choices, finished=finished, prompt_logprobs=prompt_logprobs)


def spoken(name: str, tokenizer: Tokenizer) -> Iterator[tuple[list[int], bool]]:
    """Ids as a model may say them, and whether they are the tokenizer's own for some text."""
    for text in (*TEXTS, INDIC, FLAGS):
        yield tokenizer.encode(text, add_special_tokens=False), True
    rng = random.Random(name)
    low, size = min(300, tokenizer.vocab_size), tokenizer.vocab_size
    special = sorted(tokenizer._special)[:8]
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in (INDIC, FLAGS)]
    for _ in range(4):
        anything = [rng.choice((rng.randrange(low), rng.randrange(size + 4))) for _ in range(30)]
        pieces = [ids[start : start + 7] for ids in texts for start in (rng.randrange(len(ids)),)]
        mixed = [*anything[:10], *pieces[0], *rng.sample(special, min(2, len(special))), *anything[10:20], *pieces[1]]
        yield mixed, False
        yield [rng.randrange(low) for _ in range(25)], False


def choice_text(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else (choice.get("delta") or choice["message"])["content"]


@pytest.mark.parametrize("name", LOADERS)
def test_streamed_text_equals_whole_text(name: str, load: Callable[[str], Tokenizer]) -> None:
    tokenizer = load(name)
    cases = list(spoken(name, tokenizer))
    held_back = 0
    for number, ((ids, proper), (other, _)) in enumerate(pairwise(cases)):
        first, second = Api(tokenizer, [ids, other], number), Api(tokenizer, [ids, other], number + 1000)
        options: dict[str, Any] = [
            {"n": 2},
            {"n": 2, "echo": True, "logprobs": 1},
            {"logprobs": 0, "return_token_ids": True, "skip_special_tokens": False},
        ][number % 3]
        whole = first.whole("/v1/completions", prompt=PROMPT, **options)
        events = second.streamed("/v1/completions", prompt=PROMPT, **options)
        assert sorted(events) == [choice["index"] for choice in whole]
        for choice in whole:
            mine = events[choice["index"]]
            assert "".join(map(choice_text, mine)) == choice["text"]
            if "\ufffd" not in choice["text"]:
                assert not any("\ufffd" in choice_text(event) for event in mine)
            held_back += sum(not choice_text(event) for event in mine)
            assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
            if choice["logprobs"]:
                parts = [event["logprobs"] for event in mine if event["logprobs"]]
                for key, expected in choice["logprobs"].items():
                    assert [item for part in parts for item in part[key]] == expected, key
                said = (ids, other)[choice["index"]]
                assert len(choice["logprobs"]["tokens"]) == len(said) + 3 * bool(options.get("echo"))
        if proper and "echo" not in options and "skip_special_tokens" not in options:
            assert whole[0]["text"] == in_context(tokenizer, PROMPT, ids)
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "logprobs": bool(number % 2)}
        (said_whole,) = first.whole("/v1/chat/completions", **chat)
        said_events = second.streamed("/v1/chat/completions", **chat)[0]
        assert "".join(map(choice_text, said_events)) == choice_text(said_whole)
        if number % 2:
            listed = [item for event in said_events if event["logprobs"] for item in event["logprobs"]["content"]]
            assert listed == said_whole["logprobs"]["content"]
            assert len(listed) == len(ids)
    assert held_back, "every token had text at once, so nothing was ever held back"


@pytest.mark.parametrize("name", LOADERS)
def test_stop_strings_leak_nothing(name: str, load: Callable[[str], Tokenizer]) -> None:
    tokenizer = load(name)
    rng = random.Random(name)
    stopped = 0
    for number, (ids, _) in enumerate(spoken(name, tokenizer)):
        (full,) = Api(tokenizer, [ids], 0).whole("/v1/completions", prompt=PROMPT)
        text = full["text"]
        if len(text) < 8:
            continue
        start = rng.randrange(2, len(text) - 4)
        stops = [text[start : start + rng.choice((1, 2, 4))], text[start + 2 : start + 4] + "never said"]
        # The stop string that is complete first; of those that end together, the longest.
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
        end, length = min(ends)
        for include in (False, True):
            expected = text[:end] if include else text[: end + length]
            options = {"prompt": PROMPT, "stop": stops, "include_stop_str_in_output": include}
            (whole,) = Api(tokenizer, [ids], number).whole("/v1/completions", **options)
            events = Api(tokenizer, [ids], number + 1).streamed("/v1/completions", **options)[0]
            for end_of in (whole, events[-1]):
                assert (end_of["finish_reason"], end_of["stop_reason"]) == ("stop", stops[0])
            assert whole["text"] == expected
            shown = ""
            for event in events:
                shown += event["text"]
                assert expected.startswith(shown), "what is not part of the answer was sent"
            assert shown == expected
            stopped += 1
    assert stopped >= 16
