"""Sampling from candidates of ranks chooses what sampling from whole rows chooses."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from test_sampler import batch_of, random_logits
from torch import Tensor

from engine.backends import native
from engine.backends.native.ranks import Ranks, shared_memory
from engine.execution.divided_sampling import DividedSampler, needs_whole, picked
from engine.execution.sampler import sample
from engine.model.sharding import Share
from engine.scheduling.plan import SamplingBatch, StepResult

pytestmark = pytest.mark.skipif(not native.available(), reason="there is no native library, nor a compiler")
VOCABULARY = 1203
COUNT = 3


@pytest.fixture
def ranks() -> Iterator[list[Ranks]]:
    file = shared_memory(COUNT)
    yield [Ranks(rank, COUNT, file) for rank in range(COUNT)]
    os.close(file)


def divided(ranks: list[Ranks], logits: Tensor, batch: SamplingBatch) -> tuple[StepResult, int]:
    """The result of the ranks, and how many rows needed all logits."""
    vocabulary, gathered = logits.shape[1], []
    gather = Ranks.gather

    def counted(self: Ranks, x: Tensor, widths: list[int]) -> Tensor:
        gathered.append(len(x))
        return gather(self, x, widths)

    def act(rank: Ranks) -> StepResult | None:
        begin, end = Share(rank.rank, COUNT).of(vocabulary)
        return DividedSampler(rank, vocabulary).sample(logits[:, begin:end].clone(), batch)

    with mock.patch.object(Ranks, "gather", counted), ThreadPoolExecutor(COUNT) as threads:
        first, *others = threads.map(act, ranks)
    assert first is not None
    assert others == [None] * (COUNT - 1)
    return first, sum(gathered) // COUNT


def assert_equal(found: StepResult, wanted: StepResult, batch: SamplingBatch) -> None:
    table = batch.table
    for row, (draws, beams, reports) in enumerate(table[["num_draws", "beam_width", "num_logprobs"]].tolist()):
        count = beams or draws
        logprobs = wanted.logprobs[row, :count]
        np.testing.assert_allclose(found.logprobs[row, :count], logprobs, atol=2e-6)
        fine = ~np.isnan(logprobs)
        assert (found.tokens[row, :count] == wanted.tokens[row, :count])[fine].all(), row
        if beams:
            np.testing.assert_allclose(found.scores[row, :count], wanted.scores[row, :count], atol=2e-6)
        if reports >= 0:
            assert (found.ranks[row, :count] == wanted.ranks[row, :count])[fine].all(), row
            assert found.top_ids[row, :reports].tolist() == wanted.top_ids[row, :reports].tolist()
            np.testing.assert_allclose(found.top_logprobs[row, :reports], wanted.top_logprobs[row, :reports], atol=2e-6)
    if wanted.watched is not None:
        assert found.watched is not None
        np.testing.assert_allclose(found.watched, wanted.watched, atol=2e-6)


def random_row(chance: random.Random) -> dict[str, Any]:
    """Greedy, beams or sampling, with any filters, edits, masks and reports."""
    tokens = lambda most: [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, most))]  # noqa: E731
    row: dict[str, Any] = {"watch": [1, VOCABULARY - 1, 700]}
    kind = chance.choice(["greedy", "beams", "draw", "draw", "draw"])
    if kind == "beams":
        row |= {"beam_width": chance.randint(1, 9), "renormalize": chance.random() < 0.2}
    elif kind == "draw":
        row["draws"] = [chance.random() for _ in range(chance.randint(1, 3))]
        row["temperature"] = chance.choice([0.3, 1.0, 1.7])
        row["top_k"] = chance.choice([0, 0, 1, 5, 40, 300])
        row["top_p"] = chance.choice([1.0, 1.0, 0.2, 0.7, 0.95])
        row["min_p"] = chance.choice([0.0, 0.0, 0.0, 0.05])
        row["typical_p"] = chance.choice([1.0] * 9 + [0.8])
    else:
        row["temperature"] = 0.0
    if chance.random() < 0.3:
        row["num_logprobs"] = chance.choice([0, 1, 5])
    if chance.random() < 0.3:
        row |= {"bias": {token: chance.uniform(-8, 8) for token in tokens(3)}, "ban": tokens(4)}
    if chance.random() < 0.3:
        row |= {"output": tokens(20), "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.1}
    if chance.random() < 0.2:
        row["allow"] = tokens(chance.choice([1, 40, 400]))
    if chance.random() < 0.05:
        row["force"] = tokens(2)
    return row


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_rows(seed: int, ranks: list[Ranks]) -> None:
    chance = random.Random(seed)
    for number in range(15):
        rows = [random_row(chance) for _ in range(chance.randint(1, 20))]
        logits = random_logits(len(rows), VOCABULARY, 100 * seed + number, chance.choice([0.5, 2.0, 6.0]))
        batch = batch_of(rows, VOCABULARY)
        found, whole = divided(ranks, logits, batch)
        assert_equal(found, sample(logits.clone(), batch), batch)
        named = int(needs_whole(batch).sum())
        assert named <= whole <= named + int((batch.table["top_p"] < 1).sum())


def test_rows_do_not_depend_on_others(ranks: list[Ranks]) -> None:
    """To the bit, whichever way others take."""
    chance = random.Random(7)
    rows = [random_row(chance) for _ in range(24)]
    logits = random_logits(len(rows), VOCABULARY, 8, 2.0)
    batch = batch_of(rows, VOCABULARY)
    together, _ = divided(ranks, logits, batch)
    for row in range(len(rows)):
        own = picked(batch, np.array([row]))
        alone, _ = divided(ranks, logits[row : row + 1], own)
        count = int(max(own.table["num_draws"][0], own.table["beam_width"][0]))
        for name in ("tokens", "logprobs", "scores"):
            np.testing.assert_array_equal(getattr(alone, name)[0, :count], getattr(together, name)[row, :count])


def test_rows_that_need_all_logits_after_all(ranks: list[Ranks]) -> None:
    """Top-k whose limit is a tie, and top-p that keeps more tokens than ranks send; a nucleus of few does not."""
    logits = random_logits(4, VOCABULARY, 3)
    logits[0] = (logits[0] * 4).round()
    logits[1] *= 0.01
    logits[2] *= 5.0
    logits[3, 900] = torch.nan
    rows = [{"top_k": 50, "draws": [0.3]}, {"top_p": 0.95, "draws": [0.9]}, {"top_p": 0.9, "draws": [0.5]}, {}]
    batch = batch_of(rows, VOCABULARY)
    assert not needs_whole(batch).any()
    found, whole = divided(ranks, logits, batch)
    assert whole == 2
    assert_equal(found, sample(logits.clone(), batch), batch)
    assert np.isnan(found.logprobs[3]).all()


def test_equal_logits_give_the_lowest_token(ranks: list[Ranks]) -> None:
    logits = torch.zeros(2, VOCABULARY)
    batch = batch_of([{"temperature": 0.0, "num_logprobs": 3}, {"beam_width": 4}], VOCABULARY)
    found, _ = divided(ranks, logits, batch)
    assert found.tokens[0, 0] == 0
    assert found.top_ids[0].tolist() == [0, 1, 2]
    assert found.tokens[1].tolist() == [0, 1, 2, 3]
    logits[:, : VOCABULARY // 2] = -torch.inf  # one rank has nothing else
    found, _ = divided(ranks, logits, replace(batch))
    assert_equal(found, sample(logits.clone(), batch), batch)


def test_rows_without_a_possible_token_fail(ranks: list[Ranks]) -> None:
    """Also if no row of the batch has an edit of a candidate."""
    everything = range(VOCABULARY)
    rows = [{"temperature": 0.0, "ban": everything}, {"top_k": 5, "ban": everything}, {"ban": everything}]
    batch = batch_of([*rows, {"top_p": 0.9, "ban": everything}], VOCABULARY)
    found, _ = divided(ranks, random_logits(4, VOCABULARY, 1), batch)
    assert np.isnan(found.logprobs).all()


@pytest.mark.filterwarnings("error")
def test_a_rank_with_nan_fails_the_row_without_a_warning(ranks: list[Ranks]) -> None:
    logits = random_logits(1, VOCABULARY, 1)
    logits[0, 3], logits[0, 4] = torch.nan, 50.0
    batch = batch_of([{"top_p": 0.9, "temperature": 0.01, "watch": [4]}], VOCABULARY)
    found, _ = divided(ranks, logits, batch)
    assert np.isnan(found.logprobs).all()
