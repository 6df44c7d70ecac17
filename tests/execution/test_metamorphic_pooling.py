"""What an input is made into depends on that input alone: not on the batch, its order, the size of steps, prefix hits
or preemptions. Bit for bit, in float32 on a CPU."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.checkpoints import random_prompt
from support.driving import check_idle, finish, make_engine, preempt_all, watching
from support.native import each_amx, loaded

from engine import Engine, EngineConfig, PoolingParams, SamplingParams, Seq2SeqInput, TokenInput
from engine.backends import native
from engine.backends.native import gemm
from engine.errors import EngineDeadError, InvalidRequestError
from engine.interface.outputs import Pooled, RequestDelta, RequestOutput
from engine.process.client import start_engine
from engine.scheduling.plan import StepPlan

VOCAB = 211
LENGTHS = [1, 300, 2, 33, 5, 129, 17, 4, 64, 8, 31, 32, 65, 3, 100, 16]

Work = tuple[list[int], list[int] | None, PoolingParams]


def make_bert(folder: Path, kind: str, labels: int, hidden_size: int) -> Path:
    """A tiny random BERT with the head of that kind."""
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=320,
        num_labels=labels,
    )
    model = getattr(transformers, f"Bert{kind}")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            is_norm = "LayerNorm.weight" in name
            parameter.copy_(1.0 + 0.3 * noise if is_norm else noise * (0.3 if parameter.dim() == 1 else 0.2))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def berts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of tiny BERTs, by the head's kind."""
    made: dict[tuple[str, int, int], Path] = {}

    def get(kind: str = "Model", labels: int = 3, hidden_size: int = 64) -> Path:
        key = kind, labels, hidden_size
        if key not in made:
            made[key] = make_bert(tmp_path_factory.mktemp(kind), *key)
        return made[key]

    return get


@contextmanager
def engine_of(path: Path, **settings: Any) -> Iterator[Engine]:
    engine = make_engine(path, **settings)
    try:
        yield engine
    finally:
        engine.close()


def submit(engine: Engine, name: str, work: Work, **terms: Any) -> None:
    tokens, types, params = work
    engine.add_request(name, TokenInput(tokens, token_type_ids=types), params, **terms)


def answers(outputs: dict[str, RequestOutput], count: int) -> list[Pooled]:
    found = []
    for number in range(count):
        output = outputs[str(number)]
        assert output.finished
        assert output.error is None
        assert output.outputs == []
        assert output.pooled is not None
        found.append(output.pooled)
    return found


def together(engine: Engine, works: Sequence[Work], order: Sequence[int] | None = None) -> list[Pooled]:
    """All at once, added in that order; the answers in the order of the works."""
    for number in range(len(works)) if order is None else order:
        submit(engine, str(number), works[number])
    return answers(finish(engine), len(works))


def alone(engine: Engine, works: Sequence[Work]) -> list[Pooled]:
    return [together(engine, [work])[0] for work in works]


