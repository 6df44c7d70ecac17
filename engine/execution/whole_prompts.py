"""Whether torch's flash attention computes long whole prompts: found out at start, by trying it.

It is requested with `EngineConfig.flash_prefill`, and replaces Octavo's kernels only if a model's attention is of its
kind and its results, on random rows in scattered pages, agree with theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionBackend, AttentionMetadata, Paged
from engine.backends.triton import attention_flash
from engine.backends.triton.attention import TritonAttention
from engine.backends.triton.attention_flash import FlashPrompts, HeadShape
from engine.model.attention_operations import Attend
from engine.model.layers import SelfAttention
from engine.model.transformer import Transformer

logger = logging.getLogger("octavo.execution")

# Several tiles of queries and of keys in both kernels, and multiples of neither.
_LENGTHS = (301, 77)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashFacts:
    """The attentions of a model that torch's flash attention can compute for long whole prompts.

    Attributes:
        shapes: the shapes of heads for which its results agree with those of Octavo's kernels.
        layers: number of layers that it can compute.
        of: number of layers with keys and values in pages of their own.
        why: the reason why it cannot compute the other layers; "" if it can.
        wrong: whether it was tried for some layers, and failed or gave other results.
        too_short: the reason why no prompt in a step is long enough; "" if some can be.
    """

    shapes: frozenset[HeadShape] = frozenset()
    layers: int = 0
    of: int = 0
    why: str = ""
    wrong: bool = False
    too_short: str = ""


def use_flash(
    model: Transformer, backend: AttentionBackend, cache_dtype: torch.dtype, block_size: int, max_tokens: int
) -> None:
    """From now on, let torch's flash attention compute long whole prompts if it can; the log says where.

    Args:
        cache_dtype, block_size: the pages' format and size.
        max_tokens: maximum tokens of a step.
    """
    unused = "torch's flash attention is not used, Octavo's kernels are: %s"
    too_short = _too_short(max_tokens)
    if too_short and isinstance(backend, TritonAttention) and _own_attentions(model):
        logger.warning(unused, too_short)  # without a trial, which would compile a kernel for each shape of heads
        return
    facts = look_at_flash(model, backend, cache_dtype, block_size, max_tokens, model.device)
    if not facts.shapes:
        logger.warning(unused, facts.why)
        return
    assert isinstance(backend, TritonAttention)
    backend.flash = FlashPrompts(facts.shapes, attention_flash.FEWEST)
    rest = f", Octavo's kernels in {facts.of - facts.layers} ({facts.why})" if facts.why else ""
    logger.log(
        logging.WARNING if facts.wrong else logging.INFO,
        "whole prompts of at least %d tokens use torch's flash attention in %d layers%s",
        attention_flash.FEWEST,
        facts.layers,
        rest,
    )


def look_at_flash(
    model: Transformer,
    backend: AttentionBackend,
    cache_dtype: torch.dtype,
    block_size: int,
    max_tokens: int,
    device: torch.device,
) -> FlashFacts:
    """Find out which attentions of a model torch's flash attention can compute, by trying it with heads of each shape.

    Args:
        model: may consist of shapes only, without memory.
        cache_dtype, block_size: the pages' format and size.
        max_tokens: maximum tokens of a step.
    """
    attentions = _own_attentions(model)
    if not isinstance(backend, TritonAttention):
        return FlashFacts(of=len(attentions), why=f"attention is computed by the {backend.name} backend")
    if not attentions:
        return FlashFacts(why="no layer has keys and values of its own in pages")
    refusals: list[str] = []
    tried: dict[HeadShape, str] = {}
    for one in attentions:
        problem = _obstacle(model, one, cache_dtype)
        if not problem:
            shape = HeadShape(one.part.heads, one.part.kv_heads, one.part.head_dim, model.dtype)
            if shape not in tried:
                tried[shape] = find_difference(shape, one.part.scale, block_size, device)
            problem = tried[shape]
        refusals += [problem] if problem else []
    return FlashFacts(
        shapes=frozenset(shape for shape, problem in tried.items() if not problem),
        layers=len(attentions) - len(refusals),
        of=len(attentions),
        why="; ".join(dict.fromkeys(refusals)),
        wrong=any(tried.values()),
        too_short=_too_short(max_tokens),
    )


def _too_short(max_tokens: int) -> str:
    """The reason why steps hold no prompt that is long enough; "" if they do."""
    if max_tokens >= (fewest := attention_flash.FEWEST):
        return ""
    return f"it is for prompts of at least {fewest} tokens, but --max-num-batched-tokens is {max_tokens}"


def _own_attentions(model: Transformer) -> list[Attend]:
    operations = () if model.decoder is None else model.decoder.program.operations
    return [one for one in operations if isinstance(one, Attend) and isinstance(one.module, SelfAttention)]


def _obstacle(model: Transformer, one: Attend, pages: torch.dtype) -> str:
    """The reason why torch's flash attention cannot replace an attention; "" if it can."""
    assert model.decoder is not None
    return attention_flash.obstacle(
        model.dtype,
        one.part.head_dim,
        pages,
        causal=one.causal,
        window=one.window,
        bias=model.decoder.tables.bias(one.module),
        softcap=one.part.softcap,
        sinks=one.sinks is not None,
    )


