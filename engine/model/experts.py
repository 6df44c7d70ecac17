"""Mixtures of experts (arXiv:1701.06538): tokens are grouped by expert, and each expert computes its group at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends import triton as gpu
from engine.backends.native.gemm import Packed, Quantised, Weight
from engine.model import spec
from engine.model.activations import activate, activate_by_name, gate_by_name
from engine.model.layers import DenseFeedForward, GatedFeedForward, Linear, OpenedFeedForward
from engine.model.norms import build_norm
from engine.model.packing import PackedProduct, on_gpu, pack_product
from engine.model.place import Place
from engine.model.quantisation import Held, device_product, on_device
from engine.model.row_kernels import RowModule


class ExpertMatrices(nn.Module):
    """One matrix for each expert (or each head), weight [count, out, in], and a bias [count, out] if they have one."""

    def __init__(self, count: int, inputs: int, outputs: int, bias: bool, place: Place):
        super().__init__()
        self.count, self.inputs, self.outputs = count, inputs, outputs
        self.device = place.device
        self.weight = place.matrix(count, outputs, inputs)
        self.bias = place.parameter(count, outputs) if bias else None
        self.packed: list[PackedProduct] | None = None  # the matrices in the form of a CPU's kernels
        # all matrices, quantised, on a GPU; numbers and scales begin with [count, out]
        self.few_bits: Quantised | None = None
        self.stored: Held | None = None  # like those of `Linear`
        self.taken = False

    def pack(self, quantization: Held | None = None, quantised: Callable[[int], Weight | Packed] | None = None) -> None:
        """Lay the loaded matrices out for a CPU's kernels, or for a GPU's if they are quantised; the plain ones are
        released, or are on the model's device afterwards. `quantised`: returns a matrix that is already quantised or
        packed; the plain ones then need not be loaded."""
        matrices = self.weight if quantised is None else map(quantised, range(self.count))
        if not on_gpu(self.device):
            biases = [None] * self.count if self.bias is None else list(self.bias)
            products = (pack_product(one, bias, quantization) for one, bias in zip(matrices, biases, strict=True))
            packed = [product for product in products if product is not None]
            self.packed = packed if packed and len(packed) == self.count else None
        elif quantization is not None:
            self.few_bits = stacked((on_device(one, quantization, self.device) for one in matrices), self.count)
        kept = self.weight.new_empty(0, self.outputs, self.inputs) if self.is_packed else self.weight
        self.weight = nn.Parameter(kept.to(self.device), requires_grad=False)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """[rows, in] to [rows, out] with one expert's matrix."""
        if self.packed is not None:
            return self.packed[expert](x)
        bias = None if self.bias is None else self.bias[expert]
        if self.few_bits is None:
            return F.linear(x, self.weight[expert], bias)
        values, scales = self.few_bits.values[expert], self.few_bits.scales[expert]
        return device_product(Quantised(values, scales, self.inputs), bias)(x)

    @property
    def is_packed(self) -> bool:
        """Whether the plain matrices have been released."""
        return self.packed is not None or self.few_bits is not None

    @property
    def held(self) -> Tensor | Quantised:
        """The matrices in the form of a GPU's kernels."""
        return self.weight if self.few_bits is None else self.few_bits


def stacked(matrices: Iterable[Quantised], count: int) -> Quantised:
    """A stack of this many matrices, whose numbers and scales begin with [count, out]; one matrix at a time exists
    twice."""
    whole: Quantised | None = None
    for index, one in enumerate(matrices):
        if whole is None:
            values, scales = (part.new_empty(count, *part.shape) for part in (one.values, one.scales))
            whole = Quantised(values, scales, one.inputs)
        whole.values[index], whole.scales[index] = one.values, one.scales
    assert whole is not None
    return whole