def whole_works(kind: str) -> list[Work]:
    """Inputs of all lengths, some with two segments, for a tiny BERT of that kind."""
    rng, works = random.Random(3), list[Work]()
    for seed, length in enumerate(LENGTHS):
        tokens = random_prompt(VOCAB, seed, length)
        types = [int(place > length // 2) for place in range(length)] if seed % 3 == 0 else None
        match kind:
            case "Model":
                params = PoolingParams(pooling=rng.choice(["mean", "cls", "last", "max", "weighted_mean"]))
            case "ForMaskedLM":
                places = sorted(rng.sample(range(length), min(length, 3)))
                params = PoolingParams(task="fill_mask", positions=places, top_k=rng.randint(1, 9))
            case "ForTokenClassification":
                params = PoolingParams(task="token_classify", use_activation=bool(seed % 2))
            case _:
                params = PoolingParams(task="classify", use_activation=bool(seed % 2))
        works.append((tokens, types, params))
    return works


# Heads of 16 features have attention of their own on a CPU, others not.
KINDS = [
    ("Model", 3, 64),
    ("Model", 3, 48),
    ("ForMaskedLM", 3, 64),
    ("ForTokenClassification", 5, 64),
    ("ForSequenceClassification", 1, 64),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_input_is_read_the_same_in_any_company(kind: tuple[str, int, int], berts: Callable[..., Path]) -> None:
    works = whole_works(kind[0])
    with engine_of(berts(*kind)) as engine:
        expected = alone(engine, works)
        assert len({answer.data for answer in expected}) == len(works), "answers tell inputs apart"
        for seed in range(3):
            order = random.Random(seed).sample(range(len(works)), len(works))
            with watching(engine) as plans:
                assert together(engine, works, order) == expected
            assert [plan.num_rows for plan in plans] == [len(works)], "all were read in one step"
    for budget in (1, 40, 333):
        with engine_of(berts(*kind), max_num_batched_tokens=budget) as engine, watching(engine) as plans:
            assert together(engine, works) == expected
            assert all(plan.unchunked and (plan.num_tokens <= budget or plan.num_rows == 1) for plan in plans)
            assert (len(plans) == len(works)) == (budget == 1)
            assert engine.stats().num_steps == len(plans)
            check_idle(engine)


@each_amx
def test_short_inputs_go_by_vectors_in_any_company(
    berts: Callable[..., Path], isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And others by matrix tiles, where there are any."""
    works = whole_works("Model")
    with native.use(loaded(isa)):
        with engine_of(berts()) as engine:
            by_tiles = together(engine, works)
        monkeypatch.setattr(gemm, "has_amx", lambda: False)
        with engine_of(berts()) as engine:
            by_vectors = together(engine, works)
    same = [one == other for one, other in zip(by_tiles, by_vectors, strict=True)]
    assert same == [length <= 12 for length in LENGTHS]
    for one, other in zip(by_tiles, by_vectors, strict=True):
        np.testing.assert_allclose(one.values(), other.values(), rtol=1e-3, atol=1e-5)


def test_steps_of_limited_time_change_no_answer(berts: Callable[..., Path]) -> None:
    works = whole_works("Model")
    with engine_of(berts()) as engine:
        expected = together(engine, works)
    with engine_of(berts(), max_step_time=1e-4) as engine, watching(engine) as plans:
        assert together(engine, works) == expected
        assert len(plans) > 3


def test_the_number_of_inputs_in_a_step_is_limited_only_where_that_is_set(berts: Callable[..., Path]) -> None:
    works: list[Work] = [([number], None, PoolingParams()) for number in range(200)]
    with engine_of(berts(), max_num_batched_tokens=200) as engine, watching(engine) as plans:
        together(engine, works)
        assert engine.info.max_num_seqs == 200
        assert [plan.num_rows for plan in plans] == [200]
    with engine_of(berts(), max_num_seqs=64) as engine, watching(engine) as plans:
        together(engine, works)
        assert [plan.num_rows for plan in plans] == [64, 64, 64, 8]


def test_whole_inputs_leave_nothing_behind(berts: Callable[..., Path]) -> None:
    """No pages; requests that are aborted, late, or of another priority."""
    with engine_of(berts(), max_num_batched_tokens=40) as engine:
        info, stats = engine.info, engine.stats()
        assert info.encoder_only
        assert (info.block_size, info.num_blocks, info.full_requests) == (0, 0, 0.0)
        assert (stats.pages_total, stats.pages_held) == (0, 0)
        works = whole_works("Model")
        (expected,) = alone(engine, works[3:4])
        for number, work in enumerate(works):
            submit(engine, str(number), work, priority=-1 if number == 3 else 0, deadline=0.0 if number == 5 else None)
        engine.abort_request("4")
        first = engine.step()
        assert [output.request_id for output in first] == ["5", "3", "0"]
        assert (first[0].finished, first[0].pooled, first[0].error) == (True, None, "deadline")
        assert first[1].pooled == expected
        engine.abort_request("7")
        outputs = finish(engine)
        assert {int(name) for name in outputs} == set(range(len(works))) - {0, 3, 4, 5, 7}
        stats = engine.stats()
        assert stats.num_aborted == 3
        assert stats.num_finished == len(outputs) + 3  # one alone, 0 and 3
        assert stats.generation_tokens == stats.num_preemptions == 0
        assert stats.prompt_tokens == stats.computed_tokens
        check_idle(engine)


def broken(engine: Engine, token: int) -> None:
    """Let a step fail that computes this token, after it has computed."""
    original = engine.runner.kind.run

    def failing(plan: StepPlan, *others: Any) -> torch.Tensor:
        hidden: torch.Tensor = original(plan, *others)
        if (plan.token_ids == token).any():
            raise RuntimeError("the poison was computed")
        return hidden

    engine.runner.kind.run = failing  # type: ignore[method-assign]


def spoiled(engine: Engine, token: int) -> None:
    """Let this token's hidden state be no number."""
    original = engine.runner.kind.run

    def spoiling(plan: StepPlan, *others: Any) -> torch.Tensor:
        hidden: torch.Tensor = original(plan, *others)
        hidden[: plan.num_tokens][torch.from_numpy(plan.token_ids == token)] = math.nan
        return hidden

    engine.runner.kind.run = spoiling  # type: ignore[method-assign]


FAULTS = [(broken, "RuntimeError: the poison was computed"), (spoiled, "not a finite number")]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=["raises", "nan"])
def test_only_the_input_at_fault_ends(
    fault: Callable[[Engine, int], None], message: str, berts: Callable[..., Path]
) -> None:
    works = [
        ([token for token in tokens if token] or [1], None, PoolingParams()) for tokens, _, _ in whole_works("Model")
    ]
    with engine_of(berts()) as engine:
        expected = together(engine, works)
        fault(engine, 0)
        for name in ("first", "second"):
            submit(engine, name, ([3, 0, 4], None, PoolingParams()))
        for number, work in enumerate(works):
            submit(engine, str(number), work)
        outputs = finish(engine)
        for name in ("first", "second"):
            ended = outputs.pop(name)
            assert ended.pooled is None
            assert message in str(ended.error)
        assert answers(outputs, len(works)) == expected
        assert answers({"0": together_output(engine, works[0])}, 1) == expected[:1], "the engine goes on"


def together_output(engine: Engine, work: Work) -> RequestOutput:
    submit(engine, "0", work)
    return finish(engine)["0"]


def test_an_engine_that_can_read_nothing_ends(berts: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(berts()) as engine:
        submit(engine, "0", ([1], None, PoolingParams()))

        def lost(plan: StepPlan, *others: Any) -> torch.Tensor:
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(engine.runner.kind, "run", lost)
        with pytest.raises(EngineDeadError, match="even a step of one token fails: RuntimeError: the device is lost"):
            engine.step()


@pytest.mark.slow
async def test_an_engine_in_its_own_process_answers_as_one_in_ours(berts: Callable[..., Path]) -> None:
    """Accepted first, then the whole answer; a refusal; a request that is given up; one that comes too late."""
    works = whole_works("ForMaskedLM")
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "show_progress": False}
    with engine_of(berts("ForMaskedLM")) as engine:
        expected = together(engine, works)
    client = start_engine(EngineConfig(model=str(berts("ForMaskedLM")), **settings))

    async def ask(name: str, work: Work, **terms: Any) -> list[RequestDelta]:
        tokens, types, params = work
        return [
            delta async for delta in client.generate(name, TokenInput(tokens, token_type_ids=types), params, **terms)
        ]

    try:
        found = await asyncio.gather(*(ask(str(number), work) for number, work in enumerate(works)))
        assert [[delta.finished for delta in deltas] for deltas in found] == [[False, True]] * len(works)
        assert [deltas[-1].pooled for deltas in found] == expected
        assert all(not delta.choices and delta.error is None for deltas in found for delta in deltas)
        with pytest.raises(InvalidRequestError, match="positions must be below the 2 tokens"):
            await ask("refused", ([1, 2], None, PoolingParams(task="fill_mask", positions=[2])))
        late = await ask("late", works[0], deadline=time.monotonic() - 1.0)
        assert (late[-1].finished, late[-1].pooled, late[-1].error) == (True, None, "deadline")
        given_up = client.generate("given up", works[1][0], works[1][2])
        await anext(given_up)
        await given_up.aclose()
        await client.settled()
        stats = client.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_total) == (0, 0, 0)
    finally:
        await client.close()


# ------------------------------------------------------------------ decoder-only models

DECODER = "llama-grouped"


def decoder_works() -> list[Work]:
    """Prompts with common beginnings, to be pooled in all ways."""
    shared = random_prompt(307, 40, 70)
    modes = ["mean", "last", "weighted_mean", "cls", "max", "mean_sqrt_len"]
    works: list[Work] = []
    for number, length in enumerate([40, 70, 3, 33, 64, 1, 50, 65, 17, 70, 12, 48]):
        tokens = shared[:length] + random_prompt(307, number, number % 3 + 1)
        params = PoolingParams(pooling=modes[number % len(modes)], normalize=number % 2 == 0, skip_tokens=number % 4)  # type: ignore[arg-type]
        works.append((tokens, None, params))
    return works


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"max_num_batched_tokens": 45, "max_num_seqs": 5, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 32, "max_num_seqs": 16, "num_gpu_blocks_override": 28, "block_size": 4},
    ],
    ids=["default", "chunks", "uncached", "few pages"],
)
def test_a_prompt_is_pooled_the_same_in_any_company(settings: dict[str, Any], checkpoint: Callable[[str], Any]) -> None:
    """Beside others, in chunks, beside requests that generate, found in the cache, and after preemptions."""
    path, works = checkpoint(DECODER).path, decoder_works()
    with engine_of(path, enable_prefix_caching=False, max_num_batched_tokens=512) as engine:
        expected = [np.array(answer.values()) for answer in alone(engine, works)]
    with engine_of(path, **settings) as engine, watching(engine) as plans:
        for number, work in enumerate(works):
            submit(engine, str(number), work)
            greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
            engine.add_request(f"text {number}", random_prompt(307, 60 + number, 6), greedy)
        partway = 0

        def disturb(number: int) -> None:
            """At three steps, and the first three times that a step leaves an input partly read."""
            nonlocal partway
            pooled = [group.request.pooling for group in engine.scheduler._running if group.request.pooling]
            found = any(one.needs_all for one in pooled)
            partway += found
            if number in (2, 5, 9) or (found and partway <= 3):
                preempt_all(engine)

        outputs = finish(engine, disturb)
        found = answers(outputs, len(works))
        stats = engine.stats()
        assert stats.num_preemptions > 5
        parts = [row for plan in plans for row in plan.pooling]
        assert any(plan.pooling and plan.sampling is not None for plan in plans)
        if "max_num_batched_tokens" in settings:
            assert sum(row.before is not None for row in parts) > 5, "inputs came in chunks"
            begun = sum(row.start == 0 and row.pooling.needs_all for row in parts)
            assert begun > sum(params.pooling != "last" for _, _, params in works), "some started over"
        hits = {int(name): outputs[name].num_cached_tokens for name in map(str, range(len(works)))}
        assert all(works[number][2].pooling == "last" for number, count in hits.items() if count)
    for answer, truth in zip(found, expected, strict=True):
        # A token that is computed alone may differ in its last bits from one that is computed in a chunk.
        np.testing.assert_allclose(answer.values(), truth, rtol=0, atol=2e-6 * np.abs(truth).max())


