"""Decoding parameters and `generation_config.json`, compared with `transformers` where it has them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import reference
from support.checkpoints import Checkpoint, random_prompt, with_generation_config
from support.reference import MIN_MARGIN, Reference

from engine import LLM, CompletionOutput, InvalidRequestError, SamplingParams
from engine.scheduling.philox import uniforms

NAME = "llama-grouped"
LENGTH = 24
BEAM_LENGTH = 12
FAVOURITES = list(range(0, 307, 3))

# Ours, and the reference's words for it.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition_penalty": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "repetition_reward": ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "unigrams": ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
    "bigrams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "trigrams": ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
    "min_tokens": ({"min_tokens": 9}, {"min_new_tokens": 9}),
    "min_length": ({"min_length": 34}, {"min_length": 34}),
    "suppress": ({"suppress_tokens": FAVOURITES}, {"suppress_tokens": FAVOURITES}),
    "begin_suppress": ({"begin_suppress_tokens": FAVOURITES}, {"begin_suppress_tokens": FAVOURITES}),
    "forced_eos": ({"forced_eos_token_id": 90}, {"forced_eos_token_id": 90}),
    "bad_words": (
        {"bad_words_ids": [[t] for t in FAVOURITES[1:]] + [[7], [4, 5]]},
        {"bad_words_ids": [[t] for t in FAVOURITES[1:]] + [[7], [4, 5]]},
    ),
    "prompt_rewarded": ({"encoder_repetition_penalty": 1.6}, {"encoder_repetition_penalty": 1.6}),
    "prompt_words": ({"encoder_no_repeat_ngram_size": 1}, {"encoder_no_repeat_ngram_size": 1}),
    "bias": (
        {"logit_bias": {5: 4.0, 90: -3.5, 11: 2.25}},
        {"sequence_bias": {(5,): 4.0, (90,): -3.5, (11,): 2.25}},
    ),
    "together": (
        {
            "logit_bias": {5: 4.0, 90: -3.5},
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 2,
            "min_tokens": 6,
            "suppress_tokens": [1, 2, 3, 44],
            "begin_suppress_tokens": FAVOURITES,
            "forced_eos_token_id": 7,
        },
        {
            "sequence_bias": {(5,): 4.0, (90,): -3.5},
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 2,
            "min_new_tokens": 6,
            "suppress_tokens": [1, 2, 3, 44],
            "begin_suppress_tokens": FAVOURITES,
            "forced_eos_token_id": 7,
        },
    ),
}


def assert_equal(ours: list[CompletionOutput], expected: Reference) -> None:
    assert expected.margin > MIN_MARGIN
    assert [answer.token_ids for answer in ours] == [answer.tokens for answer in expected.answers]
    for answer, other in zip(ours, expected.answers, strict=True):
        if other.score is not None:
            assert answer.score == pytest.approx(other.score, abs=1e-4)


@pytest.fixture(scope="module")
def plain(checkpoint: Callable[[str], Checkpoint]) -> dict[int, list[Reference]]:
    """The reference's answers without any setting, by the number of beams."""
    model = checkpoint(NAME)
    arguments = [(model.model, prompt, model.eos) for prompt in model.prompts()]
    return {
        1: [reference.greedy(*each, LENGTH) for each in arguments],
        4: [reference.beams(*each, BEAM_LENGTH, num_beams=4, n=4) for each in arguments],
    }


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_setting(
    setting: str, checkpoint: Callable[[str], Checkpoint], shared_llm: Any, plain: dict[int, list[Reference]]
) -> None:
    """Each parameter alone and all together; each changes at least one of the answers."""
    model = checkpoint(NAME)
    ours, theirs = SETTINGS[setting]
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, **ours)
    changed = 0
    outputs = shared_llm(NAME).generate(model.prompts(), params)
    for prompt, output, other in zip(model.prompts(), outputs, plain[1], strict=True):
        expected = reference.greedy(model.model, prompt, model.eos, LENGTH, **theirs)
        assert_equal(output.outputs, expected)
        changed += expected.answers != other.answers
    assert changed > 0


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("setting", SETTINGS)
def test_beam_setting(
    setting: str, checkpoint: Callable[[str], Checkpoint], shared_llm: Any, plain: dict[int, list[Reference]]
) -> None:
    """The same for beams, where processors act on log-probabilities."""
    reference.skip_if_older(setting == "prompt_rewarded")
    model = checkpoint(NAME)
    ours, theirs = SETTINGS[setting]
    params = SamplingParams(num_beams=4, n=4, max_tokens=BEAM_LENGTH, **ours)
    changed = 0
    outputs = shared_llm(NAME).generate(model.prompts(), params)
    for prompt, output, other in zip(model.prompts(), outputs, plain[4], strict=True):
        expected = reference.beams(model.model, prompt, model.eos, BEAM_LENGTH, num_beams=4, n=4, **theirs)
        assert_equal(output.outputs, expected)
        changed += expected.answers != other.answers
    assert changed > 0


