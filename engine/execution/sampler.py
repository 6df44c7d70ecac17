"""Logits to candidates, for all rows of a step together.

The order of operations is that of `transformers`: logit_bias, the encoder's and the decoder's repetition penalty,
OpenAI's penalties, DRY, bans, forced tokens; then for rows that sample temperature, top-n-sigma, top-k, top-p, min-p,
typical-p, XTC. Beam rows start from log-probabilities instead of logits, as in `transformers`.

The native library samples on a CPU, `sampler_device.py` on a GPU, and `sampler_torch.py` elsewhere. Rows with filters
that the kernels do not support (`by_torch`) are drawn by `backends/torch/sampling_whole.py`. All choose the same tokens
except where rounding decides. If logits are equal, the lowest token comes first; if only log-probabilities are equal,
the larger logit does. `torch.topk` takes any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.backends import native
from engine.backends import triton as gpu
from engine.backends.native.sampling import LogitRows, mask
from engine.backends.torch import sampling_whole
from engine.execution import sampler_torch
from engine.execution.pending import LateScores, PromptScores
from engine.interface.sampling_table import GREEDY_TEMPERATURE, Kind, by_torch
from engine.scheduling.plan import Bool, Float32, Int32, PromptLogprobRows, SamplingBatch, StepResult, TokenScores

# Rows scored at a time, so that prompt log-probabilities do not need all logits at once.
PROMPT_ROWS = 128

# Logits [P, vocabulary], targets, numbers of alternatives, and the maximum of these.
_Scorer = Callable[[Tensor, Int32, Int32, int], "TokenScores | LateScores"]


def sample(logits: Tensor, batch: SamplingBatch) -> StepResult:
    """Candidates for each row of float32 logits [S, vocabulary]."""
    if gpu.serves(logits.device):
        from engine.execution.sampler_device import DeviceSampler

        return DeviceSampler(logits.device).sample(logits, batch).result()
    if not _native(logits):
        return sampler_torch.sample(logits, batch)
    return sample_rows(LogitRows(logits), batch)


def sample_rows(rows: LogitRows, batch: SamplingBatch) -> StepResult:
    """Candidates for each row, by the native library."""
    table = batch.table
    width = max(_most(table["num_draws"]), min(_most(table["beam_width"]), rows.vocabulary), 1)
    tokens = rows.place.repeat(width).reshape(-1, width)
    scores = np.full(tokens.shape, -np.inf, dtype=np.float32)
    ranks = np.zeros(tokens.shape, dtype=np.int32)
    reports = table["num_logprobs"]
    number = min(_most(reports), rows.vocabulary)
    top_ids = np.zeros((len(rows), max(number, 0)), dtype=np.int32)
    top_logprobs = np.zeros(top_ids.shape, dtype=np.float32)
    asking = _where(reports >= 0) if number >= 0 else None
    if asking is not None and number > 0:
        top_ids[asking], top_logprobs[asking] = rows.best(asking, reports[asking], number)
    impossible = _choose(rows, batch, tokens, scores)
    logprobs = rows.logprobs(tokens)
    if impossible is not None:
        # NaN tells the scheduler that a row failed; a row in which every token is banned fails, too.
        logprobs[impossible] = np.nan
    if asking is not None:
        ranks[asking] = rows.ranks(asking, tokens[asking])
    return StepResult(
        tokens=tokens,
        scores=scores,
        logprobs=logprobs,
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        watched=None if batch.watched is None else rows.logprobs(batch.watched),
    )


def score_prompt(hidden_to_logits: object, hidden: Tensor, rows: PromptLogprobRows) -> PromptScores:
    """Log-probability, rank and best alternatives of each target token. It does not wait for a GPU.

    Args:
        hidden_to_logits: maps hidden states [N, hidden] to float32 logits [N, vocabulary].
        hidden: [P, hidden].
    """
    assert callable(hidden_to_logits)
    most = _most(rows.num_logprobs)
    score: _Scorer | None = None
    parts: list[TokenScores | LateScores] = []
    for start in range(0, len(rows.rows), PROMPT_ROWS):
        part = slice(start, start + PROMPT_ROWS)
        logits = hidden_to_logits(hidden[part])
        score = score or _scorer(logits)
        parts.append(score(logits, rows.targets[part], rows.num_logprobs[part], min(most, logits.shape[1])))
    return PromptScores(parts)


def _scorer(logits: Tensor) -> _Scorer:
    if gpu.serves(logits.device):
        from engine.execution.sampler_device import DeviceSampler

        return DeviceSampler(logits.device).score
    return _score if _native(logits) else sampler_torch.score


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


def _choose(rows: LogitRows, batch: SamplingBatch, tokens: Int32, scores: Float32) -> Bool | None:
    """Write what rows choose: tokens [S, C], which contain the likeliest one, and scores of beams. Returns which of
    them are impossible [S, C], None if none is."""
    table, edits = batch.table, batch.edits
    edited = len(edits) or len(batch.masked)
    drawing = max(table["temperature"].tolist()) >= np.float32(GREEDY_TEMPERATURE)
    if not drawing and not _most(table["beam_width"]) and not edited:
        return None
    searching = table["beam_width"] > 0
    sampling = ~searching & (table["temperature"] >= GREEDY_TEMPERATURE)
    whole_rows = (table["renormalize"] > 0) & searching
    if not edited and not whole_rows.any():
        found = _search(rows, batch, _where(searching), tokens, scores)
        _draw(rows, batch, _where(sampling), tokens)
        return searching[:, None] & (scores == -np.inf) if found else None
    # Rows that change as a whole are rare, and get separate memory.
    whole_rows[edits["row"][edits["kind"] == Kind.FORCE]] = True
    whole_rows[batch.masked] |= searching[batch.masked]
    plain, whole, within = ~whole_rows, _where(whole_rows), ~whole_rows[batch.masked]
    masked = batch.masked[within]
    with contextlib.ExitStack() as changed:
        if len(edits):
            changed.enter_context(rows.edited(edits, table, searching))
        if len(masked):
            changed.enter_context(rows.confined(masked, batch.masks[within], table[masked], sampling[masked]))
        _search(rows, batch, _where(searching & plain), tokens, scores)
        _draw(rows, batch, _where(sampling & plain), tokens)
        if len(edits) or len(masked):
            greedy = _where(plain & ~(searching | sampling))
            tokens[greedy] = rows.best(greedy, np.ones_like(greedy), 1)[0]
        chosen = rows.values[np.arange(len(rows))[:, None], tokens]
        if len(whole):
            rewritten = _rewritten(rows, batch, whole)
            tokens[whole] = rewritten.place[:, None]
            _search(rewritten, batch, _where(searching[whole]), tokens, scores, whole)
            _draw(rewritten, batch, _where(sampling[whole]), tokens, whole)
            chosen[whole] = rewritten.values[np.arange(len(whole))[:, None], tokens[whole]]
    impossible: Bool = np.where(searching[:, None], scores, chosen) == -np.inf
    return impossible


def _search(
    rows: LogitRows, batch: SamplingBatch, at: Int32, tokens: Int32, scores: Float32, place: Int32 | None = None
) -> bool:
    """Write the candidates of the beams in rows `at`, which have other positions in the batch if these are given.
    Returns whether there are any."""
    if not len(at):
        return False
    of = at if place is None else place[at]
    wanted = batch.table["beam_width"][of]
    width = min(_most(wanted), rows.vocabulary)
    tokens[of, :width], scores[of, :width] = rows.best(at, wanted, width)
    return True


def _draw(rows: LogitRows, batch: SamplingBatch, at: Int32, tokens: Int32, place: Int32 | None = None) -> None:
    """Write what rows `at` draw, with arguments as in `_search`."""
    if not len(at):
        return
    of = at if place is None else place[at]
    apart = by_torch(batch.table[of])
    for row, number in zip(at[apart].tolist(), of[apart].tolist(), strict=True):
        logits = torch.from_numpy(rows.values[row])
        chosen = sampling_whole.draw(logits, batch.table[number : number + 1], batch.uniforms[number])
        tokens[number, : len(chosen)] = chosen.numpy()
    at, of = at[~apart], of[~apart]
    if not len(at):
        return
    drawn, _ = rows.draw(at, batch.table[of], batch.uniforms[of])
    tokens[of, : drawn.shape[1]] = drawn


def _rewritten(rows: LogitRows, batch: SamplingBatch, whole: Int32) -> LogitRows:
    """Rows with forced tokens, beams with masks, and rows whose scores become log-probabilities again."""
    made = torch.empty((len(whole), rows.vocabulary), dtype=torch.float32)
    values: Float32 = made.numpy()
    forces = batch.edits[batch.edits["kind"] == Kind.FORCE]
    forced = np.isin(whole, forces["row"])
    values[forced] = -np.inf
    values[np.searchsorted(whole, forces["row"]), forces["token"]] = 0.0
    for place in np.flatnonzero(~forced).tolist():
        row = int(whole[place])
        if not batch.table["beam_width"][row]:
            values[place] = rows.values[row]  # with its edits
            continue
        np.subtract(rows.values[row], rows.peak[row], out=values[place])
        values[place] -= rows.log_sum[row]
        rows.put(row, values[place])
    free = np.isin(batch.masked, whole) & ~np.isin(batch.masked, forces["row"])
    if free.any():
        mask(values, np.searchsorted(whole, batch.masked[free]).astype(np.int32), batch.masks[free])
    rewritten = LogitRows(made)
    # A score that does not become a log-probability again is kept.
    own = ~((batch.table["renormalize"][whole] > 0) & (batch.table["beam_width"][whole] > 0))
    rewritten.peak[own] = rewritten.log_sum[own] = 0.0
    return rewritten


def _most(values: Int32) -> int:
    return int(max(values.tolist()))  # faster than numpy, for the rows of one step


def _where(mask: Bool) -> Int32:
    return mask.nonzero()[0].astype(np.int32)
