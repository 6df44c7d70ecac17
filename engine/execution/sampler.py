"""Logits to candidates, for all rows of a step together.

Order of operations as in `transformers`: logit_bias, the encoder's and the decoder's repetition penalty, OpenAI's
penalties, bans, forced tokens; then for rows that sample temperature, top-k, top-p, min-p. Beam rows start from
log-probabilities instead of logits, as there.

On a CPU the native library does the work: it walks over the logits once, and looks for large ones where that walk has
seen them. What a request changes of logits is written into them and taken back. `sampler_torch.py` serves other
devices, and machines without the library. Both choose the same tokens but where rounding decides: exponentials may
differ in their last bits, so a uniform number right between two tokens, or a sum right at top_p, may fall on either
side. Of equal logits the lowest token comes first here, and where log-probabilities are equal and logits are not, the
larger logit; `torch.topk` takes any.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import native
from engine.execution import sampler_torch
from engine.native.sampling import Draws, Edits, Listed, LogitRows
from engine.scheduling.plan import Float32, Int32, PromptLogprobRows, SamplingBatch, StepResult, TokenScores

# Below this a softmax is one-hot in float32 for any two logits that differ.
GREEDY_TEMPERATURE = 1e-5
# Rows scored at a time, so that prompt log-probabilities do not need all logits at once.
PROMPT_ROWS = 128


def sample(logits: Tensor, batch: SamplingBatch) -> StepResult:
    """Candidates for each row of float32 logits [S, vocabulary]."""
    if not _native(logits):
        return sampler_torch.sample(logits, batch)
    rows = LogitRows(logits)
    beams = np.flatnonzero(batch.beam_width).astype(np.int32)
    width = max(int(batch.num_draws.max()), 1)
    if len(beams):
        width = max(width, min(int(batch.beam_width.max()), rows.vocabulary))
    tokens = rows.place.repeat(width).reshape(-1, width)
    scores = np.full(tokens.shape, -np.inf, dtype=np.float32)
    asking = np.flatnonzero(batch.num_logprobs >= 0).astype(np.int32)
    top_ids, top_logprobs = _most_probable(rows, asking, batch)
    impossible = _choose(rows, batch, beams, tokens, scores)
    logprobs = rows.logprobs(tokens)
    if impossible is not None:
        # NaN tells the scheduler that a row failed; one in which every token is banned has, too.
        logprobs[impossible] = np.nan
    ranks = np.zeros(tokens.shape, dtype=np.int32)
    if len(asking):
        ranks[asking] = rows.ranks(asking, tokens[asking])
    return StepResult(
        tokens=tokens, scores=scores, logprobs=logprobs, ranks=ranks, top_ids=top_ids, top_logprobs=top_logprobs
    )


def score_prompt(hidden_to_logits: object, hidden: Tensor, rows: PromptLogprobRows) -> TokenScores:
    """Log-probability, rank and best alternatives of each target token.

    Args:
        hidden_to_logits: maps hidden states [N, hidden] to float32 logits [N, vocabulary].
        hidden: [P, hidden].
    """
    assert callable(hidden_to_logits)
    most = int(rows.num_logprobs.max())
    parts: list[TokenScores] = []
    for start in range(0, len(rows.rows), PROMPT_ROWS):
        part = slice(start, start + PROMPT_ROWS)
        logits = hidden_to_logits(hidden[part])
        score = _score if _native(logits) else sampler_torch.score
        parts.append(score(logits, rows.targets[part], rows.num_logprobs[part], min(most, logits.shape[1])))
    return TokenScores(
        logprobs=np.concatenate([part.logprobs for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )


def _native(logits: Tensor) -> bool:
    return logits.is_cpu and logits.dtype == torch.float32 and native.available()


def _score(logits: Tensor, targets: Int32, counts: Int32, width: int) -> TokenScores:
    rows = LogitRows(logits)
    everyone = np.arange(len(rows), dtype=np.int32)
    column = np.ascontiguousarray(targets[:, None])
    top_ids, top_logprobs = rows.best(everyone, counts, width)
    return TokenScores(
        logprobs=rows.logprobs(column)[:, 0],
        ranks=rows.ranks(everyone, column)[:, 0],
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _most_probable(rows: LogitRows, asking: Int32, batch: SamplingBatch) -> tuple[Int32, Float32]:
    """The most probable tokens [S, L] of rows that ask for them."""
    number = min(max(int(batch.num_logprobs.max()), 0), rows.vocabulary)
    top_ids = np.zeros((len(rows), number), dtype=np.int32)
    top_logprobs = np.zeros((len(rows), number), dtype=np.float32)
    if number:
        top_ids[asking], top_logprobs[asking] = rows.best(asking, batch.num_logprobs[asking], number)
    return top_ids, top_logprobs


def _choose(
    rows: LogitRows, batch: SamplingBatch, beams: Int32, tokens: Int32, scores: Float32
) -> NDArray[np.bool_] | None:
    """Writes what rows choose: tokens [S, C], which hold the likeliest one, and scores of beams. Which of them are
    impossible [S, C], None for none."""
    searching = batch.beam_width > 0
    greedy = ~searching & (batch.temperature < GREEDY_TEMPERATURE)
    drawing = np.flatnonzero(~(searching | greedy)).astype(np.int32)
    edits = _edits(batch, searching)
    renormalized = np.flatnonzero(batch.renormalize & searching)
    if not edits and not len(batch.force_row) and not len(renormalized):
        _search(rows, beams, batch, beams, tokens, scores)
        _draw(rows, drawing, batch, drawing, tokens)
        return searching[:, None] & (scores == -np.inf) if len(beams) else None
    # Rows that change as a whole are rare, and get memory of their own.
    whole = np.union1d(batch.force_row, renormalized).astype(np.int32)
    beams, drawing = np.setdiff1d(beams, whole), np.setdiff1d(drawing, whole)
    with rows.edited(edits) if edits else contextlib.nullcontext():
        _search(rows, beams, batch, beams, tokens, scores)
        _draw(rows, drawing, batch, drawing, tokens)
        if edits:
            likeliest = np.setdiff1d(np.flatnonzero(greedy).astype(np.int32), whole)
            tokens[likeliest] = rows.best(likeliest, np.ones_like(likeliest), 1)[0]
        chosen = rows.values[np.arange(len(rows))[:, None], tokens]
        if len(whole):
            rewritten = _rewritten(rows, batch, whole)
            _choose_of_rewritten(rewritten, batch, whole, tokens, scores)
            chosen[whole] = rewritten.values[np.arange(len(whole))[:, None], tokens[whole]]
    found: NDArray[np.bool_] = np.where(searching[:, None], scores, chosen) == -np.inf
    return found


def _edits(batch: SamplingBatch, apart: NDArray[np.bool_]) -> Edits | None:
    lists = (batch.bias_row, batch.source_row, batch.history_row, batch.ban_row)
    if not any(map(len, lists)):
        return None
    return Edits(
        bias=Listed(rows=batch.bias_row, tokens=batch.bias_token),
        bias_value=batch.bias_value,
        source=Listed(rows=batch.source_row, tokens=batch.source_token),
        source_reward=batch.source_reward,
        history=Listed(rows=batch.history_row, tokens=batch.history_token),
        history_is_output=batch.history_is_output,
        repetition=batch.repetition_penalty,
        frequency=batch.frequency_penalty,
        presence=batch.presence_penalty,
        ban=Listed(rows=batch.ban_row, tokens=batch.ban_token),
        apart=apart,
    )


def _search(rows: LogitRows, at: Int32, batch: SamplingBatch, of: Int32, tokens: Int32, scores: Float32) -> None:
    """The candidates of beams: the rows `at` are those `of` the batch."""
    if len(of):
        wanted = batch.beam_width[of]
        width = min(int(wanted.max()), rows.vocabulary)
        tokens[of, :width], scores[of, :width] = rows.best(at, wanted, width)


def _draw(rows: LogitRows, at: Int32, batch: SamplingBatch, of: Int32, tokens: Int32) -> None:
    if len(of):
        draws = Draws(
            temperature=batch.temperature[of],
            top_k=batch.top_k[of],
            top_p=batch.top_p[of],
            min_p=batch.min_p[of],
            counts=batch.num_draws[of],
            uniforms=batch.uniforms[of],
        )
        tokens[of, : draws.uniforms.shape[1]] = rows.draw(at, draws)[0]


def _rewritten(rows: LogitRows, batch: SamplingBatch, whole: Int32) -> LogitRows:
    """Rows with forced tokens, and beams whose scores are made log-probabilities again."""
    made = torch.empty((len(whole), rows.vocabulary), dtype=torch.float32)
    values: Float32 = made.numpy()
    forced = np.isin(whole, batch.force_row)
    values[forced] = -np.inf
    values[np.searchsorted(whole, batch.force_row), batch.force_token] = 0.0
    for place in np.flatnonzero(~forced).tolist():
        row = int(whole[place])
        np.subtract(rows.values[row], rows.peak[row], out=values[place])
        values[place] -= rows.log_sum[row]
        rows.put(row, values[place])
    rewritten = LogitRows(made)
    # What is not made a log-probability again is its own.
    own = ~(batch.renormalize[whole] & (batch.beam_width[whole] > 0))
    rewritten.peak[own] = rewritten.log_sum[own] = 0.0
    return rewritten


def _choose_of_rewritten(rows: LogitRows, batch: SamplingBatch, whole: Int32, tokens: Int32, scores: Float32) -> None:
    tokens[whole] = rows.place[:, None]
    searching = batch.beam_width[whole] > 0
    drawing = ~searching & (batch.temperature[whole] >= GREEDY_TEMPERATURE)
    beams, draws = np.flatnonzero(searching).astype(np.int32), np.flatnonzero(drawing).astype(np.int32)
    _search(rows, beams, batch, whole[beams], tokens, scores)
    _draw(rows, draws, batch, whole[draws], tokens)
