"""Adapters by the kernels for GPUs, or by Triton's interpreter, against torch: the kernel, and whole steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from support.adapters import LLAMA, make_adapter
from support.checkpoints import make_checkpoint, random_prompt
from support.driving import Job, add, finish, make_engine, run, run_alone, tokens_of
from support.gpu import kernels

from engine import SamplingParams
from engine.backends.native.memory import Arena
from engine.backends.triton import adapters
from engine.execution.recording import eager
from engine.model.adapter_slots import AdapterSlots
from engine.model.adapters import LowRank
from engine.model.executors.triton import TritonExecutor

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs", "rank"), [(83, 200, 5), (64, 128, 16), (130, 70, 96)])
def test_the_kernel_adds_what_torch_adds(dtype: torch.dtype, inputs: int, outputs: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * gain

    with kernels() as device:
        made = AdapterSlots(inputs, outputs, 4, rank, dtype, device)
        for slot, own in ((1, rank), (3, 1)):
            addition = LowRank(random(own, inputs, gain=0.1), random(outputs, own))
            made.put(slot, made.lay_out(addition, Arena()))
        slots = torch.tensor([0, 3, 3, 1, 1, 0, 2, *[1] * 20, 3], device=device)
        wide = torch.full((len(slots), inputs + 5), torch.nan, dtype=dtype, device=device)
        x = wide[:, :inputs]
        x.copy_(random(len(slots), inputs))
        before = random(len(slots), outputs).to(device, dtype)
        out = before.clone()
        adapters.add(x, out, slots, made.down, made.up)
        expected = made.add(x, before, slots)
        exact = 1e-5 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(out, expected, rtol=exact, atol=exact)
        assert torch.equal(out[slots == 0], before[slots == 0])
        assert torch.equal(out[slots == 2], before[slots == 2]), "the slot is empty"
        for row in (1, 4, 20):
            alone = before[row : row + 1].clone()
            adapters.add(x[row : row + 1], alone, slots[row : row + 1].int(), made.down, made.up)
            assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize("recorded", [False, True])
def test_steps_have_the_answers_of_a_cpu(tmp_path: Path, recorded: bool) -> None:
    checkpoint = make_checkpoint("llama-grouped", tmp_path)
    made = [make_adapter(checkpoint.model, LLAMA, seed)[0] for seed in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    beams = SamplingParams(temperature=0.0, num_beams=2, max_tokens=4)
    jobs = [
        Job(random_prompt(307, number, 6 + number), beams if name == "1" else params, {"adapter": name})
        for number, name in enumerate(["0", "1", "2", None])
    ]
    settings = {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 8, "max_loras": 4}
    plain = make_engine(checkpoint.path, **settings)
    for number, adapter in enumerate(made):
        plain.load_adapter(str(number), adapter)
    expected = run_alone(plain, jobs)
    plain.close()
    with kernels() as device:
        engine = make_engine(checkpoint.path, **settings, device=str(device), async_scheduling=True)
        executor = engine.runner.model.trunk.executor
        assert isinstance(executor, TritonExecutor)
        if device.type == "cpu" and recorded:
            engine.runner.use_graphs(8, eager)
        for number, adapter in enumerate(made):  # after steps were recorded
            engine.load_adapter(str(number), adapter)
        assert run(engine, jobs) == expected
        if recorded:
            assert engine.runner.graphs is not None
            assert engine.runner.graphs.num_replayed > 2
        # A slot that is filled again serves its new adapter in the steps that were recorded before.
        engine.unload_adapter("0")
        engine.load_adapter("new", made[2])
        add(engine, "0", Job(jobs[2].prompt, params, {"adapter": "new"}))
        assert tokens_of(finish(engine)["0"]) == expected[2]
        engine.close()
