"""How a GPU's memory is divided, with a GPU that is made up: its sizes, and what steps take of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import random_prompt
from support.driving import Job, add, make_engine, run
from support.jobs import CHECKPOINT, MIXED, greedy, prompt
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES

from engine import ConfigError, Engine, EngineConfig, InvalidRequestError, ModelLoadError
from engine.execution import loading, profiling
from engine.execution.cuda_graphs import graph_sizes
from engine.execution.kv_cache import page_bytes
from engine.execution.loading import check_weights_fit
from engine.execution.memory import CudaMemory, DeviceMemory, device_memory, gib
from engine.execution.pending import LateStep
from engine.execution.profiling import GRAPH, PARTS, Needs, measure_needs
from engine.execution.prompt_graphs import token_sizes
from engine.execution.runner import ModelRunner
from engine.scheduling.plan import StepPlan

CPU = torch.device("cpu")
MIB = 2**20
TOKEN, ROW = 3000, 5000  # bytes that a step takes for each


class MadeUpMemory:
    """A GPU of some size, of which others have a part. A step takes bytes for its tokens and sampled rows, and the
    first one leaves libraries with some."""

    def __init__(self, total: int, others: int = 0, weights: int = 0, libraries: int = 0):
        self._total, self._others, self._weights, self._libraries = total, others, weights, libraries
        self._peak, self._loaded = 0, False
        self.plans: list[StepPlan] = []

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self._others - self._weights - self._libraries * self._loaded

    def allocated(self) -> int:
        return self._weights

    def peak(self) -> int:
        return self._peak

    def reset(self) -> None:
        self._peak = self._weights

    def run(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._loaded = True
        rows = 0 if plan.sampling is None else len(plan.sampling.rows)
        taken = TOKEN * (plan.num_tokens + (0 if plan.encoder is None else len(plan.encoder.token_ids))) + ROW * rows
        if taken > self.free():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB, made by the test")
        self._peak = max(self._peak, self._weights + taken)


@contextmanager
def gpu(memory: MadeUpMemory) -> Iterator[None]:
    """The CPU is taken for a GPU with this memory while an engine starts."""
    with pytest.MonkeyPatch.context() as patch:
        launch = ModelRunner.launch

        def watched(runner: ModelRunner, plan: StepPlan) -> LateStep:
            memory.run(plan)
            return launch(runner, plan)

        patch.setattr(ModelRunner, "launch", watched)
        patch.setattr(profiling, "device_memory", lambda device: memory)
        yield


def start(path: Path, memory: MadeUpMemory, **settings: Any) -> Engine:
    with gpu(memory):
        return make_engine(path, **({"num_gpu_blocks_override": None, "max_num_seqs": 128} | settings))


def size_of_page(engine: Engine) -> int:
    return page_bytes(engine.runner.model.kv_shapes(), engine.info.block_size, engine.runner.model.dtype)


def test_pages_get_what_is_left(checkpoint: Callable[[str], Any]) -> None:
    """Beside weights, libraries, what others have, the largest step and recorded steps; and the utilization's rest."""
    path = checkpoint(CHECKPOINT).path
    memory = MadeUpMemory(60 * MIB, others=5 * MIB, weights=7 * MIB, libraries=MIB)
    one = start(path, memory, gpu_memory_utilization=0.8, enforce_eager=True, max_num_batched_tokens=512)
    left = int(0.8 * 60 * MIB) - 13 * MIB - (512 * TOKEN + 128 * ROW)
    assert one.info.num_blocks == left // size_of_page(one) - 1
    assert len(one.runner.cache.layers[0][0]) == one.info.num_blocks + 1
    largest = memory.plans[0]
    assert (largest.num_tokens, largest.num_rows) == (512, 128)
    assert largest.sampling is not None
    assert len(largest.sampling.rows) == 128
    expected = make_engine(path)
    assert run(one, MIXED[:4]) == run(expected, MIXED[:4])
    expected.close()
    one.close()


