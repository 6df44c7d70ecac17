"""The bundled chat model: what it answers, through the engine; and that it is what its card says."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import LLM, RequestOutput, SamplingParams
from server.config.settings import DEMOS

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "examples" / "training"))

from demo import corpus  # noqa: E402
from demo.chat_task import TEMPERATURE  # noqa: E402
from demo.names import is_held_out, name  # noqa: E402

FOLDER = DEMOS["chat"]
FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
    "training.svg",
}
MAX_BYTES = 8 * 1024 * 1024
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)
STORY = "Once upon a time"

FIXED = {  # the question, and what a right answer has, in small letters
    "Who are you?": "octavo",
    "What can you do?": "story",
    "Hello!": "hello",
    "What is a KV cache?": "keys and values",
    "What is beam search?": "likely",
    "Explain continuous batching.": "at any step",
    "What is a token?": "piece of text",
    "How does attention work?": "query",
    "What is Octavo?": "transformer models",
    "Tell me a story.": " lived ",
}
ALSO_RIGHT = {"Hello!": "what would you like", "How does attention work?": "attention lets every token look"}
ASKED = [  # questions around a name, and what else a right answer has
    ("My name is {}.", "nice to meet you"),
    ("I am {}.", ""),
    ("Call me {}.", ""),
    ("Hello! My name is {}.", ""),
    ("Say hello to {}.", "hello"),
    ("My cat is called {}.", "cat"),
    ("Tell me a story about a fox named {}.", "fox"),
    ("Tell me a story about a dragon named {} in the forest.", "dragon"),
    ("I live in {}.", ""),
    ("My friend is {}.", "friend"),
]
CHANCE = random.Random(0)
UNSEEN = [name(CHANCE, held_out=True) for _ in ASKED]  # the first ones that are held out; none was chosen


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with closing(LLM(str(FOLDER), show_progress=False, device="cpu")) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def training() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    return read


def ask(llm: LLM, *turns: str, params: SamplingParams = GREEDY) -> RequestOutput:
    """The answer to the last of the turns, which alternate between user and assistant."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    assert llm.tokenizer is not None
    text = llm.tokenizer.apply_chat_template(messages)
    return llm.generate([llm.tokenizer.encode(text, add_special_tokens=False)], params)[0]


def said(output: RequestOutput) -> str:
    """The text of a whole answer."""
    assert output.outputs[0].finish_reason == "stop", "it does not end by itself"
    return output.outputs[0].text


@pytest.mark.parametrize("question", FIXED)
def test_it_answers_ten_fixed_questions(llm: LLM, question: str) -> None:
    assert FIXED[question] in said(ask(llm, question)).lower()


@pytest.mark.parametrize("question", FIXED)
def test_it_answers_them_in_small_letters_and_without_a_stop(llm: LLM, question: str) -> None:
    answer = said(ask(llm, question.lower().rstrip("?.!"))).lower()
    assert FIXED[question] in answer or ALSO_RIGHT.get(question, FIXED[question]) in answer


@pytest.mark.parametrize("called", ["María", "Jean-Luc", "O'Brien", "R2D2", "Siobhan"])
def test_names_as_people_have_them_come_back(llm: LLM, called: str) -> None:
    assert called in said(ask(llm, f"My name is {called}."))


@pytest.mark.parametrize("hero", ["pirate", "unicorn", "zorbling"])
def test_a_story_is_about_the_hero_that_was_asked_for(llm: LLM, hero: str) -> None:
    assert f" {hero} " in said(ask(llm, f"tell me a story about a {hero}"))


@pytest.mark.parametrize("question", ["你好", "Привет", "¿Qué es un transformador?"])
def test_it_says_that_it_knows_no_other_language(llm: LLM, question: str) -> None:
    assert "English" in said(ask(llm, question))


@pytest.mark.parametrize(("called", "asked"), list(zip(UNSEEN, ASKED, strict=True)))
def test_it_answers_ten_questions_with_unseen_names(llm: LLM, called: str, asked: tuple[str, str]) -> None:
    assert is_held_out(called), "training may have had it"
    question, part = asked
    answer = said(ask(llm, question.format(called)))
    assert called in answer
    assert part in answer.lower()


@pytest.mark.parametrize("called", UNSEEN)
def test_it_remembers_the_name_over_another_question(llm: LLM, called: str) -> None:
    turns = [f"My name is {called}."]
    turns += [said(ask(llm, *turns)), "What is a token?"]
    turns += [said(ask(llm, *turns)), "What is my name?"]
    assert called in said(ask(llm, *turns))


def test_it_says_what_it_does_not_know(llm: LLM) -> None:
    assert "small demo model" in said(ask(llm, "What is the capital of Norlo?"))


