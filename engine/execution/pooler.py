"""From hidden states to the results of pooling requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.interface.outputs import Activation, PoolingMode
from engine.interface.pooling import Pooling
from engine.model import spec
from engine.model.heads import classes
from engine.model.sentence import InputWeights, SparseVectors, VocabularyWeights
from engine.scheduling.plan import Float64, Int32, PooledRow, PoolingRow, StepPlan

# Rows of logits at a time, so that masks do not need the logits of all of them at once.
_LOGITS = 128
_TINY = 1e-12  # as in torch.nn.functional.normalize


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParts:
    """The parts of a checkpoint that compute vectors, beside the model and its head."""

    # matrices after pooling, [N, modes * hidden] float32 to [N, features]; None if there are none
    project: Callable[[Tensor], Tensor] | None = None
    # how sparse vectors are computed; None: as in `VocabularyWeights`, if that is possible
    sparse: SparseVectors | None = None
    weigh: Callable[[Tensor], Tensor] | None = None  # the layer of `InputWeights`, [N, hidden] to [N, 1]
    # layers that compute token vectors, [N, hidden] to [N, features]; None: the hidden states are the vectors
    tokens: Callable[[Tensor], Tensor] | None = None


NO_PARTS = PoolingParts()


@dataclass(eq=False)
class Pooler:
    """Computes the pooled rows of a plan.

    Vectors are summed in float64, so that the number of parts in which an input is computed makes no difference.
    """

    head: spec.Head
    apply: Callable[[Tensor], Tensor]  # the model's head over hidden states [N, hidden], float32
    _: KW_ONLY
    parts: PoolingParts = NO_PARTS
    # what an Embedder's probe computes from hidden states, given each input's start and end
    gather: Callable[[Tensor, Sequence[tuple[int, int]]], Tensor] | None = None
    # for a model that finds entities: scores of spans for labels, given an input's hidden states and which tokens stand
    # for labels and words
    label_spans: Callable[[Tensor, Sequence[int], Sequence[int]], Tensor] | None = None
    activation: Activation = "none"

    def with_head(self, apply: Callable[[Tensor], Tensor]) -> Pooler:
        """The same pooler with another head of the model's kind."""
        return replace(self, apply=apply)

    def pool(self, hidden: Tensor, plan: StepPlan) -> tuple[PooledRow, ...]:
        """The results of the plan's pooling rows, in order. `hidden`: [Tp, hidden] states of the plan's tokens."""
        answers: dict[int, PooledRow] = {}
        starts = plan.query_start
        by_task: dict[str, list[PoolingRow]] = {}
        for row in plan.pooling:
            by_task.setdefault(row.pooling.task, []).append(row)
        for task, rows in by_task.items():
            spans = [(int(starts[row.row]), int(starts[row.row + 1])) for row in rows]
            match task:
                case "embed" if isinstance(self.head, spec.Embedder):
                    found = self._embed_by_head(hidden, plan, rows, spans)
                case "embed":
                    found = self._embed(hidden, rows, spans)
                case "token_embed":
                    found = self._embed_tokens(hidden, rows, spans)
                case "sparse_embed":
                    found = self._embed_sparsely(hidden, plan, rows, spans)
                case "classify":
                    found = self._classify(hidden, plan, rows, spans)
                case "token_classify" | "answer":
                    found = self._classify_tokens(hidden, rows, spans)
                case "entities":
                    found = self._find_entities(hidden, rows, spans)
                case _:
                    found = self._predict(hidden, rows, spans)
            answers.update((row.row, answer) for row, answer in zip(rows, found, strict=True))
        return tuple(answers[row.row] for row in plan.pooling)

    def _embed(self, hidden: Tensor, rows: Sequence[PoolingRow], spans: Sequence[tuple[int, int]]) -> list[PooledRow]:
        parts = [_parts(hidden[a:b], row) for row, (a, b) in zip(rows, spans, strict=True)]
        found = torch.cat(parts).cpu().numpy()  # at once: each transfer waits for the device
        ends = np.cumsum([len(part) for part in parts])
        sums = [_add(row, part) for row, part in zip(rows, np.split(found, ends[:-1]), strict=True)]
        lengths = [row.start + b - a for row, (a, b) in zip(rows, spans, strict=True)]
        finished = [i for i, row in enumerate(rows) if row.complete]
        answers = [PooledRow(values=total) for total in sums]
        for i in finished:
            pooling = rows[i].pooling
            divisors = np.array([_divisor(mode, lengths[i], pooling.skip_tokens) for mode in pooling.modes])
            vector = (sums[i] / divisors[:, None]).ravel().astype(np.float32)
            if self.parts.project is not None:
                vector = self.parts.project(torch.from_numpy(vector)[None].to(hidden.device))[0].cpu().numpy()
            answers[i] = _finished(vector, pooling)
        return answers

    def _embed_by_head(
        self, hidden: Tensor, plan: StepPlan, rows: Sequence[PoolingRow], spans: Sequence[tuple[int, int]]
    ) -> list[PooledRow]:
        """The vectors of a model whose head says which state it uses. Inputs are always whole."""
        assert isinstance(self.head, spec.Embedder)
        if self.gather is not None:
            states = self.gather(hidden[: plan.num_tokens], spans)
        else:
            pooling = self.head.pooling
            chosen = [_place(pooling, plan.token_ids[begin:end]) + begin for begin, end in spans]
            states = hidden[torch.tensor(chosen, device=hidden.device)]
        vectors = self.apply(states).cpu().numpy()
        return [_finished(vector, row.pooling) for row, vector in zip(rows, vectors, strict=True)]

    def _embed_tokens(
        self, hidden: Tensor, rows: Sequence[PoolingRow], spans: Sequence[tuple[int, int]]
    ) -> list[PooledRow]:
        """A vector for each token; each input is computed separately, so that none depends on the others. Inputs are
        always whole."""
        answers = []
        for row, (begin, end) in zip(rows, spans, strict=True):
            first, last = begin + row.pooling.skip_tokens, end
            vectors = hidden[first:last].float()
            if row.pooling.left_out:
                kept = np.setdiff1d(np.arange(first, last), np.add(row.pooling.left_out, begin))
                vectors = vectors[torch.from_numpy(kept - first).to(vectors.device)]
            if self.parts.tokens is not None:
                vectors = self.parts.tokens(vectors)
            if row.pooling.normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=-1, eps=_TINY)
            answers.append(PooledRow(values=vectors.cpu().numpy()))
        return answers

    def _embed_sparsely(
        self, hidden: Tensor, plan: StepPlan, rows: Sequence[PoolingRow], spans: Sequence[tuple[int, int]]
    ) -> list[PooledRow]:
        """The weights above 0 and their tokens, in token order. Inputs are always whole."""
        answers = []
        for begin, end in spans:
            match self.parts.sparse or VocabularyWeights():
                case InputWeights():
                    assert self.parts.weigh is not None
                    found = self.parts.weigh(hidden[begin:end].float()).relu().flatten().cpu().numpy()
                    tokens, places = np.unique(plan.token_ids[begin:end], return_inverse=True)
                    weights = np.zeros(len(tokens), dtype=np.float32)
                    np.maximum.at(weights, places, found)
                case VocabularyWeights() as part:
                    weights = self._over_vocabulary(hidden[begin:end], part).cpu().numpy()
                    tokens = np.arange(len(weights), dtype=np.int32)
            kept = np.flatnonzero(weights > 0)
            ids = tokens[kept].astype(np.int32)
            answers.append(PooledRow(values=weights[kept][None], ids=ids[None]))
        return answers

    def _over_vocabulary(self, states: Tensor, part: VocabularyWeights) -> Tensor:
        """The vector [vocabulary] of an input's hidden states [T, hidden]."""
        total: Tensor | None = None
        for some in torch.split(states, _LOGITS):
            weights = self.apply(some).relu()
            for _ in range(part.logarithms):
                weights = weights.log1p()
            new = weights.amax(0) if part.pooling == "max" else weights.sum(0)
            if total is not None:
                new = torch.maximum(total, new) if part.pooling == "max" else total + new
            total = new
        assert total is not None
        return total

    def _classify(
        self, hidden: Tensor, plan: StepPlan, rows: Sequence[PoolingRow], spans: Sequence[tuple[int, int]]
    ) -> list[PooledRow]:
        assert isinstance(self.head, spec.Classifier)
        states = [
            _state(self.head, hidden[a:b], plan.token_ids[a:b], row.before)
            for row, (a, b) in zip(rows, spans, strict=True)
        ]
        answers = {
            i: PooledRow(values=states[i][None].double().cpu().numpy())
            for i, row in enumerate(rows)
            if not row.complete
        }
        complete = [i for i, row in enumerate(rows) if row.complete]
        if complete:
            vectors = torch.stack([states[i] for i in complete])
            scores = self._scores(self.apply(vectors), [rows[i] for i in complete], [1] * len(complete))
            answers.update(zip(complete, scores, strict=True))
        return [answers[i] for i in range(len(rows))]

    def _classify_tokens(
        self, hidden: Tensor, rows: Sequence[PoolingRow], spans: Sequence[tuple[int, int]]
    ) -> list[PooledRow]:
        tokens = torch.cat([hidden[a:b] for a, b in spans])
        found = self._scores(self.apply(tokens), rows, [b - a for a, b in spans])
        return [
            new if row.before is None else PooledRow(values=np.concatenate((row.before, new.values), dtype=np.float64))
            for row, new in zip(rows, found, strict=True)
        ]

    def _find_entities(
        self, hidden: Tensor, rows: Sequence[PoolingRow], spans: Sequence[tuple[int, int]]
    ) -> list[PooledRow]:
        """The scores above the threshold; each input is computed separately, so that none depends on the others. Inputs
        are always whole."""
        assert self.label_spans is not None
        answers = []
        for row, (begin, end) in zip(rows, spans, strict=True):
            asked = row.pooling
            scores = self.label_spans(hidden[begin:end], asked.positions, asked.words).flatten()
            found = (~(scores <= asked.threshold)).nonzero().flatten()  # NaN is found, and reported
            values, ids = scores[found].cpu().numpy(), found.to(torch.int32).cpu().numpy()
            answers.append(PooledRow(values=values[None], ids=ids[None]))
        return answers

    def _scores(self, numbers: Tensor, rows: Sequence[PoolingRow], counts: Sequence[int]) -> list[PooledRow]:
        meant = classes(numbers, self.activation).cpu().numpy()
        plain = numbers.cpu().numpy()
        answers, begin = [], 0
        for row, count in zip(rows, counts, strict=True):
            values = meant if row.pooling.use_activation else plain
            answers.append(PooledRow(values=values[begin : begin + count]))
            begin += count
        return answers

    def _predict(self, hidden: Tensor, rows: Sequence[PoolingRow], spans: Sequence[tuple[int, int]]) -> list[PooledRow]:
        wanted = [a + position for row, (a, _) in zip(rows, spans, strict=True) for position in row.pooling.positions]
        chunks = torch.split(torch.tensor(wanted, device=hidden.device), _LOGITS)
        most = max(row.pooling.top_k for row in rows)
        parts = [self.apply(hidden[part]).softmax(-1).topk(most, dim=-1) for part in chunks]
        values = torch.cat([probabilities for probabilities, _ in parts]).cpu().numpy()
        ids = torch.cat([tokens for _, tokens in parts]).to(torch.int32).cpu().numpy()
        answers, begin = [], 0
        for row in rows:
            end, k = begin + len(row.pooling.positions), row.pooling.top_k
            answers.append(PooledRow(values=values[begin:end, :k], ids=ids[begin:end, :k]))
            begin = end
        return answers


