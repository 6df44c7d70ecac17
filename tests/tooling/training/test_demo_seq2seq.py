"""The bundled encoder-decoder: it translates sentences that training never had, and beams find what greedy misses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from engine import LLM, SamplingParams
from server.config.settings import DEMOS

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "examples" / "training"))

from demo import seq2seq_task  # noqa: E402

FOLDER = DEMOS["seq2seq"]
MAX_BYTES = 4 * 1024 * 1024
BEAMS = SamplingParams(temperature=0.0, num_beams=4, length_penalty=0.0, max_tokens=64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
FIRST = 5000  # sentences from this number on are not those of the card
PAIRS = [seq2seq_task.pair(number, held_out=True) for number in range(FIRST, FIRST + 60)]


EXACT = {
    "ke li kanus apo vila li kampasn blava no portur?",
    "nun li felus dora li kampan perdur.",
    "li pana dora en isla petran donet.",
    "pana brava apo ponta libran dora no pintur.",
    "hodi li amis apo isla li ovun dora no donur.",
    "nokta panas veta sub horta ridur.",
    "ke li rexas pos monta li kampan donur?",
    "nun kanu brava pos isla li navan no portar.",
    "li ami sub monta li kampan donar.",
    "li vulpa sub isla li mapan amorur.",
}
assert {pair.source for pair in PAIRS} >= EXACT


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with closing(LLM(str(FOLDER), show_progress=False, device="cpu")) as made:
        yield made


@pytest.fixture(scope="module")
def training() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    return read


def translate(llm: LLM, sentences: list[str], params: SamplingParams) -> list[str]:
    outputs = [output.outputs[0] for output in llm.generate(sentences, params)]
    assert all(output.finish_reason == "stop" for output in outputs)
    return [output.text for output in outputs]


@pytest.mark.parametrize(
    ("folian", "english"),
    [
        ("li vulpa lantan trovet.", "The fox found a lantern."),
        ("luma li vulpa lantan trovet.", "Later the fox found a lantern."),
        ("ke li puru en horta dormar?", "Does the child sleep in the garden?"),
    ],
)
def test_beams_translate(llm: LLM, folian: str, english: str) -> None:
    assert translate(llm, [folian], BEAMS) == [english]


def test_beams_translate_sentences_that_training_never_had(llm: LLM) -> None:
    got = translate(llm, [pair.source for pair in PAIRS], BEAMS)
    right = sum(text == pair.best for text, pair in zip(got, PAIRS, strict=True))
    assert right >= 0.65 * len(PAIRS), f"{right} of {len(PAIRS)}"


@pytest.mark.parametrize("number", [number for number, pair in enumerate(PAIRS) if pair.source in EXACT])
def test_beams_translate_some_of_them_exactly(llm: LLM, number: int) -> None:
    assert translate(llm, [PAIRS[number].source], BEAMS) == [PAIRS[number].best]


def test_greedy_goes_astray_where_beams_do_not(llm: LLM) -> None:
    sentence = "luma li vulpa lantan trovet."
    assert translate(llm, [sentence], GREEDY)[0].startswith("After")
    assert translate(llm, [sentence], BEAMS)[0].startswith("Later")
    split = [pair for pair in PAIRS if pair.split]
    greedy, beams = (translate(llm, [pair.source for pair in split], params) for params in (GREEDY, BEAMS))
    assert len(split) > 5
    assert sum(text == pair.best for text, pair in zip(greedy, split, strict=True)) < 0.1 * len(split)
    assert sum(text == pair.best for text, pair in zip(beams, split, strict=True)) > 0.4 * len(split)


def test_the_beams_are_translations_too_in_order(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, num_beams=4, n=4, length_penalty=0.0, max_tokens=64)
    outputs = llm.generate(["luma li ursu pika poman perdet."], params)[0].outputs
    assert outputs[0].text == "Later the small bear lost an apple."
    assert len({output.text for output in outputs}) == 4
    assert all("small bear lost a" in output.text for output in outputs)
    sums = [output.cumulative_logprob or 0.0 for output in outputs]
    assert sums == sorted(sums, reverse=True)
    assert max(sums) < 0.0


@pytest.mark.parametrize("beams", [1, 4])
def test_transformers_says_the_same(llm: LLM, beams: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model, notes = AutoModelForSeq2SeqLM.from_pretrained(FOLDER, output_loading_info=True)
    assert not any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    for pair in PAIRS[:5]:
        ids = tokenizer(pair.source, return_tensors="pt").input_ids
        row = model.generate(ids, do_sample=False, num_beams=beams, length_penalty=0.0, max_new_tokens=64)[0].tolist()
        output = llm.generate([pair.source], BEAMS if beams > 1 else GREEDY)[0].outputs[0]
        assert list(output.token_ids) == [token for token in row if token != tokenizer.pad_token_id]


def test_it_is_small_and_complete() -> None:
    names = {file.name for file in FOLDER.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "training.json", "training.svg"} <= names
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= MAX_BYTES


def test_it_was_trained_on_the_corpus_that_is_here(training: dict[str, Any]) -> None:
    assert seq2seq_task.digest(training["digest_count"]) == training["digest"], "the corpus has changed: train again"


def test_its_card_has_the_measured_figures_and_the_lexicon(training: dict[str, Any]) -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"{training['curve'][-1]['held_out']:.2f}" in card
    assert training["digest"] in card
    assert "vulpa fox" in card
