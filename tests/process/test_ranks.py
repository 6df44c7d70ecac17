"""Ranks that divide a model: their meetings, and engines whose steps they compute."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch
from support.driving import Job, add, finish, logprobs, make_engine, run, run_alone
from support.executors import use_torch
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.family_shape import BEAM_TOKENS, GREEDY_TOKENS, NUM_BEAMS, FamilyCheckpoint
from support.gguf_files import KINDS, library, write_file
from support.jobs import MIXED, beams, greedy, prompt
from support.peft_folders import adapter_tensors, matrices, write_adapter
from support.ranks import ThreadRanks, in_threads
from support.runners import executor_of, is_running, wait_gone
from support.service import PATIENCE, Service, children, wait_for

from engine import ConfigError, Engine, EngineDeadError, SamplingParams, UnsupportedModelError
from engine.backends import native
from engine.backends.native import ranks as meetings
from engine.backends.native.program import Program
from engine.backends.native.ranks import Ranks, shared_memory
from engine.errors import RankError
from engine.execution.division import RankExecutor
from engine.execution.executor import LocalExecutor
from engine.execution.runner import ModelRunner
from engine.model.gguf import folder as folders
from engine.model.layers import Linear
from engine.model.quantisation import Held, Parts
from engine.process.runner import Do, Failure, FillSlot, ProcessExecutor, RunnerAnswer, _Late, _Reading

ORACLE = Path(sys.prefix) / "clients" / "quantised"  # tools/setup.py puts it there

needs_library = pytest.mark.skipif(native.prospect()[0] == "", reason="there is no native library")
pytestmark = needs_library


@pytest.fixture
def three() -> Iterator[tuple[list[Ranks], Callable[..., list[Any]]]]:
    """Three ranks with small buffers; and a function that calls another with each of them, in a thread."""
    file = shared_memory(3, 4096)
    ranks = [Ranks(rank, 3, file, 4096) for rank in range(3)]
    os.close(file)
    with ThreadPoolExecutor(3) as threads:
        yield ranks, lambda act: [future.result() for future in [threads.submit(act, each) for each in ranks]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_added_in_the_order_of_ranks(dtype: torch.dtype, three: Any) -> None:
    """Of more elements than a buffer holds, again and again."""
    each = three[1]
    numbers = torch.randn(3, 4000, 3).to(dtype)
    for size in (5, 4000, 1024):
        first, second, third = numbers[:, :size].float()
        expected = ((first + second) + third).to(dtype)
        for found in each(lambda rank, size=size: rank.reduce(numbers[rank.rank, :size])):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_adds_the_same_sums(dtype: torch.dtype, three: Any) -> None:
    """Rows of which a buffer holds ten or twenty at a time."""
    numbers = torch.randn(3, 64, 96).to(dtype)

    def act(rank: Ranks) -> torch.Tensor:
        program, rows = Program(dtype), numbers[rank.rank].clone()
        x = program.buffer(96)
        program.give(x)
        program.reduce(x, rank)
        places, starts = torch.zeros(64, dtype=torch.int64), torch.tensor([0, 64], dtype=torch.int32)
        program.begin([(x, rows)], positions=places, slots=None, calls=[], starts=starts)
        program.run(0, 1)
        program.end()
        return rows

    first, second, third = numbers.float()
    for found in three[1](act):
        assert torch.equal(found, ((first + second) + third).to(dtype))


def test_columns_of_unequal_width_are_gathered(three: Any) -> None:
    each = three[1]
    widths, whole = [300, 200, 301], torch.randn(9, 801)
    found = each(lambda rank: rank.gather(whole.split(widths, dim=1)[rank.rank], widths))
    assert torch.equal(found[0], whole)
    assert all(part.shape == whole.shape for part in found)
    assert each(lambda rank: (rank.smallest(rank.rank + 5), rank.largest(rank.rank + 5))) == [(5, 7)] * 3


def test_a_rank_that_fails_ends_the_order_for_all(three: Any) -> None:
    """The next order is carried out as if nothing had happened."""
    each = three[1]
    x = torch.ones(2000)

    def act(rank: Ranks) -> object:
        rank.begin()
        if rank.rank == 1:
            rank.reduce(x)
            rank.fail()
            return None
        try:
            for _ in range(3):
                rank.reduce(x)
        except RankError as error:
            rank.fail()  # as `failing` does: rank 2 may have met rank 1 and wait for rank 0
            return str(error)
        return "no error"

    first, none, last = each(act)
    assert (first, none) == ("rank 1 of 3 failed in this step", None)
    assert last in ("rank 0 of 3 failed in this step", "rank 1 of 3 failed in this step")
    each(lambda rank: rank.begin())
    assert all(torch.equal(found, 3 * x) for found in each(lambda rank: rank.reduce(x)))


def test_a_rank_that_does_not_come(three: Any) -> None:
    ranks, each = three
    each(lambda rank: rank.begin())
    ranks[0].patience = 0.05
    with pytest.raises(EngineDeadError, match=r"rank 1 of 3 did not come within 0.05 seconds, for which rank 0 waited"):
        ranks[0].smallest(1)


def test_a_rank_that_cannot_begin_ends_the_order_for_all(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 never comes. Rank 2 looks at rank 0 first, and must not wait for rank 1 as long as rank 0 did."""
    executors = [RankExecutor(cast(LocalExecutor, SimpleNamespace(runner=None, facts=None)), each) for each in three[0]]
    monkeypatch.setattr(meetings, "_PATIENCE", 0.05)
    with pytest.raises(EngineDeadError, match="rank 1 of 3 did not come"):
        executors[0].trial()
    with pytest.raises(RankError, match="rank 0 of 3 failed in this step"):
        executors[2].trial()


