"""The sampler against exact distributions, against `transformers`' processors, and against itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    EncoderRepetitionPenaltyLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from engine.backends import native
from engine.execution.sampler import sample, score_prompt
from engine.interface.constraints import allow
from engine.interface.sampling_table import COLUMNS, EDIT, GREEDY_TEMPERATURE, Kind, mask_words, neutral_rows
from engine.scheduling.philox import uniforms
from engine.scheduling.plan import PromptLogprobRows, SamplingBatch, StepResult

VOCAB = 50


@pytest.fixture(autouse=True, params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """By the native library where there is one, and by torch."""
    if request.param == "native":
        if not native.available():
            pytest.skip("there is no native library, nor a compiler")
        yield
    else:
        with native.use(None):
            yield


def batch_of(rows: Sequence[dict[str, Any]], vocabulary: int = VOCAB) -> SamplingBatch:
    """A batch from one dict a row; what is left out is neutral.

    Keys: the parameters by name; `draws` (uniform numbers), `beam_width`, `num_logprobs`, `prompt`,
    `output` (for the penalties), `bias`, `dry`, `ban`, `force`; `allow`, tokens below `vocabulary`; `watch`,
            of all rows or none.
    """

    draws = [row.get("draws", () if row.get("beam_width") else (0.5,)) for row in rows]
    numbers = np.zeros((len(rows), max(1, *map(len, draws))))
    for i, values in enumerate(draws):
        numbers[i, : len(values)] = values
    edits = [
        (i, token, kind, value)
        for i, row in enumerate(rows)
        for kind, entries in (
            (Kind.BIAS, row.get("bias", {}).items()),
            (Kind.SOURCE, [(token, row.get("source_reward", 1.0)) for token in row.get("source", ())]),
            (Kind.HISTORY, [(token, 0.0) for token in row.get("prompt", ())]),
            (Kind.HISTORY, [(token, 1.0) for token in row.get("output", ())]),
            (Kind.DRY, row.get("dry", {}).items()),
            (Kind.BAN, [(token, 0.0) for token in row.get("ban", ())]),
            (Kind.FORCE, [(token, 0.0) for token in row.get("force", ())]),
        )
        for token, value in entries
    ]
    masked = [i for i, row in enumerate(rows) if "allow" in row]
    masks = np.zeros((len(masked), mask_words(vocabulary)), dtype=np.uint32)
    for mask, i in zip(masks, masked, strict=True):
        allow(mask, [token for token in rows[i]["allow"] if token < vocabulary])
    columns = {c.name: [row.get(c.name, c.neutral) for row in rows] for c in COLUMNS if c.name != "num_draws"}
    return SamplingBatch(
        rows=np.arange(len(rows), dtype=np.int32),
        table=neutral_rows(len(rows), num_draws=[len(values) for values in draws], **columns),
        uniforms=numbers,
        edits=np.array(edits, dtype=EDIT),
        masked=np.array(masked, dtype=np.int32),
        masks=masks,
        watched=np.array([row["watch"] for row in rows], dtype=np.int32) if "watch" in rows[0] else None,
    )


def random_logits(rows: int, vocabulary: int = VOCAB, seed: int = 0, scale: float = 1.5) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def near_the_largest(scores: Tensor, sigma: float) -> Tensor:
    """Top-n-sigma as its paper has it (arXiv:2411.07641): M = max l, keep l_i >= M - n * sigma(l), where the deviation
    is that of all logits that are finite."""
    finite = [float(x) for x in scores[0] if x > -torch.inf]
    mean = sum(finite) / len(finite)
    deviation = (sum((x - mean) ** 2 for x in finite) / len(finite)) ** 0.5
    return scores.masked_fill(scores < max(finite) - sigma * deviation, -torch.inf)


def without_top_choices(scores: Tensor, threshold: float) -> Tensor:
    """XTC as llama.cpp has it, where it counts: candidates in falling order, the last one that has the threshold, and
    those after it stay."""
    probabilities, order = scores[0].double().softmax(dim=-1).sort(descending=True)
    reached = [place for place, p in enumerate(probabilities.tolist()) if p > 0 and p >= threshold]
    return scores.index_fill(1, order[: max(reached, default=0)], -torch.inf)


def warped(logits: Tensor, row: dict[str, Any]) -> Tensor:
    """One row [vocabulary] through `transformers`' warpers, in its order, and what it has none for."""
    scores, ids = logits[None], torch.zeros(1, 1, dtype=torch.int64)
    if row.get("temperature", 1.0) != 1.0:
        scores = TemperatureLogitsWarper(row["temperature"])(ids, scores)
    if row.get("top_n_sigma", 0.0) > 0.0:
        scores = near_the_largest(scores, row["top_n_sigma"])
    if row.get("top_k"):
        scores = TopKLogitsWarper(row["top_k"])(ids, scores)
    if row.get("top_p", 1.0) < 1.0:
        scores = TopPLogitsWarper(row["top_p"])(ids, scores)
    if row.get("min_p"):
        scores = MinPLogitsWarper(row["min_p"])(ids, scores)
    if row.get("typical_p", 1.0) < 1.0:
        scores = TypicalLogitsWarper(row["typical_p"])(ids, scores)
    if row.get("xtc_probability", 0.0) >= 1.0:
        scores = without_top_choices(scores, row.get("xtc_threshold", 0.1))
    return scores[0]


