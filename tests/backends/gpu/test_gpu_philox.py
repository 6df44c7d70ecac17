"""The device's random numbers are those of `engine.scheduling.philox`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl
from support.gpu import kernels
from test_philox import VECTORS, words

from engine.backends.triton import philox
from engine.scheduling.philox import uniforms


@triton.jit
def _words(counter, key, out):
    c0, c1, c2, c3 = tl.load(counter), tl.load(counter + 1), tl.load(counter + 2), tl.load(counter + 3)
    o0, o1, o2, o3 = philox.philox4x32(
        c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32),
        tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32),
    )  # fmt: skip
    tl.store(out, o0.to(tl.int64))
    tl.store(out + 1, o1.to(tl.int64))
    tl.store(out + 2, o2.to(tl.int64))
    tl.store(out + 3, o3.to(tl.int64))


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    with kernels() as device:
        given_counter, given_key = (
            torch.from_numpy(words(text)[0].astype(np.int64)).to(device) for text in (counter, key)
        )
        out = torch.full((4,), -1, dtype=torch.int64, device=device)
        _words[(1,)](given_counter, given_key, out)
    assert out.cpu().tolist() == words(expected)[0].tolist()


SEEDS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.sampled_from([0, 1, -1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]))
PLACES = st.one_of(st.integers(0, 50), st.integers(0, 2**31 - 1))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(rows=st.lists(st.tuples(SEEDS, PLACES, PLACES), min_size=1, max_size=300))
def test_numbers_are_the_host_s_to_the_bit(rows: list[tuple[int, int, int]]) -> None:
    seeds, choices, positions = zip(*rows, strict=True)
    bits = np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64).view(np.int64)
    with kernels() as device:
        made = philox.uniforms(
            torch.from_numpy(bits).to(device),
            torch.tensor(choices, dtype=torch.int32, device=device),
            torch.tensor(positions, dtype=torch.int32, device=device),
        )
    assert made.cpu().numpy().tobytes() == uniforms(seeds, choices, positions).tobytes()


def test_there_may_be_no_number_to_make() -> None:
    with kernels() as device:
        nothing = torch.zeros(0, dtype=torch.int32, device=device)
        assert philox.uniforms(nothing.long(), nothing, nothing).shape == (0,)
