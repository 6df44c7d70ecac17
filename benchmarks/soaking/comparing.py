"""An answer under load against the answer to the same request alone: nothing lost, doubled or changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from soaking.answers import Choice

_CLOSE = 1e-4  # of a vector of length 1; pages that were found are summed up in another order than those computed anew


def differences(alone: Mapping[int, Choice], got: Mapping[int, Choice], *, cut: bool = False) -> list[str]:
    """The differences, one line for each choice.

    Args:
        cut: the answer was cut short: what came must be the beginning of what was to come.
    """
    found = []
    for index, choice in got.items():
        expected = alone.get(index)
        if expected is None:
            found.append(f"choice {index} has no counterpart")
            continue
        ended = choice.finish_reason is not None
        if problem := _unlike(expected.token_ids, choice.token_ids, cut and not ended):
            found.append(f"choice {index}: token {problem}")
        elif problem := _unlike(expected.text, choice.text, cut and not ended):
            found.append(f"choice {index}: character {problem}")
        elif (ended or not cut) and choice.finish_reason != expected.finish_reason:
            found.append(f"choice {index} ended with {choice.finish_reason}, alone with {expected.finish_reason}")
    return found


def vector_differences(alone: Any, got: Any) -> list[str]:
    """The same of answers to /v1/embeddings and /tokenize."""
    if "tokens" in alone:
        return [] if alone["tokens"] == got.get("tokens") else ["the tokens differ"]
    vectors = [[item["embedding"] for item in answer.get("data", ())] for answer in (alone, got)]
    if len(vectors[0]) != len(vectors[1]):
        return [f"{len(vectors[1])} vectors came, not {len(vectors[0])}"]
    return [
        f"vector {number} is off by {distance:.1e}"
        for number, (one, two) in enumerate(zip(*vectors, strict=True))
        if not (distance := math.dist(one, two)) < _CLOSE
    ]


def _unlike(expected: Sequence[Any], got: Sequence[Any], cut: bool) -> str:
    """The first difference between two sequences; empty if there is none."""
    if got == (expected[: len(got)] if cut else expected):
        return ""
    place = next((i for i, (one, two) in enumerate(zip(expected, got, strict=False)) if one != two), None)
    if place is None:
        place = min(len(expected), len(got))
    rest, wanted = got[place:], expected[place:]
    kind = "differs"
    if len(rest) > 1 and rest[1:] == wanted[: len(rest) - 1] and place and rest[0] == got[place - 1]:
        kind = "is doubled"
    elif wanted and rest == wanted[1 : 1 + len(rest)] and (rest or not cut):
        kind = "is lost"
    return f"{place} of {len(expected)} {kind}: {got[max(0, place - 2) : place + 3]!r}"