def distribution(scores: Tensor) -> np.ndarray:
    return scores.double().softmax(dim=-1).numpy()


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.8},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.85},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.08},
    {"top_k": VOCAB + 5, "top_p": 0.999},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"typical_p": 0.6},
    {"top_n_sigma": 1.2},
    {"xtc_probability": 1.0, "xtc_threshold": 0.08},
    {"temperature": 1.4, "typical_p": 0.9, "top_p": 0.95},
    {"temperature": 0.7, "top_n_sigma": 1.5, "top_k": 20, "top_p": 0.98},
    {"temperature": 1.2, "top_k": 15, "min_p": 0.02, "typical_p": 0.8, "xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"top_n_sigma": 3.0, "top_p": 0.9, "xtc_probability": 1.0},
    {"typical_p": 1e-9},
    {"top_n_sigma": 1e-9},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.51},
    {"xtc_probability": 0.0, "xtc_threshold": 0.01},
]


@pytest.mark.parametrize("row", [*FILTERS[:8], *FILTERS[12:19]], ids=str)
def test_draws_follow_the_exact_distribution(row: dict[str, Any]) -> None:
    from scipy import stats

    number = 20_000
    logits = random_logits(1, 20, seed=2)
    draws = uniforms([11] * number, [0] * number, range(number))
    tokens = sample(logits, batch_of([{**row, "draws": draws}])).tokens[0]
    expected = distribution(warped(logits[0], row)) * number
    counts = np.bincount(tokens, minlength=20)
    assert (counts[expected == 0.0] == 0).all()
    likely = expected >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum())
    if wanted[-1] == 0.0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 2
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_one_draw_in_each_of_many_rows_follows_the_distribution_too() -> None:
    from scipy import stats

    number, row = 6000, FILTERS[7]
    logits = random_logits(1, 20, seed=4)
    draws = uniforms(range(number), [0] * number, [0] * number)
    tokens = sample(logits.repeat(number, 1), batch_of([{**row, "draws": [u]} for u in draws])).tokens[:, 0]
    expected = distribution(warped(logits[0], row)) * number
    kept = expected > 0
    assert stats.chisquare(np.bincount(tokens, minlength=20)[kept], expected[kept]).pvalue > 1e-3


def test_filters_leave_the_tokens_that_transformers_leaves() -> None:
    """A uniform number in the middle of each token's interval must give that very token: then the set of
    tokens, their probabilities and their order are right. All kinds of rows in one batch."""
    rows = [dict(row) for row in FILTERS * 6]
    logits = random_logits(len(rows), seed=5)
    allowed = []
    for i, row in enumerate(rows):
        probabilities = distribution(warped(logits[i], row))
        tokens = np.flatnonzero(probabilities > 1e-7)
        allowed.append(tokens)
        row["draws"] = (probabilities.cumsum() - probabilities / 2)[tokens]
    result = sample(logits, batch_of(rows)).tokens
    for i, tokens in enumerate(allowed):
        assert result[i, : len(tokens)].tolist() == tokens.tolist(), rows[i]
    assert len({len(tokens) for tokens in allowed}) > 5


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    row=st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.5, 1.0, 1.7])},
        optional={
            "top_n_sigma": st.floats(0.0625, 4.0, width=16),
            "top_k": st.integers(1, VOCAB + 2),
            "top_p": st.floats(0.0625, 1.0, width=16),
            "min_p": st.floats(0.0, 0.5, width=16),
            "typical_p": st.floats(0.0625, 1.0, width=16),
            "xtc_threshold": st.floats(0.0, 0.625, width=16),
            "xtc_probability": st.just(1.0),
        },
    ),
    seed=st.integers(0, 2**20),
    scale=st.sampled_from([0.3, 1.5, 6.0]),
    impossible=st.integers(0, VOCAB - 1),
)
def test_any_filters_together_leave_what_their_references_leave(
    row: dict[str, Any], seed: int, scale: float, impossible: int
) -> None:
    logits = random_logits(1, seed=seed, scale=scale)
    logits[0, torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:impossible]] = -torch.inf
    probabilities = distribution(warped(logits[0], row))
    tokens = np.flatnonzero(probabilities > 1e-7)
    draws = (probabilities.cumsum() - probabilities / 2)[tokens]
    assert sample(logits, batch_of([{**row, "draws": draws}])).tokens[0].tolist() == tokens.tolist()


