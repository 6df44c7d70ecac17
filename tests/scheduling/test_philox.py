"""The random numbers: the published test vectors, and what sampling relies on."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scheduling.philox import philox4x32, uniforms

# Known-answer vectors of the Random123 library for philox4x32-10: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(*texts: str) -> np.ndarray:
    return np.array([[int(word, 16) for word in text.split()] for text in texts], dtype=np.uint64)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    assert (philox4x32(words(counter), words(key)) == words(expected)).all()


def test_rows_do_not_know_each_other() -> None:
    counters, keys, expected = zip(*VECTORS, strict=True)
    assert (philox4x32(words(*counters), words(*keys)) == words(*expected)).all()


def test_the_input_is_left_alone() -> None:
    counter, key = words(VECTORS[2][0]), words(VECTORS[2][1])
    philox4x32(counter, key)
    assert (counter == words(VECTORS[2][0])).all()
    assert (key == words(VECTORS[2][1])).all()


def test_uniforms_are_made_of_the_first_two_words() -> None:
    first, second = 0x6627E8D5, 0xE169C58D
    assert uniforms([0], [0], [0])[0] == ((first >> 5) * 2**26 + (second >> 6)) / 2**53


def test_uniforms_lie_in_the_unit_interval_and_are_uniform() -> None:
    from scipy import stats

    numbers = uniforms([7] * 20_000, [0] * 20_000, range(20_000))
    assert numbers.dtype == np.float64
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    # Neighbouring positions, choices and seeds are as unlike as any other numbers.
    for other in (
        uniforms([7] * 20_000, [0] * 20_000, range(1, 20_001)),
        uniforms([7] * 20_000, [1] * 20_000, range(20_000)),
        uniforms([8] * 20_000, [0] * 20_000, range(20_000)),
    ):
        assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.03


def test_each_of_seed_choice_and_position_counts() -> None:
    where = [(seed, choice, position) for seed in (0, 1, 2**32, 2**64 - 2) for choice in (0, 1) for position in (0, 1)]
    assert len(set(uniforms(*zip(*where, strict=True)).tolist())) == len(where)


def test_a_negative_seed_is_its_two_s_complement() -> None:
    assert uniforms([-1], [3], [5]) == uniforms([2**64 - 1], [3], [5])


def test_a_number_is_the_same_in_any_batch() -> None:
    together = uniforms([5, 6, 7], [0, 1, 2], [9, 8, 7])
    alone = [uniforms([seed], [choice], [place])[0] for seed, choice, place in ((5, 0, 9), (6, 1, 8), (7, 2, 7))]
    assert together.tolist() == alone
