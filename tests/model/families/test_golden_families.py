"""Every decoder-only family against `transformers`, on tiny random checkpoints in float32: the same tokens
by greedy decoding and by beam search, the same scores, the same hidden states.

The shapes are in `support/family_shapes`, one module a family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import transformers
from support.driving import Job, answers, make_engine
from support.encoders import ENCODER_SHAPES
from support.everyday import everyday
from support.families import FAMILY_SHAPES, FamilyCheckpoint, make_family_checkpoint, stops
from support.family_shape import BEAM_PROMPTS, BEAM_TOKENS, GREEDY_TOKENS, NUM_BEAMS, SEARCHES
from support.pages import Pages, close, load, scattered_tables
from support.reference import MIN_MARGIN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine import Engine, SamplingParams
from engine.model import families

pytestmark = pytest.mark.whole

SERVED = [name for name, shape in FAMILY_SHAPES.items() if shape.architecture in families.supported()]


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and the engine that has loaded it."""

    model: FamilyCheckpoint
    engine: Engine


@pytest.fixture(scope="module", params=everyday(SERVED))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Each shape in turn, made and loaded once for all tests."""
    model = make_family_checkpoint(FAMILY_SHAPES[request.param], tmp_path_factory.mktemp(request.param))
    # Small pages, so that prompts cover several, and windows leave some of them behind.
    engine = make_engine(
        model.path,
        max_model_len=model.shape.max_model_len,
        block_size=4,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
    )
    yield Subject(model, engine)
    engine.close()


def test_greedy_equals_reference(subject: Subject) -> None:
    """All prompts in one batch and each alone, all decisions clear; answers end by EOS and by the limit."""
    model = subject.model
    jobs = [Job(prompt, SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS)) for prompt in model.prompts()]
    assert max(len(job.prompt) for job in jobs) > model.window
    together = answers(subject.engine, jobs)
    reasons = set()
    for job, crowd in zip(jobs, together, strict=True):
        expected = model.greedy(job.prompt)
        assert expected.margin > MIN_MARGIN
        tokens = expected.answers[0].tokens
        (alone,) = answers(subject.engine, [job])
        for output in (crowd, alone):
            answer = output.outputs[0]
            assert answer.token_ids == tokens
            assert answer.finish_reason == ("stop" if tokens[-1] in model.shape.eos else "length")
            reasons.add(answer.finish_reason)
    assert reasons == {"stop", "length"}


@pytest.mark.slow
def test_beams_equal_reference(subject: Subject) -> None:
    """Four beams, all answers in order with their scores, for several rules of ending, and of another prompt for one;
    some end by themselves, at several lengths."""
    model = subject.model
    first, second = model.prompts()[:BEAM_PROMPTS]
    cases = [*((first, *how) for how in SEARCHES), (second, *SEARCHES[0])]
    jobs = [
        Job(
            prompt,
            SamplingParams(
                num_beams=NUM_BEAMS, n=NUM_BEAMS, max_tokens=BEAM_TOKENS, length_penalty=penalty, early_stopping=early
            ),
        )
        for prompt, penalty, early in cases
    ]
    lengths = set()
    for case, output in zip(cases, answers(subject.engine, jobs), strict=True):
        expected = model.beams(*case)
        assert expected.margin > MIN_MARGIN
        assert [answer.token_ids for answer in output.outputs] == [answer.tokens for answer in expected.answers]
        for answer, other in zip(output.outputs, expected.answers, strict=True):
            assert answer.score == pytest.approx(other.score, abs=1e-4)
            assert answer.finish_reason == ("stop" if answer.token_ids[-1] in model.shape.eos else "length")
        lengths |= stops(model, expected)
    assert len(lengths) > 1


def test_hidden_states_equal_reference(subject: Subject) -> None:
    """What the head gets, for prompts of several lengths in one ragged batch, whole and in chunks."""
    reference, lengths = subject.model, list(subject.model.shape.lengths)
    assert max(lengths) > reference.window
    assert max(lengths) <= reference.shape.max_model_len
    prompts = reference.ragged()
    expected = []
    for prompt in prompts:
        hidden, margin = reference.hidden(prompt)
        assert margin > MIN_MARGIN
        expected.append(hidden)
    model = load(reference.path, max_model_len=reference.shape.max_model_len)
    tables = scattered_tables(lengths)
    for ours, theirs in zip(Pages(model, tables, reach=lengths).step(prompts), expected, strict=True):
        close(ours, theirs)
    pages = Pages(model, tables, reach=lengths)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for chunk in (5, 1, 11, max(lengths)):
        # Rows move on by different steps; one that is done stands by with nothing to do.
        steps = [prompt[pages.lengths[row] :][: chunk + row] for row, prompt in enumerate(prompts)]
        for row, hidden in enumerate(pages.step(steps, padding=chunk % 3)):
            parts[row].append(hidden)
    for pieces, theirs in zip(parts, expected, strict=True):
        close(torch.cat(pieces), theirs)


def test_no_parameter_is_left_at_its_first_value(subject: Subject) -> None:
    """A norm or bias of all ones or zeros would not show when it is left out."""
    for name, parameter in subject.model.model.named_parameters():
        assert parameter.numel() == 1 or bool((parameter != parameter.flatten()[0]).any()), name


def test_every_family_has_two_shapes_and_every_architecture_one() -> None:
    """Whatever the registry serves as a decoder with a head is compared here, each family in at least two
    configurations. Of what is an encoder here (XLM), transformers has a decoder of the same name."""
    decoders = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - {s.architecture for s in ENCODER_SHAPES.values()}
    shapes = [shape.architecture for shape in FAMILY_SHAPES.values()]
    served = [name for name in families.supported() if name in decoders and getattr(transformers, name).can_generate()]
    assert served
    assert set(served) <= set(shapes)
    for family in families.FAMILIES:
        own = [name for name in shapes if name in family.architectures]
        assert len(own) >= 2 or not set(served) & set(family.architectures), family.name
