"""Low-rank additions of adapters to a product on a GPU: one kernel for all adapters of a step.

Each program takes 16 tokens, some outputs and one slot, and ends at once if none of its tokens has that slot. So a step
without adapters costs one launch per product, and no program depends on how tokens are distributed over slots. A
token's bits depend only on its own row: a program computes all of its rows in the same tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _INPUTS, _OUTPUTS, _RANKS = 16, 64, 128, 64  # tokens of a tile


@triton.jit(do_not_specialize=["tokens"])
def adapters_kernel(
    x, down, up, slots, out, tokens, x_stride, out_stride, inputs, outputs, rank,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """out[token] += up[slot] @ (down[slot] @ x[token]) for the tokens that have the program's slot. `down`: [slots,
    rank, inputs]; up: [slots, outputs, rank]; slots: [tokens], 0 for none."""
    numbers = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.program_id(2) + 1
    mine = tl.load(slots + numbers, mask=numbers < tokens, other=0) == slot
    if tl.max(mine.to(tl.int32), 0) > 0:
        token = numbers.to(tl.int64)[:, None]
        own = mine[:, None]
        feature = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        own_down = down + slot.to(tl.int64) * rank * inputs
        own_up = up + slot.to(tl.int64) * rank * outputs
        total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        for first in range(0, rank, RANKS):
            ranks = first + tl.arange(0, RANKS)
            thin = tl.zeros((ROWS, RANKS), dtype=tl.float32)
            for start in range(0, inputs, INPUTS):
                at = start + tl.arange(0, INPUTS)
                rows = tl.load(x + token * x_stride + at[None, :], mask=own & (at < inputs)[None, :], other=0.0)
                weights = tl.load(
                    own_down + ranks[None, :].to(tl.int64) * inputs + at[:, None],
                    mask=(ranks < rank)[None, :] & (at < inputs)[:, None],
                    other=0.0,
                )
                thin = tl.dot(rows, weights, thin, input_precision="ieee")
            columns = tl.load(
                own_up + feature[None, :].to(tl.int64) * rank + ranks[:, None],
                mask=(ranks < rank)[:, None] & (feature < outputs)[None, :],
                other=0.0,
            )
            total = tl.dot(thin, columns.to(tl.float32), total, input_precision="ieee")
        place = out + token * out_stride + feature[None, :]
        inside = own & (feature < outputs)[None, :]
        before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (before + total).to(out.dtype.element_ty), mask=inside)


def add(x: Tensor, out: Tensor, slots: Tensor, down: Tensor, up: Tensor) -> None:
    """out [T, out] += the result of the adapters in slots [T] for rows x [T, in]. `down`: [1 + slots, rank, in] in the
    format of x; up: [1 + slots, out, rank] likewise. Slot 0 is not read."""
    count, rank, inputs = down.shape
    outputs = up.shape[1]
    assert x.stride(1) == out.stride(1) == 1
    grid = (triton.cdiv(len(x), _ROWS), triton.cdiv(outputs, _OUTPUTS), count - 1)
    adapters_kernel[grid](
        x, down, up, slots, out, len(x), x.stride(0), out.stride(0), inputs, outputs, rank,
        ROWS=_ROWS, INPUTS=_INPUTS, OUTPUTS=_OUTPUTS, RANKS=min(_RANKS, max(16, triton.next_power_of_2(rank))),
    )  # fmt: skip


def warm(down: Tensor, up: Tensor) -> None:
    """Compile the kernel for slots of one size, in the form in which unrecorded steps launch it."""
    x, out = down.new_zeros(1, down.shape[2]), up.new_zeros(1, up.shape[1])
    add(x, out, torch.zeros(1, dtype=torch.int64, device=down.device), down, up)
