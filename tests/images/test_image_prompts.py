"""Images among a prompt's tokens: chunks, pages, preemption, kept vectors, budgets, messages, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.driving import check_idle, finish, make_engine, watching
from support.executors import by_torch
from support.seeing import IMAGE, SeeingModel, make_seeing_model, picture

from engine import Engine, InvalidRequestError, SamplingParams, TokenInput
from engine.interface.request import Decoding, Request
from engine.interface.vision import PlacedImage, SeenImage, VisionInfo
from engine.process.messages import AddRequest, decode_command, encode_add
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.budget import Costs, StepLimit, StepWork
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.needs import SequenceNeeds
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
WORDS = [17, 201, 45, 88, 130, 9, 250]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_seeing_model("llava-next", tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def engine(model: SeeingModel) -> Iterator[Engine]:
    made = make_engine(model.path, block_size=4)
    yield made
    made.close()


def info_of(engine: Engine) -> VisionInfo:
    assert engine.info.vision is not None
    return engine.info.vision


def vectors_of(engine: Engine) -> Any:
    return engine.runner.kind.images  # type: ignore[attr-defined]


def answer(engine: Engine, prompt: TokenInput, params: SamplingParams = GREEDY) -> list[int]:
    engine.add_request("one", prompt, params)
    return finish(engine)["one"].outputs[0].token_ids


def test_steps_that_cut_through_an_image_change_nothing(model: SeeingModel, engine: Engine) -> None:
    parts = [*WORDS, picture(40, 90, 1), *WORDS[:3], picture(33, 33, 2)]
    prompt = model.prompt(parts, info_of(engine))
    whole = answer(engine, prompt)
    cut = make_engine(model.path, block_size=4, max_num_batched_tokens=7)
    with watching(cut) as plans:
        assert answer(cut, prompt) == whole
    starts = [image.first for plan in plans for image in plan.images]
    assert len([first for first in starts if first]) > 5  # within images
    assert vectors_of(cut).num_made == 2  # each image once
    check_idle(cut)
    cut.close()


def test_torch_computes_the_same(model: SeeingModel, engine: Engine) -> None:
    prompt = model.prompt([*WORDS, picture(61, 30, 3), 40], info_of(engine))
    native = answer(engine, prompt)
    engine.reset_prefix_cache()
    vectors_of(engine)._kept.clear()
    with by_torch(engine.runner.model):
        assert answer(engine, prompt) == native
    assert vectors_of(engine).num_made == 2


def test_answers_are_alone_as_in_a_crowd(model: SeeingModel) -> None:
    crowd = make_engine(model.path, block_size=4, enable_prefix_caching=False)
    prompts = [
        model.prompt([*WORDS[: n + 1], picture(20 + 9 * n, 70 - 8 * n, n), 60 + n], info_of(crowd)) for n in range(4)
    ]
    prompts.append(TokenInput([*WORDS, 21]))
    alone = [answer(crowd, prompt) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        crowd.add_request(str(number), prompt, GREEDY)
    found = finish(crowd)
    assert [found[str(number)].outputs[0].token_ids for number in range(5)] == alone
    crowd.close()


def test_pages_are_found_by_the_images_in_them(model: SeeingModel, engine: Engine) -> None:
    """The same image again: pages are found, and nothing is made anew. Another one of the same tokens shares none."""
    first, second = (model.prompt([*WORDS[:4], picture(30, 30, n), 77, 78], info_of(engine)) for n in (1, 2))
    assert list(first.token_ids) == list(second.token_ids)
    one = answer(engine, first)
    hits = engine.stats().prefix_hits
    other = answer(engine, second)
    assert other != one
    assert engine.stats().prefix_hits - hits == 4  # the page before the image
    hits = engine.stats().prefix_hits
    assert answer(engine, first) == one
    assert engine.stats().prefix_hits - hits >= len(first.token_ids) - 5
    assert vectors_of(engine).num_made == 2


def test_a_preempted_prompt_goes_on(model: SeeingModel) -> None:
    roomy = make_engine(model.path, block_size=4)
    prompts = [model.prompt([*WORDS, picture(30 + n, 31, n), 50 + n], info_of(roomy)) for n in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = [answer(roomy, prompt, params) for prompt in prompts]
    roomy.close()
    pages = 2 * (len(prompts[0].token_ids) // 4 + 1) + 5  # two prompts, and not both of their answers
    tight = make_engine(model.path, block_size=4, num_gpu_blocks_override=pages)
    for number, prompt in enumerate(prompts):
        tight.add_request(str(number), prompt, params)
    found = finish(tight)
    assert [found[str(number)].outputs[0].token_ids for number in range(3)] == expected
    assert tight.stats().num_preemptions > 0
    check_idle(tight)
    tight.close()


def test_vectors_that_are_given_up_are_made_again(model: SeeingModel, engine: Engine) -> None:
    kept = vectors_of(engine)
    parts = [picture(30, 30, 1), 9, picture(50, 20, 2), 9, picture(30, 30, 1), 12]
    prompt = model.prompt(parts, info_of(engine))
    expected = answer(engine, prompt)
    assert kept.num_made == 2
    engine.reset_prefix_cache()
    kept._kept.clear()
    kept.num_bytes, kept._most = 0, 1  # one at a time
    assert answer(engine, prompt) == expected
    assert kept.num_made == 5
    assert len(kept._kept) == 1
    assert kept.num_bytes == sum(one.nbytes for one in kept._kept.values())


def test_steps_ahead_and_a_failed_step(model: SeeingModel, engine: Engine) -> None:
    prompts = [model.prompt([*WORDS[: n + 2], picture(35, 35 + n, n), 41], info_of(engine)) for n in range(3)]
    expected = [answer(engine, prompt) for prompt in prompts]
    ahead = make_engine(model.path, block_size=4, async_scheduling=True, max_num_batched_tokens=48)
    launch, failed = ahead.runner.launch, []

    def broken(plan: StepPlan) -> Any:
        if len(plan.images) > 1 and not failed:
            failed.append(plan)
            raise RuntimeError("broken by the test")
        return launch(plan)

    ahead.runner.launch = broken  # type: ignore[method-assign]
    for number, prompt in enumerate(prompts):
        ahead.add_request(str(number), prompt, GREEDY)
    found = finish(ahead)
    assert [found[str(number)].outputs[0].token_ids for number in range(3)] == expected
    assert failed
    ahead.close()


# ---------------------------------------------------------------- the step's budget


def seen(key: int, offset: int, count: int) -> SeenImage:
    places = np.arange(offset, offset + count, dtype=np.int32)
    return SeenImage(places, np.zeros((1, 3, 2, 2), dtype=np.uint8), (2, 2), bytes([key]) * 20)


def test_many_images_do_not_hold_up_a_stream() -> None:
    """A prompt of 40 images beside an answer that is written: no step has the work of more than one image."""
    needs = SequenceNeeds(crop_work=100.0, kept_vectors=10_000)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, block_size=4, needs=needs)
    scheduler = Scheduler(config, BlockPool(400))
    limit = StepLimit(Costs(), tokens=150, work=150, least=15)
    scheduler.add(Request(request_id="stream", prompt_token_ids=(5, 6), decoding=Decoding(max_tokens=200)))
    images = tuple(seen(number, 3 + 9 * number, 8) for number in range(40))
    tokens = tuple(IMAGE if any(n in image.places for image in images) else 7 for n in range(3 + 9 * 40))
    works, told = [], []
    for step in range(60):
        if step == 2:
            scheduler.add(
                Request(request_id="many", prompt_token_ids=tokens, decoding=Decoding(max_tokens=1), images=images)
            )
        plan = scheduler.schedule(limit)
        assert plan is not None
        works.append(StepWork.of(plan).total(Costs()))
        count = 0 if plan.sampling is None else len(plan.sampling.rows)
        values = np.zeros((count, 1), dtype=np.float32)
        result = StepResult(
            tokens=np.full((count, 1), 9, dtype=np.int32), scores=values, logprobs=values,
            ranks=np.zeros((count, 1), dtype=np.int32), top_ids=np.zeros((count, 0), dtype=np.int32),
            top_logprobs=values[:, :0],
        )  # fmt: skip
        deltas = scheduler.update(result)
        told.append({delta.request_id for delta in deltas})
        if "many" in told[-1]:
            break
    assert "many" in told[-1]
    assert all("stream" in names for names in told[1:])
    assert max(works) <= 150
    assert sum(work > 100 for work in works) == 40  # each image once, one in a step


# ---------------------------------------------------------------- messages and refusals


def test_images_travel_to_the_engines_process(model: SeeingModel, engine: Engine) -> None:
    prompt = model.prompt([*WORDS, picture(50, 20, 2), 12], info_of(engine))
    arrived = decode_command(encode_add("one", prompt, GREEDY))
    assert isinstance(arrived, AddRequest)
    found = arrived.input
    assert isinstance(found, TokenInput)
    assert list(found.token_ids) == list(prompt.token_ids)
    (image,) = found.images
    assert np.array_equal(image.pixels, prompt.images[0].pixels)
    assert (image.offset, image.length, image.size) == (7, prompt.images[0].length, (20, 50))
    assert answer(engine, found) == answer(engine, prompt)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 2}, "image 0 has .* vectors, but .* of its tokens are 3"),
        ({"offset": 400}, "image 0: its tokens lie outside the prompt"),
        ({"size": (20, 500)}, "image 0: 3 crops are not those of an image of 500 x 20 pixels"),
        ({"size": (0, 5)}, "crops are not those of an image of 5 x 0"),
        ({"pixels": np.zeros((1, 3, 28, 27), np.uint8)}, r"reads uint8 of the shape \[crops, 3, 28, 28\]"),
        ({"pixels": np.zeros((1, 3, 28, 28), np.float32)}, "got float32 of"),
    ],
)
def test_wrong_images_are_refused(model: SeeingModel, engine: Engine, change: dict[str, Any], message: str) -> None:
    prompt = model.prompt([*WORDS, picture(50, 20, 2), 12], info_of(engine))
    fields = {name: getattr(prompt.images[0], name) for name in ("offset", "length", "pixels", "size")}
    wrong = replace(prompt, images=(PlacedImage(**{**fields, **change}),))
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        engine.add_request("one", wrong, GREEDY)
    assert refusal.value.param == "images"
    check_idle(engine)


def test_a_folder_without_a_processor_is_a_text_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = make_seeing_model("llava", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    engine = make_engine(tmp_path)
    assert "Requests with images are refused" in caplog.text
    assert "no preprocessor_config.json" in caplog.text
    assert engine.info.vision is None
    assert engine.runner.model.vision is None
    with pytest.raises(InvalidRequestError, match="reads no images"):
        engine.add_request(
            "one", TokenInput([IMAGE], images=(PlacedImage(0, 1, np.zeros((1, 3, 28, 28), np.uint8), (1, 1)),)), GREEDY
        )
    engine.close()
    assert made.shape.architecture.startswith("Llava")
