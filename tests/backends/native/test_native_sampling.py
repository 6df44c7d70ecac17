"""What sampling asks of rows of logits, against float64 and sorting, for each instruction set that the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.native import each_isa, kernels_of, needs_native
from test_sampler import batch_of
from torch import Tensor

from engine.backends import native
from engine.backends.native.build import SOURCES
from engine.backends.native.sampling import LogitRows
from engine.execution import sampler, sampler_torch
from engine.interface.sampling_table import EDIT, TABLE, EditList, Kind, Table, neutral_rows
from engine.scheduling.plan import PromptLogprobRows, StepResult

pytestmark = needs_native
few = settings(max_examples=40, deadline=None, derandomize=True)
SIZES = st.one_of(st.integers(1, 200), st.sampled_from([1000, 4095, 4096, 4097, 8200, 13_001]))


def int32(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@st.composite
def logits(draw: st.DrawFn, sizes: st.SearchStrategy[int] = SIZES) -> Tensor:
    """Rows [1 to 5, size] that lie apart, with NaN between them: peaked or flat, with ties, with -inf."""
    rows, size = draw(st.integers(1, 5)), draw(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    values = torch.randn(rows, size, generator=generator) * draw(st.sampled_from([0.0, 0.1, 1.5, 6.0]))
    values += draw(st.sampled_from([0.0, -300.0, 40.0]))
    if draw(st.booleans()):
        values = (values * 2).round() / 2
    if draw(st.booleans()):
        values[torch.rand(rows, size, generator=generator) < draw(st.sampled_from([0.05, 0.9]))] = -torch.inf
        values[:, size // 2] = 1.0
    wide = torch.full((rows, size + draw(st.sampled_from([0, 3]))), torch.nan)
    wide[:, :size] = values
    return wide[:, :size]


def by_rank(row: np.ndarray) -> np.ndarray:
    """Columns from the largest down, equal ones from the left."""
    return np.lexsort((np.arange(len(row)), -row))


# ------------------------------------------------------------------ the walk, the best, ranks


@each_isa
@few
@given(rows=logits(), threads=st.sampled_from([1, 2]))
def test_peaks_and_sums(isa: str, rows: Tensor, threads: int) -> None:
    with kernels_of(isa, threads):
        found = LogitRows(rows)
        tokens = int32([[0, rows.shape[1] - 1]] * len(rows))
        logprobs = found.logprobs(tokens)
    assert (found.peak == rows.numpy().max(axis=1)).all()
    assert (found.place == rows.numpy().argmax(axis=1)).all()
    wanted = rows.double().log_softmax(dim=1).numpy()
    assert np.allclose(
        found.log_sum, rows.double().sub(rows.amax(1, keepdim=True)).exp().sum(1).log(), rtol=0, atol=2e-6
    )
    assert np.allclose(logprobs, wanted[:, [0, -1]], rtol=1e-6, atol=2e-6)


@each_isa
@pytest.mark.parametrize("size", [1, 15, 64, 100, 4096, 9000])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_numbers_are_known(isa: str, size: int, bad: float) -> None:
    """Wherever the culprit is; the rows beside it are as they were."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4, size, generator=generator)
    rows[3] = -torch.inf
    everyone, counts = np.arange(4, dtype=np.int32), int32([min(size, 3)] * 4)
    with kernels_of(isa):
        clean = LogitRows(rows)
        for place in {0, size // 2, size - 1}:
            spoilt = rows.clone()
            spoilt[1, place] = bad
            found = LogitRows(spoilt)
            assert np.isnan(found.log_sum).tolist() == [False, True, False, True]
            assert (found.log_sum[[0, 2]] == clean.log_sum[[0, 2]]).all()
            assert found.place[1] == 0
            best, scores = found.best(everyone, counts, 3)
            assert np.isnan(scores[[1, 3], : min(size, 3)]).all()
            assert np.isfinite(scores[[0, 2], : min(size, 3)]).all()
            assert ((best >= 0) & (best < size)).all()
            assert np.isnan(found.logprobs(int32([[0]] * 4))[[1, 3]]).all()


@each_isa
@few
@given(rows=logits(), threads=st.sampled_from([1, 2]), data=st.data())
def test_the_best_are_those_of_a_sort(isa: str, rows: Tensor, threads: int, data: st.DataObject) -> None:
    size = rows.shape[1]
    chosen = int32(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4)))
    number = st.one_of(st.integers(1, 10), st.integers(1, 2 * size))
    counts = int32([data.draw(number) for _ in chosen])
    width = min(int(counts.max()), size) + data.draw(st.sampled_from([0, 2]))
    with kernels_of(isa, threads):
        tokens, scores = LogitRows(rows).best(chosen, counts, width)
    own = rows.double().log_softmax(dim=1).numpy()
    for i, (row, count) in enumerate(zip(chosen, np.minimum(counts, size), strict=True)):
        wanted = by_rank(rows[row].numpy())[:count]
        assert tokens[i, :count].tolist() == wanted.tolist()
        assert np.allclose(scores[i, :count], own[row, wanted], rtol=1e-6, atol=2e-6)
        assert (scores[i, count:] == -np.inf).all()


