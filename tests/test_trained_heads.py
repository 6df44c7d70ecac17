"""Heads that predict later tokens change how many steps an answer takes, and nothing that is said of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import LLAMA, make_adapter
from support.driving import BOTH_DEPTHS, Job, add, check_idle, finish, make_engine
from support.families import FAMILY_SHAPES
from support.family_shape import FamilyShape, make_family_checkpoint
from support.family_shapes.deepseek import SHAPES as DEEPSEEK
from support.family_shapes.glm4_moe import SHAPES as GLM
from support.jobs import CHECKPOINT, MIXED, VOCAB, greedy, prompt, sampled
from support.trained_heads import Predicting, make_predicting
from test_ahead import MORE
from test_drafts import check_same
from test_ngram_drafts import LIMITED
from torch import Tensor, nn

from engine import Engine, EngineConfig, RequestOutput
from engine.errors import ConfigError, UnsupportedModelError
from engine.execution.starting import resolve
from engine.execution.trained_head import TrainedHead
from engine.interface.speculation import SpeculativeConfig
from engine.scheduling.plan import StepPlan

SHAPES = {
    "glm": replace(GLM["glm4-moe"], vocab=VOCAB),
    "glm, tied": replace(GLM["glm4-moe-groups-norms-biases-tied"], vocab=VOCAB),
    "deepseek": replace(DEEPSEEK["deepseek-v3"], vocab=VOCAB),
    "deepseek, halves": replace(DEEPSEEK["deepseek-v3-ungrouped-halves-biases"], vocab=VOCAB),
}
# Each token has a direction of its own, so a matrix can map it to any other.
WIDE = FamilyShape("Glm4MoeForCausalLM", GLM["glm4-moe"].settings | {"hidden_size": 64}, vocab=60)


def following(model: Any, norms: dict[str, nn.Module], joining: Tensor) -> None:
    """The model's next token is a function of the last one, and the head knows it from the hidden state alone: layers
    add nothing, and the head's matrix maps the hidden state of a token to the embedding of the next one."""
    count, width = model.lm_head.weight.shape
    table = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(3))).Q[:count]
    after = torch.roll(torch.arange(count), -7)
    model.model.embed_tokens.weight.copy_(table)
    model.lm_head.weight.copy_(20 * table[torch.roll(torch.arange(count), 7)])
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.zero_()
    for norm in (model.model.norm, *norms.values()):
        norm.weight.fill_(1.0)
    joining.zero_()
    joining[:, width:] = table[after].T @ table


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Predicting]:
    """Makes each checkpoint once."""
    made: dict[str, Predicting] = {}

    def make(name: str, change: Any = None) -> Predicting:
        if name not in made:
            shape = WIDE if name == "wide" else SHAPES[name]
            made[name] = make_predicting(shape, tmp_path_factory.mktemp("head"), change)
        return made[name]

    return make


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """Makes engines and closes them."""
    made: list[Engine] = []

    def make(path: Path, **settings: Any) -> Engine:
        made.append(make_engine(path, **(getattr(request, "param", {}) | settings)))
        made[-1].scheduler.draft_costs = None
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def with_head(count: int, **settings: Any) -> dict[str, Any]:
    return settings | {"speculative_config": {"method": "mtp", "num_speculative_tokens": count}}


def outputs(engine: Engine, jobs: list[Job]) -> list[RequestOutput]:
    for number, job in enumerate(jobs):
        add(engine, str(number), job)
    answers = finish(engine)
    check_idle(engine)
    return [answers[str(number)] for number in range(len(jobs))]


def watch(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """The known tokens at each draft, and the drafts."""
    seen: list[tuple[list[int], list[int]]] = []
    head = engine._draft_model
    assert head is not None
    propose = head.propose

    def spy(request: Any, sequence: Any, most: int) -> Any:
        drafts, rate = propose(request, sequence, most)
        seen.append((sequence.tokens.tolist(), list(drafts)))
        return drafts, rate

    head.propose = spy  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", SHAPES)
def test_the_head_drafts_as_the_reference_does(
    name: str, predicting: Callable[..., Predicting], engines: Callable[..., Engine]
) -> None:
    """Also behind a prompt in parts, and with other answers to the same prompt."""
    made = predicting(name)
    one = engines(made.path, **with_head(3, max_num_batched_tokens=40, block_size=4))
    seen = watch(one)
    outputs(one, [Job(prompt(1, 2), greedy(6)), Job(prompt(2, 70), greedy(8)), Job(prompt(3, 11), sampled(3, 6, n=3))])
    greedily = [(tokens, drafts) for tokens, drafts in seen if tokens[:11] != prompt(3, 11)]
    assert len(greedily) > 8
    for tokens, drafts in greedily:
        assert drafts
        assert drafts == made.drafts(tokens, len(drafts))


@pytest.mark.parametrize("count", [1, 3])
def test_a_head_that_is_right_is_accepted(
    count: int, predicting: Callable[..., Predicting], engines: Callable[..., Engine]
) -> None:
    """Each draft follows from the hidden state of the last accepted position, whatever came before: wrong drafts of a
    prediction, a page that was found, or other answers."""
    made = predicting("wide", following)
    one = engines(made.path, **with_head(count, block_size=4))
    told = [(5 + 7 * i) % 60 for i in range(1, 41)]
    wrong = [*told[:9], 1, 1, *told[11:20], 2, *told[21:]]
    jobs = [Job([9, 3, 5], greedy(40)), Job([1, 1, 40, 2, 5], greedy(40, predicted_token_ids=wrong))]
    jobs += [Job([*range(40), 5], sampled(1, 40, n=3, temperature=0.5))]
    for _ in range(2):
        before = one.stats()
        for answer in outputs(one, jobs):
            assert all(choice.token_ids == told for choice in answer.outputs)
        after = one.stats()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
    assert accepted > 80
    assert drafted - accepted <= 30  # of the prediction
    outputs(one, jobs[::2])
    assert one.stats().num_draft_tokens - after.num_draft_tokens > 60
    assert one.stats().num_accepted_draft_tokens - after.num_accepted_draft_tokens == (
        one.stats().num_draft_tokens - after.num_draft_tokens
    )


@BOTH_DEPTHS
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 24, "max_num_seqs": 16},
        {"block_size": 4, "num_gpu_blocks_override": 45, "kv_cache_dtype": "int8"},
    ],
    ids=["chunks", "few pages"],
)
def test_no_answer_differs(
    settings: dict[str, Any], predicting: Callable[..., Predicting], engines: Callable[..., Engine]
) -> None:
    """Whatever can be asked for. The second time, prompts are found in the pages of both."""
    path = predicting("glm").path
    jobs = [*MIXED, *MORE, *LIMITED]
    plain = outputs(engines(path, **settings), jobs)
    one = engines(path, **with_head(2, **settings))
    for _ in range(2):
        before = one.stats().num_draft_tokens
        check_same(outputs(one, jobs), plain)
        assert one.stats().num_draft_tokens - before > 40
    if "num_gpu_blocks_override" in settings:
        assert one.stats().num_preemptions > 0


