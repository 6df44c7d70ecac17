"""Low-rank adapters (LoRA, arXiv:2106.09685) in the engine's form, independent of the file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from engine.backends.native.adapters import Part


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's addition to one product: `y += x @ down.T @ up.T`."""

    down: Tensor  # [rank, in] float32
    up: Tensor  # [out, rank] float32, including the adapter's scale


LaidOut = LowRank | list[Part]
"""An addition in the form of a GPU's slots, or of a CPU's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter, checked against its model."""

    name: str  # the name that requests send as their model
    path: str  # the folder or file that it came from
    digest: bytes  # a hash of everything that changes answers; adapters with equal digests share cached pages
    # the additions, by the module path of the `Linear` in the model (`model.named_modules()`)
    products: Mapping[str, LowRank]
    # whole parameters of heads from the adapter (`modules_to_save`), by their path in the model
    replaced: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest rank of its products."""
        return max((len(product.down) for product in self.products.values()), default=0)

    @property
    def num_bytes(self) -> int:
        products = [tensor for product in self.products.values() for tensor in (product.down, product.up)]
        return sum(tensor.nbytes for tensor in (*products, *self.replaced.values()))
