"""Every encoder-decoder family against `transformers`, on tiny random checkpoints in float32: the same tokens by
greedy decoding and by beam search, the same scores, the same hidden states of encoder and decoder.

The shapes are in `support/seq2seq_shapes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.driving import finish, make_engine, watching
from support.everyday import everyday
from support.pages import BLOCK, Pages, close, load, scattered_tables
from support.reference import MIN_MARGIN, skip_if_older
from support.seq2seq import (
    BEAM_CASES,
    BEAM_TOKENS,
    GREEDY_TOKENS,
    LENGTHS,
    MAX_LEN,
    NO_PAIRS,
    SEARCHES,
    START,
    Case,
    Seq2SeqCheckpoint,
    make_seq2seq_checkpoint,
    stops,
)
from support.seq2seq_shapes import SHAPES
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from engine import Engine, RequestOutput, SamplingParams, Seq2SeqInput
from engine.model import families

GREEDY = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS, **NO_PAIRS)


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and the engine that has loaded it."""

    model: Seq2SeqCheckpoint
    engine: Engine


@pytest.fixture(scope="module", params=everyday(SHAPES))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Each shape in turn, made and loaded once for all tests."""
    model = make_seq2seq_checkpoint(SHAPES[request.param], tmp_path_factory.mktemp(request.param))
    engine = make_engine(
        model.path, max_model_len=MAX_LEN, block_size=4, max_num_seqs=64, max_num_batched_tokens=512,
        enable_prefix_caching=False,
    )  # fmt: skip
    yield Subject(model, engine)
    engine.close()


def outputs(engine: Engine, jobs: list[tuple[Case, SamplingParams]]) -> list[RequestOutput]:
    """Run the jobs together."""
    for number, (case, params) in enumerate(jobs):
        # The start token comes by itself.
        input = case.source if len(case.begin) == 1 else Seq2SeqInput(case.source, case.begin[1:])
        engine.add_request(str(number), input, params)
    finished = finish(engine)
    return [finished[str(number)] for number in range(len(jobs))]


def test_answers_equal_reference(subject: Subject) -> None:
    """Greedy and beam searches of all cases in one batch, and each greedy one alone; all decisions are clear."""
    model = subject.model
    skip_if_older(model.shape.own_vocab is not None)
    cases = model.cases()
    # All rules of ending for one case, two for each of the others.
    searches = [(case, how) for case in cases[:BEAM_CASES] for how in (SEARCHES if case is cases[0] else SEARCHES[:2])]
    beams = [
        SamplingParams(
            num_beams=number,
            n=number,
            max_tokens=BEAM_TOKENS,
            length_penalty=penalty,
            early_stopping=early,
            **NO_PAIRS,
        )
        for _, (number, penalty, early) in searches
    ]
    jobs = [(case, GREEDY) for case in cases] + [(case, p) for (case, _), p in zip(searches, beams, strict=True)]
    together = outputs(subject.engine, jobs)
    reasons, answers = set(), set()
    for case, crowd in zip(cases, together, strict=False):
        expected = model.greedy(case)
        assert expected.margin > MIN_MARGIN
        tokens = expected.answers[0].tokens
        (alone,) = outputs(subject.engine, [(case, GREEDY)])
        for output in (crowd, alone):
            answer = output.outputs[0]
            assert answer.token_ids == tokens
            assert answer.finish_reason == ("stop" if tokens[-1] in model.shape.eos else "length")
            assert output.encoder_token_ids == list(case.source)
            assert output.prompt_token_ids == list(case.begin)
        reasons.add(crowd.outputs[0].finish_reason)
        answers.add(tuple(tokens))
    assert reasons == {"stop", "length"}
    assert len(answers) == len(cases)
    lengths = set()
    for (case, how), output in zip(searches, together[len(cases) :], strict=True):
        expected = model.beams(case, *how)
        assert expected.margin > MIN_MARGIN
        assert [answer.token_ids for answer in output.outputs] == [answer.tokens for answer in expected.answers]
        for answer, other in zip(output.outputs, expected.answers, strict=True):
            assert answer.score == pytest.approx(other.score, abs=1e-4)
            assert answer.finish_reason == ("stop" if answer.token_ids[-1] in model.shape.eos else "length")
        lengths |= stops(model.shape, expected)
    assert len(lengths) > 1


def test_decoder_prompts_in_chunks(subject: Subject) -> None:
    """A budget that leaves a step of the encoder one token of a longer decoder prompt."""
    model = subject.model
    case = max(model.cases(), key=lambda case: len(case.begin))
    engine = make_engine(
        model.path, max_model_len=MAX_LEN, block_size=4, max_num_seqs=2, max_num_batched_tokens=len(case.source) + 1
    )
    with watching(engine) as plans:
        (output,) = outputs(engine, [(case, GREEDY)])
    assert output.outputs[0].token_ids == model.greedy(case).answers[0].tokens
    assert [plan.num_tokens for plan in plans[:3]] == [1, len(case.source) + 1, len(case.begin) - len(case.source) - 2]
    assert [plan.encoder is not None for plan in plans[:2]] == [True, False]
    engine.close()


def test_hidden_states_equal_reference(subject: Subject) -> None:
    """Of the encoder, for inputs of several lengths in one ragged batch; of the decoder, whole and in chunks."""
    cases = subject.model.cases()
    shape = subject.model.shape
    sources = [list(case.source) for case in cases]
    targets = [[START, *(t % shape.vocab for t in range(3 * n, 5 * n))] for n in (9, 0, 17, 3, 1)]
    expected = [subject.model.hidden(source, target) for source, target in zip(sources, targets, strict=True)]
    model = load(subject.model.path, max_model_len=MAX_LEN)
    tables = scattered_tables([len(target) for target in targets])
    more = 1 + max(map(max, tables))
    lengths = [len(source) for source in sources]
    cross = [[more + page for page in table] for table in scattered_tables(lengths)]
    pages = Pages(model, tables, more=1 + max(map(max, cross)))
    for ours, (theirs, _) in zip(pages.encode(sources, cross, padding=3), expected, strict=True):
        close(ours, theirs)
    for ours, (_, theirs) in zip(pages.step(targets), expected, strict=True):
        close(ours, theirs)
    again = Pages(model, tables, more=1 + max(map(max, cross)))
    again.encode(sources, cross)
    parts: list[list[torch.Tensor]] = [[] for _ in targets]
    for chunk in (5, 1, 11, 40):
        # Rows move on by different steps; one that is done stands by with nothing to do.
        steps = [target[again.lengths[row] :][: chunk + row] for row, target in enumerate(targets)]
        for row, hidden in enumerate(again.step(steps, padding=chunk % 3)):
            parts[row].append(hidden)
    for pieces, (_, theirs) in zip(parts, expected, strict=True):
        close(torch.cat(pieces), theirs)


@pytest.mark.parametrize("name", ["marian", "pegasus"])
def test_fixed_positions_that_a_checkpoint_stores(name: str, tmp_path: Path) -> None:
    """Other ones than the formula's, in both stacks: they change answers, to what the reference says."""
    plain = make_seq2seq_checkpoint(SHAPES[name], tmp_path)
    file = tmp_path / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    other = {f"model.{stack}.embed_positions.weight": torch.randn(MAX_LEN, 32, generator=generator)
             for stack in ("encoder", "decoder")}  # fmt: skip
    save_file(load_file(file) | other, file, metadata={"format": "pt"})
    changed = replace(plain, model=type(plain.model).from_pretrained(tmp_path, attn_implementation="eager").eval())
    engine = make_engine(tmp_path, max_model_len=MAX_LEN, block_size=4, max_num_seqs=8, max_num_batched_tokens=512)
    different = 0
    for case in plain.cases():
        expected = changed.greedy(case)
        assert expected.margin > MIN_MARGIN
        (output,) = outputs(engine, [(case, GREEDY)])
        assert output.outputs[0].token_ids == expected.answers[0].tokens
        different += expected.answers[0].tokens != plain.greedy(case).answers[0].tokens
    assert different > 1
    engine.close()