@pytest.mark.slow
def test_xtc_counts_for_its_share_of_the_places() -> None:
    """XTC's decision depends on the row's seed, answer and place alone, not on the tokens or on the number of draws."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -9.0]])
    place = {"xtc_probability": 0.3, "xtc_threshold": 0.1, "draws": [0.0]}
    rows = [{**place, "seed": 7, "choice": choice, "position": at} for choice in range(4) for at in range(1000)]
    left_out = (sample(logits.repeat(len(rows), 1), batch_of(rows)).tokens[:, 0] != 0).reshape(4, 1000)
    assert abs(left_out.mean() - 0.3) < 0.03
    assert all(abs(left_out[choice].mean() - 0.3) < 0.06 for choice in range(4))
    assert abs((left_out[0] & left_out[1]).mean() - 0.09) < 0.04, "one answer says nothing of another"
    for at in (0, 1, 2, 3, 999):
        several = {**place, "seed": 7, "position": at, "draws": [0.0] * 4}
        assert (sample(logits, batch_of([several])).tokens[0] != 0).tolist() == left_out[:, at].tolist()
        alone = {**several, "draws": [0.999, 0.1, 0.999, 0.1], "xtc_probability": 1.0, "xtc_threshold": 0.3}
        assert sample(logits, batch_of([alone])).tokens[0].tolist() == [2, 0, 2, 0], "a single choice has no top ones"
    another = sample(logits.repeat(1000, 1), batch_of([{**row, "seed": 8} for row in rows[:1000]])).tokens[:, 0] != 0
    assert (another != left_out[0]).any()


def test_the_borders_of_the_unit_interval() -> None:
    """0 gives the first possible token, the largest number below 1 the last; never an impossible one."""
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [7, 20, 33]] = 0.0
    draws = [0.0, np.nextafter(1.0, 0.0), 0.5, np.nextafter(1 / 3, 0.0), np.nextafter(1 / 3, 1.0)]
    for row in ({}, {"top_k": 40}, {"top_p": 0.99}, {"min_p": 0.1}):
        assert sample(logits, batch_of([{**row, "draws": draws}])).tokens[0].tolist() == [7, 33, 20, 7, 20]


def test_greedy_is_argmax_whatever_the_filters_say() -> None:
    logits = random_logits(len(FILTERS), seed=6)
    rows = [{**row, "temperature": 0.0, "draws": [0.999]} for row in FILTERS]
    assert sample(logits, batch_of(rows)).tokens[:, 0].tolist() == logits.argmax(dim=-1).tolist()


def test_a_tiny_temperature_is_greedy_and_no_overflow() -> None:
    logits = random_logits(3, seed=7, scale=50.0)
    rows = [{"temperature": t, "draws": [0.99]} for t in (1e-45, 1e-6, 1e-4)]
    assert sample(logits, batch_of(rows)).tokens[:, 0].tolist() == logits.argmax(dim=-1).tolist()


def test_an_enormous_temperature_is_uniform() -> None:
    from scipy import stats

    number = 5000
    draws = uniforms([1] * number, [0] * number, range(number))
    tokens = sample(random_logits(1, 20), batch_of([{"temperature": 1e30, "draws": draws}])).tokens[0]
    assert stats.chisquare(np.bincount(tokens, minlength=20)).pvalue > 1e-3


# ------------------------------------------------------------------ processors, seen through beam rows


def processed(logits: Tensor, rows: Sequence[dict[str, Any]]) -> Tensor:
    """Processed log-probabilities of all tokens: what beam rows report as scores."""
    result = sample(logits, batch_of([{**row, "beam_width": logits.shape[1]} for row in rows]))
    scores = torch.empty_like(logits)
    return scores.scatter_(1, torch.from_numpy(result.tokens).long(), torch.from_numpy(result.scores))


def test_beams_see_all_tokens_best_first() -> None:
    logits = random_logits(4)
    result = sample(logits, batch_of([{"beam_width": VOCAB}] * 4))
    expected = logits.log_softmax(dim=-1).sort(dim=-1, descending=True)
    assert (result.tokens == expected.indices.numpy()).all()
    assert np.allclose(result.scores, expected.values.numpy(), atol=1e-6)
    assert np.allclose(result.logprobs, expected.values.numpy(), atol=1e-6)


def test_more_beams_than_tokens() -> None:
    result = sample(random_logits(1, 3), batch_of([{"beam_width": 8}]))
    assert result.tokens.shape == (1, 3)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    logits = random_logits(3, seed=8, scale=3.0)
    prompts, outputs = [[1, 2, 2, 9], [3], [0, 49]], [[2, 30], [], [30, 30, 30]]
    rows = [
        {"repetition_penalty": penalty, "prompt": prompt, "output": output}
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    scores = logits.log_softmax(dim=-1)
    expected = torch.cat(
        [
            RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*prompt, *output]]), scores[i : i + 1])
            for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
    )
    torch.testing.assert_close(processed(logits, rows), expected, atol=1e-6, rtol=1e-6)


def test_repetition_penalty_of_rows_that_sample_acts_on_logits() -> None:
    """Greedy: the penalised logits decide, and positive ones are divided, negative ones multiplied."""
    logits = torch.tensor([[2.0, 1.9, -5.0], [-1.0, -1.1, -5.0], [2.0, 1.9, -5.0]])
    rows = [
        {"temperature": 0.0, "repetition_penalty": 1.5, "prompt": [0]},
        {"temperature": 0.0, "repetition_penalty": 1.5, "output": [0]},
        {"temperature": 0.0, "repetition_penalty": 1.5, "prompt": [1]},
    ]
    assert sample(logits, batch_of(rows)).tokens[:, 0].tolist() == [1, 1, 0]


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_encoder_repetition_penalty_is_transformers(penalty: float) -> None:
    """Tokens outside the vocabulary, those of an encoder with one of its own, count for nothing."""
    logits = random_logits(3, seed=8, scale=3.0)
    sources = [[1, 2, 9, 49], [3], []]
    rows = [{"source_reward": 1 / penalty, "source": source} for source in sources]
    rows[1]["source"] = [3, VOCAB, VOCAB + 7]
    expected = logits.log_softmax(dim=-1)
    for i in range(2):
        processor = EncoderRepetitionPenaltyLogitsProcessor(penalty, torch.tensor([sources[i]]))
        expected[i] = processor(torch.zeros(1, 1, dtype=torch.int64), expected[i : i + 1])[0]
    torch.testing.assert_close(processed(logits, rows), expected, atol=1e-6, rtol=1e-6)


def test_renormalized_rows_are_log_probabilities_again() -> None:
    """After bans and forced tokens, and without effect on the other rows."""
    logits = random_logits(3, seed=8)
    rows: list[dict[str, Any]] = [
        {"ban": [1, 2]},
        {"ban": [3], "renormalize": True},
        {"force": [5], "renormalize": True},
    ]
    expected = logits.log_softmax(dim=-1)
    expected[0, [1, 2]] = expected[1, 3] = -torch.inf
    expected[1] = expected[1].log_softmax(dim=-1)
    expected[2] = torch.full((VOCAB,), -torch.inf)
    expected[2, 5] = 0.0
    torch.testing.assert_close(processed(logits, rows), expected, atol=1e-6, rtol=1e-6)


def test_presence_and_frequency_penalties_are_openai_s() -> None:
    """logit - count * frequency - (count > 0) * presence, counted over the output alone."""
    logits = random_logits(2, seed=9)
    output = [[4, 4, 4, 5], [6]]
    rows = [
        {"presence_penalty": 0.5, "frequency_penalty": 0.25, "prompt": [4, 7, 7], "output": output[0]},
        {"presence_penalty": -1.5, "frequency_penalty": -0.75, "prompt": [6, 8], "output": output[1]},
    ]
    expected = logits.log_softmax(dim=-1)
    for i, row in enumerate(rows):
        for token in set(output[i]):
            expected[i, token] -= output[i].count(token) * row["frequency_penalty"] + row["presence_penalty"]
    torch.testing.assert_close(processed(logits, rows), expected, atol=1e-6, rtol=1e-6)


def test_all_penalties_together_in_their_order() -> None:
    logits = random_logits(1, seed=10)
    row = {
        "repetition_penalty": 1.7,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "prompt": [1],
        "output": [2, 2],
        "bias": {1: 4.0, 2: -1.0, 3: 2.5},
        "dry": {2: 1.5, 6: 0.8},
        "ban": [5],
    }
    biased = logits.log_softmax(dim=-1)
    biased[0, 1] += 4.0
    biased[0, 2] -= 1.0
    biased[0, 3] += 2.5
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 2]]), biased)
    expected[0, 2] -= 0.2 * 2 + 0.3 + 1.5
    expected[0, 6] -= 0.8
    expected[0, 5] = -torch.inf
    torch.testing.assert_close(processed(logits, [row]), expected, atol=1e-6, rtol=1e-6)


def test_bias_is_added_to_the_logits_of_its_row_only() -> None:
    logits = random_logits(3, seed=11)
    rows = [{"bias": {2: 100.0}}, {}, {"bias": {2: -100.0, 4: 100.0}}]
    greedy = sample(logits, batch_of([{**row, "temperature": 0.0} for row in rows])).tokens[:, 0].tolist()
    assert greedy == [2, int(logits[1].argmax()), 4]
    expected = logits.log_softmax(dim=-1)
    expected[0, 2] += 100.0
    expected[2, 2] -= 100.0
    expected[2, 4] += 100.0
    torch.testing.assert_close(processed(logits, rows), expected, atol=1e-6, rtol=1e-6)


def test_banned_tokens_never_come() -> None:
    number = 2000
    logits = random_logits(1, 8, seed=12)
    draws = uniforms([5] * number, [0] * number, range(number))
    tokens = sample(logits, batch_of([{"ban": [0, 3, 7], "draws": draws}])).tokens[0]
    assert set(tokens.tolist()) == {1, 2, 4, 5, 6}
    assert (processed(logits, [{"ban": [0, 3, 7]}])[0, [0, 3, 7]] == -torch.inf).all()


def test_forced_tokens_alone_are_possible_even_if_banned() -> None:
    logits = random_logits(2, 8, seed=13)
    for how in ({"temperature": 0.0}, {"temperature": 1.0, "draws": [0.0, 0.5, 0.99]}):
        tokens = sample(logits, batch_of([{**how, "force": [3], "ban": [3]}, how])).tokens
        assert set(tokens[0].tolist()) == {3}
    scores = processed(logits, [{"force": [3, 6]}, {}])
    assert scores[0, [3, 6]].tolist() == [0.0, 0.0]
    assert (scores[0] > -torch.inf).sum() == 2
    assert (scores[1] > -torch.inf).all()


def test_the_logits_are_left_alone() -> None:
    logits = random_logits(3, seed=14)
    before = logits.clone()
    rows = [
        {"beam_width": 4},
        {
            "top_k": 3,
            "top_p": 0.5,
            "min_p": 0.1,
            "repetition_penalty": 2.0,
            "prompt": [1],
            "ban": [2],
            "bias": {3: 1.0},
        },
        {"force": [1]},
    ]
    sample(logits, batch_of(rows))
    assert torch.equal(logits, before)


# ------------------------------------------------------------------ what is reported


def test_logprobs_ranks_and_top_tokens_are_the_model_s_own() -> None:
    """Before penalties, temperature and filters."""
    logits = random_logits(4, seed=15)
    rows = [
        {"num_logprobs": 0, "temperature": 0.0},
        {"num_logprobs": 5, "temperature": 0.3, "top_k": 2, "draws": [0.9]},
        {"num_logprobs": 3, "draws": [0.1, 0.5, 0.9]},
        {"num_logprobs": 2, "ban": [int(logits[3].argmax())], "temperature": 0.0},
    ]
    result = sample(logits, batch_of(rows))
    expected = logits.log_softmax(dim=-1)
    assert result.top_ids.shape == (4, 5)
    for i, row in enumerate(rows):
        draws = len(row.get("draws", [0]))
        for token, logprob, rank in zip(
            result.tokens[i, :draws], result.logprobs[i, :draws], result.ranks[i, :draws], strict=True
        ):
            assert logprob == pytest.approx(float(expected[i, token]), abs=1e-6)
            assert rank == int((logits[i] > logits[i, token]).sum()) + 1
        best = expected[i].topk(row["num_logprobs"])
        assert result.top_ids[i, : row["num_logprobs"]].tolist() == best.indices.tolist()
        assert np.allclose(result.top_logprobs[i, : row["num_logprobs"]], best.values, atol=1e-6)
    assert result.ranks[0, 0] == 1
    assert result.ranks[3, 0] == 2


def test_watched_tokens_have_the_model_s_own_logprobs() -> None:
    logits = random_logits(3)
    rows: list[dict[str, Any]] = [
        {"watch": [7, 0, 7]},
        {"watch": [1, 49, 0], "bias": {1: 9.0}, "ban": [49], "temperature": 0.3},
        {"watch": [3, 2, 1], "beam_width": 2, "draws": ()},
    ]
    found = sample(logits.clone(), batch_of(rows)).watched
    own = logits.log_softmax(dim=-1)
    assert found is not None
    for i, row in enumerate(rows):
        np.testing.assert_allclose(found[i], own[i, row["watch"]].numpy(), atol=1e-6)
        alone = sample(logits[i : i + 1].clone(), batch_of([row])).watched
        assert alone is not None
        assert np.array_equal(alone[0], found[i]), "a row does not know its neighbours"


def test_beam_candidates_have_ranks_too() -> None:
    result = sample(random_logits(1), batch_of([{"beam_width": 6, "num_logprobs": 1}]))
    assert result.ranks[0].tolist() == [1, 2, 3, 4, 5, 6]


def test_nothing_is_reported_to_rows_that_do_not_ask() -> None:
    result = sample(random_logits(2), batch_of([{}, {}]))
    assert result.top_ids.shape == (2, 0)
    assert (result.ranks == 0).all()


def test_more_logprobs_than_tokens() -> None:
    assert sample(random_logits(1, 4), batch_of([{"num_logprobs": 20}])).top_ids.shape == (1, 4)


def test_prompt_scoring() -> None:
    """Each row's target, rank and best alternatives; more rows than are computed at a time."""
    hidden, head = random_logits(300, 16, seed=16), random_logits(16, VOCAB, seed=17)
    targets = np.arange(300, dtype=np.int32) * 7 % VOCAB
    rows = PromptLogprobRows(
        rows=np.arange(300, dtype=np.int32), targets=targets, num_logprobs=np.full(300, 3, dtype=np.int32)
    )
    scores = score_prompt(lambda x: x @ head, hidden, rows).result()
    expected = (hidden @ head).log_softmax(dim=-1)
    chosen = expected[torch.arange(300), torch.from_numpy(targets).long()]
    assert np.allclose(scores.logprobs, chosen, atol=1e-5)
    assert scores.ranks.tolist() == ((expected > chosen[:, None]).sum(dim=-1) + 1).tolist()
    best = expected.topk(3, dim=-1)
    assert scores.top_ids.tolist() == best.indices.tolist()
    assert np.allclose(scores.top_logprobs, best.values, atol=1e-5)
    assert all(len(part) == 300 for part in (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs))