@each_isa
@few
@given(rows=logits(), data=st.data())
def test_ranks_count_what_is_larger(isa: str, rows: Tensor, data: st.DataObject) -> None:
    tokens = int32([[data.draw(st.integers(0, rows.shape[1] - 1)) for _ in range(3)] for _ in rows])
    with kernels_of(isa, 2):
        found = LogitRows(rows).ranks(np.arange(len(rows), dtype=np.int32), tokens)
    values = rows.numpy()
    for i, row in enumerate(tokens):
        assert found[i].tolist() == [int((values[i] > values[i, token]).sum()) + 1 for token in row]


# ------------------------------------------------------------------ draws


@dataclass(frozen=True, slots=True)
class Filters:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def table(self, draws: int) -> Table:
        return neutral_rows(1, num_draws=draws, **asdict(self))


def weights_of(row: Tensor, temperature: float) -> np.ndarray:
    scaled = (row / torch.tensor(temperature, dtype=torch.float32)).double().numpy()
    found: np.ndarray = np.exp(scaled - scaled.max())
    return found


@st.composite
def filtered(draw: st.DrawFn) -> tuple[Tensor, Filters, np.ndarray]:
    """A row, filters of which none is so close to a weight that rounding decides, and the weights that they leave."""
    row = draw(logits())[0]
    temperature = draw(st.sampled_from([1.0, 0.7, 0.05, 3.0, 1e6]))
    whole = weights_of(row, temperature)
    scaled = (row / torch.tensor(temperature, dtype=torch.float32)).numpy()
    order = by_rank(scaled)
    kept = np.ones(len(row), dtype=bool)
    top_k, top_p, min_p = 0, 1.0, 0.0
    among = len(row)
    if draw(st.booleans()):
        top_k = draw(st.integers(1, len(row) + 2))
        among = min(top_k, among)
        kept &= scaled >= scaled[order[among - 1]]
    if draw(st.booleans()):
        reached = whole[order[:among]].cumsum()
        reached = np.concatenate(([0.0], reached / reached[-1]))
        last = draw(st.integers(0, among - 1))
        assume(reached[last + 1] - reached[last] > 1e-5)
        top_p = float((reached[last] + reached[last + 1]) / 2)
        assume(top_p < 1 - 1e-6)
        kept &= scaled >= scaled[order[last]]
    if draw(st.booleans()):
        distinct = np.unique(whole)
        at = draw(st.integers(0, len(distinct) - 1))
        below = distinct[at - 1] if at else 0.0
        assume(distinct[at] > 1e-30 and distinct[at] > below * (1 + 1e-4))
        min_p = float((below + distinct[at]) / 2)
        kept &= whole >= min_p
    return row, Filters(temperature, top_k, top_p, min_p), np.where(kept, whole, 0.0)