def test_no_parameter_is_left_at_its_first_value(subject: Subject) -> None:
    """A norm or bias of all ones or zeros would not show when it is left out; and Marian's sinusoids are not stored."""
    model = subject.model.model
    tensors = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n == "final_logits_bias"}
    without = ("T5", "M2M100", "Switch", "FSMT", "PegasusX", "ProphetNet")
    unbiased = any(name in subject.model.shape.architecture for name in without)
    assert ("final_logits_bias" in tensors) != unbiased
    for name, tensor in tensors.items():
        assert tensor.numel() == 1 or bool((tensor != tensor.flatten()[0]).any()), name
    with safe_open(subject.model.path / "model.safetensors", "pt") as file:
        sinusoids = [name for name in file.keys() if name.endswith("embed_positions.weight")]  # noqa: SIM118
    if "Marian" in subject.model.shape.architecture:
        assert not sinusoids


def test_lengths_of_cases() -> None:
    """From one token to several pages, on both sides."""
    sources, begins = zip(*LENGTHS, strict=True)
    assert min(sources) == min(begins) == 1
    assert max(sources) == 200
    assert max(begins) > BLOCK


def test_every_architecture_has_two_shapes() -> None:
    """Whatever the registry serves as an encoder-decoder with a head is compared here; mT5 is T5 by another name."""
    known = set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values())
    served = [name for name in families.supported() if name in known and getattr(transformers, name).can_generate()]
    assert {"T5ForConditionalGeneration", "BartForConditionalGeneration", "MarianMTModel"} <= set(served)
    shapes = [shape.architecture for shape in SHAPES.values()]
    assert {name for name in served if shapes.count(name) < 2} == {"MT5ForConditionalGeneration"}
    assert "MT5ForConditionalGeneration" in shapes
