"""Mixtures of experts (arXiv:1701.06538): tokens are grouped by expert, and each expert works once on its group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model import spec
from engine.model.layers import ACTIVATIONS, Linear, Place, Step, can_pack


class ExpertMatrices(nn.Module):
    """One matrix per expert, weight [count, out, in]."""

    def __init__(self, count: int, inputs: int, outputs: int, place: Place):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight = place.parameter(count, outputs, inputs)
        self.packed: list[Tensor] | None = None

    def pack(self) -> None:
        """Lay the filled matrices out as the CPU's kernels read them; the plain ones are given up."""
        if can_pack(self.weight):
            self.packed = [torch.ops.mkldnn._reorder_linear_weight(one, None) for one in self.weight.detach()]
            self.weight = nn.Parameter(self.weight.new_empty(0, self.outputs, self.inputs), requires_grad=False)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """[rows, in] to [rows, out] by one expert's matrix."""
        if self.packed is None:
            return F.linear(x, self.weight[expert])
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed[expert], None, "none", [], "")
        return out


class ExpertsFeedForward(nn.Module):
    """Each token's `active` likeliest experts, weighted by their probabilities.

    A token's result does not depend on the others: every product has at least `Step.min_rows` rows, and each
    token adds its experts up in their order.
    """

    def __init__(self, part: spec.Experts, hidden_size: int, place: Place):
        super().__init__()
        self.part = part
        self.gated = isinstance(part.expert, spec.Gated)
        width = part.expert.width
        self.router = Linear(hidden_size, part.count, False, place)
        self.up = ExpertMatrices(part.count, hidden_size, 2 * width if self.gated else width, place)
        self.down = ExpertMatrices(part.count, width, hidden_size, place)
        self.activation = ACTIVATIONS[part.expert.activation]

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[Tp, hidden] to [Tp, hidden]; padding gives zeros."""
        tokens = step.slots.shape[0]
        weights, chosen = self.route(x)
        # The sort is stable, so that an expert's tokens keep their order.
        order = chosen[:tokens].flatten().argsort(stable=True)
        counts = chosen[:tokens].flatten().bincount(minlength=self.part.count).tolist()
        shares = weights[:tokens].flatten().index_select(0, order).unsqueeze(1)
        rows = order // self.part.active
        out = torch.zeros_like(x)
        end = 0
        for expert, count in enumerate(counts):
            if count:
                start, end = end, end + count
                own = rows[start:end]
                result = self.compute(x.index_select(0, own), expert, step.min_rows)
                out.index_add_(0, own, (result * shares[start:end]).to(x.dtype))
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (float32) and experts of each token, [Tp, active] both."""
        probabilities = self.router(x).float().softmax(dim=-1)
        weights, chosen = probabilities.topk(self.part.active, dim=-1)
        if self.part.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen

    def compute(self, x: Tensor, expert: int, min_rows: int) -> Tensor:
        """One expert's answer to its tokens, [rows, hidden]."""
        count = x.shape[0]
        if count < min_rows:
            x = F.pad(x, (0, 0, 0, min_rows - count))
        if self.gated:
            gate, up = self.up(x, expert).chunk(2, dim=-1)
            inner = self.activation(gate).mul_(up)
        else:
            inner = self.activation(self.up(x, expert))
        out: Tensor = self.down(inner, expert)
        return out[:count]