@pytest.mark.parametrize("num_beams", [1, 4])
def test_forced_bos(num_beams: int, checkpoint: Callable[[str], Checkpoint], shared_llm: Any) -> None:
    """It follows a prompt of one token only; begin_suppress_tokens then bind the token after it."""
    model = checkpoint(NAME)
    ours = {"forced_bos_token_id": 33, "begin_suppress_tokens": FAVOURITES, "max_tokens": BEAM_LENGTH}
    theirs = {"forced_bos_token_id": 33, "begin_suppress_tokens": FAVOURITES}
    for prompt in ([40], [40, 41]):
        if num_beams == 1:
            expected = reference.greedy(model.model, prompt, model.eos, BEAM_LENGTH, **theirs)
            params = SamplingParams(temperature=0.0, **ours)
        else:
            expected = reference.beams(model.model, prompt, model.eos, BEAM_LENGTH, num_beams=4, n=2, **theirs)
            params = SamplingParams(num_beams=4, n=2, **ours)
        output = shared_llm(NAME).generate([prompt], params)[0]
        assert_equal(output.outputs, expected)
        assert (output.outputs[0].token_ids[0] == 33) == (len(prompt) == 1)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_openai_penalties(num_beams: int, checkpoint: Callable[[str], Checkpoint], shared_llm: Any) -> None:
    """presence and frequency penalties count the output alone."""
    model = checkpoint("gpt2-untied")
    ours: dict[str, Any] = {"presence_penalty": 0.7, "frequency_penalty": 1.1, "max_tokens": BEAM_LENGTH}
    params = SamplingParams(**ours, **({"temperature": 0.0} if num_beams == 1 else {"num_beams": 4, "n": 4}))
    changed = 0
    for prompt, output in zip(
        model.prompts(), shared_llm("gpt2-untied").generate(model.prompts(), params), strict=True
    ):
        processors = [reference.OpenAIPenalties(len(prompt), 0.7, 1.1)]
        arguments = (model.model, prompt, model.eos, BEAM_LENGTH)
        if num_beams == 1:
            expected = reference.greedy(*arguments, processors=processors)
            changed += expected.answers != reference.greedy(*arguments).answers
        else:
            expected = reference.beams(*arguments, num_beams=4, n=4, processors=processors)
            changed += expected.answers != reference.beams(*arguments, num_beams=4, n=4).answers
        assert_equal(output.outputs, expected)
    assert changed > 0


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 9},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.2, "top_p": 0.95, "repetition_penalty": 1.2},
        {"typical_p": 0.6},
        {"temperature": 1.3, "top_k": 60, "top_p": 0.97, "min_p": 0.01, "typical_p": 0.9, "repetition_penalty": 1.2},
    ],
    ids=lambda filters: "+".join(filters) or "plain",
)
def test_sampling_follows_the_reference_distribution(
    filters: dict[str, Any], checkpoint: Callable[[str], Checkpoint], shared_llm: Any
) -> None:
    """Each seeded token is where its random number falls in the distribution that the reference's own
    processors leave, in vocabulary order."""
    model = checkpoint("gpt2-tied")
    processors = _warpers(filters)
    outputs = shared_llm("gpt2-tied").generate(
        model.prompts(), SamplingParams(**({"temperature": 1.0} | filters), seed=11, max_tokens=16, n=2)
    )
    for prompt, output in zip(model.prompts(), outputs, strict=True):
        for answer in output.outputs:
            tokens = [*prompt, *answer.token_ids]
            with torch.no_grad():
                logits = model.model(torch.tensor([tokens])).logits[0].float()
            for position, token in enumerate(answer.token_ids):
                end = len(prompt) + position
                scores = processors(torch.tensor([tokens[:end]]), logits[end - 1 : end].clone())[0]
                edges = scores.double().softmax(dim=-1).cumsum(dim=-1)
                number = float(uniforms([11], [answer.index], [position])[0])
                assert (edges - number).abs().min() > 1e-6
                assert token == int((edges < number).sum())


