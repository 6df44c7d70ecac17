"""The number of rows that a matrix product needs so that a row's result does not depend on the others.

For few rows, libraries choose another kernel with another order of summation. Above a backend's threshold, every row
has the same bits whatever else is in the batch; below it, the runner pads. The threshold is measured at start, with the
model's shapes. Octavo's own kernels have none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from engine.model.experts import ExpertMatrices
from engine.model.layers import Linear

logger = logging.getLogger("octavo.execution")

MOST_ROWS = 32
_TRIED = (*range(1, MOST_ROWS + 1), 48, 64, 100)
_LARGE = 2**26
_WIDE, _MOST_REPEATS = 1024, 16

# Thresholds by the values from which a library chooses its kernel, so that a process measures each once.
_measured: dict[tuple[object, ...], int] = {}


def min_invariant_rows(model: nn.Module) -> int:
    """The smallest number of rows from which on all products with the model's matrices are invariant.

    Returns 1, and logs it, if that cannot be promised (for GPUs, or if there is no such number up to MOST_ROWS).
    """
    threads = torch.get_num_threads()
    thresholds = [1]
    for module in model.modules():
        if isinstance(module, Linear | ExpertMatrices):
            if module.weight.device.type != "cpu":
                logger.info(
                    "On a GPU, the last bits of an answer's log-probabilities may depend on other requests in the "
                    "batch."
                )
                return 1
            if _is_invariant(module):
                continue
            shape = (module.inputs, module.outputs, module.weight.dtype)
            kernel = (*shape, type(module), module.packed is None, threads)
            if kernel not in _measured:
                product = partial(module, expert=0) if isinstance(module, ExpertMatrices) else module
                _measured[kernel] = _threshold(product, *shape)
            thresholds.append(_measured[kernel])
    rows = max(thresholds)
    if rows > MOST_ROWS:
        logger.warning(
            "On this CPU, the last bits of an answer's log-probabilities may depend on other requests in the batch."
        )
        return 1
    logger.debug("matrix products are independent of the batch from %d rows on", rows)
    return rows


def _is_invariant(module: Linear | ExpertMatrices) -> bool:
    """Whether all kernels of this module are invariant by design, so that nothing has to be measured."""
    packed = module.packed if isinstance(module.packed, list) else [module.packed]
    return all(product is not None and product.invariant for product in packed)


@torch.inference_mode()
def _threshold(product: Callable[[Tensor], Tensor], inputs: int, outputs: int, dtype: torch.dtype) -> int:
    """The smallest number of rows from which on a product is invariant; MOST_ROWS + 1 if there is none.

    Kernels often differ in only a few rows, so each count is tried on many: on most for small counts, where kernels
    change, and on fewer if a product is so large that it takes long. Narrow products, such as those of routers, are
    quick and show a difference in fewer rows, so they are tried on more rows.
    """
    generator = torch.Generator().manual_seed(0)
    repeats = min(max(_WIDE // outputs, 1), _MOST_REPEATS)
    x = torch.randn(max(64 * repeats, max(_TRIED)), inputs, generator=generator).to(dtype)
    truth = torch.cat([product(part) for part in torch.split(x, max(_TRIED))])
    lowest = MOST_ROWS + 1
    for rows in reversed(_TRIED):
        samples = (64 if rows <= 4 and inputs * outputs <= _LARGE else 32) * repeats
        for start in range(0, max(samples - rows, 0) + 1, rows):
            if not torch.equal(product(x[start : start + rows].clone()), truth[start : start + rows]):
                return lowest
        lowest = rows
    return lowest
