"""The trie of sequences in arrays, compared with one of dictionaries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.interface import trie as module
from engine.interface.constraints import fill_masks
from engine.interface.sampling_table import mask_words
from engine.interface.trie import Member, Trie

END = "end"


def made(titles: Sequence[Sequence[int]], vocab_size: int) -> Trie:
    starts = np.cumsum([0, *map(len, titles)])
    ids = np.array([token for title in titles for token in title], dtype=np.int32)
    return Trie.of(ids, starts, vocab_size)


def naive(titles: Sequence[Sequence[int]]) -> dict[Any, Any]:
    root: dict[Any, Any] = {}
    for title in titles:
        node = root
        for token in title:
            node = node.setdefault(token, {})
        node[END] = {}
    return root


def tokens_of(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def filled(states: Sequence[Member], vocab_size: int) -> list[set[int]]:
    """What each allows, asked together, in rows of a larger matrix; each alone says the same."""
    masks = np.zeros((2 * len(states) + 1, mask_words(vocab_size)), dtype=np.uint32)
    places = [2 * number + 1 for number in range(len(states))][::-1]
    fill_masks(states, places, masks)
    found = [tokens_of(masks[place]) for place in places]
    assert not masks[::2].any()
    for state, tokens in zip(states, found, strict=True):
        alone = np.zeros(mask_words(vocab_size), dtype=np.uint32)
        state.fill(alone)
        assert tokens_of(alone) == tokens
    return found


def check(titles: Sequence[Sequence[int]], vocab_size: int, ends: Sequence[int]) -> None:
    """Every node of the one is the same node of the other."""
    trie, root = made(titles, vocab_size), naive(titles)
    different = {tuple(title) for title in titles}
    assert trie.num_sequences == len(different)
    assert trie.longest == max(map(len, titles))
    assert trie.num_nodes == 1 + len({title[:end] for title in different for end in range(1, len(title) + 1)})
    assert set(np.flatnonzero(trie.used()).tolist()) == {token for title in titles for token in title}
    first: dict[tuple[int, ...], int] = {}
    repeated = []
    for number, title in enumerate(map(tuple, titles)):
        if title in first:
            repeated.append((number, first[title]))
        first.setdefault(title, number)
    assert sorted(map(tuple, trie.duplicates.T.tolist())) == repeated
    level = [(Member(trie, ends), root)]
    while level:
        for (_, node), tokens in zip(level, filled([state for state, _ in level], vocab_size), strict=True):
            assert tokens == (node.keys() - {END}) | (set(ends) if END in node else set())
        following = []
        for state, node in level:
            assert state.is_complete == (node.keys() == {END})
            assert state.forced() == forced(node)
            for token in range(vocab_size):
                if token in node:
                    child = state.fork()
                    child.accept(token)
                    following.append((child, node[token]))
                else:
                    with pytest.raises(ValueError, match=f"token {token} is not allowed next"):
                        state.accept(token)
        level = following


def forced(node: dict[Any, Any]) -> list[int]:
    found = []
    while len(node) == 1 and END not in node:
        (token,) = node
        found.append(token)
        node = node[token]
    return found


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=40))
@example([[0]])
@example([[5, 5, 5], [5], [5, 5, 5], [5]])
@example([[0, 1], [0, 1, 2], [1], [0]])
def test_every_node_is_that_of_a_naive_trie(titles: list[list[int]]) -> None:
    """Titles that begin others, that repeat others; a word of a mask that several tokens share."""
    check(titles, 8, (6, 7))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 97])
def test_vocabularies_around_a_word_of_a_mask(vocab_size: int) -> None:
    numbers = random.Random(vocab_size)
    most = max(vocab_size - 1, 1)  # the last one ends
    titles = [[numbers.randrange(most) for _ in range(numbers.randint(1, 4))] for _ in range(60)]
    check(titles, vocab_size, (vocab_size - 1,) if vocab_size > 1 else ())


def test_masks_of_wide_nodes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They say the same; no more of them are kept than memory is meant for."""
    numbers = random.Random(1)
    titles = [[numbers.randrange(40), numbers.randrange(300), numbers.randrange(300)] for _ in range(4000)]
    monkeypatch.setattr(module, "WIDE", 30)
    monkeypatch.setattr(module, "_MOST_KEPT", 7)
    trie, root = made(titles, 301), naive(titles)
    seen = 0
    for _ in range(2):
        states, nodes = [Member(trie, (300,))], [root]
        for token in root:
            states.append(Member(trie, (300,)))
            states[-1].accept(token)
            nodes.append(root[token])
        masks = np.zeros((len(states), mask_words(301)), dtype=np.uint32)
        fill_masks(states, range(len(states)), masks)
        assert [tokens_of(mask) for mask in masks] == [set(node) for node in nodes]
        masks[:] = 0  # what is kept is not what was filled
        seen = max(seen, len(trie._rows))
    assert 0 < seen <= 7


def test_states_of_several_tries_are_filled_together() -> None:
    one, other = made([[1, 2], [3]], 40), made([[33], [1], [1, 5]], 40)
    states = [Member(trie, (0,)) for trie in (one, other, one)]
    states[1].accept(1)
    assert filled(states, 40) == [{1, 3}, {0, 5}, {1, 3}]


def test_a_fork_goes_its_own_way() -> None:
    trie = made([[1, 2], [1, 3], [4]], 8)
    state = Member(trie, (0,))
    state.accept(1)
    fork = state.fork()
    fork.accept(2)
    assert (state.is_complete, fork.is_complete) == (False, True)
    assert filled([state], 8) == [{2, 3}]


@pytest.mark.slow
def test_one_long_title_beside_many_short_ones_takes_no_memory_for_those() -> None:
    """No matrix of all titles by the longest one's length is ever made."""
    titles = [[number % 97] for number in range(20_000)] + [[5] * 50_000]
    trie = made(titles, 100)
    assert trie.num_nodes == 1 + 97 + 49_999
    assert trie.nbytes < 10 * trie.num_nodes
    assert Member(trie, (99,)).is_complete is False
