"""Low-rank adapters (LoRA, arXiv:2106.09685) as the engine holds them, whatever file they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The addition of an adapter to one product: `y += x @ down.T @ up.T`.

    Attributes:
        down: [rank, in] float32.
        up: [out, rank] float32; the adapter's scale is already in it.
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter, checked against the model that it was read for.

    Attributes:
        name: requests name it as their model.
        path: the folder or file that it came from.
        digest: a hash of everything that changes answers; adapters with equal digests share cached pages.
        products: the additions, by the module path of the `Linear` in the model (`model.named_modules()`).
        replaced: parameters of heads that the adapter brings whole (`modules_to_save`), by their path in the model.
    """

    name: str
    path: str
    digest: bytes
    products: Mapping[str, LowRank]
    replaced: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest rank of its products."""
        return max((len(product.down) for product in self.products.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        products = [tensor for product in self.products.values() for tensor in (product.down, product.up)]
        return sum(tensor.nbytes for tensor in (*products, *self.replaced.values()))
