"""What tests of attention on a GPU share: batches on any device, outputs in poisoned memory, bounds of rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata, Bias, Paged, Ragged
from engine.backends.attention.formats import FP8, LARGEST, convert, quantise
from engine.backends.torch.attention import TorchReference
from engine.backends.triton.attention import TritonAttention

CPU = torch.device("cpu")


def stored(kv: Paged, dtype: torch.dtype, centred: bool = False) -> Paged:
    """The same pages in another format; what was poison stays poison."""
    if dtype not in LARGEST:
        return replace(kv, keys=convert(kv.keys, dtype), values=convert(kv.values, dtype))
    centre, keys = None, kv.keys.float()
    if centred:
        centre = torch.linspace(-1, 1, keys[0, 0].numel()).view(keys.shape[2:])
        keys = keys - centre
    (keys, key_scales), (values, value_scales) = quantise(keys, dtype), quantise(kv.values, dtype)
    return Paged(keys, values, kv.block_tables, key_scales, value_scales, centre)


def moved(x: Any, device: torch.device) -> Any:
    """A tensor, or a dataclass of some, on a device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, (Paged, Ragged, Bias)):
        return replace(x, **{field.name: moved(getattr(x, field.name), device) for field in fields(x)})
    return x


@contextmanager
def poisoned() -> Iterator[None]:
    """`torch.empty` gives memory with 0xff in each byte: NaN, or -1."""
    real = torch.empty

    def empty(*size: Any, **how: Any) -> Tensor:
        made = real(*size, **how)
        if made.numel():
            made.view(-1).view(torch.uint8).fill_(0xFF)
        return made

    with mock.patch.object(torch, "empty", empty):
        yield


def attend(
    device: torch.device,
    q: Tensor,
    kv: Paged | Ragged,
    lengths: Sequence[int],
    contexts: Sequence[int],
    max_context: int | None = None,
    **how: Any,
) -> Tensor:
    """Results of the kernels, on the CPU; what they write to was poisoned."""
    metadata = AttentionMetadata.build(list(lengths), list(contexts), device)
    if max_context is not None:
        metadata = replace(metadata, max_context=max_context)
    how = {name: moved(value, device) for name, value in how.items()}
    with poisoned():
        out = TritonAttention().attend(moved(q, device), moved(kv, device), metadata, **how)
    return out.cpu()


def assert_close(
    device: torch.device, q: Tensor, kv: Paged | Ragged, lengths: Sequence[int], contexts: Sequence[int], **how: Any
) -> Tensor:
    """The kernels' result, which has to be the reference's but for what formats round.

    Sums in float32 may differ by some units of their last place. In 16 bits each weight is rounded, and so is a result.
    """
    got = attend(device, q, kv, lengths, contexts, **how)
    how.pop("max_context", None)
    metadata = AttentionMetadata.build(list(lengths), list(contexts), CPU)
    want = TorchReference().attend(q.float(), kv, metadata, **how)
    plain = kv if kv.values.dtype != FP8 else replace(kv, values=kv.values.float())
    sizes = TorchReference().attend(q.float(), replace(plain, values=plain.values.abs()), metadata, **how)
    bound = 1e-5 + 3e-5 * sizes
    if q.dtype != torch.float32:
        bound = bound + torch.finfo(q.dtype).eps * (want.abs() / 2 + sizes)
    assert got.dtype == q.dtype
    assert got.shape == q.shape
    apart = (got.float() - want).abs()
    assert bool((apart <= bound).all()), f"{float((apart - bound).nan_to_num(1e9).max())} beyond the bound"
    return got