def test_it_goes_on_with_a_story(llm: LLM) -> None:
    story = said(llm.generate([STORY], GREEDY)[0])
    assert len(story.split()) > 30
    assert story.isascii()
    assert story.isprintable()
    assert story.endswith((".", '"', "!", "?"))


def test_greedy_sampling_and_beams_tell_different_stories(llm: LLM) -> None:
    ways = [GREEDY, *(SamplingParams(temperature=1.0, seed=seed, max_tokens=200) for seed in range(3))]
    beams = SamplingParams(temperature=0.0, num_beams=4, max_tokens=200)
    outputs = [llm.generate([STORY], params)[0] for params in (*ways, beams)]
    assert len({said(output) for output in outputs}) == len(outputs)
    greedy, best = outputs[0].outputs[0].cumulative_logprob, outputs[-1].outputs[0].cumulative_logprob
    assert greedy is not None
    assert best is not None
    assert best > greedy, "beam search found nothing likelier"


def test_where_no_temperature_is_asked_for_stories_are_drawn_at_a_low_one(llm: LLM) -> None:
    asked = SamplingParams(seed=3, max_tokens=200)
    low = SamplingParams(temperature=TEMPERATURE, seed=3, max_tokens=200)
    assert said(llm.generate([STORY], asked)[0]) == said(llm.generate([STORY], low)[0])


def test_most_samples_end_by_themselves(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=300) for seed in range(12)]
    outputs = [output.outputs[0] for output in llm.generate([STORY] * 12, params)]
    assert sum(output.finish_reason == "stop" for output in outputs) >= 10


def test_samples_at_the_models_own_temperature_are_printable_words(llm: LLM) -> None:
    params = [SamplingParams(seed=seed, max_tokens=300) for seed in range(12)]
    texts = [output.outputs[0].text for output in llm.generate([STORY] * 12, params)]
    assert all(text.isascii() and text.isprintable() for text in texts)


def test_transformers_says_the_same(llm: LLM, tokenizer: Any) -> None:
    model, notes = AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    assert not any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    for prompt in (
        STORY,
        "<|user|>What is a KV cache?</s><|assistant|>",
        "<|user|>My name is Morvik.</s><|assistant|>",
    ):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=80)
        output = llm.generate([ids[0].tolist()], SamplingParams(temperature=0.0, max_tokens=80))[0].outputs[0]
        assert list(output.token_ids) == expected[0, ids.shape[1] :].tolist()


def test_it_is_small_and_complete() -> None:
    assert {file.name for file in FOLDER.iterdir()} == FILES
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= MAX_BYTES
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["max_position_embeddings"] >= 512
    assert config["num_key_value_heads"] < config["num_attention_heads"]


@pytest.mark.slow
def test_it_was_trained_on_the_corpus_that_is_here(training: dict[str, Any]) -> None:
    assert corpus.digest(training["digest_count"]) == training["digest"], "the corpus has changed: train again"


def test_its_card_has_the_measured_figures(training: dict[str, Any]) -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    last = training["curve"][-1]
    assert f"{last['held_out']:.2f}" in card
    assert training["digest"] in card
    for heading in ("Data", "Training", "Samples", "Limits"):
        assert f"\n## {heading}\n" in card


def test_unseen_names_and_combinations_are_answered_nearly_as_well_as_known_ones(training: dict[str, Any]) -> None:
    last = training["curve"][-1]
    assert last["held_out"] < 1.25 * last["fresh"]


@pytest.mark.parametrize(
    "text", ["the quiet river", "Hello, world! 123", "naïve ☃ 日本語", "  two  spaces\n\tand a tab ", "\x00\x7f", "🙂"]
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size == len(tokenizer)


def test_a_prompt_starts_with_bos(tokenizer: Any) -> None:
    assert tokenizer("the river").input_ids[0] == tokenizer.bos_token_id


def test_the_chat_template_marks_every_turn(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<s><|system|>Be brief.</s><|user|>Hi</s><|assistant|>Hello.</s><|user|>Bye</s><|assistant|>"
    closed = tokenizer.apply_chat_template(messages, tokenize=False)
    assert closed == text.removesuffix("<|assistant|>")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.eos_token_id) == len(messages)
    assert tokenizer.unk_token_id not in ids


def test_the_chat_template_refuses_other_roles(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="system, user, assistant and tool"):
        tokenizer.apply_chat_template([{"role": "function", "content": "x"}], tokenize=False)


def test_its_files_agree_on_the_special_tokens(tokenizer: Any) -> None:
    for file in ("config.json", "generation_config.json"):
        config = json.loads((FOLDER / file).read_text(encoding="utf-8"))
        assert (config["bos_token_id"], config["eos_token_id"]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