class ExpertsFeedForward(RowModule):
    """Each token's `active` likeliest experts, weighted by their probabilities. The program adds the bias of their sum,
    if there is one.

    A token's result does not depend on the others: every product has at least `min_rows` rows, and each token adds its
    experts' results in the order of their numbers.
    """

    def __init__(self, part: spec.Experts, hidden_size: int, place: Place):
        super().__init__()
        self.part = part
        self.gated = isinstance(part.expert, spec.Gated | spec.Clamped)
        width, bias = part.expert.width, part.expert.bias
        self.router = Linear(hidden_size, part.count, part.router_bias, place)
        self.up = ExpertMatrices(part.count, hidden_size, 2 * width if self.gated else width, bias, place)
        self.down = ExpertMatrices(part.count, width, hidden_size, bias, place)
        self.bias = place.parameter(hidden_size) if part.sum_bias else None
        self.activation = "clamped" if isinstance(part.expert, spec.Clamped) else part.expert.activation
        if isinstance(part.routing, spec.Corrected):
            self.correction = replace(place, dtype=torch.float32).parameter(part.count)
        if isinstance(part.routing, spec.Rescaled):
            self.factors = replace(place, dtype=torch.float32).parameter(part.count)

    def forward(
        self, x: Tensor, tokens: int, min_rows: int = 1, starts: Tensor | None = None, judged: Tensor | None = None
    ) -> Tensor:
        """[Tp, hidden] to [Tp, hidden]; rows past `tokens` are padding, which goes to no expert and gives zeros.

        Args:
            starts: [R + 1] where the tokens of each input begin, and the end; None: all belong to one input.
            judged: [Tp, hidden] what the router reads; None: x.
        """
        judged = x if judged is None else judged
        if self.kernels is not None and gpu.serves(x.device) and self.up.packed is None:
            return self.mix(x, tokens, starts, judged)
        out = torch.zeros_like(x)
        if not tokens:
            return out
        weights, chosen = self._admitted(judged, tokens, starts)
        chosen, places = chosen.sort(dim=-1)
        weights = weights.gather(-1, places)
        rows, sizes, slots = group(chosen, self.part.count, min_rows)
        rows = rows // self.part.active
        # Groups are gathered one by one, so that their rows are separate tensors with the alignment that kernels
        # prefer.
        answers = x.new_empty(rows.shape[0], x.shape[1])
        factors: Sequence[Tensor | None] = [None] * len(sizes)
        if isinstance(self.part.routing, spec.ScaledInput):
            opened = x.new_ones(len(rows), 1)
            opened[slots.flatten()] = weights.view(-1, 1).to(x.dtype)
            factors, weights = torch.split(opened, sizes), torch.ones_like(weights)
        parts = zip(torch.split(rows, sizes), torch.split(answers, sizes), factors, strict=True)
        for expert, (own, answer, factor) in enumerate(parts):
            if sizes[expert]:
                read = x.index_select(0, own)
                answer.copy_(self.compute(read if factor is None else read * factor, expert))
        for slot, weight in zip(slots.unbind(1), weights.unsqueeze(2).unbind(1), strict=True):
            out[:tokens] += (answers.index_select(0, slot) * weight).to(x.dtype)
        return out

    def mix(self, x: Tensor, tokens: int, starts: Tensor | None = None, judged: Tensor | None = None) -> Tensor:
        """The same with kernels that do not read from the device how many tokens an expert has."""
        judged = x if judged is None else judged
        from engine.backends.triton import experts

        how: dict[str, Any] = {"tokens": tokens, "activation": self.activation, "gated": self.gated}
        if self.up.bias is not None and self.down.bias is not None:
            how["biases"] = self.up.bias, self.down.bias
        if isinstance(self.part.expert, spec.Clamped):
            how["clamp"] = self.part.expert.limit, self.part.expert.slope
        matrices = self.up.held, self.down.held
        part = self.part
        if isinstance(part.routing, spec.Likeliest) and part.capacity is None:
            return experts.mix(x, self.router(judged), *matrices, active=part.active, normalize=part.normalize, **how)
        weights, chosen = self._admitted(judged, tokens, starts)
        chosen, places = chosen.sort(dim=-1)
        weights, chosen = weights.gather(-1, places), chosen.int()
        if not isinstance(part.routing, spec.ScaledInput):
            return experts.spread(x, weights, chosen, *matrices, **how)
        # One expert of each token at a time, because the inputs differ.
        out = torch.zeros_like(x)
        ones = weights.new_ones(tokens, 1)
        for slot in range(part.active):
            read = torch.cat((x[:tokens] * weights[:, slot, None].to(x.dtype), x[tokens:]))
            out += experts.spread(read, ones, chosen[:, slot, None].contiguous(), *matrices, **how)
        return out

    @property
    def shape(self) -> tuple[object, ...]:
        """Modules with equal values run the same compiled kernels."""
        bits = [None if each.few_bits is None else each.few_bits.values.dtype for each in (self.up, self.down)]
        return self.part, self.down.outputs, self.up.weight.dtype, *bits

    def warm(self, most: int) -> None:
        """Compile the kernels for steps of up to `most` tokens, if kernels are used, so that no request waits for
        that."""
        weight = self.up.weight
        if not gpu.serves(weight.device) or self.up.packed is not None:
            return
        from engine.backends.triton import experts

        capability = experts.capability_of(weight.device)
        few_bits = self.up.few_bits is not None or self.down.few_bits is not None
        for tokens in experts.trial_sizes(most, self.part.active, self.part.count, weight.dtype, capability, few_bits):
            self.mix(weight.new_zeros(tokens, self.up.inputs), tokens)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (float32) and experts of each token, [Tp, active] both; of equal experts the first are chosen."""
        match self.part.routing:
            case spec.Likeliest():
                weights, chosen = best(self.router(x).float().softmax(dim=-1), self.part.active)
                if self.part.normalize:
                    weights = weights / weights.sum(dim=-1, keepdim=True)
                return weights, chosen
            case spec.Rescaled():
                weights, chosen = best(self.router(x).float().softmax(dim=-1), self.part.active)
                return weights / weights.sum(dim=-1, keepdim=True) * self.factors[chosen], chosen
            case spec.Corrected() as routing:
                return self._corrected(x, routing)
            case spec.GroupLimited() as routing:
                scores = self._logits(x).softmax(dim=-1)
                weights, chosen = best(
                    _open(scores, routing.groups, routing.open_groups, routing.leaders), self.part.active
                )
                if self.part.normalize:
                    weights = weights / weights.sum(dim=-1, keepdim=True)
                return weights * routing.scale, chosen
            case spec.ScaledInput():
                numbers, chosen = best(self.router(x), self.part.active)
                return activate(torch.sigmoid, numbers.float()), chosen
            case spec.SparseMixer(tolerance):
                return _mixed_sparsely(self.router(x).float(), self.part.active, tolerance)

    def _admitted(self, x: Tensor, tokens: int, starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and experts of the first T = `tokens` tokens, [T, active]; weights are 0 if an expert already has as
        many tokens of an input as it may take."""
        weights, chosen = (found[:tokens] for found in self.route(x))
        if self.part.capacity is None:
            return weights, chosen
        came = F.one_hot(chosen, self.part.count).sum(dim=1).cumsum(dim=0)  # [T, count], over all inputs
        if starts is not None:
            before = torch.cat((came.new_zeros(1, self.part.count), came))[starts[:-1].long()]
            own = torch.bucketize(torch.arange(len(came), device=came.device), starts[1:].long(), right=True)
            came = came - before[own]
        return weights * (came.gather(-1, chosen) <= self.part.capacity), chosen

    def _logits(self, x: Tensor) -> Tensor:
        """The router's logits, computed in float32."""
        if self.router.packed is not None:
            return self.router.in_float32(x)
        bias = self.router.bias
        return F.linear(x.float(), self.router.weight.float(), None if bias is None else bias.float())

    def _corrected(self, x: Tensor, routing: spec.Corrected) -> tuple[Tensor, Tensor]:
        logits = self._logits(x)
        scores = activate(torch.sigmoid, logits) if routing.score == "sigmoid" else logits.softmax(dim=-1)
        judged = logits if routing.of_logits else scores
        favoured = _open(judged + self.correction, routing.groups, routing.open_groups, 2)
        chosen = best(favoured, self.part.active)[1]
        weights = scores.gather(-1, chosen)
        if self.part.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True).clamp(min=routing.least) + routing.added)
        return weights * routing.scale, chosen

    def compute(self, x: Tensor, expert: int) -> Tensor:
        """One expert's results for its tokens, [rows, hidden]."""
        wide, part = self.up(x, expert), self.part.expert
        match part:
            case spec.Clamped():
                hidden = _clamped(wide, part)
            case spec.Gated():
                hidden = gate_by_name(part.activation, wide, self.kernels)
            case spec.Dense():
                hidden = activate_by_name(part.activation, wide, self.kernels)
        out: Tensor = self.down(hidden, expert)
        return out