def test_chunks_of_many_tokens_change_no_bit(checkpoint: Callable[[str], Any]) -> None:
    works = [work for work in decoder_works() if len(work[0]) > 30]
    with engine_of(checkpoint(DECODER).path, enable_prefix_caching=False) as engine:
        expected = alone(engine, works)
        assert together(engine, works) == expected
    for budget in (32, 64):
        settings = {"max_num_batched_tokens": budget, "max_num_seqs": 8, "enable_prefix_caching": False}
        with engine_of(checkpoint(DECODER).path, **settings) as engine, watching(engine) as plans:
            assert [len(np.diff(plan.query_start)) for plan in plans] == []
            assert together(engine, works) == expected
            assert any(row.before is not None for plan in plans for row in plan.pooling)


def test_the_last_token_takes_prefix_hits_and_a_mean_takes_none(checkpoint: Callable[[str], Any]) -> None:
    tokens = random_prompt(307, 50, 100)
    with engine_of(checkpoint(DECODER).path) as engine:
        found: dict[str, tuple[int, Pooled]] = {}
        for name, pooling, salt in [
            ("mean", "mean", None), ("mean again", "mean", None), ("last", "last", None), ("salted", "last", "a"),
        ]:  # fmt: skip
            submit(engine, name, (tokens, None, PoolingParams(pooling=pooling)), cache_salt=salt)  # type: ignore[arg-type]
            output = finish(engine)[name]
            assert output.pooled is not None
            found[name] = output.num_cached_tokens, output.pooled
        assert {name: cached for name, (cached, _) in found.items()} == {
            "mean": 0, "mean again": 0, "last": 96, "salted": 0,
        }  # fmt: skip
        assert found["mean"] == found["mean again"]
        np.testing.assert_allclose(found["last"][1].values(), found["salted"][1].values(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=["raises", "nan"])
def test_a_pooled_prompt_at_fault_ends_alone(
    fault: Callable[[Engine, int], None], message: str, checkpoint: Callable[[str], Any]
) -> None:
    """In a chunk in the middle of it, beside requests that generate."""
    poison = 300
    works = [
        ([token for token in tokens if token != poison], types, params) for tokens, types, params in decoder_works()
    ]
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "enable_prefix_caching": False}
    with engine_of(checkpoint(DECODER).path, **settings) as engine:
        expected = [np.array(answer.values()) for answer in alone(engine, works)]
        fault(engine, poison)
        bad = [*random_prompt(299, 1, 40), poison, *random_prompt(299, 2, 40)]
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        engine.add_request("text", random_prompt(299, 3, 6), greedy)
        submit(engine, "bad", (bad, None, PoolingParams(pooling="mean")))
        for number, work in enumerate(works):
            submit(engine, str(number), work)
        outputs = finish(engine)
        ended = outputs.pop("bad")
        assert ended.pooled is None
        assert message in str(ended.error)
        assert len(outputs.pop("text").outputs[0].token_ids) == 8
        for answer, truth in zip(answers(outputs, len(works)), expected, strict=True):
            np.testing.assert_allclose(answer.values(), truth, rtol=0, atol=2e-6 * np.abs(truth).max())