def test_an_adapter_changes_the_hidden_states_that_the_head_reads(
    predicting: Callable[..., Predicting], engines: Callable[..., Engine]
) -> None:
    made = predicting("glm")
    products = {ours: theirs for ours, theirs in LLAMA.items() if "attention" in ours}
    adapter, _ = make_adapter(made.model, products, 3, gain=0.3)
    jobs = [Job(prompt(1, 9), greedy(20, logprobs=1), {"adapter": name}) for name in ("a", None)]
    found = []
    for settings in ({"max_loras": 1}, with_head(2, max_loras=1)):
        one = engines(made.path, **settings)
        one.load_adapter("a", adapter)
        found.append(outputs(one, jobs))
    assert found[0][0].outputs[0].token_ids != found[0][1].outputs[0].token_ids
    check_same(found[1], found[0])
    assert one.stats().num_draft_tokens > 40


@pytest.mark.parametrize("call", [1, 5])
def test_a_head_that_fails_fails_no_request(
    call: int, predicting: Callable[..., Predicting], engines: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither where it reads a prompt nor where it drafts."""
    path = predicting("wide", following).path
    jobs = [Job([*range(1, 50)], greedy(20)), Job([5], sampled(1, 20))]
    plain = outputs(engines(path), jobs)
    one = engines(path, **with_head(2))
    runner = one._draft_model._executor.runner  # type: ignore[union-attr]
    launch, calls = runner.launch, []

    def broken(plan: StepPlan) -> Any:
        calls.append(plan)
        if len(calls) == call:
            raise MemoryError("made by the test")
        return launch(plan)

    runner.launch = broken
    check_same(outputs(one, jobs), plain)
    assert len(calls) == call
    assert "the draft model failed" in caplog.text
    assert (one.stats().num_accepted_draft_tokens > 0) == (call > 1)


def test_pages_of_the_head_are_part_of_the_plan(
    predicting: Callable[..., Predicting], engines: Callable[..., Engine]
) -> None:
    """Three layers and the head's one fit into `kv_cache_memory`."""
    memory = {"kv_cache_memory": 1 << 20, "num_gpu_blocks_override": None}
    path = predicting("glm").path
    alone, both = engines(path, **memory), engines(path, **with_head(1, **memory))
    assert abs(4 * both.info.num_blocks - 3 * alone.info.num_blocks) < 4
    assert both._draft_model._pool.total == both.info.num_blocks  # type: ignore[union-attr]


def test_models_without_such_a_head_are_named(
    predicting: Callable[..., Predicting],
    engines: Callable[..., Engine],
    checkpoint: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mtp is for .*Glm4MoeForCausalLM, but the config says Llama"):
        engines(checkpoint(CHECKPOINT).path, **with_head(1))
    path = predicting("glm").path
    with pytest.raises(ConfigError, match="mtp needs distributed_executor_backend uni, got 'mp'"):
        engines(path, **with_head(1, distributed_executor_backend="mp"))
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UnsupportedModelError, match="needs num_nextn_predict_layers 1 in the config, got 0"):
        engines(tmp_path, **with_head(1))
    made = make_family_checkpoint(FAMILY_SHAPES["qwen3-next"], tmp_path / "state")
    with pytest.raises(ConfigError, match=r"layers of .* carry a state, which cannot be rolled back"):
        engines(made.path, **with_head(1))
    config_of = EngineConfig(model=str(path), device="cpu", show_progress=False)
    resolved = resolve(config_of, torch.device("cpu"))
    head = TrainedHead(config_of, SpeculativeConfig(method="mtp"))
    for change, message in (
        ({"device": torch.device("cuda")}, "mtp runs on the CPU only, but the device is cuda"),
        ({"file": Path("x.gguf")}, "mtp needs a checkpoint folder, but x.gguf is a GGUF file"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            head.adapt(replace(resolved, **change))
