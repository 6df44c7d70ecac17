"""Images whose tokens see each other (Gemma 3): one step computes all of an image, however prompts are cut. And what
images cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.driving import check_idle, finish, make_engine, watching
from support.executors import by_torch
from support.native import needs_native
from support.seeing import IMAGE, SeeingModel, make_seeing_model, picture
from test_attention_reference import CPU, make_row, paged
from test_image_prompts import GREEDY, WORDS, answer, info_of, seen, vectors_of
from test_native_attention import assert_close, batch, stored

from cli.commands import models
from engine import Engine, EngineConfig, InvalidRequestError, SamplingParams, TokenInput, inspect_model
from engine.backends import native
from engine.backends.attention.base import AttentionBackend, AttentionMetadata, Window
from engine.backends.native.attention import NativeAttention
from engine.backends.torch.attention import TorchReference
from engine.execution import kv_cache
from engine.execution.image_vectors import MOST_BYTES
from engine.interface.request import Decoding, Request
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.budget import Costs, StepLimit
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.needs import SequenceNeeds
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_seeing_model("gemma3", tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def engine(model: SeeingModel) -> Iterator[Engine]:
    made = make_engine(model.path, block_size=4)
    yield made
    made.close()


def prompt_of(model: SeeingModel, engine: Engine, seed: int = 1, count: int = 2) -> TokenInput:
    parts = [part for n in range(count) for part in (*WORDS[: 5 + n], picture(40, 90, seed + n))]
    return model.prompt([*parts, *WORDS[:3]], info_of(engine))


def images_of(plans: list[StepPlan]) -> list[tuple[int, int]]:
    return [(image.first, image.count) for plan in plans for image in plan.images]


def test_no_step_cuts_through_an_image(model: SeeingModel, engine: Engine) -> None:
    """Small steps, beside streams that take of their room, give the same tokens; each image is one row."""
    prompts = [prompt_of(model, engine, 1 + 5 * n) for n in range(3)]
    expected = [answer(engine, prompt) for prompt in prompts]
    cut = make_engine(model.path, block_size=4, **SMALL)
    with watching(cut) as plans:
        for number, prompt in enumerate(prompts):
            cut.add_request(str(number), prompt, GREEDY)
        found = finish(cut)
    assert [found[str(number)].outputs[0].token_ids for number in range(3)] == expected
    assert images_of(plans) == [(0, 16)] * 6
    assert all(plan.num_tokens <= 20 for plan in plans)
    rows = [(plan.two_way, plan.query_start.tolist()) for plan in plans if plan.images]
    assert all(two_way is not None and sum(two_way) == 1 for two_way, _ in rows)
    for two_way, start in rows:
        assert [start[n + 1] - start[n] for n, flag in enumerate(two_way or ()) if flag] == [16]
    check_idle(cut)
    cut.close()


def test_torch_computes_the_same(model: SeeingModel, engine: Engine) -> None:
    prompt = prompt_of(model, engine)
    expected = answer(engine, prompt)
    engine.reset_prefix_cache()
    with by_torch(engine.runner.model):
        assert answer(engine, prompt) == expected


@pytest.mark.parametrize("words", [3, 5, 6])
def test_a_prefix_may_end_within_an_image(model: SeeingModel, engine: Engine, words: int) -> None:
    """Pages of a part of an image are found, and its other tokens see all of it."""
    (image,) = prompt_of(model, engine, 3, count=1).images
    ids, images = [*WORDS[:words], *[IMAGE] * 16], (replace(image, offset=words),)
    expected = answer(engine, TokenInput([*ids, 9, 10], images=images))
    engine.reset_prefix_cache()
    answer(engine, TokenInput(ids, images=images))
    hits = engine.stats().prefix_hits
    assert answer(engine, TokenInput([*ids, 9, 10], images=images)) == expected
    assert engine.stats().prefix_hits - hits == (16 if words == 3 else 20)  # of words + 16
    assert vectors_of(engine).num_made == 1


def test_a_preempted_prompt_goes_on(model: SeeingModel, engine: Engine) -> None:
    prompts = [prompt_of(model, engine, 20 + n, count=1) for n in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = [answer(engine, prompt, params) for prompt in prompts]
    pages = 2 * (len(prompts[0].token_ids) // 4 + 1) + 5
    tight = make_engine(model.path, block_size=4, num_gpu_blocks_override=pages, enable_prefix_caching=False)
    for number, prompt in enumerate(prompts):
        tight.add_request(str(number), prompt, params)
    found = finish(tight)
    assert [found[str(number)].outputs[0].token_ids for number in range(3)] == expected
    assert tight.stats().num_preemptions > 0
    check_idle(tight)
    tight.close()


def test_several_answers_of_a_preempted_prompt(model: SeeingModel, engine: Engine) -> None:
    """All sequences of a request begin with the prompt, which is computed once more after a preemption."""
    prompt = prompt_of(model, engine, 30, count=1)
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20, ignore_eos=True)

    def run(one: Engine) -> list[list[int]]:
        one.add_request("stream", TokenInput(WORDS), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        one.add_request("several", prompt, params)
        return [each.token_ids for each in finish(one)["several"].outputs]

    expected = run(engine)
    tight = make_engine(model.path, block_size=4, num_gpu_blocks_override=28, enable_prefix_caching=False)
    assert run(tight) == expected
    assert tight.stats().num_preemptions > 0
    check_idle(tight)
    tight.close()


def test_steps_that_are_too_small_refuse_images(model: SeeingModel, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(model.path, max_num_seqs=4, max_num_batched_tokens=19)
    assert engine.info.vision is None
    assert "20 together, but max_num_batched_tokens is 19. Raise --max-num-batched-tokens." in caplog.text
    engine.close()


@pytest.mark.parametrize("backend", [TorchReference(), NativeAttention()], ids=lambda one: one.name)
@pytest.mark.parametrize("window", [None, 5, 40])
def test_attention_of_rows_that_see_all_later_keys(backend: AttentionBackend, window: int | None) -> None:
    """Against the textbook in float64, among rows that see no later keys; and the same bits alone."""
    if backend.name == "native" and not native.available():
        pytest.skip("there is no native library")
    shape = [(7, 90, 1), (1, 33, 0), (130, 300, 1), (64, 64, 1), (40, 170, 0), (1, 20, 1), (90, 210, 2), (1, 80, 2)]
    rows = [make_row(number, context, 4, 2, 24, torch.float32) for number, (_, context, _) in enumerate(shape)]
    counts, flags = [count for count, _, _ in shape], tuple(flag for _, _, flag in shape)
    q = torch.cat([row.q[len(row.q) - count :] for row, count in zip(rows, counts, strict=True)])

    def attend(queries: torch.Tensor, some: slice) -> torch.Tensor:
        contexts = [len(row.k) for row in rows[some]]
        metadata = replace(AttentionMetadata.build(counts[some], contexts, CPU), two_way=flags[some])
        sight = None if window is None else Window(window)
        return backend.attend(queries, paged(rows[some]), metadata, window=sight, scale=0.2)

    parts = attend(q, slice(None)).split(counts)
    for number, (row, count, flag) in enumerate(zip(rows, counts, flags, strict=True)):
        key, query = torch.arange(len(row.k)), torch.arange(len(row.k) - count, len(row.k))[:, None]
        seen = (key <= query) | (flag > 0)
        if window is not None:
            seen = seen & ((key >= query - window) | (flag == 2))
        k, v = (x.double().repeat_interleave(2, 1) for x in (row.k, row.v))
        scores = torch.einsum("qhd,khd->hqk", row.q[-count:].double(), k) * 0.2
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        wanted = torch.einsum("hqk,khd->qhd", weights, v)
        torch.testing.assert_close(parts[number].double(), wanted, rtol=1e-5, atol=1e-5)
        alone = attend(row.q[-count:], slice(number, number + 1))
        if count > 1:  # a single query is a tile of its own for torch
            assert torch.equal(alone, parts[number])


def test_a_prompt_that_is_seen_whole(tmp_path: Path) -> None:
    """One step computes it, beside streams; only an equal prompt is found; a longer one than a step is refused."""
    model = make_seeing_model("paligemma2", tmp_path)
    engine = make_engine(model.path, block_size=4, max_num_seqs=4, max_num_batched_tokens=36)
    prompt, other = (model.prompt([*parts, picture(40, 30, 3), *WORDS[:5]], info_of(engine)) for parts in ((), (9,)))
    longer = TokenInput([*prompt.token_ids, 9], images=prompt.images)
    prompts = (prompt, longer, other)
    alone = [answer(engine, one) for one in prompts]
    assert answer(engine, prompt) == alone[0]
    assert engine.stats().prefix_hits == (len(prompt.token_ids) - 1) // 4 * 4
    engine.reset_prefix_cache()
    with watching(engine) as plans:
        for number, one in enumerate(prompts):
            engine.add_request(str(number), one, GREEDY)
        found = finish(engine)
    assert [found[str(number)].outputs[0].token_ids for number in range(3)] == alone
    seen = [np.diff(plan.query_start)[np.array(plan.two_way) == 2] for plan in plans if plan.two_way]
    assert sorted(np.concatenate(seen)) == sorted(len(one.token_ids) for one in prompts)
    with pytest.raises(InvalidRequestError, match=r"one step has to compute all of them and has room for 32"):
        engine.add_request("long", TokenInput([*prompt.token_ids, *[9] * 18], images=prompt.images), GREEDY)
    engine.close()


def test_image_tokens_of_no_image_are_words(model: SeeingModel, engine: Engine) -> None:
    """They see no later tokens: a prompt goes on as its first part says."""
    prompt = TokenInput([*WORDS, *[IMAGE] * 5, 9])
    with watching(engine) as plans:
        answer(engine, prompt)
    assert all(plan.two_way is None for plan in plans)


def test_an_image_runs_although_it_exceeds_the_wanted_time() -> None:
    """A step that may hold 5 tokens computes the image of the oldest prompt, while streams go on."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, needs=SequenceNeeds())
    scheduler, limit = Scheduler(config, BlockPool(200)), StepLimit(Costs(), tokens=5, work=5, least=1)
    scheduler.add(Request(request_id="stream", prompt_token_ids=(5, 6), decoding=Decoding(max_tokens=200)))
    tokens = (7, 8, 9, *[IMAGE] * 16, 10)
    for key, name in ((1, "one"), (2, "two")):
        image = replace(seen(key, 3, 16), two_way=(3, 19))
        scheduler.add(
            Request(request_id=name, prompt_token_ids=tokens, decoding=Decoding(max_tokens=1), images=(image,))
        )
    waiting, rows = {"one", "two"}, []
    for _ in range(60):
        plan = scheduler.schedule(limit)
        assert plan is not None
        counts = np.diff(plan.query_start).tolist()
        rows += [count for count, two_way in zip(counts, plan.two_way or [False] * len(counts), strict=True) if two_way]
        count = 0 if plan.sampling is None else len(plan.sampling.rows)
        values = np.zeros((count, 1), dtype=np.float32)
        result = StepResult(
            tokens=np.full((count, 1), 9, dtype=np.int32), scores=values, logprobs=values,
            ranks=np.zeros((count, 1), dtype=np.int32), top_ids=np.zeros((count, 0), dtype=np.int32),
            top_logprobs=values[:, :0],
        )  # fmt: skip
        waiting -= {delta.request_id for delta in scheduler.update(result)}
        if not waiting:
            break
    assert not waiting
    assert rows == [16, 16]


