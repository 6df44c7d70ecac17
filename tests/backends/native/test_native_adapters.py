"""The library's low-rank additions against torch, with every instruction set."""

from __future__ import annotations

import pytest
import torch
from support.native import each_isa, kernels_of, needs_native
from torch import Tensor

from engine.backends.native import gemm
from engine.backends.native.adapters import AdapterTable, find_runs, lay_out
from engine.backends.native.memory import Arena
from engine.backends.native.program import Program

pytestmark = needs_native

INPUTS, OUTPUTS, RANK = 83, 200, 24
SLOTS = torch.tensor([0, 3, 3, 3, 3, 3, 1, 0, 0, 2, 3, 1, 1, 4, 0, 5, 5, 5, 5, 5])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrices() -> list[tuple[Tensor, Tensor]]:
    """Adapters of slots 1 to 5: a small one; one that joins three matrices; one of bfloat16's numbers; one whose ranks
    reach outputs that overlap; one of float16's numbers."""
    joined = torch.block_diag(random(130, 5, seed=1), random(7, 8, seed=2), random(63, 3, seed=3))
    mixed = random(OUTPUTS, 3, seed=4)
    mixed[50:, 0], mixed[:150, 1] = 0, 0
    ups = [random(OUTPUTS, 1, seed=5), joined, random(OUTPUTS, RANK, seed=6).bfloat16().float(), mixed]
    found = [(random(up.shape[1], INPUTS, seed=10 + slot) * 0.1, up) for slot, up in enumerate(ups)]
    return [*found, ((random(RANK, INPUTS, seed=7) * 0.1).half().float(), random(OUTPUTS, RANK, seed=8).half().float())]


def table() -> AdapterTable:
    made = AdapterTable(6, INPUTS, OUTPUTS, RANK)
    for slot, (down, up) in enumerate(matrices(), start=1):
        made.put(slot, lay_out(down, up, Arena()))
    return made


def computed(x: Tensor, slots: Tensor, made: AdapterTable, packed: gemm.Packed) -> Tensor:
    """A product with its adapters, in one program."""
    program = Program(x.dtype)
    rows, out = program.buffer(INPUTS), program.buffer(OUTPUTS)
    program.give(rows)
    program.give(out)
    thin = program.shrink(made, rows)
    program.product(packed, rows, out)
    program.expand(made, thin, out)
    result = torch.empty(len(x), OUTPUTS, dtype=x.dtype)
    positions, starts = torch.arange(len(x)), torch.tensor([0, len(x)], dtype=torch.int32)
    program.begin([(rows, x), (out, result)], positions=positions, slots=None, calls=[], starts=starts,
                  runs=find_runs(slots))  # fmt: skip
    program.run(0, len(program))
    program.end()
    return result


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_token_gets_the_change_of_its_slot(isa: str, dtype: torch.dtype) -> None:
    weight, x = random(OUTPUTS, INPUTS, seed=30) * 0.1, random(len(SLOTS), INPUTS, seed=31).to(dtype)
    expected = x.double() @ weight.to(dtype).double().T
    for row, slot in enumerate(SLOTS.tolist()):
        if slot:
            down, up = (part.double() for part in matrices()[slot - 1])
            expected[row] += x[row].double() @ down.T @ up.T
    for threads in (1, 3):
        with kernels_of(isa, threads):
            packed, made = gemm.pack(weight.to(dtype), None), table()
            found = computed(x, SLOTS, made, packed)
            exact = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0.03}
            torch.testing.assert_close(found.double(), expected, **exact)
            plain = computed(x, torch.zeros_like(SLOTS), made, packed)
            assert torch.equal(found[SLOTS == 0], plain[SLOTS == 0])
            for row in range(len(SLOTS)):
                alone = computed(x[row : row + 1].clone(), SLOTS[row : row + 1], made, packed)
                assert torch.equal(alone[0], found[row])


def test_a_slot_gives_its_matrices_back_and_forgets_them() -> None:
    made = table()
    for slot, (down, up) in enumerate(matrices(), start=1):
        kept = made.matrices(slot)
        assert kept is not None
        torch.testing.assert_close(kept[1] @ kept[0], up @ down, rtol=0, atol=1e-5)
    blocks = [(part.first, part.outputs, len(part.down), part.up.dtype) for part in made._parts[2]]
    assert blocks == [(0, 130, 5, torch.float32), (130, 7, 8, torch.float32), (137, 63, 3, torch.float32)]
    assert made._parts[3][0].up.dtype == torch.bfloat16, "the numbers are bfloat16's: half the memory holds them"
    assert {part.dtype for part in (made._parts[5][0].down, made._parts[5][0].up)} == {torch.float16}
    assert len(made._parts[4]) == 1, "no two threads add to the same numbers"
    made.clear(2)
    assert made.matrices(2) is made.matrices(0) is None


def test_runs_are_those_of_tokens_with_an_adapter() -> None:
    runs = find_runs(SLOTS)
    assert runs is not None
    assert runs.tolist() == [[1, 5, 3], [6, 1, 1], [9, 1, 2], [10, 1, 3], [11, 2, 1], [13, 1, 4], [15, 5, 5]]
    assert find_runs(torch.zeros(4, dtype=torch.int64)) is None