def test_recorded_steps_have_a_reserve(checkpoint: Callable[[str], Any]) -> None:
    """The memory of the largest that is recorded once for all, and the nodes of each: here all tokens of a step are."""
    one = make_engine(checkpoint(CHECKPOINT).path)
    memory = MadeUpMemory(100 * MIB, weights=9 * MIB, libraries=MIB)
    with gpu(memory):
        eager, recorded = (measure_needs(one.runner, memory, 64, 8, graphs=graphs) for graphs in (False, True))
    step = 64 * TOKEN + 8 * ROW
    weights = one.runner.model.weight_bytes()
    assert eager == Needs(total=100 * MIB, used=10 * MIB, weights=weights, step=step, graphs=0)
    graphs = 2 * len(graph_sizes(8)) + len(token_sizes(64))
    assert recorded == replace(eager, graphs=graphs * GRAPH + PARTS + step)
    one.close()


@pytest.mark.parametrize("settings", [{"num_gpu_blocks_override": 9}, {"kv_cache_memory": MIB}])
def test_settings_that_say_it_are_not_doubted(settings: dict[str, Any], checkpoint: Callable[[str], Any]) -> None:
    memory = MadeUpMemory(MIB)
    one = start(checkpoint(CHECKPOINT).path, memory, **settings)
    assert max(plan.num_tokens for plan in memory.plans) < 40, "small steps are timed, and no large one is run"
    assert one.info.num_blocks == settings.get("num_gpu_blocks_override", MIB // size_of_page(one) - 1)
    one.close()


def test_steps_with_fewer_positions_than_tokens(checkpoint: Callable[[str], Any]) -> None:
    """More rows than are sampled fill the step, and none is longer than the context."""
    memory = MadeUpMemory(100 * MIB)
    one = start(checkpoint(CHECKPOINT).path, memory, max_model_len=20, max_num_seqs=3, max_num_batched_tokens=200)
    largest, scored = memory.plans[:2]
    assert largest.num_tokens == 200
    assert max(largest.context_lens) < 20
    assert largest.sampling is not None
    assert len(largest.sampling.rows) == 3
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs.rows) == 19
    assert not any(tensor[0].any() for layer in one.runner.cache.layers for tensor in layer)
    one.close()


def test_encoder_inputs_are_part_of_the_largest_step(tmp_path: Path) -> None:
    make_seq2seq_checkpoint(SHAPES["t5"], tmp_path)
    memory = MadeUpMemory(100 * MIB)
    one = start(tmp_path, memory, max_model_len=100, max_num_batched_tokens=250, enforce_eager=True)
    encoder = memory.plans[0].encoder
    assert encoder is not None
    assert encoder.starts.tolist() == [0, 100, 200, 250]
    left = int(0.9 * 100 * MIB) - 500 * TOKEN - 128 * ROW
    assert one.info.num_blocks == min(left // size_of_page(one) - 1, 128 * 2 * 7)
    expected = make_engine(tmp_path, max_model_len=100)
    job = Job(random_prompt(SHAPES["t5"].vocab, 3, 17), greedy(6))
    assert run(one, [job]) == run(expected, [job])
    expected.close()
    one.close()


def test_a_model_that_does_not_fit_says_what_it_needs(checkpoint: Callable[[str], Any]) -> None:
    path = checkpoint(CHECKPOINT).path
    memory = MadeUpMemory(20 * MIB, others=8 * MIB, weights=7 * MIB)
    with pytest.raises(ConfigError) as caught:
        start(path, memory, max_num_batched_tokens=512, gpu_memory_utilization=0.8)
    for part in (
        "of 20.0 MiB, --gpu-memory-utilization 0.8 allows 16.0 MiB", "(512 tokens, 128 rows) 2.1 MiB",
        "0.0 MiB are left", "request of 1536 tokens", "--max-num-batched-tokens, --max-num-seqs or --max-model-len",
        "--kv-cache-dtype", "--device cuda:1",
    ):  # fmt: skip
        assert part in str(caught.value)


def test_a_step_that_does_not_fit_says_which(checkpoint: Callable[[str], Any]) -> None:
    memory = MadeUpMemory(12 * MIB, weights=11 * MIB)
    with pytest.raises(
        ConfigError, match=r"largest step \(512 tokens, 128 rows\) .* --max-num-batched-tokens"
    ) as caught:
        start(checkpoint(CHECKPOINT).path, memory, max_num_batched_tokens=512)
    assert "1.0 MiB are free (CUDA out of memory." in str(caught.value)


def test_other_errors_of_that_step_are_not_taken_for_it(checkpoint: Callable[[str], Any]) -> None:
    class Broken(MadeUpMemory):
        def run(self, plan: StepPlan) -> None:
            raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError, match="a fault of ours"):
        start(checkpoint(CHECKPOINT).path, Broken(100 * MIB))