def test_prompt_scoring_without_alternatives() -> None:
    rows = PromptLogprobRows(
        rows=np.zeros(1, np.int32), targets=np.zeros(1, np.int32), num_logprobs=np.zeros(1, np.int32)
    )
    assert score_prompt(lambda x: x, random_logits(1), rows).result().top_ids.shape == (1, 0)


# ------------------------------------------------------------------ alone and in a crowd


def mixed_rows() -> list[dict[str, Any]]:
    """Rows of every kind."""
    return [
        {"temperature": 0.0, "num_logprobs": 3},
        {"draws": [0.37], "num_logprobs": 0},
        {"top_k": 7, "draws": [0.2, 0.9, 0.6], "num_logprobs": 5},
        {"top_k": 30, "top_p": 0.8, "draws": [0.7]},
        {"top_p": 0.9, "temperature": 0.8, "draws": [0.4]},
        {"min_p": 0.05, "temperature": 1.4, "draws": [0.95]},
        {"beam_width": 4, "num_logprobs": 2},
        {"beam_width": 12},
        {"repetition_penalty": 1.4, "prompt": [1, 2, 3], "output": [4, 4], "draws": [0.5]},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "output": [9, 9, 8], "temperature": 0.0},
        {"bias": {5: 3.0, 6: -2.0}, "ban": [0, 1], "draws": [0.1]},
        {"force": [11], "draws": [0.3]},
        {"beam_width": 4, "repetition_penalty": 1.2, "prompt": [2, 2], "bias": {1: 1.0}, "dry": {1: 2.0}, "ban": [4]},
        {"dry": {3: 1.25, 7: 40.0}, "draws": [0.2], "presence_penalty": 0.5, "output": [3]},
        {"typical_p": 0.7, "temperature": 1.2, "draws": [0.3, 0.8]},
        {"top_n_sigma": 1.5, "repetition_penalty": 1.3, "prompt": [3], "draws": [0.6], "num_logprobs": 2},
        {"xtc_probability": 0.5, "xtc_threshold": 0.02, "seed": 4, "position": 3, "draws": [0.1, 0.5, 0.9]},
        {"typical_p": 0.5, "temperature": 0.0},
    ]