@pytest.mark.slow
@each_isa
@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=filtered(), threads=st.sampled_from([1, 2]))
def test_filters_leave_the_right_tokens_in_their_order(
    isa: str, case: tuple[Tensor, Filters, np.ndarray], threads: int
) -> None:
    """A uniform number in the middle of a token's interval gives this token; 0 and nearly 1 the first and the last."""
    row, filters, weights = case
    probabilities = weights / weights.sum()
    tokens = np.flatnonzero(probabilities > 1e-5)
    tokens = tokens[:: max(1, len(tokens) // 50)]
    assume(len(tokens))
    middle = (probabilities.cumsum() - probabilities / 2)[tokens]
    with kernels_of(isa, threads):
        uniforms = np.append(middle, [0.0, np.nextafter(1.0, 0)])[None]
        found, _ = LogitRows(row[None]).draw(int32([0]), filters.table(uniforms.size), uniforms)
    assert found[0, :-2].tolist() == tokens.tolist()
    assert weights[found[0, -2:]].min() > 0
    possible = np.flatnonzero(weights > 1e-30)
    assert found[0, -2] <= possible[0]


@each_isa
def test_all_tokens_are_asked_only_for_a_wide_nucleus(isa: str) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(4, 32_003, generator=generator) * torch.tensor([[0.3], [6.0], [0.3], [0.0]])
    everyone = np.arange(4, dtype=np.int32)
    uniforms = np.linspace(0, 1, 40, endpoint=False)[None].repeat(4, axis=0)
    with kernels_of(isa, 2):
        tokens, wide = LogitRows(rows).draw(
            everyone,
            neutral_rows(4, top_k=[0, 0, 40, 0], top_p=[0.9, 0.9, 0.9, 0.5], num_draws=40),
            uniforms,
        )
    assert wide.tolist() == [1, 0, 0, 1]
    for row in (0, 1):
        weights = weights_of(rows[row], 1.0)
        order = by_rank(rows[row].numpy())
        before = weights[order].cumsum() - weights[order]
        cut = order[before < np.float64(np.float32(0.9)) * weights.sum()]
        kept = np.zeros(rows.shape[1])
        kept[cut] = weights[cut]
        wanted = np.searchsorted(kept.cumsum(), uniforms[row] * kept.sum(), side="right")
        assert tokens[row].tolist() == wanted.tolist()
    assert tokens[3].tolist() == np.floor(uniforms[3] * rows.shape[1]).astype(int).tolist()  # all are equal, and stay


@pytest.mark.parametrize("scale", [0.3, 6.0])
def test_torch_sorts_all_tokens_only_for_a_wide_nucleus(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(3, 5001, generator=torch.Generator().manual_seed(3)) * scale
    batch = batch_of([{"top_p": 0.9, "draws": [0.1, 0.5, 0.9]}, {"top_p": 0.8, "top_k": 20}, {"top_p": 1.0}])
    sorted_rows: list[int] = []
    real = Tensor.sort

    def sort(values: Tensor, *arguments: Any, **options: Any) -> Any:
        sorted_rows.append(len(values))
        return real(values, *arguments, **options)

    monkeypatch.setattr(Tensor, "sort", sort)
    with native.use(None):
        alone = sampler.sample(rows, batch)
    assert sorted_rows == ([1] if scale < 1 else [])
    ours = sampler.sample(rows, batch)
    assert (alone.tokens[0] == ours.tokens[0]).all()
    assert (alone.tokens[1:, 0] == ours.tokens[1:, 0]).all()


# ------------------------------------------------------------------ edits


def edits_of(entries: list[tuple[int, int, Kind, float]]) -> EditList:
    return np.array(sorted(entries, key=lambda entry: (entry[0], entry[2])), dtype=EDIT)


def penalties_of(rows: int) -> Table:
    number = np.arange(rows)
    return neutral_rows(
        rows, repetition_penalty=1.25 + number, frequency_penalty=0.5 * number, presence_penalty=0.75 - number
    )


def naive_edit(row: np.ndarray, number: int, edits: EditList, table: Table) -> np.ndarray:
    """Token after token, in float32."""
    row = row.copy()
    one = np.float32(1)

    def of(kind: Kind) -> Iterator[tuple[int, np.float32]]:
        for edit in edits:
            if edit["row"] == number and edit["kind"] == kind and 0 <= edit["token"] < len(row):
                yield int(edit["token"]), edit["value"]

    for token, value in of(Kind.BIAS):
        row[token] += value
    for token, reward in of(Kind.SOURCE):
        row[token] = row[token] * reward if row[token] < 0 else row[token] / reward
    repetition, frequency, presence = (
        table[number][f"{name}_penalty"] for name in ("repetition", "frequency", "presence")
    )
    seen = list(of(Kind.HISTORY))
    for token in {token for token, _ in seen}:
        outputs = sum(one for other, value in seen if other == token and value > 0)
        score = row[token] * repetition if row[token] < 0 else row[token] / repetition
        row[token] = score - (frequency * np.float32(outputs) + presence * np.float32(outputs > 0))
    for token, value in of(Kind.DRY):
        row[token] -= value
    for token, _ in of(Kind.BAN):
        row[token] = -np.inf
    return row


@each_isa
@few
@given(rows=logits(st.integers(1, 300)), data=st.data())
def test_edits_are_made_in_their_order_and_taken_back(isa: str, rows: Tensor, data: st.DataObject) -> None:
    count, size = rows.shape
    token = st.integers(0, size + 2)  # some are outside
    row = st.integers(0, count - 1)
    entries: list[tuple[int, int, Kind, float]] = []
    for kind, value, most, unique in (
        (Kind.BIAS, st.floats(-50, 50, width=32), 12, False),
        (Kind.SOURCE, st.floats(0.25, 4, width=32), 12, True),
        (Kind.HISTORY, st.sampled_from([0.0, 1.0]), 60, False),
        (Kind.DRY, st.floats(0, 50, width=32), 12, True),
        (Kind.BAN, st.just(0.0), 12, False),
    ):
        item, by = st.tuples(row, token, st.just(kind), value), (lambda entry: entry[:2]) if unique else None
        entries += data.draw(st.lists(item, max_size=most, unique_by=by))
    edits, table = edits_of(entries), penalties_of(count)
    apart = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    before = rows.clone()
    everyone, wanted = np.arange(count, dtype=np.int32), int32([data.draw(st.integers(1, size)) for _ in range(count)])
    with kernels_of(isa, 2):
        found = LogitRows(rows)
        clean = found.best(everyone, int32([size] * count), size)
        own = found.logprobs(np.arange(size, dtype=np.int32)[None].repeat(count, axis=0))
        with found.edited(edits, table, apart):
            best, scores = found.best(everyone, wanted, size)
            seen = found.values.copy()
            placed = own.copy()
            for i in everyone:
                found.put(int(i), placed[i])
        again = found.best(everyone, int32([size] * count), size)
    assert torch.equal(rows, before)
    assert clean[0].tobytes() == again[0].tobytes()
    assert clean[1].tobytes() == again[1].tobytes()
    for i in range(count):
        expected = naive_edit(own[i] if apart[i] else before[i].numpy(), i, edits, table)
        if apart[i]:
            assert placed[i].tobytes() == expected.tobytes()
            assert np.sort(-expected)[: wanted[i]].tolist() == (-scores[i, : wanted[i]]).tolist()
            assert (expected[best[i, : wanted[i]]] == scores[i, : wanted[i]]).all()
        else:
            assert (seen[i] == expected).all()
            assert best[i, : wanted[i]].tolist() == by_rank(expected)[: wanted[i]].tolist()
        assert len(set(best[i, : wanted[i]].tolist())) == wanted[i]


# ------------------------------------------------------------------ alone, in a crowd, by torch


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "num_logprobs": 4},
    {"draws": [0.1, 0.7]},
    {"temperature": 0.7, "top_k": 30, "draws": [0.4], "num_logprobs": 0},
    {"temperature": 0.7, "top_k": 30, "top_p": 0.8, "draws": [0.4]},
    {"top_p": 0.95, "draws": [0.2, 0.8]},
    {"min_p": 0.02, "top_p": 0.99, "draws": [0.6]},
    {"beam_width": 8, "num_logprobs": 2},
    {"beam_width": 8, "ban": [0, 1], "repetition_penalty": 1.3, "prompt": [3, 4], "output": [5, 5]},
    {"beam_width": 5, "renormalize": True, "ban": [2]},
    {"beam_width": 4, "force": [6]},
    {"force": [7, 3], "draws": [0.2, 0.9]},
    {"temperature": 0.0, "bias": {2: 30.0}, "ban": [2]},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "output": [1, 1, 8], "draws": [0.3]},
    {"beam_width": 6, "source_reward": 1.5, "source": [1, 2, 3]},
]