def _finished(vector: NDArray[np.float32], pooling: Pooling) -> PooledRow:
    vector = vector[: pooling.dimensions]
    if pooling.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), _TINY)
    return PooledRow(values=vector[None])


def _place(pooling: object, tokens: Int32) -> int:
    """The index of the hidden state from which an input's vector is made."""
    match pooling:
        case "last":
            return len(tokens) - 1
        case spec.AtToken(id=None):
            return int(tokens.argmax())
        case spec.AtToken(id=wanted):
            return int((tokens == wanted).argmax())
        case _:
            return 0


def _state(head: spec.Classifier, states: Tensor, tokens: Int32, before: Float64 | None) -> Tensor:
    """The vector [hidden] that a head classifies, from an input's tokens so far; several states are concatenated.

    Args:
        states, tokens: [T, hidden] and [T] for its newest tokens.
        before: [1, hidden] the vector without them. Only "last" is computed in parts.
    """
    if head.pooling == "mean":
        return states.double().mean(0).to(states.dtype)
    if head.pooling == "cls":
        return states[0]
    if isinstance(head.pooling, spec.FirstStates):
        return states[: head.pooling.count].flatten()
    wanted = np.arange(len(tokens)) if head.padding_id is None else np.flatnonzero(tokens != head.padding_id)
    if len(wanted):
        return states[int(wanted[-1])]
    # All tokens are padding: like the reference, take the first token.
    return states[0] if before is None else torch.from_numpy(before[0]).to(states)


