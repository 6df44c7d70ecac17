"""Heads that predict later tokens change how many steps an answer takes, and nothing that is said of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import LLAMA, make_adapter
from support.driving import BOTH_DEPTHS, Job, answers, make_engine
from support.executors import counted, use_torch
from support.families import FAMILY_SHAPES
from support.family_shape import FamilyShape, make_family_checkpoint
from support.family_shapes.deepseek import SHAPES as DEEPSEEK
from support.family_shapes.glm4_moe import SHAPES as GLM
from support.family_shapes.qwen3_5 import SHAPES as QWEN
from support.jobs import CHECKPOINT, MIXED, VOCAB, greedy, prompt, sampled
from support.native import needs_native
from support.trained_heads import Eagle3, Predicting, make_eagle3, make_predicting
from test_ahead import MORE
from test_drafts import check_same
from test_ngram_drafts import LIMITED
from torch import Tensor, nn

from engine import Engine, EngineConfig
from engine.errors import ConfigError, ModelLoadError, UnsupportedModelError
from engine.execution.starting import resolve
from engine.execution.trained_head import TrainedHead
from engine.interface.speculation import SpeculativeConfig
from engine.scheduling.plan import StepPlan

SHAPES = {
    "glm": replace(GLM["glm4-moe"], vocab=VOCAB),
    "glm, tied": replace(GLM["glm4-moe-groups-norms-biases-tied"], vocab=VOCAB),
    "deepseek": replace(DEEPSEEK["deepseek-v3"], vocab=VOCAB),
    "qwen3-next": replace(QWEN["qwen3-next"], vocab=VOCAB),
    "qwen3.5, tied": replace(QWEN["qwen3.5-odd-tied"], vocab=VOCAB),
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


def following_eagle(model: Any, weights: dict[str, Tensor]) -> None:
    """The same for EAGLE-3: its layer adds nothing, and `fc` maps the state of a token to the embedding of the next."""
    joining = torch.empty(64, 128)
    following(model, {}, joining)
    weights["fc.weight"] = torch.cat((joining[:, 64:], torch.zeros(64, 128)), dim=1)
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name].zero_()
        elif "norm" in name:
            weights[name].fill_(1.0)
    known = weights["d2t"] + torch.arange(len(weights["d2t"]))
    weights["lm_head.weight"] = model.lm_head.weight[known].clone()


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Predicting | Eagle3]:
    """Makes each checkpoint once."""
    made: dict[str, Predicting | Eagle3] = {}

    def make(name: str) -> Predicting | Eagle3:
        if name not in made:
            folder = tmp_path_factory.mktemp("head")
            if name.startswith("eagle3"):
                sure = name == "eagle3, sure"
                change = following_eagle if sure else None
                made[name] = make_eagle3(
                    folder, vocab=60 if sure else VOCAB, own_table=name == "eagle3, table", change=change
                )
            else:
                sure = name == "wide"
                made[name] = make_predicting(WIDE if sure else SHAPES[name], folder, following if sure else None)
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


def with_head(count: int, made: Predicting | Eagle3 | None = None, **settings: Any) -> dict[str, Any]:
    method = {"method": "mtp"} if made is None else made.method
    return settings | {"speculative_config": method | {"num_speculative_tokens": count}}


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


@pytest.mark.parametrize("name", [*SHAPES, "eagle3", "eagle3, table"])
def test_the_head_drafts_as_the_reference_does(
    name: str, predicting: Callable[..., Any], engines: Callable[..., Engine]
) -> None:
    """Also behind a prompt in parts, and with other answers to the same prompt."""
    made = predicting(name)
    one = engines(made.path, **with_head(3, made, max_num_batched_tokens=40, block_size=4))
    seen = watch(one)
    answers(one, [Job(prompt(1, 2), greedy(6)), Job(prompt(2, 70), greedy(8)), Job(prompt(3, 11), sampled(3, 6, n=3))])
    for model in (one.executor.runner.model, one._draft_model._executor.runner.model):  # type: ignore[attr-defined,union-attr]
        use_torch(model)
    with counted() as native:
        answers(one, [Job(prompt(4, 9), greedy(6))])
    assert not native.called
    greedily = [(tokens, drafts) for tokens, drafts in seen if tokens[:11] != prompt(3, 11)]
    assert len(greedily) > 12
    for tokens, drafts in greedily:
        assert drafts
        assert drafts == made.drafts(tokens, len(drafts))


@needs_native
@pytest.mark.parametrize("name", ["deepseek", "glm", "eagle3"])
def test_log_probabilities_are_the_same_bits(
    name: str, predicting: Callable[..., Any], engines: Callable[..., Engine]
) -> None:
    """With a head beside the model, and drafts beside the tokens."""
    made = predicting(name)
    jobs = [Job(prompt(1, 40), greedy(24, logprobs=2)), Job(prompt(2, 5), sampled(2, 24, logprobs=2, n=2))]
    plain, one = answers(engines(made.path), jobs), engines(made.path, **with_head(2, made))
    for found, wanted in zip(answers(one, jobs), plain, strict=True):
        for choice, other in zip(found.outputs, wanted.outputs, strict=True):
            assert choice.token_ids == other.token_ids
            assert choice.logprobs == other.logprobs
    assert one.stats().num_draft_tokens > 60


@pytest.mark.parametrize(("name", "count"), [("wide", 1), ("wide", 3), ("eagle3, sure", 1)])
def test_a_head_that_is_right_is_accepted(
    name: str, count: int, predicting: Callable[..., Any], engines: Callable[..., Engine]
) -> None:
    """Each draft follows from the hidden state of the last accepted position, whatever came before: wrong drafts of a
    prediction, a page that was found, or other answers."""
    made = predicting(name)
    one = engines(made.path, **with_head(count, made, block_size=4))
    told = [(5 + 7 * i) % 60 for i in range(1, 41)]
    wrong = [*told[:9], 1, 1, *told[11:20], 2, *told[21:]]
    jobs = [Job([9, 3, 5], greedy(40)), Job([1, 1, 40, 2, 5], greedy(40, predicted_token_ids=wrong))]
    jobs += [Job([*range(40), 5], sampled(1, 40, n=3, temperature=0.5))]
    for _ in range(2):
        before = one.stats()
        for answer in answers(one, jobs):
            assert all(choice.token_ids == told for choice in answer.outputs)
        after = one.stats()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
    assert accepted > 80
    assert drafted - accepted <= 30  # of the prediction
    answers(one, jobs[::2])
    assert one.stats().num_draft_tokens - after.num_draft_tokens > 60
    assert one.stats().num_accepted_draft_tokens - after.num_accepted_draft_tokens == (
        one.stats().num_draft_tokens - after.num_draft_tokens
    )


@BOTH_DEPTHS
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("glm", {"max_num_batched_tokens": 24, "max_num_seqs": 16}),
        ("eagle3", {"block_size": 4, "num_gpu_blocks_override": 45, "kv_cache_dtype": "int8"}),
    ],
    ids=["mtp, chunks", "eagle3, few pages"],
)
def test_no_answer_differs(
    name: str, settings: dict[str, Any], predicting: Callable[..., Any], engines: Callable[..., Engine]
) -> None:
    """Whatever can be asked for. The second time, prompts are found in the pages of both."""
    made = predicting(name)
    jobs = [*MIXED, *MORE, *LIMITED]
    plain = answers(engines(made.path, **settings), jobs)
    one = engines(made.path, **with_head(2, made, **settings))
    for _ in range(2):
        before = one.stats().num_draft_tokens
        check_same(answers(one, jobs), plain)
        assert one.stats().num_draft_tokens - before > 40
    if "num_gpu_blocks_override" in settings:
        assert one.stats().num_preemptions > 0


def test_an_adapter_changes_the_hidden_states_that_the_head_reads(
    predicting: Callable[..., Any], engines: Callable[..., Engine]
) -> None:
    made = predicting("glm")
    products = {ours: theirs for ours, theirs in LLAMA.items() if "attention" in ours}
    adapter, _ = make_adapter(made.model, products, 3, gain=0.3)
    jobs = [Job(prompt(1, 9), greedy(20, logprobs=1), {"adapter": name}) for name in ("a", None)]
    found = []
    for settings in ({"max_loras": 1}, with_head(2, max_loras=1)):
        one = engines(made.path, **settings)
        one.load_adapter("a", adapter)
        found.append(answers(one, jobs))
    assert found[0][0].outputs[0].token_ids != found[0][1].outputs[0].token_ids
    check_same(found[1], found[0])
    assert one.stats().num_draft_tokens > 40


@pytest.mark.parametrize("call", [1, 5])
def test_a_head_that_fails_fails_no_request(
    call: int, predicting: Callable[..., Any], engines: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither where it reads a prompt nor where it drafts."""
    path = predicting("wide").path
    jobs = [Job([*range(1, 50)], greedy(20)), Job([5], sampled(1, 20))]
    plain = answers(engines(path), jobs)
    one = engines(path, **with_head(2))
    runner = one._draft_model._executor.runner  # type: ignore[union-attr]
    launch, calls = runner.launch, []

    def broken(plan: StepPlan) -> Any:
        calls.append(plan)
        if len(calls) == call:
            raise MemoryError("made by the test")
        return launch(plan)

    runner.launch = broken
    check_same(answers(one, jobs), plain)
    assert len(calls) == call
    assert "the draft model failed" in caplog.text
    assert (one.stats().num_accepted_draft_tokens > 0) == (call > 1)


