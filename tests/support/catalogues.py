"""Catalogues for tests: files of titles, random titles that have much in common, and the reference's own trie."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

Title = tuple[int, ...]


def write(path: Path, titles: Iterable[Any]) -> str:
    """A file of titles: texts and objects as they are, sequences as ids."""
    lines = [{"ids": list(title)} if isinstance(title, (list, tuple)) else title for title in titles]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def random_titles(
    seed: int, count: int, vocabulary: int, *, without: Iterable[int] = (), longest: int = 6
) -> list[Title]:
    """Different titles of which many begin alike, and some begin others."""
    numbers, found = random.Random(seed), dict[Title, None]()
    tokens = [token for token in range(vocabulary) if token not in set(without)]
    branches = [numbers.sample(tokens, min(len(tokens), 3 + 4 * depth)) for depth in range(longest)]
    branches[0] = tokens
    while len(found) < count:
        found[tuple(numbers.choice(branches[depth]) for depth in range(numbers.randint(1, longest)))] = None
        if numbers.random() < 0.3:  # the beginning of one that is there
            title = numbers.choice(list(found)[-20:])
            found[title[: numbers.randint(1, len(title))]] = None
    return list(found)[:count]


def reference_rule(
    titles: Iterable[Sequence[int]], begin: int, ends: Sequence[int]
) -> Callable[[int, torch.Tensor], list[int]]:
    """`prefix_allowed_tokens_fn` of transformers' `generate`, by a trie of dictionaries as GENRE has it.

    Args:
        begin: tokens before the answer.
        ends: tokens that end it.
    """
    root: dict[int, Any] = {}
    for title in titles:
        node = root
        for token in title:
            node = node.setdefault(token, {})
        for end in ends:
            node[end] = {}

    def allowed(_: int, tokens: torch.Tensor) -> list[int]:
        node = root
        for token in tokens[begin:].tolist():
            if token not in node:
                return list(ends)  # a beam that only fills a place
            node = node[token]
        return list(node) or list(ends)

    return allowed