def used(result: StepResult, i: int, row: dict[str, Any]) -> dict[str, np.ndarray]:
    """What row i may use of a result."""
    columns = min(row.get("beam_width", len(row.get("draws", [0]))), result.tokens.shape[1])
    number = max(row.get("num_logprobs", -1), 0)
    found = {name: getattr(result, name)[i, :columns] for name in ("tokens", "scores", "logprobs")}
    found |= {name: getattr(result, name)[i, :number] for name in ("top_ids", "top_logprobs")}
    if "num_logprobs" in row:
        found["ranks"] = result.ranks[i, :columns]
    return found


@each_isa
@pytest.mark.parametrize("size", [50, 4099, 32_003])
@pytest.mark.parametrize("ties", [False, True])
def test_rows_are_to_the_bit_what_they_are_alone_with_any_number_of_threads(isa: str, size: int, ties: bool) -> None:
    rows = torch.randn(len(KINDS), size, generator=torch.Generator().manual_seed(4)) * 2
    if ties:
        rows = (rows * 4).round() / 4
    with kernels_of(isa, 2):
        crowd = sampler.sample(rows, batch_of(KINDS))
    with kernels_of(isa, 1):
        for i, row in enumerate(KINDS):
            alone = used(sampler.sample(rows[i : i + 1], batch_of([row])), 0, row)
            for name, values in used(crowd, i, row).items():
                assert values.tobytes() == alone[name].tobytes(), (name, row)
    with kernels_of(isa, 2):
        single = sampler.sample(rows[:1], batch_of(KINDS[:1]))
    assert single.logprobs.tobytes() == crowd.logprobs[:1, :1].tobytes()


