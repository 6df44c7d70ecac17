"""How many rows a matrix product needs so that a row's result does not depend on the others.

Libraries choose another kernel, with another order of summation, for few rows. Above a backend's
threshold every row comes out the same to the bit, whoever else is in the batch; below it the runner
pads. The threshold is measured at start, on the model's own shapes.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from engine.model.layers import Linear

logger = logging.getLogger("octavo.execution")

MOST_ROWS = 32
_TRIED = (*range(1, MOST_ROWS + 1), 48, 64, 100)


def min_invariant_rows(model: nn.Module) -> int:
    """Fewest rows from which on all products with the model's matrices are invariant.

    Returns 1, and says so in the log, where that cannot be promised (GPUs, or no such number up to
    MOST_ROWS).
    """
    products: dict[tuple[int, int, torch.dtype], nn.Module] = {}
    for module in model.modules():
        if isinstance(module, Linear):
            products[module.inputs, module.outputs, module.weight.dtype] = module
    if any(next(product.parameters()).device.type != "cpu" for product in products.values()):
        logger.info("matrix products on a GPU: a row's last bits may depend on the batch")
        return 1
    rows = max((_threshold(product, key[0], key[2]) for key, product in products.items()), default=1)
    if rows > MOST_ROWS:
        logger.warning("matrix products on this CPU: a row's last bits may depend on the batch")
        return 1
    logger.info("matrix products are invariant from %d rows on", rows)
    return rows


@torch.inference_mode()
def _threshold(product: nn.Module, inputs: int, dtype: torch.dtype) -> int:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_TRIED) + 7, inputs, generator=generator).to(dtype)
    truth = product(x)
    lowest = MOST_ROWS + 1
    for rows in reversed(_TRIED):
        for offset in (0, 7):
            y = product(x[offset : offset + rows].contiguous())
            if not torch.equal(y, truth[offset : offset + rows]):
                return lowest
        lowest = rows
    return lowest
