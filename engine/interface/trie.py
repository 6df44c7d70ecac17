"""Answers that are members of a set of sequences: the set as a trie in three arrays, and the constraint that follows
it.

A trie of a million titles has some millions of nodes. An object for each would take gigabytes and minutes; the arrays
take nine bytes per node, and are built level by level by sorting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.interface.sampling_table import MaskRow, Masks, mask_words

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

# The number of children from which on a node's mask is cached. Few nodes have that many, but most answers pass them.
WIDE = 512
_MOST_KEPT = 256  # masks of wide nodes, one bit per token of the vocabulary


@dataclass(frozen=True, slots=True)
class Trie:
    """Token sequences, merged where their beginnings are equal.

    Nodes are numbered level by level from the root, which is 0. The children of a node have successive numbers, in the
    order of their tokens; so do the children of successive nodes.
    """

    vocab_size: int
    tokens: Int32  # [nodes] the token that leads to a node; the root's has no meaning
    children: Int32  # [nodes + 1] the first child of each node; the last child precedes the next node's first
    ends: NDArray[np.bool_]  # [nodes] whether a sequence ends here
    num_sequences: int
    longest: int
    duplicates: Int64  # [2, count] indices of repeated sequences, and of those that they repeat
    _rows: dict[int, MaskRow] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, ids: Int32, starts: Int64, vocab_size: int) -> Trie:
        """The trie of some sequences.

        Args:
            ids: the tokens of all sequences, one after the other, each in [0, vocab_size).
            starts: [sequences + 1] where each begins, and the end. No sequence is empty.
        """
        lengths = np.diff(starts)
        assert len(lengths)
        assert lengths.min() > 0
        shift = max(int(vocab_size - 1).bit_length(), 1)
        order = np.arange(len(lengths))
        node = np.zeros(len(lengths), dtype=np.int64)  # of each sequence in that order, numbered within its level
        tokens, counts = [np.zeros(1, dtype=np.int32)], []
        ends, duplicates = [np.zeros(1, dtype=np.bool_)], []
        depth = 0
        while len(order):
            key = (node << shift) | ids[starts[order] + depth]
            by = np.argsort(key)
            key, order = key[by], order[by]
            is_new = np.ones(len(key), dtype=np.bool_)
            np.not_equal(key[1:], key[:-1], out=is_new[1:])
            node, new = np.cumsum(is_new) - 1, key[is_new]
            tokens.append((new & ((1 << shift) - 1)).astype(np.int32))
            counts.append(np.bincount(new >> shift, minlength=len(tokens[-2])))
            depth += 1
            over = lengths[order] == depth
            ended = np.zeros(len(new), dtype=np.bool_)
            ended[node[over]] = True
            ends.append(ended)
            duplicates.append(_repeated(order[over], node[over]))
            order, node = order[~over], node[~over]
        counts.append(np.zeros(len(tokens[-1]), dtype=np.int64))
        children = np.ones(sum(map(len, tokens)) + 1, dtype=np.int64)
        np.cumsum(np.concatenate(counts), out=children[1:])
        children[1:] += 1
        if children[-1] > np.iinfo(np.int32).max:
            raise OverflowError(f"a trie may have at most {np.iinfo(np.int32).max} nodes, got {children[-1]}")
        repeated = np.concatenate(duplicates, axis=1)
        return cls(
            vocab_size=vocab_size,
            tokens=np.concatenate(tokens),
            children=children.astype(np.int32),
            ends=np.concatenate(ends),
            num_sequences=len(lengths) - repeated.shape[1],
            longest=int(lengths.max()),
            duplicates=repeated,
        )

    @property
    def num_nodes(self) -> int:
        """The number of nodes, including the root."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self.tokens.nbytes + self.children.nbytes + self.ends.nbytes

    def used(self) -> NDArray[np.bool_]:
        """[vocab_size] the tokens that occur."""
        found = np.zeros(self.vocab_size, dtype=np.bool_)
        found[self.tokens[1:]] = True
        return found

    def fill(self, firsts: Sequence[int], lasts: Sequence[int], places: Sequence[int], masks: Masks) -> None:
        """Set the bits of the tokens of nodes [first, last), which are all children of one node, in these rows of
        `masks`, whose words are 0."""
        narrow: list[int] = []
        for number, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            if last - first < WIDE:
                narrow.append(number)
            else:
                masks[places[number]] = self._row(first, last)
        if narrow:
            begin = np.array([firsts[i] for i in narrow], dtype=np.int64)
            end = np.array([lasts[i] for i in narrow], dtype=np.int64)
            self._set(begin, end - begin, np.array([places[i] for i in narrow], dtype=np.int64), masks)

    def _row(self, first: int, last: int) -> MaskRow:
        row = self._rows.get(first)
        if row is None:
            if len(self._rows) >= _MOST_KEPT:
                self._rows.clear()
            row = np.zeros(mask_words(self.vocab_size), dtype=np.uint32)
            self._set(np.array([first]), np.array([last - first]), np.zeros(1, dtype=np.int64), row[None])
            self._rows[first] = row
        return row

    def _set(self, begin: Int64, counts: Int64, places: Int64, masks: Masks) -> None:
        """A word contains the bits of adjacent tokens, because those of a node are sorted."""
        skipped = begin - (np.cumsum(counts) - counts)
        tokens = self.tokens[np.arange(counts.sum()) + np.repeat(skipped, counts)]
        rows, words = np.repeat(places, counts), tokens >> 5
        bits = np.left_shift(np.uint32(1), (tokens & 31).astype(np.uint32))
        is_first = np.ones(len(tokens), dtype=np.bool_)
        np.not_equal(words[1:], words[:-1], out=is_first[1:])
        is_first[1:] |= rows[1:] != rows[:-1]
        (starts,) = np.nonzero(is_first)
        masks[rows[starts], words[starts]] = np.bitwise_or.reduceat(bits, starts)