def assert_equal_rows(together: StepResult, i: int, alone: StepResult, row: dict[str, Any], vocabulary: int) -> None:
    """What row i may use of a batch's result is to the bit what it has alone."""
    used = min(row["beam_width"], vocabulary) if "beam_width" in row else len(row.get("draws", [0]))
    number = max(row.get("num_logprobs", -1), 0)
    for name, count in (
        ("tokens", used),
        ("scores", used),
        ("logprobs", used),
        ("top_ids", number),
        ("top_logprobs", number),
    ):
        crowd, single = getattr(together, name)[i, :count], getattr(alone, name)[0, :count]
        assert crowd.tobytes() == single.tobytes(), (name, row, crowd, single)
    if "num_logprobs" in row:
        assert together.ranks[i, :used].tolist() == alone.ranks[0, :used].tolist()


@pytest.mark.parametrize("vocabulary", [40, 1000, 70_000])
@pytest.mark.parametrize("ties", [False, True])
def test_a_row_does_not_know_its_neighbours(vocabulary: int, ties: bool) -> None:
    """70,000 tokens are more than torch reduces in one thread; with ties, as bfloat16 makes them, a wider
    neighbour must not change which of two equal candidates comes first."""
    rows = mixed_rows()
    logits = random_logits(len(rows), vocabulary, seed=18)
    if ties:
        logits = (logits * 4).round() / 4
    together = sample(logits, batch_of(rows))
    for i, row in enumerate(rows):
        assert_equal_rows(together, i, sample(logits[i : i + 1], batch_of([row])), row, vocabulary)
    for count in (2, 5, 9):
        part = sample(logits[:count], batch_of(rows[:count]))
        for i in range(count):
            assert_equal_rows(part, i, sample(logits[i : i + 1], batch_of(rows[i : i + 1])), rows[i], vocabulary)


