"""Answers from catalogues, equal to those of `transformers.generate` with `prefix_allowed_tokens_fn`, and to a search
through all titles."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import reference
from support.catalogues import Title, random_titles, reference_rule, write
from support.checkpoints import SHAPES, Checkpoint
from support.reference import MIN_MARGIN, Reference
from support.seq2seq import MAX_LEN, START, Case, Seq2SeqCheckpoint, make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ
from support.text_seq2seq import MAX_LENGTH, TEXTS, WORDS, make_text_checkpoint

from engine import LLM, CompletionOutput, SamplingParams, Seq2SeqInput

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "show_progress": False, "max_step_time": 0,
    "num_gpu_blocks_override": 2048,
}  # fmt: skip
CATALOGUE = {"catalogue": "titles"}
NAMES = ("llama-full-tied", "gpt2-untied")  # of one EOS: with several the reference's answers have duplicates
# (beams, length penalty, early stopping)
SEARCHES: tuple[tuple[int, float, bool | str], ...] = (
    (2, 1.0, False),
    (5, 0.6, True),
    (8, 1.4, "never"),
    (16, 0.0, False),
)
Made = tuple[Any, LLM, list[Title]]


def is_clear(expected: Reference) -> bool:
    """Every decision was, and all answers are: where few candidates are left, the reference fills its beams up with
    others at a score of -1e9, and takes their ends for answers, which may even stop the search."""
    return expected.margin > MIN_MARGIN and all((answer.score or 0.0) > -1e8 for answer in expected.answers)


def assert_equal(
    ours: Sequence[CompletionOutput], expected: Reference, titles: set[Title], ends: Sequence[int]
) -> None:
    assert [answer.token_ids for answer in ours] == [answer.tokens for answer in expected.answers]
    for answer, other in zip(ours, expected.answers, strict=True):
        assert answer.finish_reason == "stop"
        assert answer.token_ids[-1] in ends
        assert tuple(answer.token_ids[:-1]) in titles
        if other.score is not None:
            assert answer.score == pytest.approx(other.score, abs=1e-4)


@pytest.fixture(scope="module")
def decoders(
    checkpoint: Callable[[str], Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Made]]:
    """Gives a decoder, an engine that has loaded it with a catalogue, and the titles, made once."""
    made: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in made:
            model, shape = checkpoint(name), SHAPES[name]
            titles = random_titles(3, 400, shape.vocab, without=shape.eos)
            path = write(tmp_path_factory.mktemp("catalogue") / "titles.jsonl", titles)
            made[name] = model, LLM(str(model.path), catalogue=[f"titles={path}"], **SETTINGS), titles
        return made[name]

    yield get
    for _, llm, _ in made.values():
        llm.engine.check_integrity()
        llm.close()


@pytest.mark.parametrize("name", NAMES)
def test_decoders(name: str, decoders: Callable[[str], Made]) -> None:
    """Greedy and beams, all answers in one batch; titles that begin others end where the reference ends them."""
    model, llm, titles = decoders(name)
    known, longest = set(titles), max(map(len, titles)) + 1
    prefixes = {title for title in titles if any(other[: len(title)] == title and other != title for other in titles)}
    cases = [(prompt, search) for prompt in model.prompts() for search in ((1, 1.0, False), *SEARCHES)]
    params = [
        SamplingParams(temperature=0, constraint=CATALOGUE)
        if beams == 1
        else SamplingParams(
            num_beams=beams, n=beams, length_penalty=penalty, early_stopping=stopping, constraint=CATALOGUE
        )
        for _, (beams, penalty, stopping) in cases
    ]
    outputs = llm.generate([prompt for prompt, _ in cases], params)
    compared: Counter[int] = Counter()
    ended, gone_on = 0, 0
    for (prompt, (beams, penalty, stopping)), output in zip(cases, outputs, strict=True):
        rule = {"prefix_allowed_tokens_fn": reference_rule(titles, len(prompt), model.eos)}
        if beams == 1:
            expected = reference.greedy(model.model, prompt, model.eos, longest, **rule)
        else:
            expected = reference.beams(
                model.model, prompt, model.eos, longest, num_beams=beams, n=beams, length_penalty=penalty,
                early_stopping=stopping, **rule,
            )  # fmt: skip
        if is_clear(expected):
            assert_equal(output.outputs, expected, known, model.eos)
            found = {tuple(answer.token_ids[:-1]) for answer in output.outputs}
            assert len(found) == beams
            ended += len(found & prefixes)
            gone_on += sum(any(title[:end] in prefixes for end in range(1, len(title))) for title in found)
            compared[beams] += 1
    assert min(compared[beams] for beams in (1, *(search[0] for search in SEARCHES))) >= 3
    assert ended > 0
    assert gone_on > 0


def log_probabilities(model: Any, prompt: Sequence[int], title: Title) -> dict[int, float]:
    """Of the title with each of the tokens that may end it."""
    scores = reference.logprobs(model.model, [*prompt, *title])[len(prompt) - 1 :]
    whole = sum(float(scores[place, token]) for place, token in enumerate(title))
    return {end: whole + float(scores[len(title), end]) for end in model.eos}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-grouped", "gpt2-untied"])
def test_as_many_beams_as_titles_find_all_of_them(
    name: str, checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """In the order of a search through all; also where a model has several tokens that end answers: each title comes
    once, with the most probable of them."""
    model, shape = checkpoint(name), SHAPES[name]
    titles = random_titles(5, 240, shape.vocab, without=shape.eos, longest=5)
    file = write(tmp_path / "titles.jsonl", titles)
    llm = LLM(str(model.path), catalogue=[f"titles={file}"], **SETTINGS)
    for prompt, early in zip(model.prompts()[:2], (False, True), strict=True):
        params = SamplingParams(num_beams=256, n=240, length_penalty=0.0, early_stopping=early, constraint=CATALOGUE)
        (output,) = llm.generate([prompt], params)
        expected = {title: log_probabilities(model, prompt, title) for title in titles}
        found = [tuple(answer.token_ids[:-1]) for answer in output.outputs]
        assert sorted(found) == sorted(titles)
        for answer, title in zip(output.outputs, found, strict=True):
            end, best = max(expected[title].items(), key=lambda item: item[1])
            assert answer.score == pytest.approx(best, abs=1e-3)
            assert answer.token_ids[-1] == end
        scores = [answer.score for answer in output.outputs]
        assert scores == sorted(scores, key=lambda score: -(score or 0.0))
    llm.engine.check_integrity()
    llm.close()


@pytest.mark.slow
def test_sampled_titles_have_the_models_probabilities(decoders: Callable[[str], Made], tmp_path: Path) -> None:
    """Each token is drawn from what the trie leaves, as a sampler over the masked distribution would."""
    model, _, _ = decoders("gpt2-untied")
    eos = model.eos[0]
    titles: list[Title] = [(3,), (3, 5), (3, 5, 8), (4, 1), (4, 2), (11, 12, 13), (14,)]
    file = write(tmp_path / "few.jsonl", titles)
    llm = LLM(str(model.path), catalogue=[f"titles={file}"], **SETTINGS)
    prompt, temperature = model.prompts()[1], 2.5
    expected: dict[Title, float] = {}
    for title in titles:
        probability = 1.0
        scores = reference.logprobs(model.model, [*prompt, *title])[len(prompt) - 1 :]
        allowed = reference_rule(titles, 0, [eos])
        for place, token in enumerate([*title, eos]):
            rest = allowed(0, torch.tensor(title[:place], dtype=torch.int64))
            weights = torch.softmax(scores[place, rest] / temperature, dim=0)
            probability *= float(weights[rest.index(token)])
        expected[title] = probability
    assert sum(expected.values()) == pytest.approx(1.0)
    assert sorted(expected.values())[-2] > 0.03, "nearly always the same title"
    drawn, count = Counter[Title](), 4000
    params = [SamplingParams(n=100, seed=seed, temperature=temperature, constraint=CATALOGUE) for seed in range(40)]
    for output in llm.generate([prompt] * 40, params):
        drawn.update(tuple(answer.token_ids[:-1]) for answer in output.outputs)
    assert sum(drawn.values()) == count
    assert set(drawn) <= set(titles)
    for title, probability in expected.items():
        assert abs(drawn[title] - count * probability) < 5 * math.sqrt(count * probability * (1 - probability)) + 1
    llm.close()


# ------------------------------------------------------------------ encoder-decoder models


@pytest.mark.slow
@pytest.mark.parametrize("forced", [None, 33], ids=["free", "forced-bos"])
@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_encoder_decoders(name: str, forced: int | None, tmp_path: Path) -> None:
    """A forced first token comes before the title."""
    model: Seq2SeqCheckpoint = make_seq2seq_checkpoint(SEQ2SEQ[name], tmp_path / "model")
    titles = random_titles(8, 300, 97, without=(*model.shape.eos, START))
    file = write(tmp_path / "titles.jsonl", titles)
    llm = LLM(str(model.path), catalogue=[f"titles={file}"], **(SETTINGS | {"max_model_len": MAX_LEN}))
    longest = max(map(len, titles)) + 1 + (forced is not None)
    more = {} if forced is None else {"forced_bos_token_id": forced}
    known = set(titles) if forced is None else {(forced, *title) for title in titles}
    compared: Counter[int] = Counter()
    cases = [Case(case.source, (START,)) for case in model.cases()]
    for case, (beams, penalty, stopping) in itertools.product(cases, ((1, 1.0, False), *SEARCHES)):
        rule: dict[str, Any] = {"prefix_allowed_tokens_fn": reference_rule(known, 1, model.shape.eos), **more}
        common = {"begin": case.begin, "use_cache": model.shape.cached, **rule}
        if beams == 1:
            params = SamplingParams(temperature=0, constraint=CATALOGUE, **more)
            expected = reference.greedy(model.model, case.source, model.shape.eos, longest, **common)
        else:
            params = SamplingParams(
                num_beams=beams, n=beams, length_penalty=penalty, early_stopping=stopping, constraint=CATALOGUE, **more
            )
            expected = reference.beams(
                model.model, case.source, model.shape.eos, longest, num_beams=beams, n=beams, length_penalty=penalty,
                early_stopping=stopping, **common,
            )  # fmt: skip
        (output,) = llm.generate(Seq2SeqInput(case.source), params)
        assert {tuple(answer.token_ids[:-1]) for answer in output.outputs} <= known
        if is_clear(expected):
            assert_equal(output.outputs, expected, known, model.shape.eos)
            compared[beams] += 1
    assert min(compared[beams] for beams in (1, 2, 8, 16)) >= 3, compared
    llm.engine.check_integrity()
    llm.close()


TITLES = ["the old poet", "the old", "a small red boat on the river", "Snow", "water, and wine", "the sea; the ship"]


@pytest.mark.parametrize(
    ("kind", "bos"), [("t5", None), ("bart", None), ("bart", 0), ("marian", None), ("pegasus", None)]
)
def test_texts_are_tokenised_as_answers(kind: str, bos: int | None, tmp_path: Path) -> None:
    """As GENRE makes its trie: what the tokenizer gives for the title, behind what the decoder begins with. BART's
    tokenizer opens an answer with <s>, which its model may or may not force."""
    one = make_text_checkpoint(kind, tmp_path / "model")
    one.model.generation_config.forced_bos_token_id = bos
    one.model.generation_config.save_pretrained(one.path)
    words = [f"{first} {second}" for first, second in itertools.pairwise(WORDS)]
    titles = [*TITLES, *words[:60], "the old poet"]
    file = write(tmp_path / "titles.jsonl", titles)
    llm = LLM(str(one.path), catalogue=[f"titles={file}"], **(SETTINGS | {"max_model_len": MAX_LENGTH}))
    labels = [tuple(ids[:-1]) for ids in one.tokenizer(text_target=titles).input_ids]
    assert all(ids[-1] == one.eos for ids in one.tokenizer(text_target=titles).input_ids)
    rule = reference_rule(labels, 1, [one.eos])
    longest = max(map(len, labels)) + 1
    for text, beams in itertools.product(TEXTS[:3], (1, 4)):
        params = SamplingParams(num_beams=beams, n=beams, temperature=0, constraint=CATALOGUE)
        (output,) = llm.generate(text, params)
        expected = one.generate(
            one.encode(text), num_beams=beams, num_return_sequences=beams, max_new_tokens=longest + 1,
            prefix_allowed_tokens_fn=rule,
        )  # fmt: skip
        assert [answer.token_ids for answer in output.outputs] == expected
        assert {answer.finish_reason for answer in output.outputs} == {"stop"}
        if kind != "marian":  # whose source and target do not have the same words
            assert {answer.text for answer in output.outputs} <= set(titles)
    llm.close()
