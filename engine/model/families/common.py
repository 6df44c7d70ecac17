"""What several families read from their configs and tables in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.spec import Activation, Attention, BandScaling, Gated, LinearScaling, ModelSpec, Rotary
from engine.model.table import Entry, Joined

# gelu_new, gelu_fast … are one function under several names: the tanh approximation.
_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def activation(name: str) -> Activation:
    """The activation of that name in a config.

    Raises:
        UnsupportedModelError: not implemented.
    """
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"The checkpoint's config asks for the activation {name!r}, which is not implemented. "
            f"Implemented: {', '.join(sorted(_ACTIVATIONS))}."
        )
    return _ACTIVATIONS[name]


def rotary(config: Any, dim: int, layer_type: str | None = None) -> Rotary:
    """The rotary part of a config whose `rope_parameters` are flat, or nested by layer type.

    Raises:
        UnsupportedModelError: a scaling that is not implemented.
    """
    parameters: Mapping[str, Any] = config.rope_parameters or {}
    if layer_type is not None and layer_type in parameters:
        parameters = parameters[layer_type]
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0
    share = parameters.get("partial_rotary_factor")
    if share is not None and share != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor must be 1 for this architecture, got {share}.")
    kind = parameters.get("rope_type", "default")
    scaling: LinearScaling | BandScaling | None
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(float(parameters["factor"]))
        case "llama3":
            original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
            scaling = BandScaling(
                factor=float(parameters["factor"]),
                low=float(parameters["low_freq_factor"]),
                high=float(parameters["high_freq_factor"]),
                original_length=int(original),
            )
        case _:
            raise UnsupportedModelError(
                f"The checkpoint's config asks for rope_type {kind!r}, which is not implemented. "
                "Implemented: default, linear, llama3."
            )
    return Rotary(dim=dim, theta=float(theta), scaling=scaling)


def qkv(target: str, sources: tuple[str, str, str], part: Attention) -> list[Entry]:
    """Separate query, key and value projections (names without .weight) in one fused matrix."""
    lengths = (part.heads * part.head_dim, part.kv_heads * part.head_dim, part.kv_heads * part.head_dim)
    kinds = ("weight", "bias") if part.qkv_bias else ("weight",)
    return [Entry(f"{target}.{k}", tuple(f"{s}.{k}" for s in sources), Joined(lengths), shard_axis=0) for k in kinds]


def linear(target: str, source: str, bias: bool, shard_axis: int) -> list[Entry]:
    """A matrix [out, in] and its bias, which is divided only where the outputs are."""
    entries = [Entry(f"{target}.weight", (f"{source}.weight",), shard_axis=shard_axis)]
    if bias:
        entries.append(Entry(f"{target}.bias", (f"{source}.bias",), shard_axis=0 if shard_axis == 0 else None))
    return entries


def gated(target: str, source: str, part: Gated) -> list[Entry]:
    """gate_proj, up_proj and down_proj under `source`."""
    lengths = (part.width, part.width)
    kinds = ("weight", "bias") if part.bias else ("weight",)
    names = (f"{source}.gate_proj", f"{source}.up_proj")
    return [
        *(
            Entry(f"{target}.gate_up.{k}", tuple(f"{name}.{k}" for name in names), Joined(lengths), shard_axis=0)
            for k in kinds
        ),
        *linear(f"{target}.down", f"{source}.down_proj", part.bias, shard_axis=1),
    ]


def projected_block(target: str, source: str, attention: Attention, ffn: Gated) -> list[Entry]:
    """Attention and feed-forward of a layer that stores q_proj, k_proj, v_proj, o_proj and a gated mlp."""
    names = (f"{source}.self_attn.q_proj", f"{source}.self_attn.k_proj", f"{source}.self_attn.v_proj")
    return [
        *qkv(f"{target}.attention.inner.qkv", names, attention),
        *linear(f"{target}.attention.inner.out", f"{source}.self_attn.o_proj", attention.out_bias, shard_axis=1),
        *gated(f"{target}.ffn.inner", f"{source}.mlp", ffn),
    ]


def head(model: ModelSpec, source: str) -> list[Entry]:
    """The output matrix, where it is not the embedding's table."""
    if model.head.tied:  # type: ignore[union-attr]
        return []
    return [Entry("head.weight", (f"{source}.weight",), shard_axis=0)]