def test_a_row_of_nan_harms_itself_alone() -> None:
    rows = mixed_rows()
    clean = random_logits(len(rows), seed=19)
    before = sample(clean, batch_of(rows))
    for victim in range(len(rows)):
        logits = clean.clone()
        logits[victim] = torch.nan
        result = sample(logits, batch_of(rows))
        assert np.isnan(result.logprobs[victim, 0])
        assert (result.tokens >= 0).all()
        assert (result.tokens < VOCAB).all()
        if "beam_width" in rows[victim]:
            assert np.isnan(result.scores[victim, 0])
        for i, row in enumerate(rows):
            if i != victim:
                single = StepResult(
                    **{
                        name: getattr(before, name)[i : i + 1]
                        for name in StepResult.__slots__
                        if getattr(before, name) is not None
                    }
                )
                assert_equal_rows(result, i, single, row, VOCAB)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_single_bad_logit_gives_no_token_outside_the_vocabulary(bad: float) -> None:
    rows = [{**row} for row in FILTERS]
    logits = random_logits(len(rows), seed=20)
    logits[:, 3] = bad
    result = sample(logits, batch_of(rows))
    assert ((result.tokens >= 0) & (result.tokens < VOCAB)).all()
    if bad == -torch.inf:
        assert not (result.tokens == 3).any()
        assert np.isfinite(result.logprobs).all()
    else:
        assert np.isnan(result.logprobs).all()


