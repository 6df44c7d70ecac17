"""What families with ALiBi (arXiv:2108.12409) share: the slopes of their heads."""

from __future__ import annotations


def slopes(heads: int, steepest: float = 8.0) -> tuple[float, ...]:
    """The slope of each head.

    Of n heads, n a power of two, head i (counted from 1) has 2^(-steepest * i / n). Where n is none, the largest
    power of two below it is served like that, and the other heads take every second slope of twice as many heads.

    Args:
        heads: how many there are.
        steepest: the last head's slope is 2^-steepest.
    """
    power = 1 << (heads.bit_length() - 1)
    own = [2.0 ** (-steepest * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-steepest * i / (2 * power)) for i in range(1, 2 * (heads - power), 2)]
    return (*own, *between)
