"""Rotary factors that depend on length are chosen once for a request, by what it can reach.

The goldens of answers on either side are shapes of `support.family_shapes`; that batches, chunks, preemptions, beams,
cached pages and recorded steps change no answer is for the metamorphic tests, which have such a model among theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support import reference
from support.checkpoints import random_prompt
from support.driving import Job, add, finish, make_engine, preempt_all, run, run_alone, watching
from support.families import FAMILY_SHAPES, FamilyCheckpoint, make_family_checkpoint
from support.jobs import greedy
from support.pages import close

from engine import Engine, PoolingParams, SamplingParams
from engine.interface.request import Decoding, Request
from engine.model.positions import DynamicScaling, LongScaling, Rotary
from engine.model.rotary import RotaryTable, rotary_frequencies
from engine.scheduling.needs import SequenceNeeds
from engine.scheduling.plan import StepPlan

LIMIT, LENGTH = 72, 128
SHAPE = FAMILY_SHAPES["phi3-factors-by-request"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FamilyCheckpoint:
    return make_family_checkpoint(SHAPE, tmp_path_factory.mktemp("by-request"))


def engine_of(model: FamilyCheckpoint, **settings: Any) -> Engine:
    """With no word about its length."""
    return make_engine(model.path, **({"block_size": 4, "max_num_seqs": 8} | settings))


def offsets_of(plan: StepPlan) -> list[int]:
    """How many rows after its position each token's angles are; nothing where all are at their positions."""
    return plan.sides["rotary_offsets"].tolist() if "rotary_offsets" in plan.sides else []


def prompt(seed: int, length: int) -> list[int]:
    return random_prompt(SHAPE.vocab, seed, length)


# ------------------------------------------------------------------ which rows of which table


def test_sections_of_tables() -> None:
    """All positions of the longest sequences first; then for each limit those of the sequences within it."""
    dynamic = Rotary(8, 1e4, scaling=DynamicScaling(4.0, 20))
    long = Rotary(8, 1e4, scaling=LongScaling((1.0,) * 4, (3.0,) * 4, 12, 1.0))
    for part in (dynamic, long, Rotary(8, 1e4)):
        table = RotaryTable(part, 8, 50, CPU, limits=(12, 20))
        assert table.cos.shape == (82, 8)
        for first, reach in ((0, 50), (50, 12), (62, 20)):
            own = RotaryTable(part, 8, reach, CPU)
            rows = torch.arange(first, first + reach)
            assert torch.equal(table(rows, torch.float32)[1], own(torch.arange(reach), torch.float32)[1])
    apart = [torch.equal(rotary_frequencies(part, 50), rotary_frequencies(part, 20)) for part in (dynamic, long)]
    assert apart == [False, True]
    assert (dynamic.limit, long.limit, Rotary(8, 1e4).limit) == (20, 12, None)


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"),
    [(12, 1, 50), (11, 2, 50), (12, 2, 62), (1, 20, 62), (20, 1, 62), (20, 2, 0), (30, 1, 0)],
)
def test_the_choice_goes_by_what_is_computed(length: int, max_tokens: int, expected: int) -> None:
    """An answer's last token is not: its keys would be the next one's."""
    needs = SequenceNeeds(rotary_shifts=((12, 50), (20, 62)))
    request = Request(request_id="", prompt_token_ids=(1,) * length, decoding=Decoding(max_tokens=max_tokens))
    assert needs.rotary_shift(request.reach) == expected
    crossed = {(11, 2): None, (12, 2): 12, (1, 20): 12, (20, 2): 20}.get((length, max_tokens))
    assert needs.crossed_limit(request) == crossed


@pytest.mark.parametrize(
    ("max_model_len", "shifts"), [(None, ((LIMIT, LENGTH),)), (LIMIT + 1, ((LIMIT, LIMIT + 1),)), (LIMIT, ())]
)
def test_limits_beyond_the_longest_sequence_are_none(
    max_model_len: int | None, shifts: tuple[Any, ...], model: FamilyCheckpoint
) -> None:
    engine = engine_of(model, max_model_len=max_model_len)
    assert engine.scheduler.config.needs.rotary_shifts == shifts
    engine.close()