def _parts(states: Tensor, row: PoolingRow) -> Tensor:
    """The vectors [modes, hidden] in float64 of a row's hidden states [T, hidden]."""
    return torch.stack([_part(states, mode, row.start, row.pooling.skip_tokens) for mode in row.pooling.modes])


def _part(states: Tensor, mode: PoolingMode, start: int, skip: int) -> Tensor:
    """The sum [hidden] in float64 that tokens from position `start` on add to a vector."""
    if mode == "last":
        return states[-1].double()
    if mode == "cls":
        return states[skip - start if start <= skip < start + len(states) else 0].double()
    counted = states[max(skip - start, 0) :].double()
    if mode == "max":
        return counted.amax(0) if len(counted) else counted.new_full(counted.shape[1:], -np.inf)
    if mode == "weighted_mean":
        first = start + len(states) - len(counted)
        weights = torch.arange(first + 1, first + 1 + len(counted), dtype=torch.float64, device=states.device)
        return weights @ counted
    return counted.sum(0)


def _add(row: PoolingRow, parts: Float64) -> Float64:
    """The vectors [modes, hidden] after this part of an input, from those before it."""
    if row.before is None:
        return parts
    total = np.empty_like(parts)
    for i, mode in enumerate(row.pooling.modes):
        if mode == "cls":  # the first token that is not left out
            total[i] = parts[i] if row.pooling.skip_tokens >= row.start else row.before[i]
        elif mode == "last":
            total[i] = parts[i]
        elif mode == "max":
            total[i] = np.maximum(row.before[i], parts[i])
        else:
            total[i] = row.before[i] + parts[i]
    return total


def _divisor(mode: PoolingMode, length: int, skip: int) -> float:
    """The divisor of the sum over an input of `length` tokens, without the first `skip`."""
    match mode:
        case "mean":
            return length - skip
        case "mean_sqrt_len":
            return float(np.sqrt(length - skip))
        case "weighted_mean":
            return (length * (length + 1) - skip * (skip + 1)) / 2
        case _:
            return 1.0