def test_an_encoder_decoder_model_makes_no_vectors(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with engine_of(tmp_path, max_model_len=32) as engine:
        for given in ([1, 2], Seq2SeqInput([1, 2])):
            with pytest.raises(InvalidRequestError, match=r"it is an encoder-decoder model.* It serves generate\."):
                engine.add_request("a", given, PoolingParams())


def test_what_a_model_cannot_do_is_refused_by_name(
    berts: Callable[..., Path], checkpoint: Callable[[str], Any]
) -> None:
    with engine_of(berts("ForSequenceClassification", 1)) as engine:
        with pytest.raises(InvalidRequestError, match=r"cannot serve generate: .*It serves classify") as refusal:
            engine.add_request("a", [1, 2], SamplingParams())
        assert refusal.value.code == "unsupported_task"
        with pytest.raises(InvalidRequestError, match="cannot serve embed"):
            engine.add_request("a", [1, 2], PoolingParams())
        with pytest.raises(InvalidRequestError, match="321 tokens, and this model takes at most 320") as refusal:
            engine.add_request("a", [1] * 321, PoolingParams(task="classify"))
        assert refusal.value.code == "context_length_exceeded"
        for types, message in [
            ([0], "1 entries for 2"),
            ([0, 2], "ids 0 to 1"),
            ([0, True], "integers"),
            ("01", "list"),
        ]:
            with pytest.raises(InvalidRequestError, match=message) as refusal:
                engine.add_request("a", TokenInput([1, 2], token_type_ids=types), PoolingParams(task="classify"))  # type: ignore[arg-type]
            assert refusal.value.param == "token_type_ids"
        assert not engine.has_unfinished_requests()
    with engine_of(checkpoint(DECODER).path, num_gpu_blocks_override=4) as engine:
        with pytest.raises(InvalidRequestError, match="token_type_ids holds 1, but the model has ids 0 to 0"):
            engine.add_request("a", TokenInput([1, 2], token_type_ids=[0, 1]), SamplingParams())
        with pytest.raises(InvalidRequestError, match="cannot serve fill_mask"):
            engine.add_request("a", [1, 2], PoolingParams(task="fill_mask", positions=[0]))
        with pytest.raises(InvalidRequestError, match=r"input of 65 tokens needs 5 pages of 16 tokens.* has 4"):
            engine.add_request("a", [1] * 65, PoolingParams())
        assert together(engine, [([1] * 64, None, PoolingParams())])[0].shape == (1, engine.info.hidden_size)