def test_an_adapter_that_one_rank_cannot_load_stays_in_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, sent = ProcessExecutor.__new__(ProcessExecutor), []

    def send(message: object) -> _Late:
        sent.append(message)
        late = _Late(executor, 2)
        broken = isinstance(message, FillSlot)
        late.replies = [RunnerAnswer(), Failure("MemoryError", "no room", True) if broken else RunnerAnswer()]
        return late

    monkeypatch.setattr(executor, "send", send)
    with pytest.raises(MemoryError, match="no room"):
        executor.load_adapter(_Reading(executor, 2, "own", 1), 3)
    assert sent == [FillSlot("own", 3), Do("unload_adapter", [3])]


# ---- whole models


FAMILIES = ["llama", "gpt2", "mixtral"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyCheckpoint:
    return make_family_checkpoint(FAMILY_SHAPES[request.param], tmp_path_factory.mktemp(request.param))


def divided(model: FamilyCheckpoint, count: int, **settings: Any) -> Engine:
    with in_threads():
        return make_engine(model.path, tensor_parallel_size=count, max_model_len=96, **settings)


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_the_answers_of_the_reference(family: FamilyCheckpoint, executor: str) -> None:
    """Together and alone, greedily and by beams."""
    one = divided(family, 2)
    assert isinstance(one.executor, ThreadRanks)
    if executor == "torch":
        for each in one.executor.executors:
            use_torch(each.runner.model)
    params = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS)
    prompts = family.prompts()
    jobs = [Job(text, params) for text in prompts]
    expected = [[answer.tokens for answer in family.greedy(text).answers] for text in prompts]
    assert run(one, jobs) == expected
    if executor == "native":
        assert run_alone(one, jobs) == expected
    searches = [Job(text, beams(NUM_BEAMS, BEAM_TOKENS)) for text in prompts[:2]]
    assert run(one, searches) == [
        [answer.tokens for answer in family.beams(text, 1.0, False).answers] for text in prompts[:2]
    ]
    one.close()


def test_an_answer_does_not_depend_on_the_others(family: FamilyCheckpoint) -> None:
    """To the bit, however requests are sampled: their log-probabilities are equal, too."""
    one = divided(family, 2, max_num_batched_tokens=24, max_num_seqs=16)
    jobs = [Job([token % family.shape.vocab for token in job.prompt], job.params) for job in MIXED]
    jobs.append(Job(jobs[2].prompt, greedy(6, logprobs=2, prompt_logprobs=2)))
    assert run(one, jobs) == run_alone(one, jobs)
    said = []
    for together in (jobs, jobs[-1:]):
        for number, job in enumerate(together):
            add(one, str(number), job)
        output = finish(one)[str(len(together) - 1)]
        said.append((output.prompt_logprobs, [answer.logprobs for answer in output.outputs]))
    assert said[0] == said[1]
    assert said[0][0]
    one.close()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> FamilyCheckpoint:
    return make_family_checkpoint(FAMILY_SHAPES["gpt2"], tmp_path_factory.mktemp("gpt2"))


def test_three_ranks_with_unequal_shares(gpt2: FamilyCheckpoint) -> None:
    """Of four heads the last rank has two. All have as many pages as the one whose pages are largest."""
    one = divided(gpt2, 3, num_gpu_blocks_override=None, kv_cache_memory=200_000)
    assert isinstance(one.executor, ThreadRanks)
    runners = [each.runner for each in one.executor.executors]
    assert [runner.model.kv_shapes()[0].kv_heads for runner in runners] == [1, 1, 2]
    sizes = [sum(tensor.nbytes for layer in runner.cache.layers for tensor in layer) for runner in runners]
    assert sizes == [sizes[0], sizes[0], 2 * sizes[0]]
    assert 0.9 < sizes[2] / (200_000 / 3) <= 1.0
    whole = make_engine(gpt2.path, max_model_len=96)
    assert max(map(_size, runners)) <= 0.5 * _size(whole.runner)
    assert sum(map(_size, runners)) == _size(whole.runner)
    params = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS)
    expected = [[answer.tokens for answer in gpt2.greedy(text).answers] for text in gpt2.prompts()]
    assert run(one, [Job(text, params) for text in gpt2.prompts()]) == expected
    one.close()
    whole.close()


