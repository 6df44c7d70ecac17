"""Feed-forward networks and experts, and the routing of tokens to experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.model.normalisation import Norm

Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh"]


@dataclass(frozen=True, slots=True)
class Dense:
    """down(activation(up(x))) with `width` hidden features. `groups`: outputs of both matrices only see the inputs of
    their own group; zeros are loaded for the others."""

    width: int
    activation: Activation
    bias: bool = False
    groups: int = 1


NO_NETWORK = Dense(0, "relu")


@dataclass(frozen=True, slots=True)
class Gated:
    """down(activation(gate(x)) * up(x)) with `width` hidden features (arXiv:2002.05202)."""

    width: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True, slots=True)
class SparselyGated:
    """down(activation(relu(g - m - cutoff * s)) * up(x)), m and s being the mean and the standard deviation of the
    gates g = gate(x) of a token: only the largest gates stay open (arXiv:2506.06644)."""

    width: int
    activation: Activation
    cutoff: float


@dataclass(frozen=True, slots=True)
class Xielu:
    """down(xielu(up(x))) with `width` hidden features; each layer learns the slopes of the function on either side of 0
    (arXiv:2411.13010): p * x^2 + x / 2 above, n * (expm1(x) - x) + x / 2 below."""

    width: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Clamped:
    """down((u + 1) * g * sigmoid(slope * g)), where g is gate(x) and u is up(x): u within [-limit, limit], g at most
    limit (arXiv:2508.10925)."""

    width: int
    limit: float
    slope: float
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The experts with the largest probabilities (softmax), which are their weights."""


@dataclass(frozen=True, slots=True)
class Rescaled:
    """The experts of the largest probabilities (softmax), which are their weights, made to sum to 1; each expert's
    weight is multiplied by a learned number at last (Gemma 4)."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """The experts with the largest sums of score and a learned correction, weighted by the scores alone: this balances
    load without a loss term (arXiv:2408.15664). Everything is computed in float32."""

    score: Literal["sigmoid", "softmax"] = "sigmoid"  # the function of the router's logits
    # groups, open_groups: the number of groups of experts, and of groups per token. A token uses the groups with the
    # best pairs of experts.
    groups: int = 1
    open_groups: int = 1
    least: float = 0.0  # minimum of the sum that divides the weights
    added: float = 0.0
    scale: float = 1.0  # factor of the weights
    of_logits: bool = False  # whether the correction is added to logits, not to scores


@dataclass(frozen=True, slots=True)
class GroupLimited:
    """The experts with the largest probabilities (softmax) within the groups that contain the largest ones; the weight
    is the probability times a constant (arXiv:2405.04434, 2.1.2). Everything is computed in float32."""

    # groups, open_groups: the number of groups of experts, and of groups per token. A token uses the groups with the
    # best experts.
    groups: int = 1
    open_groups: int = 1
    scale: float = 1.0  # factor of the weights
    leaders: int = 1  # how many experts represent a group, by the sum of their probabilities


@dataclass(frozen=True, slots=True)
class SparseMixer:
    """One expert after the other: the best of the remaining ones, weighted by its probability among similar ones
    (arXiv:2409.12136). `tolerance`: an expert is similar if its logit is less than the best by at most this share of
    the logit's size."""

    tolerance: float


@dataclass(frozen=True, slots=True)
class ScaledInput:
    """The experts with the largest logits. An expert's input is multiplied by the sigmoid of its logit. Its output is
    not weighted (Llama 4)."""


Routing = Likeliest | Rescaled | Corrected | GroupLimited | SparseMixer | ScaledInput


@dataclass(frozen=True, slots=True)
class Experts:
    """A router sends each token to `active` of `count` feed-forward experts (arXiv:1701.06538)."""

    expert: Dense | Gated | Clamped
    # count, active: the number of experts, and of experts per token
    count: int
    active: int
    normalize: bool = True  # whether the weights of a token's experts are scaled to sum to 1
    routing: Routing = Likeliest()  # how experts are chosen and weighted
    router_bias: bool = False
    sum_bias: bool = False  # whether a bias is added to the sum of a token's experts
    # an expert processes at most this many tokens of an input, the first ones; it adds nothing to later ones
    # (arXiv:2101.03961, 2.2). None: no limit.
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """sigmoid(opening(x)) * inner(x); the opening is one number per token, made by one row of weights."""

    inner: Gated


@dataclass(frozen=True, slots=True)
class Shared:
    """routed(x) + always(x): beside the experts, a network for every token (arXiv:2401.06066)."""

    routed: Experts
    always: Dense | Gated | Opened


@dataclass(frozen=True, slots=True)
class NormedSum:
    """first(always(x)) + second(routed(before(stream))), where the router reads judged(stream) and x is the normed
    stream: experts beside a network, each with norms of its own (Gemma 4). `norm`: the norm of all four; the router's
    has no other weights."""

    always: Gated
    routed: Experts
    norm: Norm


FeedForward = Dense | Gated | SparselyGated | Xielu | Experts | Shared | NormedSum
