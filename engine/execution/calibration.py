"""What int8 and fp8 pages subtract from keys before they are quantised.

Some features of keys are large for every token, and a scale that covers those leaves few steps to the others
(arXiv:2401.18079). What they have in common is known once for all: a mean key for each layer and head. Distances
from it are quantised instead (for attention itself, as in arXiv:2410.02367).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.execution.kv_cache import KVCache
from engine.model.layers import CrossPages
from engine.model.transformer import Transformer

_ROWS = 32
_TOKENS = 8


@torch.inference_mode()
def mean_keys(model: Transformer) -> list[Tensor]:
    """[kv_heads, head_dim] float32 of each layer: the mean key over short rows of random tokens.

    The rows begin anywhere in the context, so that features which rotate have no mean: one that holds for a part
    of the positions only would be harmful at the others. Tokens and positions depend on nothing but the model's
    vocabulary and max_model_len: neither a restart nor what was served before changes an answer.
    """
    count = min(_TOKENS, model.max_model_len)
    device, random = model.device, torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (_ROWS * count,), generator=random)
    starts = torch.randint(model.max_model_len - count + 1, (_ROWS, 1), generator=random)
    cache = KVCache(model.kv_shapes(), _ROWS, count, model.dtype, device)  # a page for each row
    model(
        ids.to(device),
        (starts + torch.arange(count)).view(-1).to(device),
        cache.paged(torch.arange(1, _ROWS + 1, dtype=torch.int32, device=device).unsqueeze(1)),
        torch.arange(count, (_ROWS + 1) * count, device=device),
        AttentionMetadata.build([count] * _ROWS, [count] * _ROWS, device),
        cross=None if model.encoder is None else CrossPages.empty([count] * _ROWS, device),
    )
    means = [keys[1:].float().mean((0, 1)) for keys, *_ in cache.layers]
    # Where random tokens lead to numbers that are not finite, keys are quantised as they are.
    return [mean.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0) for mean in means]