def allowed_rows(vocabulary: int) -> list[dict[str, Any]]:
    """Rows of every kind with a mask, and between them others without."""
    some, two = list(range(1, vocabulary, 3)), [7, vocabulary - 1]
    return [
        {"temperature": 0.0, "allow": some, "num_logprobs": 3},
        {"draws": [0.4]},
        {"draws": [0.1, 0.5, 0.9], "allow": some},
        {"top_k": 4, "top_p": 0.9, "draws": [0.2, 0.8], "allow": some, "temperature": 0.7},
        {"temperature": 0.0, "allow": two, "bias": {7: 5.0, 3: 90.0}},
        {"beam_width": 4, "num_logprobs": 2},
        {"beam_width": 4, "allow": some, "num_logprobs": 1},
        {"beam_width": 3, "allow": two, "renormalize": True, "ban": [7]},
        {
            "beam_width": 5, "allow": some, "bias": {1: 3.0}, "ban": [4], "repetition_penalty": 1.3, "prompt": [7, 10],
            "output": [10], "presence_penalty": 0.2, "source_reward": 1.5, "source": [1, 4],
        },
        {
            "draws": [0.3, 0.7], "allow": some, "bias": {1: 3.0, 2: 50.0}, "ban": [4], "repetition_penalty": 1.3,
            "prompt": [7, 10], "output": [13, 13], "frequency_penalty": 0.4, "min_p": 0.01,
        },
        {"temperature": 0.0, "allow": two, "force": [5]},
        {"draws": [0.6], "allow": range(vocabulary), "num_logprobs": 1},
        {"temperature": 0.0, "allow": []},
        {"draws": [0.5], "allow": [9], "ban": [9]},
        {"beam_width": 2, "allow": []},
        {"typical_p": 0.9, "draws": [0.2, 0.7], "allow": some, "bias": {1: 3.0}},
        {"top_n_sigma": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.01, "draws": [0.2, 0.7], "allow": some},
        {"top_k": 6, "draws": [0.2, 0.8], "allow": two},  # fewer than top-k, in few parts of the vocabulary
    ]  # fmt: skip


