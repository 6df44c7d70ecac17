"""A small line chart as SVG, readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 52, 120, 16, 40
COLOURS = ("#3b7dd8", "#d8683b", "#3ba66b")
INK = "#808080"


def perplexity_chart(tokens: Sequence[float], lines: Mapping[str, Sequence[float]]) -> str:
    """Perplexity (logarithmic) against millions of tokens.

    Args:
        tokens: read so far, at each point.
        lines: the values at these points, by the line's name; all at least 1.
    """
    top = max(max(values) for values in lines.values())
    low = min(min(values) for values in lines.values())
    floor, ceiling = math.log(max(1.0, low / 1.1)), math.log(top * 1.1)
    last = max(tokens)

    def x(value: float) -> float:
        return LEFT + value / last * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (ceiling - math.log(value)) / (ceiling - floor) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">'
    ]
    for value in (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500):
        if floor <= math.log(value) <= ceiling:
            parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-opacity="0.3"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = share * last
        label = f"{value / 1e6:.2g}"
        parts.append(f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">millions of tokens</text>')
    for (name, values), colour, row in zip(lines.items(), COLOURS, range(len(lines)), strict=False):
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(tokens, values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label_y = TOP + 14 + 18 * row
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{label_y}" fill="{colour}">{name} {values[-1]:.2f}</text>')
    return "\n".join([*parts, "</svg>", ""])