def _size(runner: ModelRunner) -> int:
    """The numbers in all matrices."""
    return sum(module.inputs * module.outputs for module in runner.model.modules() if isinstance(module, Linear))


def test_a_request_that_breaks_one_rank_ends_alone(gpt2: FamilyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    one, broken = divided(gpt2, 2), []
    assert isinstance(one.executor, ThreadRanks)
    model = one.executor.executors[1].runner.model
    logits = model.logits

    def poisoned(*arguments: Any, **how: Any) -> Any:
        if POISON in {int(token) for plan in seen[-1:] for token in plan.token_ids}:
            broken.append(True)
            raise RuntimeError("the poison was computed")
        return logits(*arguments, **how)

    seen: list[Any] = []
    launch = one.executor.launch
    monkeypatch.setattr(one.executor, "launch", lambda plan: (seen.append(plan), launch(plan))[1])
    monkeypatch.setattr(model, "logits", poisoned)
    POISON = 197
    texts = [[POISON, 4, 5], *gpt2.prompts()]
    for number, text in enumerate(texts):
        add(one, str(number), Job(text, SamplingParams(temperature=0.0, max_tokens=4)))
    outputs = finish(one)
    assert broken
    assert "the poison was computed" in str(outputs["0"].error)
    for number, text in enumerate(texts[1:], 1):
        assert outputs[str(number)].outputs[0].token_ids == gpt2.greedy(text).answers[0].tokens[:4]
    one.close()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"tensor_parallel_size": 5}, UnsupportedModelError, "divided among 5 ranks: 4 heads with 4 K/V heads"),
        ({"async_scheduling": True}, ConfigError, "async_scheduling does not work with tensor_parallel_size 2"),
        ({"kv_disk": "pages"}, ConfigError, "kv_disk does not work with tensor_parallel_size 2"),
        ({"speculative_config": "mtp"}, ConfigError, "method mtp does not work with tensor_parallel_size 2"),
        ({"tensor_parallel_size": 100_000}, ConfigError, "must be at most .* got 100000: each rank is a"),
        ({"tensor_parallel_size": 0}, ConfigError, "tensor_parallel_size must be an integer of at least 1, got 0"),
    ],
)
def test_what_cannot_be_divided(
    settings: dict[str, Any], error: type[Exception], message: str, gpt2: FamilyCheckpoint
) -> None:
    with pytest.raises(error, match=message):
        divided(gpt2, **({"count": settings.pop("tensor_parallel_size", 2)} | settings))


def test_ranks_need_the_library(gpt2: FamilyCheckpoint) -> None:
    with native.use(None), pytest.raises(ConfigError, match="ranks exchange numbers with the native library"):
        divided(gpt2, 2)


# ---- processes


@pytest.mark.slow
def test_ranks_in_processes(gpt2: FamilyCheckpoint) -> None:
    """They answer as one process does. If one of them is killed, the engine ends and names it, and the others end."""
    one = make_engine(gpt2.path, tensor_parallel_size=2, max_model_len=96, threads=1)
    pids = executor_of(one).pids
    assert len({os.getpid(), *pids}) == 3
    params = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS)
    expected = [[answer.tokens for answer in gpt2.greedy(text).answers] for text in gpt2.prompts()]
    assert run(one, [Job(text, params) for text in gpt2.prompts()]) == expected
    add(one, "a", Job(gpt2.prompts()[0], greedy(50)))
    one.step()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"process {pids[1]} of rank 1 of 2 has ended \(with status -9\)"):
        finish(one)
    one.close()
    for pid in pids:
        wait_gone(pid)


@pytest.mark.slow
def test_ranks_end_with_a_killed_engine(gpt2: FamilyCheckpoint) -> None:
    program = (
        "import sys, time; sys.path.insert(0, 'tests'); from support.driving import make_engine\n"
        f"e = make_engine({str(gpt2.path)!r}, tensor_parallel_size=2, max_model_len=96, threads=1)\n"
        "print(*e.executor.pids, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        process.kill()
    for pid in pids:
        wait_gone(pid)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> FamilyCheckpoint:
    """A model whose parts are whole blocks of stored formats."""
    settings = {**FAMILY_SHAPES["llama"].settings, "hidden_size": 512, "intermediate_size": 512}
    shape = replace(FAMILY_SHAPES["llama"], settings=settings)
    return make_family_checkpoint(shape, tmp_path_factory.mktemp("wide"))


def _scores(one: Engine, text: list[int]) -> torch.Tensor:
    found = logprobs(one, text)
    one.close()
    return found


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_formats(settings: dict[str, Any], wide: FamilyCheckpoint) -> None:
    """Each rank converts its part of the weights; in int8, groups are those of the whole matrix."""
    text = [token % wide.shape.vocab for token in prompt(5, 40)]
    expected = _scores(make_engine(wide.path, max_model_len=96, **settings), text)
    found = _scores(divided(wide, 2, **settings), text)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.02)


