"""A step's hidden states, and the logits of some of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.backends import triton as gpu
from engine.model.row_form import LIBRARY, RowForm
from engine.model.transformer import Transformer
from engine.scheduling.plan import Int32


class Logits:
    """Logits [N, vocabulary] of hidden states [N, hidden], computed at an invariant row count. They are no method of
    the runner, because objects that the runner owns hold them: a bound method would make a reference cycle."""

    def __init__(self, model: Transformer, min_rows: int, head: nn.Module | None = None):
        self._model, self._min_rows, self._head = model, min_rows, head

    def __call__(self, hidden: Tensor, form: RowForm = LIBRARY) -> Tensor:
        count = len(hidden)
        if count >= self._min_rows:
            return self._model.logits(hidden, form, self._head)
        hidden = torch.cat((hidden, hidden.new_zeros(self._min_rows - count, hidden.shape[1])))
        return self._model.logits(hidden, head=self._head)[:count]

    def own(self, hidden: Tensor) -> Tensor:
        """The columns of the logits that this rank computes; other ranks have the rest."""
        count = len(hidden)
        if count < self._min_rows:
            hidden = torch.cat((hidden, hidden.new_zeros(self._min_rows - count, hidden.shape[1])))
        return self._model.logits(hidden, own=True)[:count]


def hidden_of(hidden: Tensor, rows: Int32, num_tokens: int) -> Tensor:
    """The hidden states of some of a step's tokens, in order; not a copy if these are all tokens."""
    if len(rows) < num_tokens:
        return hidden[gpu.upload(rows, hidden.device).long()]
    return hidden if hidden.shape[0] == num_tokens else hidden[:num_tokens]