def test_the_longest_request_may_not_fit(checkpoint: Callable[[str], Any], caplog: pytest.LogCaptureFixture) -> None:
    """Shorter ones are served, longer ones refused, and the log says so."""
    with caplog.at_level(logging.WARNING, "octavo.execution"):
        one = make_engine(checkpoint(CHECKPOINT).path, num_gpu_blocks_override=5, max_model_len=100)
    (record,) = caplog.records
    for part in ("holds 80 tokens", "max_model_len (100)", "--max-model-len", "--kv-cache-dtype"):
        assert part in record.getMessage()
    with pytest.raises(InvalidRequestError, match="5"):
        add(one, "long", Job(prompt(1, 70), greedy(20)))
    assert len(run(one, [Job(prompt(1, 60), greedy(12))])[0][0]) == 12
    one.close()
    caplog.clear()
    make_engine(checkpoint(CHECKPOINT).path, num_gpu_blocks_override=7, max_model_len=100).close()
    assert not caplog.records


def test_weights_that_do_not_fit_are_not_read(
    checkpoint: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(CHECKPOINT).path
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    float32, cuda = torch.float32, torch.device("cuda")

    def check(memory: MadeUpMemory, utilization: float = 0.9, dtype: torch.dtype = float32) -> None:
        monkeypatch.setattr(loading, "device_memory", lambda device: memory)
        check_weights_fit(path, None, dtype, cuda, None, utilization)

    check(MadeUpMemory(2 * size))
    check(MadeUpMemory(3 * size, others=int(1.6 * size)))
    with pytest.raises(ModelLoadError) as caught:
        check(MadeUpMemory(3 * size, others=int(2.5 * size)))
    for part in (
        gib(size),
        f"{gib(size / 2)} of {gib(3 * size)} free",
        "end them, or use a smaller",
        "--dtype",
        "--device cuda:1",
    ):
        assert part in str(caught.value)
    check(MadeUpMemory(3 * size, others=int(2.1 * size)), dtype=torch.bfloat16)
    with pytest.raises(ModelLoadError, match=r"utilization 0.5 allows .*Raise --gpu-memory-utilization"):
        check(MadeUpMemory(int(1.5 * size)), utilization=0.5)
    with pytest.raises(ModelLoadError) as caught:
        check(MadeUpMemory(size // 3), dtype=torch.bfloat16)
    for part in (
        "more than all of it. Use a smaller model, smaller weights (--quantization int8 or int4), a GPU with",
    ):
        assert part in str(caught.value)
    for useless in ("--dtype", "--gpu-memory-utilization", "end them"):
        assert useless not in str(caught.value)


def test_what_is_left() -> None:
    needs = Needs(total=1000, used=300, weights=200, step=100, graphs=50)
    assert needs.left(0.9) == 450
    assert needs.left(0.4) == -50


def test_the_memory_of_a_device() -> None:
    assert device_memory(CPU) is None
    assert isinstance(device_memory(torch.device("cuda")), CudaMemory)
    assert (gib(3 * 2**29), gib(MIB // 2)) == ("1.50 GiB", "0.5 MiB")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_one() -> None:
    memory: DeviceMemory = CudaMemory(torch.device("cuda"))
    memory.reset()
    before = memory.allocated()
    torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    assert memory.peak() - before >= 64 * MIB > memory.allocated() - before
    memory.reset()
    assert memory.peak() == memory.allocated()
    assert 0 < memory.free() < memory.total()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_engine_on_a_real_one(checkpoint: Callable[[str], Any]) -> None:
    one = Engine(EngineConfig(model=str(checkpoint(CHECKPOINT).path), device="cuda", show_progress=False))
    assert one.info.full_requests >= 1.0
    assert len(run(one, MIXED[:2])[0][0]) == 20
    one.close()