@needs_native
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.int8])
def test_attention_over_other_formats(kind: torch.dtype) -> None:
    """The native kernels over pages of other formats, against the reference."""
    rows, counts = [make_row(n, length, 4, 2, 32, torch.float32) for n, length in enumerate((70, 300))], [20, 140]
    q, metadata = batch(rows, counts, True, torch.bfloat16)
    assert_close(q, stored(paged(rows), kind), replace(metadata, two_way=(True, True)), window=Window(40), scale=0.2)


# ---------------------------------------------------------------- what images cost


@pytest.mark.parametrize(("name", "tokens"), [("gemma3-scans", 4 * 4), ("llava", 16)])
def test_models_says_what_an_image_costs(
    name: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens of an image with all its crops; the vectors that are kept, and making them, take of the memory for
    pages."""
    path = str(make_seeing_model(name, tmp_path).path)
    assert models.run([path]) == 0
    assert f"at most {tokens} tokens for each in a chat" in capsys.readouterr().out
    assert models.run([path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == tokens
    monkeypatch.setattr(kv_cache, "available_memory", lambda: MOST_BYTES + 2**22)
    config = EngineConfig(model=path, device="cpu", dtype="float32", max_step_time=0, show_progress=False)
    facts, engine = inspect_model(config), Engine(config)
    making = facts.images - MOST_BYTES
    assert 16 * 40 * 4 < making < 2**19  # at least the widest rows
    free, size = 2**22 - making, facts.pages // (facts.num_blocks + 1)
    share = kv_cache.DEFAULT_CPU_SHARE
    assert facts.num_blocks == int(share * (free - facts.weights)) // size - 1
    assert engine.info.num_blocks == int(share * free) // size - 1  # the weights are there
    engine.close()
    (tmp_path / "preprocessor_config.json").unlink()
    plain = inspect_model(config)
    assert (plain.images, plain.image_tokens) == (0, 0)
    assert plain.num_blocks > facts.num_blocks
