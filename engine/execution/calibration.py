"""The offsets that int8 and fp8 pages subtract from keys before they are quantised.

Some features of keys are large for every token, and a scale that covers these leaves few steps for the others
(arXiv:2401.18079). Their common part is determined once: a mean key for each layer and head. The differences from it
are quantised instead (for attention itself, as in arXiv:2410.02367).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata
from engine.execution.kv_cache import KVCache
from engine.model.executors.choice import by_operation
from engine.model.inputs import Inputs
from engine.model.layers import CrossPages
from engine.model.rotary import RotaryTable
from engine.model.transformer import Transformer

_ROWS = 32
_TOKENS = 8
_LENGTH = 2048  # tokens of context, if a model does not say what it was made for


@torch.inference_mode()
def mean_keys(model: Transformer, context_length: int | None = None) -> list[Tensor | None]:
    """Each layer's mean key [kv_heads, head_dim] in float32 over short rows of random tokens; None if keys are also
    values.

    The rows start at any position of the context, so that rotated features have no mean: one that holds only for some
    positions would do harm at the others. Tokens and positions depend only on the checkpoint, so neither a restart, nor
    max_model_len, nor earlier requests change an answer. `context_length`: tokens of context that the model was made
    for; None if that is not known.
    """
    spec, device, random = model.spec, model.device, torch.Generator().manual_seed(0)
    # If long contexts are rotated differently, short ones count: the long ones are stretched to rotate as far.
    length = min((context_length or _LENGTH, spec.max_positions or 2**31, *spec.rotary_limits))
    count = min(_TOKENS, length, model.max_model_len)
    ids = torch.randint(model.vocab_size, (_ROWS * count,), generator=random)
    starts = torch.randint(length - count + 1, (_ROWS, 1), generator=random)
    positions = (starts + torch.arange(count)).view(-1)
    cache = KVCache(model.kv_shapes(), _ROWS, count, model.dtype, device)  # a page for each row
    stack = model.decoder
    assert stack is not None
    # Rows of rotary tables for these positions, which may lie beyond max_model_len, where the model's own tables end.
    rotary = {part: _rows(table, length, positions) for part, table in stack.tables.rotary.items()}
    by_operation(stack.program, replace(stack.tables, rotary=rotary), device).run(
        Inputs(
            token_ids=ids.to(device),
            positions=positions.to(device),
            metadata=AttentionMetadata.build([count] * _ROWS, [count] * _ROWS, device),
            tokens=_ROWS * count,
            caches=cache.paged(torch.arange(1, _ROWS + 1, dtype=torch.int32, device=device).unsqueeze(1)),
            slots=torch.arange(count, (_ROWS + 1) * count, device=device),
            cross=None if model.encoder is None else CrossPages.empty([count] * _ROWS, device),
            sides={"rotary_offsets": torch.arange(_ROWS * count, device=device) - positions.to(device)},
        )
    )
    # If random tokens lead to infinite numbers or NaN, nothing is subtracted from keys.
    return [
        None if shape.vectors == 1 else keys[1:].float().mean((0, 1)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for shape, (keys, *_) in zip(model.kv_shapes(), cache.layers, strict=True)
    ]


def _rows(table: RotaryTable, length: int, positions: Tensor) -> RotaryTable:
    own = RotaryTable(table.part, table.cos.shape[1], 0, table.cos.device, dtype=table.cos.dtype)
    own.extend(length, positions)
    return own