def test_hidden_states_that_are_unknown_cost_drafts_and_no_answer(
    predicting: Callable[..., Any], engines: Callable[..., Engine]
) -> None:
    """The head reads zeros at positions of a step that it has not seen, and shares none of their pages."""
    made = predicting("wide")
    one = engines(made.path, **with_head(1, block_size=4))
    observe, steps = one._stepping._observe, []

    def seldom(step: Any) -> None:
        steps.append(step)
        if len(steps) % 3:
            observe(step)  # type: ignore[misc]

    one._stepping._observe = seldom
    told = [(5 + 7 * i) % 60 for i in range(1, 41)]
    for job in (Job([9, 3, 5], greedy(40)), Job([9, 3, 5], greedy(40))):
        steps.clear()
        assert answers(one, [job])[0].outputs[0].token_ids == told
    assert not one._draft_model._failed  # type: ignore[union-attr]
    assert one._draft_model._pool.num_cached <= 1  # type: ignore[union-attr]
    assert 8 < one.stats().num_accepted_draft_tokens < one.stats().num_draft_tokens


def test_pages_of_the_head_are_part_of_the_plan(predicting: Callable[..., Any], engines: Callable[..., Engine]) -> None:
    """Three layers and the head's one fit into `kv_cache_memory`."""
    memory = {"kv_cache_memory": 1 << 20, "num_gpu_blocks_override": None}
    path = predicting("glm").path
    alone, both = engines(path, **memory), engines(path, **with_head(1, **memory))
    assert abs(4 * both.info.num_blocks - 3 * alone.info.num_blocks) < 4
    assert both._draft_model._pool.total == both.info.num_blocks  # type: ignore[union-attr]