def group(chosen: Tensor, count: int, min_rows: int) -> tuple[Tensor, list[int], Tensor]:
    """Sort tokens by expert.

    Args:
        chosen: [T, active] the experts of each token, of `count`.
        min_rows: a non-empty group is padded to this many rows with copies of the first choice of token 0.

    Returns:
        rows: [N] the index in `chosen`, flattened, of each row.
        sizes: rows of each expert's group, in the order of the experts.
        slots: [T, active] the row of each token's copy for each of its experts.
    """
    experts = chosen.flatten()
    # A stable sort, so that an expert's tokens keep their order.
    order = experts.argsort(stable=True)
    counts = experts.bincount(minlength=count)
    sizes = torch.where(counts > 0, counts.clamp(min=min_rows), counts)
    # The shift of an expert's first row by padding.
    moved = (sizes - counts).cumsum(0) - (sizes - counts)
    places = torch.arange(order.shape[0], device=order.device) + moved[experts[order]]
    group_sizes: list[int] = sizes.tolist()
    rows = order.new_zeros(sum(group_sizes))
    rows[places] = order
    slots = torch.empty_like(order)
    slots[order] = places
    return rows, group_sizes, slots.view_as(chosen)


def _clamped(x: Tensor, part: spec.Clamped) -> Tensor:
    """The result of `Clamped` for rows [gate | up], [T, 2 * width] to [T, width]."""
    gate, up = x.chunk(2, dim=-1)
    opened = activate(lambda g: g * torch.sigmoid(part.slope * g), gate.clamp(max=part.limit))
    return (up.clamp(-part.limit, part.limit) + 1) * opened


