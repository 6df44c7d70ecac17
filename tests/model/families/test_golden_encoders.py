"""Every encoder-only family against `transformers`, on tiny random checkpoints in float32: the same hidden states for
inputs of 1 to 300 tokens in one batch and alone, and the same answers of every head.

The shapes are in `support/encoder_shapes`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.checkpoints import random_prompt
from support.driving import finish, make_engine
from support.encoder_shape import LENGTHS, first_tokens
from support.encoders import ENCODER_SHAPES, EncoderCheckpoint, make_encoder_checkpoint
from support.everyday import everyday
from support.pages import close
from torch import Tensor

from engine import Engine, PoolingParams, TokenInput
from engine.errors import InvalidRequestError
from engine.execution.invariance import min_invariant_rows
from engine.interface.outputs import Pooled
from engine.model import families
from engine.scheduling.plan import StepPlan

pytestmark = pytest.mark.whole

# What the heads of these classes are for, by the first ending that their names have; others have none.
TASKS = {
    "SequenceClassification": "classify",
    "TokenClassification": "token_classify",
    "QuestionAnswering": "answer",
    "QuestionAnsweringSimple": "answer",
    "MaskedLM": "fill_mask",
    "WithLMHeadModel": "fill_mask",
    "ElectraForPreTraining": "embed",
    "ForPreTraining": "fill_mask",
}


@dataclass(frozen=True)
class Subject:
    """A checkpoint, the engine that has loaded it, and what tests have asked of it."""

    model: EncoderCheckpoint
    engine: Engine
    crowd: list[Tensor] = field(default_factory=list)

    @property
    def task(self) -> str:
        """What its head is for; a model without one gives vectors."""
        name = self.model.shape.architecture
        return next((task for ending, task in TASKS.items() if name.endswith(ending)), "embed")

    def params(self, input: TokenInput) -> PoolingParams:
        """A request that the head answers."""
        positions = first_tokens(input, 3) if self.task == "fill_mask" else None
        return PoolingParams(task=self.task, positions=positions, top_k=2)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=everyday(ENCODER_SHAPES))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Each shape in turn, made and loaded once for all tests."""
    model = make_encoder_checkpoint(ENCODER_SHAPES[request.param], tmp_path_factory.mktemp(request.param))
    engine = make_engine(model.path, max_num_batched_tokens=1024, max_num_seqs=32)
    yield Subject(model, engine)
    engine.close()


def pooled(engine: Engine, jobs: Sequence[tuple[TokenInput, PoolingParams]]) -> list[Pooled]:
    """Run the jobs together."""
    for number, (input, params) in enumerate(jobs):
        engine.add_request(str(number), input, params)
    finished = finish(engine)
    answers = [finished[str(number)].pooled for number in range(len(jobs))]
    return [answer for answer in answers if answer is not None]


@contextmanager
def watching(engine: Engine) -> Iterator[list[tuple[StepPlan, Tensor]]]:
    """Collects the plans that are executed, and the hidden states of each."""
    steps: list[tuple[StepPlan, Tensor]] = []
    pool = engine.runner.kind.pooler.pool

    def spy(hidden: Tensor, plan: StepPlan) -> Any:
        steps.append((plan, hidden.clone()))
        return pool(hidden, plan)

    engine.runner.kind.pooler.pool = spy  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        engine.runner.kind.pooler.pool = pool  # type: ignore[method-assign]


def read(subject: Subject, inputs: Sequence[TokenInput]) -> list[Tensor]:
    """Hidden states of these inputs, read in one step."""
    with watching(subject.engine) as steps:
        pooled(subject.engine, [(input, subject.params(input)) for input in inputs])
    ((plan, hidden),) = steps
    assert plan.num_rows == len(inputs)
    assert plan.num_tokens == sum(len(input.token_ids) for input in inputs)
    rows = hidden[: plan.num_tokens].split([len(input.token_ids) for input in inputs])
    starts = [list(plan.token_ids[start : start + 1]) for start in plan.query_start[:-1]]
    assert starts == [list(input.token_ids[:1]) for input in inputs]  # in the order that they came in
    return list(rows)


