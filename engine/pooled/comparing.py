"""Compares texts that were read separately: by one vector each, by token vectors, or by sparse vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.interface.outputs import EngineInfo, Pooled, Task
from engine.pooled.prompts import find_prompt
from engine.pooled.sides import PLAIN, Side, SideReading, read_side
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class WeighedToken:
    """A token of a sparse vector."""

    token_id: int
    weight: float


def sparse_of(pooled: Pooled, info: EngineInfo, tokenizer: Tokenizer | None) -> list[WeighedToken]:
    """The tokens in the answer to a request with the task "sparse_embed", in ascending order of ids. If they are an
    input's own tokens, special ones are left out (FlagEmbedding)."""
    special: set[int | None] = set()
    if info.sparse == "input" and tokenizer is not None:
        special = {*tokenizer.frame_ids, tokenizer.unk_token_id}
    entries = zip(pooled.token_ids()[0].tolist(), pooled.values()[0].tolist(), strict=True)
    return [WeighedToken(token, weight) for token, weight in entries if token not in special]


def cosine(a: Pooled | Sequence[float], b: Pooled | Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0 if one is zero."""
    one, other = _vector(a), _vector(b)
    norms = float(np.linalg.norm(one) * np.linalg.norm(other))
    return min(max(float(one @ other) / norms, -1.0), 1.0) if norms else 0.0


def _vector(of: Pooled | Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.asarray(of.values()[0] if isinstance(of, Pooled) else of, dtype=np.float64)


def sparse_product(one: Pooled, other: Pooled) -> float:
    """The sum, over common tokens, of the products of their weights in two sparse vectors."""
    _, here, there = np.intersect1d(one.token_ids()[0], other.token_ids()[0], assume_unique=True, return_indices=True)
    return float(one.values()[0][here].astype(np.float64) @ other.values()[0][there].astype(np.float64))


def max_sim(query: Pooled, document: Pooled) -> float:
    """The sum, over a query's tokens, of the largest product with a document's token (MaxSim, arXiv:2004.12832, 3.3).
    `query`, `document`: answers to requests with the task "token_embed"."""
    vectors = document.values()
    if not len(vectors):
        return 0.0
    return float((query.values() @ vectors.T).max(axis=1).sum(dtype=np.float64))


Comparison = Literal["cosine", "max_sim", "sparse_product"]


def comparison_of(info: EngineInfo) -> Comparison | None:
    """The comparison of texts by a model that reads them separately; None if it cannot compare them."""
    if "embed" in info.tasks:
        return "cosine"
    if info.token_vectors is not None:
        return "max_sim"
    return None if info.sparse is None else "sparse_product"


# The task for each compared text.
COMPARED: dict[Comparison, Task] = {"cosine": "embed", "max_sim": "token_embed", "sparse_product": "sparse_embed"}


def side_prompt(info: EngineInfo, side: Side) -> str:
    """The prompt for a compared text: for token vectors, the prompt of queries or documents if there is one, else the
    model's default prompt."""
    own = comparison_of(info) == "max_sim" and info.prompts.get(side)
    return find_prompt(info, side if own else None)


def compared_side(info: EngineInfo, tokenizer: Tokenizer | None, side: Side) -> SideReading:
    """The side whose rules apply to a compared text."""
    return read_side(info, tokenizer, side) if comparison_of(info) == "max_sim" else PLAIN


class Comparer:
    """Scores of pairs, for a model that reads the two texts separately (`comparison_of` must not be None)."""

    def __init__(self, info: EngineInfo):
        kind = comparison_of(info)
        assert kind is not None
        self._kind = kind
        self.task: Task = COMPARED[kind]

    def score(self, query: Pooled, document: Pooled) -> float:
        """The score of two answers."""
        match self._kind:
            case "cosine":
                return cosine(query, document)
            case "max_sim":
                return max_sim(query, document)
            case "sparse_product":
                return sparse_product(query, document)