def test_stored_formats(wide: FamilyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a GGUF file keep its formats: rows, columns in whole blocks, and rows of the vocabulary."""
    monkeypatch.setattr(folders, "cache_folder", lambda name: tmp_path / name)
    kind = replace(KINDS["llama"], shape=wide.shape)
    with library(ORACLE):
        write_file(tmp_path / "wide.gguf", kind, formats=("Q8_0", "Q4_0", "Q5_1"))
    how: dict[str, Any] = {"quantization": "stored", "skip_tokenizer_init": True, "max_model_len": 96}
    one = make_engine(tmp_path / "wide.gguf", **how)
    with in_threads():
        two = make_engine(tmp_path / "wide.gguf", tensor_parallel_size=2, **how)
    assert isinstance(two.executor, ThreadRanks)
    models = [each.runner.model for each in two.executor.executors]
    kinds = [{name: module.stored for name, module in model.named_modules() if isinstance(module, Linear)}
             for model in (one.runner.model, *models)]  # fmt: skip
    assert len({str(kind) for kind in kinds[0].values()}) > 2
    for own in kinds[1:]:
        assert {name: _kinds(kind) for name, kind in own.items()} == {n: _kinds(kind) for n, kind in kinds[0].items()}
    text = [token % wide.shape.vocab for token in prompt(6, 40)]
    torch.testing.assert_close(_scores(two, text), _scores(one, text), atol=0.1, rtol=0.02)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox"])
def test_adapters(name: str, tmp_path: Path) -> None:
    """Of all products: a rank has the part of an adapter that belongs to its part of the matrix. Some stored matrices
    are transposed or hold queries, keys and values together."""
    model = make_family_checkpoint(FAMILY_SHAPES[name], tmp_path / name)
    sizes = {key: size for key, size in matrices(model.model).items() if re.search(r"layers|\bh\.", key)}
    folder = write_adapter(tmp_path / "adapter", adapter_tensors(sizes, seed=1))
    text = [token % model.shape.vocab for token in prompt(7, 30)]
    found = []
    for one in (make_engine(model.path, max_model_len=96, max_loras=1), divided(model, 2, max_loras=1)):
        one.load_adapter("own", str(folder))
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        for adapter in ("own", None):
            one.add_request(str(adapter), text, params, adapter=adapter)
        scores = {}
        for key, output in finish(one).items():
            assert output.prompt_logprobs is not None
            scores[key] = [value.logprob for each in output.prompt_logprobs if each for value in each.values()]
        found.append(scores)
        one.close()
    for key in ("own", "None"):
        assert found[1][key] == pytest.approx(found[0][key], abs=1e-4)
    assert found[0]["own"] != pytest.approx(found[0]["None"], abs=1e-2)


def _kinds(held: Held | None) -> object:
    return held.kinds if isinstance(held, Parts) else held


@pytest.mark.slow
def test_a_service_replaces_an_engine_that_lost_a_rank(gpt2: FamilyCheckpoint, tmp_path: Path) -> None:
    flags = ("--skip-tokenizer-init", "--dtype", "float32", "--threads", "1", "--max-model-len", "96")
    service = Service(str(gpt2.path), *flags, "--tensor-parallel-size", "2", log=tmp_path / "log")
    text = gpt2.prompts()[0]

    def ask() -> httpx.Response:
        body = {"prompt": text, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        return httpx.post(f"{service.url}/v1/completions", json=body, timeout=PATIENCE)

    try:
        service.wait_ready()
        expected = gpt2.greedy(text).answers[0].tokens[:8]
        assert ask().json()["choices"][0]["token_ids"] == expected
        ranks = children(service.engine(), "engine.process.runner")
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)  # no request runs
        gone = f"process {ranks[1]} of rank"
        wait_for(lambda: gone in service.log.read_text(), "the service did not notice that a rank ended")
        wait_for(lambda: service.get("/health").status_code == 200, "the engine did not come back")
        assert ask().json()["choices"][0]["token_ids"] == expected
        for pid in ranks:
            wait_gone(pid)
        assert service.stop() == 0
    finally:
        service.process.kill()
        service.process.wait()
