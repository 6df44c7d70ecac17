"""The common part of families with ALiBi (arXiv:2108.12409): the slopes of their heads."""

from __future__ import annotations


def slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head.

    With n heads, n a power of two, head i (counted from 1) has 2^(-8 i / n). If n is not a power of two, this applies
    to the largest power of two below it, and the other heads use every second slope of twice as many heads.
    """
    power = 1 << (heads.bit_length() - 1)
    own = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * (heads - power), 2)]
    return (*own, *between)
