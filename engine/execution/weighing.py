"""Masks that depend on how likely tokens are: made before anything is sampled, by torch on any device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.interface.sampling_table import Masks
from engine.scheduling.plan import SamplingBatch


def weighed(logits: Tensor, batch: SamplingBatch) -> SamplingBatch:
    """The batch with masks that need no weighing (`engine.interface.constraints.Weighing`); the batch itself if its
    masks need none.

    The model's own logits [S, vocabulary] are compared, before other edits: tokens that a batch bans otherwise should
    also be banned in its masks. A row's answer depends on that row alone.
    """
    chosen = np.flatnonzero(batch.outweighed >= 0)
    if not len(chosen):
        return batch
    masks = batch.masks.copy()
    for first in np.unique(batch.outweighed[chosen]).tolist():
        places = np.flatnonzero(batch.outweighed == first)
        rows = logits[torch.from_numpy(batch.masked[places].astype(np.int64)).to(logits.device)].float()
        allowed = _bits(masks[places], rows.shape[1])
        rows.masked_fill_(~torch.from_numpy(allowed).to(rows.device), float("-inf"))
        best = rows[:, :first].amax(dim=1).double().cpu().numpy()
        together = _log_sum(rows[:, first:].double().cpu().numpy())
        outweighed = places[together > best]
        below = np.zeros((1, masks.shape[1] * 32), dtype=np.uint8)
        below[:, :first] = 1
        masks[outweighed] &= ~np.packbits(below, axis=1, bitorder="little").view(np.uint32)
    return replace(batch, masks=masks)


def _bits(masks: Masks, vocabulary: int) -> np.ndarray:
    """Masks as booleans [M, vocabulary]."""
    return np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :vocabulary].astype(bool)


def _log_sum(values: np.ndarray) -> np.ndarray:
    """Logarithms of the rows' sums of exponentials; -inf for a row that only has -inf."""
    most = values.max(axis=1, initial=-np.inf)
    shift = np.where(np.isfinite(most), most, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(values - shift[:, None]).sum(axis=1)) + shift)