def _warpers(filters: dict[str, Any]) -> Any:
    processors = transformers.LogitsProcessorList()
    if "repetition_penalty" in filters:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(filters["repetition_penalty"]))
    if "temperature" in filters:
        processors.append(transformers.TemperatureLogitsWarper(filters["temperature"]))
    if "top_k" in filters:
        processors.append(transformers.TopKLogitsWarper(filters["top_k"]))
    if "top_p" in filters:
        processors.append(transformers.TopPLogitsWarper(filters["top_p"]))
    if "min_p" in filters:
        processors.append(transformers.MinPLogitsWarper(filters["min_p"]))
    if "typical_p" in filters:
        processors.append(transformers.TypicalLogitsWarper(filters["typical_p"]))
    return processors


# ------------------------------------------------------------------ generation_config.json

DEFAULTS: dict[str, dict[str, Any]] = {
    "eos list": {"eos_token_id": [7, 201], "do_sample": False, "max_new_tokens": 30},
    "beams": {
        "eos_token_id": [7, 90, 201],
        "do_sample": False,
        "num_beams": 4,
        "length_penalty": 0.6,
        "early_stopping": True,
        "max_new_tokens": 14,
    },
    "processors": {
        "eos_token_id": 90,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": FAVOURITES,
        "begin_suppress_tokens": [10, 20],
        "min_new_tokens": 5,
        "forced_eos_token_id": 200,
        "max_new_tokens": 17,
    },
    "two least lengths": {
        "eos_token_id": [7, 90],
        "do_sample": False,
        "min_length": 50,
        "min_new_tokens": 2,
        "max_new_tokens": 20,
    },
    "total length": {"eos_token_id": 90, "do_sample": False, "max_length": 45, "min_length": 44},
    "unused filters": {
        "eos_token_id": [7, 90],
        "do_sample": False,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.4,
        "max_new_tokens": 20,
    },
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_the_reference(
    name: str, checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """The reference reads the same file; nothing is asked for but the model's defaults."""
    model = checkpoint(NAME)
    folder = with_generation_config(model, tmp_path / "model", {"pad_token_id": 0, **DEFAULTS[name]})
    config = transformers.GenerationConfig.from_pretrained(folder)
    llm = LLM(str(folder), device="cpu", show_progress=False)
    eos = llm.engine.defaults.eos_ids
    for prompt, output in zip(model.prompts(), llm.generate(model.prompts()), strict=True):
        ids = torch.tensor([prompt])
        expected = model.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        tokens = expected[0, len(prompt) :].tolist()
        stops = [place for place, token in enumerate(tokens) if token in eos]
        assert output.outputs[0].token_ids == tokens[: stops[0] + 1 if stops else None]
    llm.close()


def test_defaults_can_be_overridden(checkpoint: Callable[[str], Checkpoint], tmp_path: Path, shared_llm: Any) -> None:
    """What a request says is stronger than the file, and `generation_config="none"` leaves only EOS."""
    model = checkpoint(NAME)
    values = {
        "eos_token_id": list(model.eos), "do_sample": False, "num_beams": 4, "length_penalty": 2.0, "max_new_tokens": 9,
        "repetition_penalty": 1.8, "suppress_tokens": FAVOURITES, "no_repeat_ngram_size": 1, "min_new_tokens": 4,
    }  # fmt: skip
    folder = with_generation_config(model, tmp_path / "model", values)
    llm = LLM(str(folder), device="cpu", show_progress=False)
    neutral: dict[str, Any] = {
        "repetition_penalty": 1.0, "suppress_tokens": [], "no_repeat_ngram_size": 0, "min_tokens": 0,
        "max_tokens": LENGTH,
    }  # fmt: skip
    greedy = SamplingParams(num_beams=1, temperature=0.0, **neutral)
    beams = SamplingParams(num_beams=2, length_penalty=0.6, **neutral)
    for prompt in model.prompts():
        answers = [output.outputs[0] for output in llm.generate([prompt, prompt], [greedy, beams])]
        assert answers[0].token_ids == reference.greedy(model.model, prompt, model.eos, LENGTH).answers[0].tokens
        expected = reference.beams(model.model, prompt, model.eos, LENGTH, num_beams=2, length_penalty=0.6)
        assert expected.margin > MIN_MARGIN
        assert answers[1].token_ids == expected.answers[0].tokens
    llm.close()
    plain = LLM(str(folder), device="cpu", show_progress=False, generation_config="none")
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH)
    for ours, other in zip(
        plain.generate(model.prompts(), params), shared_llm(NAME).generate(model.prompts(), params), strict=True
    ):
        assert ours.outputs[0].token_ids == other.outputs[0].token_ids
    plain.close()


def test_sampling_defaults(checkpoint: Callable[[str], Checkpoint], tmp_path: Path, shared_llm: Any) -> None:
    """do_sample with temperature and filters; each can be overridden by name."""
    model = checkpoint(NAME)
    values = {"eos_token_id": list(model.eos), "do_sample": True, "temperature": 1.8, "top_k": 30, "top_p": 0.9}
    folder = with_generation_config(model, tmp_path / "sampled", values)
    llm = LLM(str(folder), device="cpu", show_progress=False)
    full = {"temperature": 1.8, "top_k": 30, "top_p": 0.9}
    tokens = {}
    for change in ({}, {"temperature": 0.0}, {"top_k": 0}, {"top_p": 1.0}, {"top_k": 2}, {"temperature": 0.3}):
        ours = llm.generate(model.prompts(), SamplingParams(seed=5, max_tokens=20, ignore_eos=True, **change))
        explicit = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, **(full | change))
        other = shared_llm(NAME).generate(model.prompts(), explicit)
        assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in other]
        tokens[str(change)] = [tuple(o.outputs[0].token_ids) for o in ours]
    assert len(set(map(tuple, tokens.values()))) == len(tokens)
    llm.close()
    greedy = with_generation_config(model, tmp_path / "greedy", {**values, "do_sample": False})
    llm = LLM(str(greedy), device="cpu", show_progress=False)
    params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)
    assert [tuple(o.outputs[0].token_ids) for o in llm.generate(model.prompts(), params)] == tokens[
        "{'temperature': 0.0}"
    ]
    warm = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, temperature=1.8)
    assert [tuple(o.outputs[0].token_ids) for o in llm.generate(model.prompts(), warm)] == tokens["{}"]
    llm.close()


