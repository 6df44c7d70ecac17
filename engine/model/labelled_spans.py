"""The head that scores spans of words for labels (GLiNER, arXiv:2311.08526)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model import spec


class LabelledSpans(nn.Module):
    """Scores of spans, in float32 whatever the model's format: the head is small, and its results are compared with a
    threshold. `hidden`: features of the hidden states."""

    def __init__(self, part: spec.LabelledSpans, hidden: int, device: torch.device):
        super().__init__()
        features = part.features
        self.width = part.reading.max_width
        self.features = features
        self.projection = None if hidden == features else _made(nn.Linear, device, hidden, features)
        self.recurrent = None
        if part.recurrent:
            form = {"num_layers": part.recurrent, "bidirectional": True, "batch_first": True}
            self.recurrent = _made(nn.LSTM, device, features, features // 2, **form)
        self.start, self.end, self.label = (_Network(features, features, device) for _ in range(3))
        self.span = _Network(2 * features, features, device)

    def forward(self, states: Tensor, labels: Sequence[int], words: Sequence[int]) -> Tensor:
        """Probabilities [words, width, labels] of the spans that begin with a word and have this many more words; -1 if
        a span would exceed the last word.

        Args:
            states: [T, hidden] of one input.
            labels, words: the tokens that represent each.
        """
        chosen = states[torch.tensor([*labels, *words], device=states.device)].float()
        if self.projection is not None:
            chosen = self.projection(chosen)
        names, x = self.label(chosen[: len(labels)]), chosen[len(labels) :]
        if self.recurrent is not None:
            x = self.recurrent(x[None])[0][0]
        # The first matrix over a span adds the contributions of its two ends, so each end is multiplied once, not once
        # per span.
        inner, outer = self.span.inner, self.span.outer
        starts = F.linear(self.start(x).relu(), inner.weight[:, : self.features], inner.bias)
        ends = F.linear(self.end(x).relu(), inner.weight[:, self.features :])
        # Likewise, the last one is multiplied with the labels, which are fewer than spans.
        weight, bias = names @ outer.weight, names @ outer.bias
        scores = states.new_full((len(x), self.width, len(names)), -1.0, dtype=torch.float32)
        for more in range(min(self.width, len(x))):
            spans = (starts[: len(x) - more] + ends[more:]).relu()
            scores[: len(x) - more, more] = torch.sigmoid(F.linear(spans, weight, bias))
        return scores


class _Network(nn.Module):
    """outer(relu(inner(x))), with an inner width of four times its result."""

    def __init__(self, inputs: int, outputs: int, device: torch.device):
        super().__init__()
        self.inner: nn.Linear = _made(nn.Linear, device, inputs, 4 * outputs)
        self.outer: nn.Linear = _made(nn.Linear, device, 4 * outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x).relu())
        return out


def _made(kind: Callable[..., nn.Module], device: torch.device, *sizes: int, **form: Any) -> Any:
    """A torch module with uninitialised parameters without gradients."""
    made = kind(*sizes, device="meta", dtype=torch.float32, **form)
    return made.to_empty(device=device).requires_grad_(False)
