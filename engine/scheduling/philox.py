"""Random numbers that depend only on their purpose: a counter-based generator.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), vectorised
over rows. Sampling stays reproducible in any batch because no state is shared between rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))

UInt64 = NDArray[np.uint64]


def philox4x32(counter: UInt64, key: UInt64) -> UInt64:
    """Ten rounds of Philox4x32.

    Args:
        counter: [N, 4] 32-bit words held in uint64.
        key: [N, 2] 32-bit words held in uint64.

    Returns:
        [N, 4] 32-bit words held in uint64.
    """
    c0, c1, c2, c3 = (counter[:, i].copy() for i in range(4))
    k0, k1 = key[:, 0].copy(), key[:, 1].copy()
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], purpose: int = 0
) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, choice index, output position). `purpose`: 0 for the
    numbers with which tokens are drawn; numbers for another purpose are independent of them."""
    seed = np.array([s & (2**64 - 1) for s in seeds], dtype=np.uint64)
    key = np.stack((seed & _MASK, seed >> _SHIFT), axis=1)
    counter = np.zeros((len(seed), 4), dtype=np.uint64)
    counter[:, 0] = np.asarray(positions, dtype=np.uint64)
    counter[:, 1] = np.asarray(choices, dtype=np.uint64)
    counter[:, 2] = purpose
    words = philox4x32(counter, key)
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)
    numerators = (high << np.uint64(26)) | low
    return numerators.astype(np.float64) * 2.0**-53
