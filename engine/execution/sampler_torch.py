"""Logits to candidates in torch: for GPUs, and without the native library (`sampler.py` describes the result)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.backends.torch import sampling_whole
from engine.interface.sampling_table import GREEDY_TEMPERATURE, EditList, Kind, Masks, Table, by_torch
from engine.scheduling.plan import Float32, Int32, SamplingBatch, StepResult, TokenScores

_NEGATIVE_INFINITY = float("-inf")
# The number of most probable tokens among which a top-p limit is searched before all are sorted.
_FEW = 256


def sample(logits: Tensor, batch: SamplingBatch) -> StepResult:
    """Candidates for each row of float32 logits [S, vocabulary]."""
    vocabulary = logits.shape[1]
    # Not logsumexp: torch divides a single row's sum among threads, so its last bits would depend on the batch.
    own = logits.log_softmax(dim=-1)
    table = batch.table
    beams = np.flatnonzero(table["beam_width"])
    processed = _process(logits, own, batch, beams)
    apart = by_torch(table)
    drawing = np.flatnonzero((table["beam_width"] == 0) & (table["temperature"] >= GREEDY_TEMPERATURE) & ~apart)
    width = int(max(table["num_draws"].max(), min(int(table["beam_width"].max()), vocabulary), 1))
    scores = torch.full((len(logits), width), _NEGATIVE_INFINITY, dtype=torch.float32, device=logits.device)
    if len(beams) < len(logits):
        tokens = processed.argmax(dim=-1, keepdim=True).repeat(1, width)
    else:
        tokens = torch.zeros_like(scores, dtype=torch.int64)
    if len(beams):
        index = _index(beams, logits)
        best, values = _top(_rows(processed, index), table["beam_width"][beams])
        columns = torch.arange(best.shape[1], device=logits.device)
        tokens[index[:, None], columns] = best
        scores[index[:, None], columns] = values
    if len(drawing):
        index = _index(drawing, logits)
        drawn = _draw(processed[index], batch, drawing)
        tokens[index[:, None], torch.arange(drawn.shape[1], device=logits.device)] = drawn
    for row in np.flatnonzero(apart).tolist():
        drawn = sampling_whole.draw(processed[row], table[row : row + 1], batch.uniforms[row])
        tokens[row, : len(drawn)] = drawn
    # NaN tells the scheduler that a row failed, and so does a row in which every token is banned.
    logprobs = own.gather(1, tokens).masked_fill(processed.gather(1, tokens) == _NEGATIVE_INFINITY, float("nan"))
    ranks, top_ids, top_logprobs = _report(logits, own, tokens, batch)
    return StepResult(
        tokens=_numpy(tokens).astype(np.int32),
        scores=_numpy(scores),
        logprobs=_numpy(logprobs),
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        watched=None if batch.watched is None else _numpy(own.gather(1, _index(batch.watched, logits))),
    )


def score(logits: Tensor, targets: Int32, counts: Int32, width: int) -> TokenScores:
    """Log-probability, rank and best alternatives [P, width] of each target token, of logits [P, vocabulary]."""
    own = logits.log_softmax(dim=-1)
    column = _index(targets, logits)[:, None]
    rank = (logits > logits.gather(1, column)).sum(dim=-1) + 1
    top, _ = _top(logits, counts, width)
    return TokenScores(
        logprobs=_numpy(own.gather(1, column)[:, 0]),
        ranks=_numpy(rank).astype(np.int32),
        top_ids=_numpy(top).astype(np.int32),
        top_logprobs=_numpy(own.gather(1, top)),
    )


def _process(logits: Tensor, own: Tensor, batch: SamplingBatch, beams: np.ndarray) -> Tensor:
    """Logits (beams: log-probabilities) after penalties, bans and forced tokens; the input itself if nothing
    changes."""
    renormalized = beams[batch.table["renormalize"][beams] > 0]
    # Tokens of an encoder with its own vocabulary may be outside the decoder's.
    edits = batch.edits[batch.edits["token"] < logits.shape[1]]
    alike = len(beams) in (0, len(logits))
    start = own if alike and len(beams) else logits
    if alike and not (len(batch.edits) or len(batch.masked) or len(renormalized)):
        return start
    processed = start.clone()
    if not alike:
        index = _index(beams, logits)
        processed[index] = own[index]
    for kind in Kind:
        if kind is Kind.FORCE and len(batch.masked):
            _mask(processed, batch.masked, batch.masks)
        chosen = edits[edits["kind"] == kind]
        if not len(chosen):
            continue
        where = (_index(chosen["row"], logits), _index(chosen["token"], logits))
        value = torch.from_numpy(np.ascontiguousarray(chosen["value"])).to(logits.device)
        if kind is Kind.BIAS:
            processed.index_put_(where, value, accumulate=True)
        elif kind is Kind.SOURCE:
            score = processed[where]
            processed[where] = torch.where(score < 0, score * value, score / value)
        elif kind is Kind.HISTORY:
            _penalize(processed, chosen, batch.table)
        elif kind is Kind.DRY:
            processed[where] -= value
        elif kind is Kind.BAN:
            processed[where] = _NEGATIVE_INFINITY
        else:
            processed[where[0]] = _NEGATIVE_INFINITY
            processed[where] = 0.0
    if len(renormalized):
        index = _index(renormalized, logits)
        processed[index] = processed[index].log_softmax(dim=-1)
    return processed


def _mask(processed: Tensor, rows: Int32, masks: Masks) -> None:
    """Make tokens impossible whose bits in masks [M, words] are 0."""
    words = torch.from_numpy(masks.view(np.int32)).to(processed.device)
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=processed.device) & 1
    index = _index(rows, processed)
    allowed = bits.flatten(1)[:, : processed.shape[1]].bool()
    processed[index] = processed[index].masked_fill(~allowed, _NEGATIVE_INFINITY)


def _penalize(processed: Tensor, history: EditList, table: Table) -> None:
    """Repetition, frequency and presence penalties on the tokens that occur, each token once."""
    vocabulary = processed.shape[1]
    key = history["row"].astype(np.int64) * vocabulary + history["token"]
    unique, inverse = np.unique(key, return_inverse=True)
    count = np.bincount(inverse, weights=history["value"], minlength=len(unique)).astype(np.float32)
    row, token = unique // vocabulary, unique % vocabulary
    where = (_index(row, processed), _index(token, processed))

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(processed.device)

    score = processed[where]
    repetition = column(table["repetition_penalty"][row])
    score = torch.where(score < 0, score * repetition, score / repetition)
    score = score - column(table["frequency_penalty"][row] * count + table["presence_penalty"][row] * (count > 0))
    processed[where] = score


def _draw(logits: Tensor, batch: SamplingBatch, rows: np.ndarray) -> Tensor:
    """Tokens [N, draws] by inverse CDF in vocabulary order, summed in float64."""
    device = logits.device
    table = batch.table[rows]
    temperature = torch.from_numpy(np.ascontiguousarray(table["temperature"])).to(device)
    scaled = logits / temperature[:, None]
    scaled = _filter(scaled, table)
    weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp()
    cumulative = sampling_whole.keep_likely(weights, table).double().cumsum(dim=-1)
    targets = torch.from_numpy(batch.uniforms[rows]).to(device) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, targets, right=True)
    # Rounding may put a target at the very end; then the last possible token is drawn.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)
    return torch.minimum(drawn, last).clamp_(max=logits.shape[1] - 1)


def _filter(scaled: Tensor, table: Table) -> Tensor:
    """Applies top-k, then top-p to the remaining tokens; -inf elsewhere."""
    vocabulary = scaled.shape[1]
    top_k = np.where(table["top_k"] > 0, np.minimum(table["top_k"], vocabulary), vocabulary)
    top_p = table["top_p"]
    limited = np.flatnonzero(top_k < vocabulary)
    unlimited = np.flatnonzero((top_k == vocabulary) & (top_p < 1.0))
    if not len(limited) and not len(unlimited):
        return scaled
    smallest = scaled.new_full((len(table), 1), _NEGATIVE_INFINITY)
    if len(limited):
        index = _index(limited, scaled)
        some = _rows(scaled, index).topk(int(top_k[limited].max()), dim=-1).values
        smallest[index], _ = _smallest(some, None, top_k[limited], top_p[limited])
    for few in (_FEW, vocabulary):
        if len(unlimited):
            index = _index(unlimited, scaled)
            group = _rows(scaled, index)
            if few < vocabulary:
                some = group.topk(few, dim=-1).values
            else:
                some = group.sort(dim=-1, descending=True).values
            # Not sum, which torch divides among threads.
            whole = (group - some[:, :1]).exp().double().cumsum(dim=-1)[:, -1:]
            smallest[index], found = _smallest(some, whole, top_k[unlimited], top_p[unlimited])
            if few < vocabulary:
                unlimited = unlimited[~_numpy(found)]
    return scaled.masked_fill(scaled < smallest, _NEGATIVE_INFINITY)


def _smallest(best: Tensor, whole: Tensor | None, top_k: np.ndarray, top_p: np.ndarray) -> tuple[Tensor, Tensor]:
    """The smallest values [N, 1] that filters keep among a row's best [N, B], and whether they are among them [N].
    `whole`: [N, 1] the weight of all tokens; None for the weight of the best `top_k`."""
    device, width = best.device, best.shape[1]
    k = torch.from_numpy(np.minimum(top_k, width).astype(np.int64)).to(device)[:, None]
    smallest = best.gather(1, k - 1)  # ties with the k-th stay, as in transformers
    if not (top_p < 1.0).any():
        return smallest, torch.ones(len(best), dtype=torch.bool, device=device)
    p = torch.from_numpy(top_p.astype(np.float64)).to(device)[:, None]
    rank = torch.arange(width, device=device)
    weights = (best - best[:, :1]).exp().double().masked_fill(rank >= k, 0.0)
    cumulative = weights.cumsum(dim=-1)
    goal = p * (cumulative[:, -1:] if whole is None else whole)
    keep = (cumulative - weights < goal) | (p >= 1.0)
    keep[:, 0] = True
    nucleus = best.gather(1, (keep & (rank < k)).sum(dim=-1, keepdim=True) - 1)
    return torch.maximum(smallest, nucleus), cumulative[:, -1] >= goal[:, 0]


def _report(logits: Tensor, own: Tensor, tokens: Tensor, batch: SamplingBatch) -> tuple[Int32, Int32, Float32]:
    """Ranks [S, C] and most probable tokens [S, L] for the rows that request them."""
    reports = batch.table["num_logprobs"]
    rows = np.flatnonzero(reports >= 0)
    number = min(max(int(reports.max()), 0), logits.shape[1])
    ranks = np.zeros(tokens.shape, dtype=np.int32)
    top_ids = np.zeros((len(logits), number), dtype=np.int32)
    top_logprobs = np.zeros((len(logits), number), dtype=np.float32)
    if len(rows):
        index = _index(rows, logits)
        raw, chosen = logits[index], logits.gather(1, tokens)[index]
        for column in range(tokens.shape[1]):  # columns, not rows: there are few draws or candidates
            ranks[rows, column] = _numpy((raw > chosen[:, column : column + 1]).sum(dim=-1) + 1)
        top, _ = _top(raw, reports[rows])
        top_ids[rows] = _numpy(top)
        top_logprobs[rows] = _numpy(own[index].gather(1, top))
    return ranks, top_ids, top_logprobs


def _top(values: Tensor, counts: Int32, width: int = 0) -> tuple[Tensor, Tensor]:
    """Each row's `counts` largest values: their columns and values [N, largest count or width].

    One call per distinct count: the order of equal values depends on how many are requested, and must not depend on
    other rows.
    """
    vocabulary = values.shape[1]
    width = min(max(width, int(counts.max())), vocabulary)
    columns = torch.zeros(len(values), width, dtype=torch.int64, device=values.device)
    best = torch.full((len(values), width), _NEGATIVE_INFINITY, dtype=values.dtype, device=values.device)
    for count in np.unique(counts):
        rows = _index(np.flatnonzero(counts == count), values)
        top = _rows(values, rows).topk(min(int(count), vocabulary), dim=-1)
        columns[rows, : top.indices.shape[1]] = top.indices
        best[rows, : top.values.shape[1]] = top.values
    return columns, best


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """Some rows in ascending order; no copy if these are all rows."""
    return values if len(index) == len(values) else values[index]


def _index(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(like.device)


def _numpy(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()