def _repeated(sequences: Int64, nodes: Int64) -> Int64:
    """[2, count] sequences that end at the same node as a sequence with a lower index, and the indices of these; nodes
    ascend."""
    order = np.lexsort((sequences, nodes))
    sequences, nodes = sequences[order], nodes[order]
    is_first = np.ones(len(nodes), dtype=np.bool_)
    np.not_equal(nodes[1:], nodes[:-1], out=is_first[1:])
    originals = sequences[is_first][np.cumsum(is_first) - 1]
    return np.stack([sequences[~is_first], originals[~is_first]])


class Member:
    """A constraint: the answer is one of the sequences of a trie.

    Args:
        trie: the sequences, without the tokens that end answers.
        end_ids: tokens that may end an answer. The trie contains none of them.
    """

    __slots__ = ("_first", "_last", "_may_end", "end_ids", "trie")

    def __init__(self, trie: Trie, end_ids: Sequence[int]):
        self.trie, self.end_ids = trie, tuple(sorted(end_ids))
        self._enter(0)

    def _enter(self, node: int) -> None:
        children = self.trie.children
        self._first, self._last = int(children[node]), int(children[node + 1])
        self._may_end = bool(self.trie.ends[node])

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return self.trie.vocab_size

    @property
    def is_complete(self) -> bool:
        """Whether no sequence continues from here."""
        return self._first == self._last

    def accept(self, token: int) -> None:
        """Continue the answer with a token. Raises ValueError if no sequence continues with it."""
        node = self._first + int(self.trie.tokens[self._first : self._last].searchsorted(token))
        if node == self._last or self.trie.tokens[node] != token:
            raise ValueError(f"token {token} is not allowed next")
        self._enter(node)

    def fill(self, mask_row: MaskRow) -> None:
        """Write which tokens may come next."""
        self.fill_together([self], [0], mask_row[None])

    @staticmethod
    def fill_together(constraints: Sequence[Member], places: Sequence[int], masks: Masks) -> None:
        """`fill` for several constraints, each into its row of `masks`."""
        tries = {id(constraint.trie): constraint.trie for constraint in constraints}
        for trie in tries.values():
            chosen = [i for i, constraint in enumerate(constraints) if constraint.trie is trie]
            firsts = [constraints[i]._first for i in chosen]
            lasts = [constraints[i]._last for i in chosen]
            trie.fill(firsts, lasts, [places[i] for i in chosen], masks)
        for place, constraint in zip(places, constraints, strict=True):
            if constraint._may_end:
                for token in constraint.end_ids:
                    masks[place, token // 32] |= np.uint32(1 << token % 32)

    def fork(self) -> Member:
        """A copy of the state, which continues independently."""
        other = Member.__new__(Member)
        other.trie, other.end_ids = self.trie, self.end_ids
        other._first, other._last, other._may_end = self._first, self._last, self._may_end
        return other

    def forced(self) -> list[int]:
        """The tokens that must follow, as long as there is no choice: the rest of the answer if only one sequence is
        left."""
        tokens, children, ends = self.trie.tokens, self.trie.children, self.trie.ends
        first, last, may_end, found = self._first, self._last, self._may_end, []
        while last - first == 1 and not may_end:
            found.append(int(tokens[first]))
            may_end, first, last = bool(ends[first]), int(children[first]), int(children[first + 1])
        return found
