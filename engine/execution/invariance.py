"""How many rows a matrix product needs so that a row's result does not depend on the others.

Libraries choose another kernel, with another order of summation, for few rows. Above a backend's
threshold every row comes out the same to the bit, whoever else is in the batch; below it the runner
pads. The threshold is measured at start, on the model's own shapes.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

logger = logging.getLogger("octavo.execution")

MOST_ROWS = 32
_TRIED = (*range(1, MOST_ROWS + 1), 48, 64, 100)


def min_invariant_rows(model: nn.Module) -> int:
    """Fewest rows from which on all products with the model's matrices are invariant.

    Returns 1, and says so in the log, where that cannot be promised (GPUs, or no such number up to
    MOST_ROWS).
    """
    weights = {
        (tuple(parameter.shape), parameter.dtype): parameter.detach()
        for parameter in model.parameters()
        if parameter.dim() == 2 and min(parameter.shape) > 1
    }
    if any(w.device.type != "cpu" for w in weights.values()):
        logger.info("matrix products on a GPU: a row's last bits may depend on the batch")
        return 1
    rows = max((_threshold(weight) for weight in weights.values()), default=1)
    if rows > MOST_ROWS:
        logger.warning("matrix products on this CPU: a row's last bits may depend on the batch")
        return 1
    logger.info("matrix products are invariant from %d rows on", rows)
    return rows


@torch.inference_mode()
def _threshold(weight: Tensor) -> int:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_TRIED) + 7, weight.shape[1], generator=generator).to(weight.dtype)
    truth = F.linear(x, weight)
    lowest = MOST_ROWS + 1
    for rows in reversed(_TRIED):
        for offset in (0, 7):
            y = F.linear(x[offset : offset + rows].contiguous(), weight)
            if not torch.equal(y, truth[offset : offset + rows]):
                return lowest
        lowest = rows
    return lowest