def test_sampling_overrides_default_beams(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    """A model's default of beams yields to a request for sampling, and holds for everything else."""
    model = checkpoint(NAME)
    values = {"eos_token_id": list(model.eos), "num_beams": 3, "max_new_tokens": 10}
    folder = with_generation_config(model, tmp_path / "model", values)
    llm = LLM(str(folder), device="cpu", show_progress=False)
    prompt = model.prompts()[0]

    def score(**change: Any) -> float | None:
        return llm.generate([prompt], SamplingParams(**change))[0].outputs[0].score

    for change in ({"temperature": 0.8}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"num_beams": 1}):
        assert score(**change) is None, change
    for change in ({}, {"temperature": 0.0}, {"length_penalty": 0.5}, {"n": 2}, {"n": 5}, {"max_tokens": 3}):
        assert score(**change) is not None, change
    assert len(llm.generate([prompt], SamplingParams(n=5))[0].outputs) == 5
    with pytest.raises(InvalidRequestError, match="max_num_beams"):
        llm.generate([prompt], SamplingParams(n=17))
    llm.close()


def test_fields_without_effect_are_named(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A field that would change the answer is named in a warning at load; a neutral one is not."""
    model = checkpoint(NAME)
    eos = {"eos_token_id": list(model.eos)}
    loud = with_generation_config(
        model, tmp_path / "loud", {**eos, "eta_cutoff": 0.4, "diversity_penalty": 0.5, "top_k": 50}
    )
    quiet = with_generation_config(
        model, tmp_path / "quiet", {**eos, "typical_p": 1.0, "num_beam_groups": 1, "renormalize_logits": False}
    )
    with caplog.at_level(logging.WARNING, logger="octavo"):
        LLM(str(quiet), device="cpu", show_progress=False).close()
        assert not [r for r in caplog.records if "implement" in r.getMessage()]
        LLM(str(loud), device="cpu", show_progress=False).close()
    (message,) = [r.getMessage() for r in caplog.records if "implement" in r.getMessage()]
    assert "eta_cutoff" in message
    assert "diversity_penalty" in message
    assert "top_k" not in message


def test_typical_p_of_the_model_counts(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    model = checkpoint(NAME)
    path = with_generation_config(model, tmp_path / "typical", {"do_sample": True, "typical_p": 0.3})
    llm = LLM(str(path), device="cpu", show_progress=False)
    how: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 20}

    def answers(**more: Any) -> list[list[int]]:
        return [one.outputs[0].token_ids for one in llm.generate(model.prompts(), SamplingParams(**how, **more))]

    try:
        own = answers()
        assert own == answers(typical_p=0.3)
        assert own != answers(typical_p=1.0)
    finally:
        llm.close()


def test_eos_of_config_json(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    """Without a generation_config.json the EOS ids come from config.json."""
    model = checkpoint(NAME)
    folder = with_generation_config(model, tmp_path / "model", {})
    (folder / "generation_config.json").unlink()
    llm = LLM(str(folder), device="cpu", show_progress=False)
    assert llm.engine.defaults.eos_ids == frozenset(model.eos)
    prompt = random_prompt(model.vocab, 0)
    answer = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=LENGTH))[0].outputs[0]
    assert answer.token_ids == reference.greedy(model.model, prompt, model.eos, LENGTH).answers[0].tokens
    llm.close()


def test_fewer_continuations_than_answers(shared_llm: Callable[[str], LLM]) -> None:
    """Where one token is forced, transformers repeats it with a score that says that there was nothing else."""
    llm = shared_llm("llama-grouped")
    params = SamplingParams(num_beams=4, n=3, max_tokens=1, forced_eos_token_id=9)
    choices = llm.generate([[5, 6, 7]], params)[0].outputs
    assert [choice.token_ids for choice in choices] == [[9]] * 3
    assert [choice.score for choice in choices] == [0.0, -1e9, -1e9]
    assert all(choice.finish_reason in ("stop", "length") for choice in choices)