# ------------------------------------------------------------------ answers


def test_max_model_len_changes_no_short_answer(model: FamilyCheckpoint) -> None:
    """To the bit: one engine has long factors as well, the other could not reach them."""
    job = Job(prompt(1, 30), greedy(LIMIT - 30, logprobs=2, prompt_logprobs=1))
    found = []
    for max_model_len in (LIMIT, LENGTH):
        engine = engine_of(model, max_model_len=max_model_len)
        with watching(engine) as plans:
            add(engine, "job", job)
            output = finish(engine)["job"]
        assert all(("rotary_offsets" in plan.sides) == (max_model_len == LENGTH) for plan in plans)
        found.append((output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs))
        engine.close()
    assert found[0] == found[1]


def test_a_request_that_crosses_has_long_factors_from_its_first_token_on(
    model: FamilyCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers takes the short ones up to the limit: the reference here has long ones alone. Said once aloud."""
    config = model.model.config.to_dict()
    config["rope_parameters"] |= {"short_factor": config["rope_parameters"]["long_factor"]}
    always = transformers.Phi3ForCausalLM(transformers.Phi3Config(**config)).eval()
    always.load_state_dict(model.model.state_dict())
    ids = prompt(3, 40)
    engine = engine_of(model)
    answers = {}
    for max_tokens in (LIMIT - 40 + 1, LIMIT - 40 + 2):
        expected = reference.greedy(model.model if max_tokens == LIMIT - 39 else always, ids, None, max_tokens)
        assert expected.margin > reference.MIN_MARGIN
        with caplog.at_level(logging.DEBUG, "octavo.engine"):
            for _ in range(2):
                (found,) = run(engine, [Job(ids, greedy(max_tokens))])
        assert found == [expected.answers[0].tokens]
        answers[max_tokens] = found[0]
    short, long = answers.values()
    assert short != long[:-1]
    told = [record for record in caplog.records if "may reach" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING, logging.DEBUG]
    assert "a request of 40 prompt tokens may reach 73 with its max_tokens of 34, more than the 72" in told[0].message
    assert "Set max_tokens to 33 or less" in told[0].message
    engine.close()


def test_vectors_go_by_the_length_of_their_input(model: FamilyCheckpoint) -> None:
    engine = engine_of(model, max_num_batched_tokens=50)
    inputs = [prompt(seed, length) for seed, length in enumerate((LIMIT, LIMIT + 1, 5, LENGTH))]
    for number, ids in enumerate(inputs):
        engine.add_request(str(number), ids, PoolingParams(pooling="mean", normalize=False))
    with watching(engine) as plans:
        outputs = finish(engine)
    for number, ids in enumerate(inputs):
        pooled = outputs[str(number)].pooled
        assert pooled is not None
        close(torch.tensor(pooled.values()[0]), model.hidden(ids)[0].mean(0))
    assert any(len(set(offsets_of(plan))) == 2 for plan in plans)
    engine.close()


def test_encoders_choose_by_input(tmp_path: Path) -> None:
    """An encoder reads whole inputs, of which each has its own factors, beside the others."""
    parameters = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    config = transformers.ModernBertConfig(
        vocab_size=61, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=24, rope_parameters=parameters, global_attn_every_n_layers=2, local_attention=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=3, sep_token_id=4,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.ModernBertModel(config).eval()
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path)
    engine = make_engine(tmp_path, max_model_len=40, max_num_batched_tokens=128)
    inputs = [random_prompt(61, seed, length) for seed, length in enumerate((40, 23, 40, 7))]
    for number, ids in enumerate(inputs):
        engine.add_request(str(number), ids, PoolingParams(pooling="mean", normalize=False))
    with watching(engine) as plans:
        outputs = finish(engine)
    assert [offsets_of(plan) for plan in plans] == [[0] * 40 + [40] * 23 + [0] * 40 + [40] * 7]
    for number, ids in enumerate(inputs):
        with torch.no_grad():
            hidden = theirs(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).last_hidden_state[0]
        pooled = outputs[str(number)].pooled
        assert pooled is not None
        close(torch.tensor(pooled.values()[0]), hidden.mean(0))
    engine.close()


# ------------------------------------------------------------------ pages


@pytest.mark.parametrize("format", ["float32", "int8"])
def test_pages_are_shared_among_requests_of_one_choice(format: str, model: FamilyCheckpoint) -> None:
    """Its beginning is the same, its keys are not: a request of the other choice finds none of it."""
    ids = prompt(5, 41)
    short, long = Job(ids, greedy(20)), Job(ids, greedy(60))
    with_answers = [short, long, short, long]
    lonely = engine_of(model, enable_prefix_caching=False, kv_cache_dtype=format)
    expected = run_alone(lonely, with_answers)
    lonely.close()
    assert expected[0][0] != expected[1][0][:20]
    engine = engine_of(model, kv_cache_dtype=format)
    cached, answers = [], []
    for number, job in enumerate(with_answers):
        add(engine, str(number), job)
        output = finish(engine)[str(number)]
        cached.append(output.num_cached_tokens)
        answers.append([answer.token_ids for answer in output.outputs])
    assert cached == [0, 0, 40, 40]
    assert answers == expected
    engine.close()


def test_a_preempted_request_keeps_its_choice(model: FamilyCheckpoint) -> None:
    """It comes back with a longer prompt, so to speak: what it can reach is what it was."""
    jobs = [Job(prompt(6, 41), greedy(LIMIT - 40)), Job(prompt(6, 41), greedy(LIMIT - 39))]
    engine = engine_of(model)
    expected = run_alone(engine, jobs)
    assert expected[0][0] != expected[1][0][:-1]
    struck: list[int] = []
    with watching(engine) as plans:
        assert run(engine, jobs, lambda step: struck.append(preempt_all(engine)) if step % 5 == 4 else None) == expected
    assert sum(struck) >= 8
    assert any(sorted(offsets_of(plan)) == [0, LENGTH] for plan in plans)
    assert engine.stats().prefix_hits > 0
    engine.close()


def test_plans_say_nothing_where_nothing_differs(checkpoint: Callable[[str], Any]) -> None:
    engine = make_engine(checkpoint("llama-grouped").path)
    with watching(engine) as plans:
        run(engine, [Job(random_prompt(60, 1, 9), SamplingParams(max_tokens=3, temperature=0.0))])
    assert plans
    assert all(not plan.sides for plan in plans)
    engine.close()


def test_turns_of_a_plan(model: FamilyCheckpoint) -> None:
    engine = engine_of(model)
    for number, job in enumerate((Job(prompt(7, 3), greedy(5)), Job(prompt(8, 80), greedy(5)))):
        add(engine, str(number), job)
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert offsets_of(plan) == [LENGTH] * 3 + [0] * 80
    assert plan.sides["rotary_offsets"].dtype == np.int32
    engine.scheduler.fail("enough")
    engine.close()


# ------------------------------------------------------------------ calibration


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize(
    "name", ["llama", "phi3-factors-by-request", "llama-dynamic-by-request", "gpt2", "falcon-alibi"]
)
def test_narrow_pages_answer_alike_whatever_the_limits(name: str, format: str, tmp_path: Path) -> None:
    """max_model_len, the pool and the step have no part in what is subtracted from keys, nor in any answer."""
    shape = FAMILY_SHAPES[name]
    make_family_checkpoint(replace(shape, finish=None), tmp_path)
    ids = random_prompt(shape.vocab, 4, 21)
    settings: list[dict[str, Any]] = [
        {},
        {"max_model_len": 40},
        {"max_model_len": 96, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 32, "max_num_seqs": 4},
    ]
    found, centres = [], []
    for changes in settings:
        engine = make_engine(tmp_path, kv_cache_dtype=format, block_size=4, **changes)
        add(engine, "job", Job(ids, greedy(15, logprobs=3)))
        answer = finish(engine)["job"].outputs[0]
        found.append((answer.token_ids, answer.logprobs))
        centres.append(engine.runner.cache.key_centres)
        engine.close()
    assert found[0] == found[1] == found[2]
    for layers in zip(*centres, strict=True):
        assert all(torch.equal(layers[0], layer) and bool(layer.any()) for layer in layers)