@each_isa
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_the_sampler_chooses_what_torch_chooses(isa: str, data: st.DataObject, seed: int) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    size = data.draw(st.sampled_from([20, 1000, 33_000]))
    scale = data.draw(st.sampled_from([0.5, 2.0, 8.0]))
    rows = torch.randn(len(kinds), size, generator=torch.Generator().manual_seed(seed)) * scale
    with kernels_of(isa, 2):
        ours = sampler.sample(rows, batch_of(kinds))
    theirs = sampler_torch.sample(rows, batch_of(kinds))
    for i, row in enumerate(kinds):
        mine, other = used(ours, i, row), used(theirs, i, row)
        possible = ~(np.isnan(other["logprobs"]))
        assert (np.isnan(mine["logprobs"]) == ~possible).all()
        for name, values in mine.items():
            wanted = other[name]
            if name in ("tokens", "scores", "logprobs", "ranks"):
                values, wanted = values[possible], wanted[possible]
            assert np.allclose(values, wanted, rtol=2e-6, atol=2e-6), (name, row)


@each_isa
def test_prompts_are_scored_as_by_torch(isa: str) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, head = torch.randn(150, 12, generator=generator), torch.randn(12, 3001, generator=generator)
    rows = PromptLogprobRows(
        rows=np.arange(150, dtype=np.int32),
        targets=int32(np.arange(150) * 19),
        num_logprobs=int32(np.arange(150) % 4),
    )
    with kernels_of(isa, 2):
        ours = sampler.score_prompt(lambda x: x @ head, hidden, rows).result()
    with native.use(None):
        theirs = sampler.score_prompt(lambda x: x @ head, hidden, rows).result()
    assert (ours.ranks == theirs.ranks).all()
    assert np.allclose(ours.logprobs, theirs.logprobs, rtol=2e-6, atol=2e-6)
    for i in range(150):
        assert (ours.top_ids[i, : i % 4] == theirs.top_ids[i, : i % 4]).all()
        assert np.allclose(ours.top_logprobs[i, : i % 4], theirs.top_logprobs[i, : i % 4], rtol=2e-6, atol=2e-6)


def test_rows_of_the_table_are_what_the_kernels_take_them_for() -> None:
    """Names and types of the twin in C++, in their order."""
    source = (SOURCES / "sampling_draw.cpp").read_text(encoding="utf-8")
    body = source.partition("struct Row {")[2].partition("};")[0]
    kinds = {"int64_t": np.int64, "int32_t": np.int32, "float": np.float32}
    found = [
        (name.strip(), np.dtype(kinds[line.split()[0]]))
        for line in body.replace("\n", " ").split(";")
        if line.strip()
        for name in line.strip().partition(" ")[2].split(",")
    ]
    assert found == [(name, TABLE[name]) for name in TABLE.names or ()]


def test_what_does_not_fit_is_refused() -> None:
    for wrong in (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3), torch.zeros(2, 0)):
        with pytest.raises(ValueError, match="must be rows of float32 on a CPU"):
            LogitRows(wrong)
    with pytest.raises(ValueError, match="expected int32"):
        LogitRows(torch.zeros(2, 3)).best(np.zeros(1, dtype=np.int64), int32([1]), 1)
    twice = torch.randn(1, 70).expand(3, 70)  # rows in the same memory
    found = LogitRows(twice)
    with found.edited(edits_of([(1, 5, Kind.BAN, 0.0)]), penalties_of(3), np.zeros(3, dtype=np.bool_)):
        assert np.isfinite(found.values[[0, 2]]).all()
        assert found.values[1, 5] == -np.inf