def best(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row [T, n] and their indices; of equal ones the first."""
    values, places = x.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], places[:, :count]


def _open(scores: Tensor, groups: int, count: int, leaders: int) -> Tensor:
    """Scores [T, experts] of the `count` groups whose best `leaders` experts have the largest sums; -inf for others."""
    if count == groups:
        return scores
    grouped = scores.view(len(scores), groups, -1)
    sums = best(grouped.flatten(0, 1), leaders)[0].view(*grouped.shape[:-1], leaders).sum(dim=-1)
    closed = torch.ones_like(sums, dtype=torch.bool)
    closed.scatter_(-1, best(sums, count)[1], False)
    return grouped.masked_fill(closed[..., None], -math.inf).view_as(scores)


def _mixed_sparsely(logits: Tensor, active: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """Weights and experts according to `SparseMixer`; logits [T, count] float32."""
    weights, chosen, left = [], [], logits
    for _ in range(active):
        most, place = best(left, 1)
        far = (most - left) / logits.abs().maximum(most) > tolerance
        weights.append(left.masked_fill(far, -math.inf).softmax(dim=-1).gather(-1, place))
        chosen.append(place)
        left = left.scatter(-1, place, -math.inf)
    return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)


class SharedExperts(nn.Module):
    """The weights of experts, and of the network beside them for every token."""

    def __init__(self, part: spec.Shared, hidden_size: int, place: Place):
        super().__init__()
        self.routed = ExpertsFeedForward(part.routed, hidden_size, place)
        self.always: nn.Module
        match part.always:
            case spec.Opened():
                self.always = OpenedFeedForward(part.always, hidden_size, place)
            case spec.Gated():
                self.always = GatedFeedForward(part.always, hidden_size, place)
            case spec.Dense():
                self.always = DenseFeedForward(part.always, hidden_size, place)


class NormedExperts(nn.Module):
    """The weights of first(always(x)) + second(routed(before(stream))), where the router reads judged(stream)."""

    def __init__(self, part: spec.NormedSum, hidden_size: int, place: Place):
        super().__init__()
        self.always = GatedFeedForward(part.always, hidden_size, place)
        self.routed = ExpertsFeedForward(part.routed, hidden_size, place)
        self.before, self.judged, self.first, self.second = (
            build_norm(part.norm, hidden_size, place) for _ in range(4)
        )