def test_hidden_states_equal_reference(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    """All inputs in one batch and each alone, equal to the bit where matrix products are invariant."""
    inputs = subject.model.inputs()
    together = read(subject, inputs)
    with caplog.at_level(logging.INFO, "octavo.execution"):
        min_invariant_rows(subject.engine.runner.model)
    promised = "may depend" not in caplog.text
    for input, crowd in zip(inputs, together, strict=True):
        expected = subject.model.hidden(input)
        close(crowd, expected)
        (alone,) = read(subject, [input])
        close(alone, expected)
        assert not promised or torch.equal(alone, crowd)


def test_the_longest_input(subject: Subject) -> None:
    """As many tokens as there are positions, whatever the ids; one more is refused with the limit."""
    longest, vocab = subject.engine.info.max_model_len, subject.model.shape.vocab
    input = TokenInput(random_prompt(vocab, 3, longest))
    (ours,) = read(subject, [input])
    close(ours, subject.model.hidden(input))
    with pytest.raises(
        InvalidRequestError, match=f"it has {longest + 1} tokens, and this model takes at most {longest} "
    ):
        pooled(subject.engine, [(TokenInput([0] * (longest + 1)), subject.params(input))])
    assert not subject.engine.has_unfinished_requests()


def test_vectors_are_means_of_norm_one(subject: Subject) -> None:
    """The default of a model that says nothing else."""
    inputs = subject.model.inputs()
    if "embed" not in subject.engine.info.tasks:
        assert subject.task in ("classify", "token_classify", "answer")
        return
    found = pooled(subject.engine, [(input, PoolingParams(task="embed")) for input in inputs])
    for input, answer in zip(inputs, found, strict=True):
        mean = subject.model.hidden(input).double().mean(0)
        close(torch.tensor(answer.values()), (mean / mean.norm())[None].float())


def test_classes_equal_reference(subject: Subject) -> None:
    """The head's numbers, and what transformers' pipelines make of them."""
    inputs = subject.model.inputs()
    if subject.task not in ("classify", "token_classify"):
        assert not set(subject.engine.info.tasks) & {"classify", "token_classify"}
        return
    assert subject.engine.info.tasks == (subject.task,)
    task: Any = subject.task
    jobs = [(input, PoolingParams(task=task, use_activation=use)) for input in inputs for use in (False, True)]
    found = [torch.tensor(answer.values()) for answer in pooled(subject.engine, jobs)]
    labels = subject.model.model.config.num_labels
    assert len(subject.engine.info.labels) == labels
    for input, numbers, scores in zip(inputs, found[::2], found[1::2], strict=True):
        expected = subject.model.logits(input).reshape(-1, labels)
        close(numbers, expected)
        if subject.task == "classify":
            close(scores, subject.model.scores(input)[None])
        else:
            assert len(numbers) == len(input.token_ids)
            close(scores, numbers.softmax(-1))


def test_ends_of_answers_equal_reference(subject: Subject) -> None:
    """The two numbers of each token, which no activation changes."""
    inputs = subject.model.inputs()
    if subject.task != "answer":
        assert "answer" not in subject.engine.info.tasks
        return
    assert subject.engine.info.tasks == ("answer",)
    found = pooled(subject.engine, [(input, PoolingParams(task="answer")) for input in inputs])
    for input, answer in zip(inputs, found, strict=True):
        close(torch.tensor(answer.values()), subject.model.logits(input))


def test_masked_tokens_equal_reference(subject: Subject) -> None:
    """Probabilities of the whole vocabulary at some positions, and the most probable tokens in their order."""
    inputs = subject.model.inputs()
    vocab = subject.model.shape.vocab
    if subject.task != "fill_mask":
        assert "fill_mask" not in subject.engine.info.tasks
        return
    positions = [first_tokens(input, 4) for input in inputs]
    jobs = [
        (input, PoolingParams(task="fill_mask", positions=places, top_k=top_k))
        for input, places in zip(inputs, positions, strict=True)
        for top_k in (vocab, 3)
    ]
    found = pooled(subject.engine, jobs)
    for input, places, all_of_them, best in zip(inputs, positions, found[::2], found[1::2], strict=True):
        expected = subject.model.logits(input)[list(places)].softmax(-1)
        values, ids = torch.tensor(all_of_them.values()), torch.tensor(all_of_them.token_ids()).long()
        close(torch.zeros_like(expected).scatter(1, ids, values), expected)
        assert bool((values[:, :-1] >= values[:, 1:]).all())
        assert best.shape == (len(places), 3)
        assert best.token_ids().tolist() == ids[:, :3].tolist()
        assert best.values().tolist() == values[:, :3].tolist()


def test_no_parameter_is_left_at_its_first_value(subject: Subject) -> None:
    """A norm or bias of all ones or zeros would not show when it is left out."""
    for name, parameter in subject.model.model.named_parameters():
        assert parameter.numel() < 2 or bool((parameter != parameter.flatten()[0]).any()), name


def test_tokens_without_position_are_among_the_inputs(subject: Subject) -> None:
    """Ids of RoBERTa's padding, not only at an input's ends."""
    unplaced = subject.engine.runner.model.encoder.embedding.unplaced
    found = [input for input in subject.model.inputs() if unplaced in list(input.token_ids)[1:-1]]
    assert (len(found) > 3) == (unplaced is not None)


def test_lengths_of_inputs() -> None:
    """From one token to 300."""
    assert min(LENGTHS) == 1
    assert max(LENGTHS) == 300


def test_every_architecture_has_shapes() -> None:
    """Each architecture of each encoder-only family is compared here, models and masked language models of each in two
    configurations; other heads read the same states and have one."""
    shapes = [shape.architecture for shape in ENCODER_SHAPES.values()]
    masked = ("MaskedLM", "WithLMHeadModel")
    served = [f for f in families.FAMILIES if f.weights and any(n.endswith(masked) for n in f.architectures)]
    assert served
    for family in served:
        elsewhere = {"HF_ColBERT"}  # no class of transformers: tests/pooled/test_retrieval.py compares it
        assert set(family.architectures) - elsewhere <= set(shapes)
        for ending in ("Model", "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"):
            names = [name for name in family.architectures if name.endswith(ending)]
            several = ending in ("Model", "MaskedLM")
            assert not names or sum(map(shapes.count, names)) > several, (family.name, ending)
