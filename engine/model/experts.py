"""Mixtures of experts (arXiv:1701.06538): tokens are grouped by expert, and each expert works once on its group."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends import triton as gpu
from engine.backends.native.gemm import Quantised
from engine.model import spec
from engine.model.activations import activate_by_name, gate_by_name
from engine.model.layers import Linear
from engine.model.packing import PackedProduct, pack_product
from engine.model.place import Place
from engine.model.quantisation import Quantization


class ExpertMatrices(nn.Module):
    """One matrix per expert, weight [count, out, in]."""

    def __init__(self, count: int, inputs: int, outputs: int, place: Place):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight = place.parameter(count, outputs, inputs)
        self.packed: list[PackedProduct] | None = None

    def pack(
        self, quantization: Quantization | None = None, quantised: Callable[[int], Quantised] | None = None
    ) -> None:
        """Lay the filled matrices out as the CPU's kernels read them; the plain ones are given up.

        Args:
            quantised: gives a matrix as it has been quantised; the plain ones need not be filled then.
        """
        matrices = self.weight if quantised is None else map(quantised, range(len(self.weight)))
        products = (pack_product(one, quantization=quantization) for one in matrices)
        packed = [product for product in products if product is not None]
        if packed and len(packed) == len(self.weight):
            self.packed = packed
            self.weight = nn.Parameter(self.weight.new_empty(0, self.outputs, self.inputs), requires_grad=False)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """[rows, in] to [rows, out] by one expert's matrix."""
        if self.packed is None:
            return F.linear(x, self.weight[expert])
        return self.packed[expert](x)


class ExpertsFeedForward(nn.Module):
    """Each token's `active` likeliest experts, weighted by their probabilities.

    A token's result does not depend on the others: every product has at least `min_rows` rows, and each
    token adds its experts up in the order of their numbers.
    """

    def __init__(self, part: spec.Experts, hidden_size: int, place: Place):
        super().__init__()
        self.part = part
        self.gated = isinstance(part.expert, spec.Gated)
        width = part.expert.width
        self.router = Linear(hidden_size, part.count, False, place)
        self.up = ExpertMatrices(part.count, hidden_size, 2 * width if self.gated else width, place)
        self.down = ExpertMatrices(part.count, width, hidden_size, place)
        self.activation = part.expert.activation

    def forward(self, x: Tensor, tokens: int, min_rows: int = 1) -> Tensor:
        """[Tp, hidden] to [Tp, hidden]; what lies past `tokens` is padding, which is sent to no expert and gives
        zeros."""
        if gpu.serves(x.device) and self.up.packed is None:
            return self.mix(x, tokens)
        out = torch.zeros_like(x)
        if not tokens:
            return out
        weights, chosen = self.route(x)
        chosen, places = chosen[:tokens].sort(dim=-1)
        weights = weights[:tokens].gather(-1, places)
        rows, sizes, slots = self.group(chosen, min_rows)
        # Groups are gathered one by one: rows of tensors of their own begin where kernels like them to begin,
        # whatever the groups before them hold.
        answers = x.new_empty(rows.shape[0], x.shape[1])
        parts = zip(torch.split(rows, sizes), torch.split(answers, sizes), strict=True)
        for expert, (own, answer) in enumerate(parts):
            if sizes[expert]:
                answer.copy_(self.compute(x.index_select(0, own), expert))
        for slot, weight in zip(slots.unbind(1), weights.unsqueeze(2).unbind(1), strict=True):
            out[:tokens] += (answers.index_select(0, slot) * weight).to(x.dtype)
        return out

    def mix(self, x: Tensor, tokens: int) -> Tensor:
        """The same by kernels that do not ask the device how many tokens an expert has."""
        from engine.backends.triton import experts

        out: Tensor = experts.mix(
            x,
            self.router(x),
            self.up.weight,
            self.down.weight,
            tokens=tokens,
            active=self.part.active,
            activation=self.activation,
            gated=self.gated,
            normalize=self.part.normalize,
        )
        return out

    @property
    def shape(self) -> tuple[object, ...]:
        """Modules of which this is the same run the same compiled kernels."""
        return self.part, self.down.outputs, self.up.weight.dtype

    def warm(self, most: int) -> None:
        """Compile the kernels for steps of up to `most` tokens, if kernels serve: so that no request waits for that."""
        weight = self.up.weight
        if not gpu.serves(weight.device) or self.up.packed is not None:
            return
        from engine.backends.triton import experts

        capability = experts.capability_of(weight.device)
        for tokens in experts.trial_sizes(most, self.part.active, self.part.count, weight.dtype, capability):
            self.mix(weight.new_zeros(tokens, self.up.inputs), tokens)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (float32) and experts of each token, [Tp, active] both; of experts alike the first are taken."""
        probabilities = self.router(x).float().softmax(dim=-1)
        weights, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
        weights, chosen = weights[:, : self.part.active], chosen[:, : self.part.active]
        if self.part.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen

    def group(self, chosen: Tensor, min_rows: int) -> tuple[Tensor, list[int], Tensor]:
        """Lay the tokens out expert by expert.

        Args:
            chosen: [T, active] the experts of each token.
            min_rows: a group that is not empty is filled up to so many rows, with copies of token 0.

        Returns:
            rows: [N] the token of each row.
            sizes: rows of each expert's group; they lie in the order of the experts.
            slots: [T, active] the row in which each token's expert finds it.
        """
        experts = chosen.flatten()
        # Stable, so that an expert's tokens keep their order.
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=self.part.count)
        sizes = torch.where(counts > 0, counts.clamp(min=min_rows), counts)
        # How far filling moves an expert's first row.
        moved = (sizes - counts).cumsum(0) - (sizes - counts)
        places = torch.arange(order.shape[0], device=order.device) + moved[experts[order]]
        group_sizes: list[int] = sizes.tolist()
        rows = order.new_zeros(sum(group_sizes))
        rows[places] = order // self.part.active
        slots = torch.empty_like(order)
        slots[order] = places
        return rows, group_sizes, slots.view_as(chosen)

    def compute(self, x: Tensor, expert: int) -> Tensor:
        """One expert's answers to its tokens, [rows, hidden]."""
        by_name = gate_by_name if self.gated else activate_by_name
        out: Tensor = self.down(by_name(self.activation, self.up(x, expert)), expert)
        return out
