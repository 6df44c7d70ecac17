"""Kernels that show what `support.gpu` makes of good and bad ones."""

from __future__ import annotations

import triton
import triton.language as tl

from support.gpu import Variant


@triton.jit
def doubled(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), missing)  # noqa: F821


@triton.jit
def silent(x, BLOCK: tl.constexpr):
    tl.load(x + tl.arange(0, BLOCK))


@triton.jit
def large(a, b, out, n, SIZE: tl.constexpr, DEEP: tl.constexpr):
    at = tl.arange(0, SIZE)
    deep = tl.arange(0, DEEP)
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for start in range(0, n, DEEP):
        left = tl.load(a + at[:, None] * n + start + deep[None, :])
        right = tl.load(b + (start + deep)[:, None] * SIZE + at[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + at[:, None] * SIZE + at[None, :], total)


VARIANTS = [
    Variant(
        name="doubled", kernel=doubled, signature={"x": "*bf16", "out": "*bf16", "n": "i32"}, constants={"BLOCK": 64}
    ),
    Variant(name="broken", kernel=broken, signature={"x": "*fp32"}, constants={"BLOCK": 64}, capabilities=(80,)),
    Variant(name="silent", kernel=silent, signature={"x": "*fp32"}, constants={"BLOCK": 64}, capabilities=(80,)),
    Variant(
        name="large",
        kernel=large,
        signature={"a": "*bf16", "b": "*bf16", "out": "*fp32", "n": "i32"},
        constants={"SIZE": 128, "DEEP": 128},
        multiples=("n",),
        num_stages=8,
        capabilities=(80,),
    ),
]