def test_models_without_such_a_head_are_named(
    predicting: Callable[..., Any],
    engines: Callable[..., Engine],
    checkpoint: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mtp is for .*Glm4MoeForCausalLM, .* but the config says Llama"):
        engines(checkpoint(CHECKPOINT).path, **with_head(1))
    path = predicting("glm").path
    with pytest.raises(ConfigError, match="mtp needs distributed_executor_backend uni, got 'mp'"):
        engines(path, **with_head(1, distributed_executor_backend="mp"))
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UnsupportedModelError, match="num_nextn_predict_layers of at least 1 in the config, got 0"):
        engines(tmp_path, **with_head(1))
    made = make_family_checkpoint(FAMILY_SHAPES["qwen3-next"], tmp_path / "state")
    with pytest.raises(ModelLoadError, match=r"mtp\."):
        engines(made.path, **with_head(1))
    config_of = EngineConfig(model=str(path), device="cpu", show_progress=False)
    resolved = resolve(config_of, torch.device("cpu"))
    head = TrainedHead(config_of, SpeculativeConfig(method="mtp"))
    for change, message in (
        ({"spec": replace(resolved.spec, encoder=resolved.spec.decoder)}, "mtp is for decoder-only models"),
        ({"device": torch.device("cuda")}, "mtp runs on the CPU only, but the device is cuda"),
        ({"file": Path("x.gguf")}, "mtp needs a checkpoint folder, but x.gguf is a GGUF file"),
    ):
        with pytest.raises((ConfigError, UnsupportedModelError), match=message):
            head.adapt(replace(resolved, **change))


def test_eagle_heads_that_do_not_fit_are_named(
    predicting: Callable[..., Any], engines: Callable[..., Engine], tmp_path: Path
) -> None:
    made = predicting("eagle3")
    weights = load_file(made.head / "model.safetensors")
    config = json.loads((made.head / "config.json").read_text(encoding="utf-8"))
    tmp_path.joinpath("head").mkdir()
    wrong, count = {key: one for key, one in weights.items() if key != "d2t"}, len(weights["d2t"])
    for change, stored, message in (
        (
            {"architectures": ["LlamaForCausalLM"]},
            weights,
            r"needs a head of LlamaForCausalLMEagle3, .* LlamaForCausalLM",
        ),
        ({"hidden_size": 32}, weights, "hidden_size of the EAGLE-3 head must be 64 for this model, got 32"),
        ({"vocab_size": 99}, weights, "vocab_size of the EAGLE-3 head must be .* for this model, got 99"),
        ({"num_hidden_layers": 2}, weights, "num_hidden_layers of the EAGLE-3 head must be 1 for this model, got 2"),
        ({"norm_before_residual": True}, weights, "norm_before_residual of the EAGLE-3 head must be False"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 7]},
            weights,
            r"three layers in order, but these are \[1, 2, 7\] of 7",
        ),
        ({}, wrong, "lacks the tensor d2t"),
        ({}, weights | {"d2t": weights["d2t"] + VOCAB}, "d2t names tokens outside the vocabulary"),
        ({}, weights | {"d2t": weights["d2t"][:1]}, rf"d2t must hold {count} integers .* stored as \[1\], torch.int64"),
        ({"eagle_aux_hidden_state_layer_ids": 5}, weights, r"three layers in order, but these are \[5\] of 7"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a", "b", "c"]}}, weights, r"but these are \['a', 'b'"),
        ({"draft_vocab_size": -1}, weights, f"draft_vocab_size .* must be from 1 to {VOCAB} .*, got -1"),
    ):
        (tmp_path / "head" / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
        save_file(stored, tmp_path / "head" / "model.safetensors", {"format": "pt"})
        with pytest.raises((UnsupportedModelError, ModelLoadError), match=message):
            engines(made.path, speculative_config={"method": "eagle3", "model": str(tmp_path / "head")})
