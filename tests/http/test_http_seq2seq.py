"""Encoder-decoder models over HTTP, as a process of its own: answers are the reference's, whole and streamed."""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from support.service import PATIENCE, Service, serving, stopped
from support.text_seq2seq import MAX_LENGTH, TEXTS, WORDS, TextCheckpoint, make_text_checkpoint

from server.config.settings import ServerSettings

BLOCK, PAGES = 4, 72
HELD = 'octavo_kv_pages{state="held"}'


class Api:
    """A service of a checkpoint."""

    def __init__(self, service: Service, checkpoint: TextCheckpoint):
        self.service = service
        self.checkpoint = checkpoint
        self.http = httpx.Client(base_url=service.url, timeout=PATIENCE)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def texts(self, **body: Any) -> list[str]:
        return [choice["text"] for choice in self.complete(**body)["choices"]]

    def streamed(self, leave_after: int | None = None, **body: Any) -> dict[int, str]:
        """Each choice's text; a client that leaves early gets a part."""
        texts: dict[int, str] = {}
        with self.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
            for number, line in enumerate(lines):
                if line == "[DONE]":
                    return texts
                for choice in json.loads(line)["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                if number + 1 == leave_after:
                    break
        assert leave_after is not None, "no [DONE]"
        return texts

    def refused(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == 400, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error


@contextmanager
def served(kind: str, folder: Path, *arguments: str) -> Iterator[Api]:
    checkpoint = make_text_checkpoint(kind, folder / kind)
    log = folder / "service.log"
    settings = ("--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", str(MAX_LENGTH), *arguments)
    with serving(str(checkpoint.path), *settings, log=log, signum=signal.SIGINT) as service:
        api = Api(service, checkpoint)
        yield api
        api.http.close()


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Few pages, so that a crowd is preempted."""
    settings = ("--num-gpu-blocks-override", str(PAGES), "--max-num-seqs", "24", "--max-num-batched-tokens", "128")
    with served("t5", tmp_path_factory.mktemp("t5"), *settings, "--max-num-queued-reqs", "64") as api:
        yield api


@pytest.fixture(scope="module")
def mbart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with served("mbart50", tmp_path_factory.mktemp("mbart50")) as api:
        yield api


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"temperature": 0, "max_tokens": 12}, {"num_beams": 1, "max_new_tokens": 12}),
        (
            {"temperature": 0, "max_tokens": 14, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
            {"num_beams": 1, "max_new_tokens": 14, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
        ),
        (
            {"num_beams": 3, "n": 3, "max_tokens": 10, "length_penalty": 0.7},
            {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 10, "length_penalty": 0.7},
        ),
        (
            {
                "use_beam_search": True,
                "best_of": 4,
                "max_tokens": 10,
                "early_stopping": True,
                "no_repeat_ngram_size": 2,
            },
            {"num_beams": 4, "max_new_tokens": 10, "early_stopping": True, "no_repeat_ngram_size": 2},
        ),
    ],
)
@pytest.mark.slow
def test_answers_are_the_references(t5: Api, asked: dict[str, Any], meant: dict[str, Any]) -> None:
    one = t5.checkpoint
    ids = [one.encode(text) for text in TEXTS]
    answers = [one.generate(encoder, **meant) for encoder in ids]
    expected = [one.text(answer) for group in answers for answer in group]
    body = t5.complete(prompt=TEXTS, return_token_ids=True, **asked)
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["token_ids"] for choice in body["choices"]] == [answer for group in answers for answer in group]
    assert body["choices"][-1]["prompt_token_ids"] == ids[-1]
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert body["usage"]["completion_tokens"] == sum(len(answer) for group in answers for answer in group)
    ends = ["stop" if answer[-1] == one.eos else "length" for group in answers for answer in group]
    assert [choice["finish_reason"] for choice in body["choices"]] == ends
    streamed = t5.streamed(prompt=ids, **asked)
    assert [streamed.get(index, "") for index in range(len(expected))] == expected
    assert len(set(expected)) > 3


def test_an_input_is_encoded_once(t5: Api) -> None:
    runs = t5.service.metric("octavo_encoder_runs_total")
    prompt = "the bell of the far tower, late at night"
    length = len(t5.checkpoint.encode(prompt))
    first = t5.complete(prompt=prompt, temperature=0)
    hits = t5.service.metric("octavo_encoder_hits_total")
    again = t5.complete(prompt=[prompt, prompt], num_beams=4, max_tokens=4)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] == 2 * length
    assert t5.service.metric("octavo_encoder_runs_total") == runs + 1
    assert t5.service.metric("octavo_encoder_hits_total") == hits + 2
    other = t5.complete(prompt=prompt, add_special_tokens=False, max_tokens=1)
    assert other["usage"]["prompt_tokens"] == length - 1
    assert t5.service.metric("octavo_encoder_runs_total") == runs + 2


def test_a_decoder_prompt_is_where_the_answer_begins(t5: Api) -> None:
    one = t5.checkpoint
    encoder, begin = one.encode(TEXTS[2]), one.tokenizer("the red boat", add_special_tokens=False).input_ids
    how: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 8, "num_return_sequences": 2, "no_repeat_ngram_size": 2}
    answers = one.generate(encoder, [0, *begin], **how)
    expected = [one.text(answer, [0, *begin]) for answer in answers]
    assert expected[0].startswith(" ")
    asked: dict[str, Any] = {"num_beams": 3, "max_tokens": 8, "n": 2, "no_repeat_ngram_size": 2}
    for given in ("the red boat", begin, [0, *begin]):
        body = t5.complete(prompt=TEXTS[2], decoder_prompt=given, **asked)
        assert [choice["text"] for choice in body["choices"]] == expected
        brought = len(begin) + (given[:1] == [0])
        assert body["usage"]["prompt_tokens"] == len(encoder) + brought
    assert t5.texts(prompt=TEXTS[2], decoder_prompt="", **asked) == t5.texts(prompt=TEXTS[2], **asked)


def test_another_start_token(t5: Api) -> None:
    one, runs = t5.checkpoint, t5.service.metric("octavo_encoder_runs_total")
    encoder, how = one.encode("one warm wind"), {"num_beams": 3, "max_new_tokens": 8}
    asked: dict[str, Any] = {"prompt": "one warm wind", "num_beams": 3, "max_tokens": 8}
    found = []
    for start in (0, 9, 23):
        (answer,) = one.generate(encoder, decoder_start_token_id=start, **how)
        found.append(one.text(answer))
        body = t5.complete(**asked, decoder_start_token_id=start)
        assert [choice["text"] for choice in body["choices"]] == found[-1:]
        assert body["usage"]["prompt_tokens"] == len(encoder)
        (answer,) = one.generate(encoder, [start, 12], decoder_start_token_id=start, **how)
        for begin in ([12], [start, 12]):
            assert t5.texts(**asked, decoder_start_token_id=start, decoder_prompt=begin) == [one.text(answer, begin)]
    assert len(set(found)) > 1
    assert t5.texts(**asked) == found[:1]
    assert t5.service.metric("octavo_encoder_runs_total") == runs + 1
    assert t5.refused(**asked, decoder_start_token_id=100_000)["param"] == "decoder_start_token_id"


def test_log_probabilities_of_a_given_answer(t5: Api) -> None:
    one = t5.checkpoint
    encoder, given = one.encode(TEXTS[0]), one.tokenizer("a small white bird", add_special_tokens=False).input_ids
    body = t5.complete(prompt=TEXTS[0], decoder_prompt=given, prompt_logprobs=0, max_tokens=1)
    entries = body["choices"][0]["prompt_logprobs"]
    with torch.no_grad():
        logits = one.model(input_ids=torch.tensor([encoder]), decoder_input_ids=torch.tensor([[0, *given]])).logits
    expected = logits[0].log_softmax(-1)[range(len(given)), given].tolist()
    assert entries[0] is None
    found = [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], given, strict=True)]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_samples_stop_strings_and_logprobs(t5: Api) -> None:
    asked = {"prompt": TEXTS[4], "n": 3, "seed": 5, "temperature": 1.3, "max_tokens": 12, "logprobs": 2}
    body = t5.complete(**asked)
    texts = [choice["text"] for choice in body["choices"]]
    assert len(set(texts)) == 3
    assert t5.streamed(**asked) == dict(enumerate(texts))
    for choice in body["choices"]:
        assert choice["logprobs"]["text_offset"][:1] == [0]
        assert all(len(top) >= 2 for top in choice["logprobs"]["top_logprobs"])
    assert sum(len(choice["logprobs"]["tokens"]) for choice in body["choices"]) == body["usage"]["completion_tokens"]
    longest = max(texts, key=len)
    stop = longest[3:6]
    stopped = t5.complete(**{**asked, "logprobs": None}, stop=stop)["choices"][texts.index(longest)]
    assert stopped["text"] == longest[: longest.index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert t5.complete(prompt="water", ignore_eos=True)["usage"]["completion_tokens"] == 16  # the default


def test_openai_client(t5: Api) -> None:
    with openai.OpenAI(base_url=f"{t5.service.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        (card,) = client.models.list()
        assert card.model_dump()["max_encoder_len"] == card.model_dump()["max_model_len"] == MAX_LENGTH
        extra: Any = {"decoder_prompt": "the river", "num_beams": 2}
        whole = client.completions.create(model="t5", prompt=TEXTS[1], max_tokens=6, extra_body=extra)
        stream = client.completions.create(model="t5", prompt=TEXTS[1], max_tokens=6, stream=True, extra_body=extra)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
        with pytest.raises(openai.BadRequestError, match="encoder-decoder model") as refused:
            client.chat.completions.create(model="t5", messages=[{"role": "user", "content": "Hello"}])
        assert refused.value.code == "unsupported_endpoint"


# ---------------------------------------------------------------- languages


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.slow
def test_languages(mbart: Api, beams: int) -> None:
    one = mbart.checkpoint
    how = {"num_beams": beams, "max_new_tokens": 9, "no_repeat_ngram_size": 2}
    asked = {"num_beams": beams, "max_tokens": 9, "no_repeat_ngram_size": 2, "temperature": 0}
    found = set()
    for source, target in (("en_XX", "ro_RO"), ("de_DE", "fr_XX"), (None, "ja_XX"), ("ro_RO", None)):
        one.tokenizer.src_lang = source or "en_XX"
        encoder = one.encode(TEXTS[0])
        code = one.tokenizer.convert_tokens_to_ids(target) if target else None
        (answer,) = one.generate(encoder, forced_bos_token_id=code, **how)
        expected = one.text(answer)
        named = {"prompt": TEXTS[0], "src_lang": source}
        body = mbart.complete(**named, tgt_lang=target, return_token_ids=True, **asked)
        assert body["choices"][0]["prompt_token_ids"] == encoder
        assert body["choices"][0]["token_ids"] == answer
        assert body["choices"][0]["text"] == expected
        assert mbart.streamed(**named, tgt_lang=target, **asked).get(0, "") == expected
        if target:
            assert mbart.texts(**named, forced_bos_token=target, **asked) == [expected]
            assert mbart.texts(**named, forced_bos_token=code, **asked) == [expected]
            assert mbart.texts(**named, forced_bos_token_id=code, **asked) == [expected]
            shown = mbart.texts(**named, tgt_lang=target, skip_special_tokens=False, **asked)
            assert shown[0].startswith(target)
        tokens = mbart.post("/tokenize", prompt=TEXTS[0], src_lang=source).json()
        assert tokens["tokens"] == encoder
        found.add(expected)
    assert len(found) > 2
    one.tokenizer.src_lang = "en_XX"


def test_a_decoder_prompt_stands_behind_the_language(mbart: Api) -> None:
    one = mbart.checkpoint
    code = one.tokenizer.convert_tokens_to_ids("ro_RO")
    words = one.tokenizer("the tower", add_special_tokens=False).input_ids
    begin = [one.eos, code, *words]
    (answer,) = one.generate(one.encode(TEXTS[0]), begin, num_beams=2, max_new_tokens=8)
    expected = one.text(answer, begin)
    asked = {"prompt": TEXTS[0], "num_beams": 2, "max_tokens": 8}
    assert mbart.texts(**asked, tgt_lang="ro_RO", decoder_prompt="the tower") == [expected]
    assert mbart.texts(**asked, tgt_lang="ro_RO", decoder_prompt=begin) == [expected]
    for text in ("ro_RO the tower", "</s>ro_RO the tower"):  # brought by the text itself, and not twice
        assert one.tokenizer(text, add_special_tokens=False).input_ids[-len(words) - 1 :] == begin[1:]
        assert mbart.texts(**asked, tgt_lang="ro_RO", decoder_prompt=text) == [expected]
    assert mbart.texts(**asked, decoder_prompt=[code, *words]) == [expected]
    error = mbart.refused(**asked, tgt_lang="ro_RO", decoder_prompt=words)
    assert (error["param"], error["code"]) == ("tgt_lang", "invalid_value")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tgt_lang": "de_XX"}, "tgt_lang", "does not have the language 'de_XX'; it has de_DE, "),
        ({"src_lang": "English"}, "src_lang", "en_XX, "),
        ({"src_lang": "en_XX", "prompt": [5, 6]}, "src_lang", "token ids"),
        ({"src_lang": "en_XX", "add_special_tokens": False}, "src_lang", "add_special_tokens"),
        ({"tgt_lang": "de_DE", "forced_bos_token": "ro_RO"}, "tgt_lang", "Send only one of them"),
        ({"forced_bos_token": 5, "forced_bos_token_id": 5}, "forced_bos_token_id", "Send only one of them"),
        ({"forced_bos_token": "nonesuch"}, "forced_bos_token", "'nonesuch'"),
        ({"forced_bos_token": 100_000}, "forced_bos_token", "token ids must be from 0 to"),
        ({"forced_bos_token": -1}, "forced_bos_token", "token ids must be from 0 to"),
        ({"forced_bos_token": 1.5}, "forced_bos_token", ""),
        ({"decoder_prompt": [100_000]}, "decoder_prompt", "token ids must be from 0 to"),
        ({"decoder_prompt": []}, "decoder_prompt", "non-empty"),
        ({"decoder_prompt": ["a"]}, "decoder_prompt", "a string or a non-empty list of token ids"),
        ({"decoder_prompt": [5] * 96}, "decoder_prompt", "96 tokens"),
        ({"decoder_prompt": [5] * 500}, "decoder_prompt", "it has 500 tokens"),
        ({"decoder_prompt": "night " * 5000}, "decoder_prompt", "maximum context length is 96 tokens"),
        (
            {"prompt": [5] * 97},
            "prompt",
            "it has 97 tokens, and the maximum context length of this model's encoder is 96",
        ),
        (
            {"prompt": [5] * 500},
            "prompt",
            "it has 500 tokens, and the maximum context length of this model's encoder is 96",
        ),
        ({"prompt": "night " * 5000}, "prompt", "encoder is 96 tokens"),
        ({"prompt": ""}, None, ""),
        ({"max_tokens": 96}, "max_tokens", "max_tokens is 96, and the decoder's beginning takes 1, in total 97"),
        ({"echo": True}, "echo", "decoder_prompt, with prompt_logprobs"),
        ({"suffix": "x"}, "suffix", "cannot fill in the middle"),
    ],
)
def test_what_is_refused(mbart: Api, fields: dict[str, Any], param: str | None, words: str) -> None:
    if param is None:  # an empty text is a special token or two
        assert mbart.complete(prompt="")["usage"]["prompt_tokens"] == 2
        return
    error = mbart.refused(**{"prompt": "the sea", **fields})
    assert error["param"] == param
    assert words in error["message"]
    mbart.service.wait_metric(HELD, 0)


def test_a_model_without_languages_says_so(t5: Api) -> None:
    for field in ("src_lang", "tgt_lang"):
        error = t5.refused(prompt="the sea", **{field: "de_DE"})
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
        assert "translate English to German" in error["message"]
    assert t5.refused("/tokenize", prompt="the sea", src_lang="de_DE")["param"] == "src_lang"


def test_it_does_not_chat(t5: Api) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    for path, told in (
        ("/v1/chat/completions", ("model", "unsupported_endpoint")),
        ("/tokenize", ("messages", "no_chat")),
    ):
        error = t5.refused(path, messages=messages)
        assert (error["param"], error["code"]) == told
        assert "/v1/completions" in error["message"]


# ---------------------------------------------------------------- around it


def test_tokenize_and_detokenize(t5: Api) -> None:
    tokens = t5.post("/tokenize", prompt=TEXTS[0]).json()
    assert tokens["tokens"] == t5.checkpoint.encode(TEXTS[0])
    assert tokens["max_model_len"] == MAX_LENGTH
    assert t5.post("/detokenize", tokens=tokens["tokens"]).json()["prompt"] == TEXTS[0] + "</s>"


def test_the_log_says_what_fits(t5: Api) -> None:
    log = t5.service.log.read_text()
    assert f"encoder-decoder, prompts of up to {MAX_LENGTH} tokens, answers of up to {MAX_LENGTH}." in log
    assert f"{PAGES * BLOCK / (2 * MAX_LENGTH):.1f} requests of {2 * MAX_LENGTH} tokens" in log


def test_doctor(t5: Api, mbart: Api) -> None:
    from cli import doctor
    from engine import EngineConfig

    for api, languages in ((t5, ""), (mbart, ", 52 languages")):
        config = EngineConfig(model=str(api.checkpoint.path), max_model_len=MAX_LENGTH, num_gpu_blocks_override=16)
        found = {finding.check: finding for finding in doctor.examine(config, ServerSettings(port=0))}
        assert f"encoder-decoder, prompts of {MAX_LENGTH} tokens, answers of {MAX_LENGTH}" in found["model"].found
        assert found["tokenizer"].found == f"{len(api.checkpoint.tokenizer)} tokens{languages}"
        assert "chat template" not in found
        assert found["chat"].verdict == "ok"


# ---------------------------------------------------------------- a crowd


def crowd() -> list[dict[str, Any]]:
    """40 requests of every kind; four inputs are asked for again and again."""
    kinds: Iterator[Callable[[int], dict[str, Any]]] = itertools.cycle(
        [
            lambda seed: {"num_beams": 4, "n": 1 + seed % 4, "max_tokens": 14, "no_repeat_ngram_size": 2},
            lambda seed: {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "repetition_penalty": 1.4},
            lambda seed: {"seed": seed, "n": 1 + seed % 3, "temperature": 1.4, "top_p": 0.95, "max_tokens": 16},
            lambda seed: {"num_beams": 2 + seed % 3, "max_tokens": 12, "length_penalty": 0.5, "early_stopping": True},
            lambda seed: {"temperature": 0, "max_tokens": 12, "decoder_prompt": "the " + WORDS[seed]},
        ]
    )
    bodies = []
    for seed, kind in zip(range(40), kinds, strict=False):
        words = [WORDS[(seed * 7 + step * (seed + 3)) % len(WORDS)] for step in range(3 + seed * 5 % 29)]
        bodies.append({"prompt": TEXTS[seed % 4] if seed % 3 == 0 else " ".join(words), **kind(seed)})
    return bodies


@pytest.mark.slow
def test_a_crowd_answers_as_alone_and_leaves_nothing(t5: Api) -> None:
    bodies = crowd()
    leavers = {number: 1 + number % 3 for number in range(3, 40, 5)}
    alone = [t5.texts(**body) for body in bodies]
    assert len({text for texts in alone for text in texts}) > 40
    names = ("preemptions", "encoder_runs", "encoder_hits", "steps", "generation_tokens", "page_copies")
    metrics = {name: f"octavo_{'num_' * (name == 'preemptions')}{name}_total" for name in names}
    before = {name: t5.service.metric(metric) for name, metric in metrics.items()}

    def ask(number: int) -> list[str]:
        body, width = bodies[number], len(alone[number])
        if number in leavers:
            texts = t5.streamed(leave_after=leavers[number], **{**body, "max_tokens": 60, "ignore_eos": True})
            return [] if texts else [""]
        if number % 2:
            texts = t5.streamed(**body)
            return [texts.get(index, "") for index in range(width)]
        return t5.texts(**body)

    with ThreadPoolExecutor(40) as pool:
        with stopped(t5.service.engine()):
            answers = [pool.submit(ask, number) for number in range(40)]
            t5.service.wait_metric("octavo_num_requests_in_service", 40)
        together = [answer.result() for answer in answers]
    for number, (found, expected) in enumerate(zip(together, alone, strict=True)):
        if number not in leavers:
            assert found == expected, number
    t5.service.wait_metric(HELD, 0)
    t5.service.wait_metric("octavo_num_requests_in_service", 0)
    assert t5.service.metric("octavo_num_requests_running") == t5.service.metric("octavo_num_requests_waiting") == 0
    assert t5.service.metric("octavo_num_queued_tokens") == 0
    grown = {name: t5.service.metric(metric) - before[name] for name, metric in metrics.items()}
    assert all(grown.values()), grown
    assert grown["generation_tokens"] > 2 * grown["steps"], "the requests did not share steps"
    states = [t5.service.metric(f'octavo_kv_pages{{state="{state}"}}') for state in ("free", "cached")]
    assert sum(states) == PAGES
    assert math.isfinite(t5.service.metric("octavo_step_seconds_sum"))
    assert [t5.texts(**bodies[number]) for number in range(5)] == alone[:5]
    assert not re.search("error|died", t5.service.log.read_text(), re.IGNORECASE)