@torch.inference_mode()
def find_difference(shape: HeadShape, scale: float, block_size: int, device: torch.device) -> str:
    """The fault of torch's flash attention for heads of a shape; "" if there is none.

    Two whole prompts of random numbers lie in scattered pages. Both kernels round the weights of a query to their
    format and then the result, so the error is half a unit in the last place of the result and of the weighted sum of
    the values' magnitudes. They may differ by twice what both errors allow. A prompt must have the same bits with and
    without the other prompt.
    """
    q, kv = _random_rows(shape, block_size, device)
    ours, theirs = TritonAttention(), TritonAttention(FlashPrompts((shape,), fewest=1))
    try:
        got = _attend(theirs, q, kv, range(len(_LENGTHS)), scale)
        alone = [_attend(theirs, part, kv, [row], scale) for row, part in enumerate(torch.split(q, list(_LENGTHS)))]
    except Exception as error:  # torch raises errors of all kinds: Octavo's kernels compute everything then
        return f"it fails for {_said(shape)} ({(str(error) or repr(error)).splitlines()[0]})"
    want = _attend(ours, q, kv, range(len(_LENGTHS)), scale).float()
    sizes = _attend(ours, q, Paged(kv.keys, kv.values.abs(), kv.block_tables), range(len(_LENGTHS)), scale).float()
    bound = 2 * torch.finfo(shape.dtype).eps * (want.abs() + sizes)
    apart = (got.float() - want).abs()
    if not bool((apart <= bound).all()):
        worst = float((apart / bound).nan_to_num(nan=torch.inf).max())
        return f"its results for {_said(shape)} differ from ours by {worst:.2g} times what rounding explains"
    if not torch.equal(torch.cat(alone), got):
        return f"its results for {_said(shape)} depend on what is computed beside a prompt"
    return ""


def _said(shape: HeadShape) -> str:
    return f"{shape.heads} heads of {shape.head_dim} features over {shape.kv_heads}"


def _random_rows(shape: HeadShape, block_size: int, device: torch.device) -> tuple[Tensor, Paged]:
    """Queries [T, heads, head_dim], and the pages of a prompt of each length; memory outside prompts is NaN."""
    random = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(device, shape.dtype)

    counts = [-(-length // block_size) for length in _LENGTHS]
    order = torch.randperm(sum(counts), generator=random) + 1
    pages = torch.full(
        (2, 1 + len(order), block_size, shape.kv_heads, shape.head_dim), torch.nan, dtype=shape.dtype, device=device
    )
    tables = torch.zeros(len(_LENGTHS), max(counts), dtype=torch.int32)
    for row, own in enumerate(torch.split(order, counts)):
        tables[row, : len(own)] = own
    kv = Paged(pages[0], pages[1], tables.to(device))
    for table, length in zip(tables.long(), _LENGTHS, strict=True):
        places = torch.arange(length)
        slots = (table[places // block_size] * block_size + places % block_size).to(device)
        kv.write(slots, *(normal(length, shape.kv_heads, shape.head_dim) for _ in range(2)))
    return normal(sum(_LENGTHS), shape.heads, shape.head_dim), kv


def _attend(backend: TritonAttention, q: Tensor, kv: Paged, rows: Iterable[int], scale: float) -> Tensor:
    chosen = list(rows)
    lengths = [_LENGTHS[row] for row in chosen]
    own = Paged(kv.keys, kv.values, kv.block_tables[chosen])
    return backend.attend(q, own, AttentionMetadata.build(lengths, lengths, q.device), scale=scale)