def as_bans(row: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """The same said by bans: the slow way, token by token."""
    allowed = set(row.get("allow", range(vocabulary)))
    rest = {name: value for name, value in row.items() if name != "allow"}
    return rest | {"ban": sorted({*row.get("ban", ()), *(set(range(vocabulary)) - allowed)})}


@pytest.mark.parametrize("vocabulary", [32, VOCAB, 64, 97, 130, 1000])
def test_masks_are_bans_of_all_other_tokens(vocabulary: int) -> None:
    """To the bit, whatever else is edited; rows without a mask are as they were. Against an oracle in numpy, too."""
    rows = allowed_rows(vocabulary)
    logits = random_logits(len(rows), vocabulary, seed=30)
    kept = logits.clone()
    found = sample(logits, batch_of(rows, vocabulary))
    assert torch.equal(logits, kept)
    expected = sample(logits, batch_of([as_bans(row, vocabulary) for row in rows], vocabulary))
    for i, row in enumerate(rows):
        width = min(row.get("beam_width", len(row.get("draws", [0]))), vocabulary)
        possible = ~np.isnan(expected.logprobs[i, :width])
        assert (np.isnan(found.logprobs[i, :width]) == ~possible).all(), row
        for name in ("tokens", "scores", "logprobs"):
            ours, theirs = getattr(found, name)[i, :width][possible], getattr(expected, name)[i, :width][possible]
            assert np.allclose(ours, theirs, rtol=1e-6, atol=1e-6), (name, row)
        if "force" not in row:
            assert set(found.tokens[i, :width][possible].tolist()) <= set(row.get("allow", range(vocabulary))), row
        assert found.top_ids[i].tolist() == expected.top_ids[i].tolist()
    likeliest = max(rows[0]["allow"], key=lambda token: float(logits[0, token]))
    assert found.tokens[0, 0] == likeliest
    assert found.tokens[10, 0] == 5
    assert np.isnan(found.logprobs[[12, 13, 14], 0]).all()


def test_masked_rows_are_to_the_bit_what_they_are_alone() -> None:
    rows = allowed_rows(VOCAB)
    logits = random_logits(len(rows), seed=31)
    together = sample(logits, batch_of(rows))
    for i, row in enumerate(rows):
        assert_equal_rows(together, i, sample(logits[i : i + 1], batch_of([row])), row, VOCAB)


def test_a_row_without_a_possible_token_harms_no_other() -> None:
    logits = random_logits(3, seed=21)
    logits[1] = -torch.inf
    rows: list[dict[str, Any]] = [{"draws": [0.3]}, {"draws": [0.3]}, {"beam_width": 3}]
    result = sample(logits, batch_of(rows))
    assert np.isnan(result.logprobs[1, 0])
    for i in (0, 2):
        assert_equal_rows(result, i, sample(logits[i : i + 1], batch_of([rows[i]])), rows[i], VOCAB)


def test_a_row_without_any_possible_token_fails_alone() -> None:
    logits = torch.zeros(2, 4)
    for temperature in (0.0, 1.0):
        result = sample(logits, batch_of([{"temperature": temperature, "ban": range(4)}, {}]))
        assert np.isnan(result.logprobs[0, 0])
        assert result.logprobs[1, 0] == pytest.approx(np.log(0.25))


def test_the_least_temperature_that_samples_does_so_in_any_batch() -> None:
    """Rounded to float32, 1e-5 is less than the constant in Python that it is compared with."""
    row: dict[str, Any] = {"temperature": GREEDY_TEMPERATURE, "draws": [0.9]}
    alone = sample(torch.zeros(1, VOCAB), batch_of([row]))
    together = sample(torch.zeros(2, VOCAB), batch_of([row, {"temperature": 1.0, "draws": [0.1]}]))
    assert alone.tokens[0, 0] == together.tokens[0, 0] > 0
