"""Attention of whole rows by torch's fused kernel, against plain sums in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata, DistanceBias, Ragged, Window
from engine.backends.torch import attention_encoder as whole
from engine.backends.torch.attention import TorchReference

CPU = torch.device("cpu")
HEADS, DIM, SCALE = 3, 16, 0.3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of the fused path has had."""
    seen: list[int] = []
    attend = whole.attend

    def spy(q: Tensor, *arguments: Any) -> Tensor:
        seen.append(len(q))
        return attend(q, *arguments)

    monkeypatch.setattr(whole, "attend", spy)
    return seen


def heads(tokens: int, seed: int, dim: int = DIM, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, side by side in memory as a projection leaves them."""
    numbers = torch.randn(tokens, 3 * HEADS, dim, generator=torch.Generator().manual_seed(seed))
    q, k, v = numbers.to(dtype).split(HEADS, dim=1)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, lens: Sequence[int], **how: Any) -> Tensor:
    metadata = AttentionMetadata.build(list(lens), list(lens), CPU)
    how = {"causal": False, "scale": SCALE} | how
    return TorchReference().attend(q, Ragged(k, v, metadata.query_start[:-1]), metadata, **how)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One row in float64."""
    a, b, c = (x.double().transpose(0, 1) for x in (q, k, v))
    return (torch.softmax(SCALE * a @ b.transpose(1, 2), -1) @ c).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_mixed_lengths(dtype: torch.dtype, calls: list[int]) -> None:
    lens = [5, 1, 0, 300, 5, 64, 2, 129, 5]
    q, k, v = heads(sum(lens) + 7, 0, dtype=dtype)
    found = attend(q, k, v, lens)
    assert calls == [len(q)]
    assert found.dtype == dtype
    start = 0
    for length in lens:
        row = slice(start, start + length)
        exact = plain(q[row], k[row], v[row])
        # In bfloat16 only the result is rounded.
        near = {"rtol": 2**-8, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
        torch.testing.assert_close(found[row].double(), exact, **near)  # type: ignore[arg-type]
        start += length
    assert not found[start:].any(), "what pads the batch gets zeros"


def test_more_keys_than_queries(calls: list[int]) -> None:
    """Rows whose keys lie elsewhere, in another order, and one without keys."""
    q, k, v = heads(30, 1)
    metadata = AttentionMetadata.build([2, 3, 2, 4], [9, 0, 9, 7], CPU)
    starts = torch.tensor([20, 0, 0, 9], dtype=torch.int32)
    found = TorchReference().attend(q[:11], Ragged(k, v, starts), metadata, causal=False, scale=SCALE)
    assert calls == [11]
    for (a, b), (c, d) in [((0, 2), (20, 29)), ((5, 7), (0, 9)), ((7, 11), (9, 16))]:
        torch.testing.assert_close(found[a:b].double(), plain(q[a:b], k[c:d], v[c:d]), rtol=1e-5, atol=2e-6)
    assert not found[2:5].any()


def test_a_row_has_the_same_bits_in_any_batch(calls: list[int]) -> None:
    """Alone, and at any place among rows of its own and of other lengths."""
    rng = random.Random(0)
    lengths = [*range(1, 66), 96, 127, 128, 129, 191, 192, 193, 300]
    rows = {length: heads(length, length) for length in lengths}
    alone = {length: attend(*rows[length], [length]) for length in lengths}
    for seed in range(6):
        chosen = rng.choices(lengths, k=40) + lengths[seed::6]
        rng.shuffle(chosen)
        batch = [torch.cat([rows[length][part] for length in chosen]) for part in range(3)]
        together = torch.split(attend(*batch, chosen), chosen)  # type: ignore[arg-type]
        assert all(torch.equal(found, alone[length]) for found, length in zip(together, chosen, strict=True))
        assert len(set(chosen)) < len(chosen)
    assert len(calls) == len(lengths) + 6


def test_no_row_sees_another(calls: list[int]) -> None:
    q, k, v = heads(12, 2)
    expected = attend(q, k, v, [4, 4, 4])
    for x in (q, k, v):
        x[4:8] = torch.nan
    found = attend(q, k, v, [4, 4, 4])
    assert len(calls) == 2
    assert found[4:8].isnan().all()
    assert torch.equal(found[:4], expected[:4])
    assert torch.equal(found[8:], expected[8:])


def test_all_layers_of_a_step_share_the_index(calls: list[int]) -> None:
    q, k, v = heads(8, 3)
    metadata = AttentionMetadata.build([3, 5], [3, 5], CPU)
    for _ in range(2):
        kv = Ragged(k, v, metadata.query_start[:-1])
        TorchReference().attend(q, kv, metadata, causal=False, scale=SCALE)
    assert len(metadata.cache) == 1


@pytest.mark.parametrize(
    ("dim", "how"),
    [
        (12, {}),
        (16, {"causal": True}),
        (16, {"window": Window(2, 2)}),
        (16, {"softcap": 20.0}),
        (16, {"bias": DistanceBias(torch.zeros(HEADS, 9), 4)}),
    ],
    ids=["unaligned heads", "causal", "window", "softcap", "bias"],
)
def test_all_else_goes_through_tiles(dim: int, how: dict[str, Any], calls: list[int]) -> None:
    q, k, v = heads(9, 4, dim)
    attend(q, k, v, [4, 5], **how)
    assert calls == []


def test_too_few_queries_are_refused_as_elsewhere() -> None:
    q, k, v = heads(9, 5)
    with pytest.raises(ValueError, match="q has 9 tokens, the rows have 10 queries"):
        attend(q, k, v, [4, 6])
