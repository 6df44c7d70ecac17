"""Parts that several families read from their configs and tables in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.model.families.rope_settings import pairs_of, rotated, scaling_of, settings_of, theta_of
from engine.model.normalisation import Norm
from engine.model.positions import Rotary, Temperature
from engine.model.spec import (
    Activation,
    Attention,
    Block,
    Clamped,
    Corrected,
    Dense,
    Experts,
    Gated,
    Likeliest,
    Lm,
    ModelSpec,
    Patches,
    Routing,
    Stack,
    Tokens,
)
from engine.model.table import Affine, Entry, Joined, Same, ScaledRows, Stacked, Transform, Transposed

# gelu_new, gelu_fast … are names of the same function: the tanh approximation.
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
    """The activation of that name in a config. Raises UnsupportedModelError if the activation is not implemented."""
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"The checkpoint's config asks for the activation {name!r}, which is not implemented. "
            f"Implemented: {', '.join(sorted(_ACTIVATIONS))}."
        )
    return _ACTIVATIONS[name]


def even_head_dim(hidden_size: int, heads: int) -> int:
    """Features per head, if the heads share the residual stream's features evenly. Raises UnsupportedModelError if they
    cannot."""
    if hidden_size % heads:
        raise UnsupportedModelError(
            f"The checkpoint's config has {hidden_size} hidden features, which {heads} attention heads cannot share "
            "evenly: the first must be a multiple of the second."
        )
    return hidden_size // heads


def head_dim_of(config: Any) -> int:
    """Features per head: the config's head_dim, or each head's share of hidden_size."""
    own = getattr(config, "head_dim", None)
    size: int = config.hidden_size // config.num_attention_heads if own is None else own
    return size


def attention(config: Any, *, heads: int | None = None, bias: bool = False, **parts: Any) -> Attention:
    """Attention with a config's heads, KV heads and head_dim; scores are scaled by the root of head_dim. Raises
    UnsupportedModelError if the heads cannot share the KV heads evenly.

    Args:
        heads: None for num_attention_heads.
        bias: whether all projections have biases.
        parts: further fields of `Attention`, and fields that differ.
    """
    heads = config.num_attention_heads if heads is None else heads
    head_dim = parts.get("head_dim") or head_dim_of(config)
    usual = {
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "qkv_bias": bias,
        "out_bias": bias,
    }
    made = Attention(**(usual | parts))
    if made.heads % made.kv_heads:
        raise UnsupportedModelError(
            f"The checkpoint's config has {made.heads} attention heads and {made.kv_heads} KV heads: the first must "
            "be a multiple of the second."
        )
    return made


def windowed(config: Any, windows: Iterable[Window | None], **parts: Any) -> list[Attention]:
    """The attention of each layer, which differs only in its window; `parts` as in `attention`."""
    return [attention(config, sees=window, **parts) for window in windows]


def multi_head(config: Any, *, heads: int | None = None, bias: bool = True, **parts: Any) -> Attention:
    """Attention whose heads share hidden_size evenly and have separate keys and values; arguments as in `attention`.
    Raises UnsupportedModelError if the heads cannot share it."""
    heads = config.num_attention_heads if heads is None else heads
    usual = {"kv_heads": heads, "head_dim": even_head_dim(config.hidden_size, heads)}
    return attention(config, heads=heads, bias=bias, **(usual | parts))


def gated_network(config: Any, *, bias: bool = False) -> Gated:
    """A gated feed-forward network from a config's intermediate_size and hidden_act."""
    return Gated(config.intermediate_size, activation(config.hidden_act), bias)


def dense_network(config: Any, *, bias: bool = True) -> Dense:
    """A plain feed-forward network from a config's intermediate_size and hidden_act."""
    return Dense(config.intermediate_size, activation(config.hidden_act), bias)


def rms(config: Any) -> Norm:
    """An RMS norm with a config's rms_norm_eps."""
    return Norm("rms", config.rms_norm_eps)


def rms_in_float32(config: Any) -> Norm:
    """The same norm, which is multiplied by its weight before it is rounded."""
    return Norm("rms", config.rms_norm_eps, in_float32=True)


def same_layers(config: Any, embedding: Tokens | Patches, block: Block, final_norm: Norm | None = None) -> Stack:
    """A stack of num_hidden_layers equal layers."""
    return Stack(
        hidden_size=config.hidden_size,
        embedding=embedding,
        blocks=(block,) * config.num_hidden_layers,
        final_norm=final_norm,
    )


def lm(config: Any, **parts: Any) -> Lm:
    """A head that is tied to the token table if the config says so; `parts` are further fields of `Lm`."""
    return Lm(tied=config.tie_word_embeddings, **parts)


def with_head(config: Any) -> bool:
    """Whether an architecture has a language model's head; a bias of the head is stored only with it."""
    name: str = config.architectures[0]
    return name.endswith(("ForCausalLM", "LMHeadModel"))


def tokens(config: Any, **parts: Any) -> Tokens:
    """A token table with a config's vocab_size and hidden_size; `parts` are further fields of `Tokens`."""
    return Tokens(**({"vocab_size": config.vocab_size, "width": config.hidden_size} | parts))


def rotary(
    config: Any,
    head_dim: int | None = None,
    layer_type: str | None = None,
    *,
    partial: bool = False,
    interleaved: bool = False,
    in_float32: bool = False,
    shares: bool = False,
) -> Rotary:
    """The rotary part of a config whose `rope_parameters` are flat, or nested by layer type. Raises
    UnsupportedModelError if a scaling is not implemented, or its settings are invalid.

    Args:
        head_dim: features per head; None: see `head_dim_of`.
        layer_type: the layer type whose parameters to use, if they are nested.
        partial: whether the family rotates only a share of the features, `partial_rotary_factor`.
        interleaved: whether the family rotates pairs of adjacent features.
        in_float32: whether the family rotates in float32, whatever the format of queries and keys.
        shares: the family knows rope_type "proportional", which rotates some pairs of a head's features.
    """
    settings = settings_of(config, layer_type)
    shares = shares and settings.get("rope_type") == "proportional"
    dim = rotated(settings, head_dim or head_dim_of(config), partial=partial, shares=shares)
    return Rotary(
        dim=dim,
        theta=theta_of(config, settings),
        interleaved=interleaved,
        scaling=scaling_of(config, settings, dim, shares=shares),
        in_float32=in_float32,
        pairs=pairs_of(settings, dim),
    )


def tempered(config: Any) -> Temperature:
    """The growth of queries with their position in a Mistral config: `llama_4_scaling_beta` of `rope_parameters`.
    Raises UnsupportedModelError if it is absent or not a number."""
    settings = settings_of(config, None)
    growth, every = (settings.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if not isinstance(growth, int | float) or not isinstance(every, int | float) or every <= 0:
        raise UnsupportedModelError(
            "rope_parameters of the config must have the numbers llama_4_scaling_beta and "
            f"original_max_position_embeddings for this architecture, got {growth!r} and {every!r}."
        )
    return Temperature(float(growth), float(every), first=0)


def sliding_window(size: int | None, *, causal: bool = True) -> Window | None:
    """The window from a config's `sliding_window`, which includes the token itself; None for none. Raises
    UnsupportedModelError if it is less than 1."""
    if size is None:
        return None
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModelError(f"sliding_window of the config must be at least 1, or null for none; got {size!r}.")
    return Window(left=size - 1, right=0 if causal else size - 1)


def layer_window(config: Any, layer_type: str, *, causal: bool = True) -> Window | None:
    """The window of a layer of this type, named in a config's `layer_types`. Raises UnsupportedModelError if the type
    is unknown, or the window has no size."""
    if layer_type == "full_attention":
        return None
    if layer_type != "sliding_attention":
        raise UnsupportedModelError(
            f"layer_types of the config holds {layer_type!r}; implemented: full_attention, sliding_attention."
        )
    if config.sliding_window is None:
        raise UnsupportedModelError(
            "layer_types of the config holds 'sliding_attention', but sliding_window is null. Set its size."
        )
    return sliding_window(config.sliding_window, causal=causal)


def layer_kinds(config: Any, *known: str, family: str = "") -> list[str]:
    """The type of each layer, from `layer_types`. Raises UnsupportedModelError if there are too few or too many, or one
    is not among those that the family implements (`known`; none: the caller checks them)."""
    types = list(config.layer_types)
    if len(types) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"layer_types in the checkpoint's config must have one entry for each of num_hidden_layers "
            f"{config.num_hidden_layers}, but has {len(types)}."
        )
    if known and (others := sorted(set(types) - set(known))):
        raise UnsupportedModelError(
            f"layer_types of the config holds {others[0]!r}; implemented{family}: {', '.join(known)}."
        )
    return types


def layer_windows(config: Any) -> list[Window | None]:
    """The window of each layer from `layer_types`; none without types. Raises UnsupportedModelError if a layer has
    another type, the number of layers differs, or a window has no size."""
    if not getattr(config, "layer_types", None):
        return [None] * config.num_hidden_layers
    return [layer_window(config, layer_type) for layer_type in layer_kinds(config)]


def routed(
    expert: Dense | Gated | Clamped,
    *,
    count: int,
    active: int,
    normalize: bool = True,
    routing: Routing | None = None,
    router_bias: bool = False,
) -> Experts:
    """Experts with `active` experts per token, `num_experts_per_tok` in configs. Raises UnsupportedModelError if there
    are fewer experts."""
    if not 1 <= active <= count:
        raise UnsupportedModelError(
            f"num_experts_per_tok of the config must be from 1 to the number of experts, {count}; got {active}."
        )
    return Experts(expert, count, active, normalize, routing or Likeliest(), router_bias)


def network_counts(config: Any) -> tuple[int, int]:
    """`n_routed_experts` and `n_shared_experts`, for layers with experts beside a network for all tokens. Raises
    UnsupportedModelError if one of them is missing."""
    count, shared = config.n_routed_experts, config.n_shared_experts
    if not count or not shared:
        raise UnsupportedModelError(
            "n_routed_experts and n_shared_experts of the config must be at least 1 where layers have experts (see "
            f"first_k_dense_replace); got {count} and {shared}."
        )
    return count, shared


def corrected(config: Any, count: int) -> Corrected:
    """Routing by corrected sigmoid scores, in groups: `n_group`, `topk_group`, `routed_scaling_factor`. Raises
    UnsupportedModelError if the groups do not match the experts."""
    groups, kept = groups_of(config, count, leaders=2)
    return Corrected(groups=groups, open_groups=kept, least=1e-20, scale=config.routed_scaling_factor)


def groups_of(config: Any, count: int, *, leaders: int) -> tuple[int, int]:
    """`n_group` and `topk_group`: the number of groups of experts, and the number of groups per token. `leaders`: the
    number of experts whose scores represent a group. Raises UnsupportedModelError if the groups do not match the
    experts."""
    groups, kept = config.n_group, config.topk_group
    if not (isinstance(groups, int) and groups >= 1 and count % groups == 0):
        raise UnsupportedModelError(f"n_group of the config must divide the number of experts, {count}; got {groups}.")
    if not (isinstance(kept, int) and 1 <= kept <= groups):
        raise UnsupportedModelError(f"topk_group of the config must be from 1 to n_group {groups}; got {kept}.")
    each = count // groups
    if kept < groups and (each < leaders or config.num_experts_per_tok > kept * each):
        raise UnsupportedModelError(
            f"n_group of the config is {groups}: each group must have at least {leaders} of the {count} experts, and "
            f"topk_group {kept} groups must have at least num_experts_per_tok {config.num_experts_per_tok} together."
        )
    return groups, kept


def qkv(target: str, sources: tuple[str, str, str], part: Attention, form: Transform | None = None) -> list[Entry]:
    """Separate query, key and value projections (names without .weight) in one fused matrix. `form`: how they are
    stored; None: like our matrix."""
    lengths = (part.heads * part.head_dim, part.kv_heads * part.head_dim, part.kv_heads * part.head_dim)
    how = form or Joined(lengths)
    kinds = ("weight", "bias") if part.qkv_bias else ("weight",)
    return [Entry(f"{target}.{k}", tuple(f"{s}.{k}" for s in sources), how) for k in kinds]


def cross(target: str, names: tuple[str, str, str, str], part: Attention) -> list[Entry]:
    """Cross-attention that is stored as query, key, value and output projections with these names."""
    queries, keys, values, out = names
    length = part.kv_heads * part.head_dim
    kinds = ("weight", "bias") if part.qkv_bias else ("weight",)
    return [
        *linear(f"{target}.queries", queries, part.qkv_bias),
        *(Entry(f"{target}.kv.{k}", (f"{keys}.{k}", f"{values}.{k}"), Joined((length, length))) for k in kinds),
        *linear(f"{target}.out", out, part.out_bias),
    ]


def token_tables(model: ModelSpec, shared: str, encoder: str, decoder: str) -> list[Entry]:
    """The token tables of an encoder-decoder model with these names: one for both stacks, stored under any of them, or
    one for each, either of which may be stored as the shared one."""
    if not model.shared_tokens:
        stacks = {"encoder": encoder, "decoder": decoder}
        return [
            Entry(f"{name}.embedding.tokens", (source,)) for name, own in stacks.items() for source in (own, shared)
        ]
    return [Entry("decoder.embedding.tokens", (source,)) for source in (shared, decoder, encoder)]


def linear(target: str, source: str, bias: bool, transform: Transform | None = None) -> list[Entry]:
    """A matrix and its bias. `transform`: the transform of the matrix, and of the bias unless the matrix is only
    transposed."""
    how = transform or Same()
    entries = [Entry(f"{target}.weight", (f"{source}.weight",), how)]
    if bias:
        entries.append(Entry(f"{target}.bias", (f"{source}.bias",), Same() if isinstance(how, Transposed) else how))
    return entries


def norm(
    target: str, source: str, *, bias: bool, weight: bool = True, transform: Transform | None = None
) -> list[Entry]:
    """A norm's weight, stored according to `transform`, and its bias, if it has them."""
    own = [Entry(f"{target}.weight", (f"{source}.weight",), transform or Same())] if weight else []
    return own + ([Entry(f"{target}.bias", (f"{source}.bias",))] if bias else [])


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def gated(target: str, source: str, part: Gated, names: tuple[str, str, str] = PROJECTIONS) -> list[Entry]:
    """The gate, up and down matrix of a gated network under `source`."""
    gate, up, down = names
    form = Joined((part.width, part.width))
    kinds = ("weight", "bias") if part.bias else ("weight",)
    return [
        *(Entry(f"{target}.gate_up.{k}", (f"{source}.{gate}.{k}", f"{source}.{up}.{k}"), form) for k in kinds),
        *linear(f"{target}.down", f"{source}.{down}", part.bias),
    ]


def experts(target: str, source: str, part: Experts, names: tuple[str, str, str], router: str) -> list[Entry]:
    """Gated experts, each with its own matrices under `source`.N, and their router. `names`: names of each expert's
    gate, up and down projection."""
    gate, up, down = names
    each = range(part.count)
    lengths = (part.expert.width, part.expert.width)
    pairs = tuple(f"{source}.{i}.{name}.weight" for i in each for name in (gate, up))
    downs = tuple(f"{source}.{i}.{down}.weight" for i in each)
    return [
        Entry(f"{target}.router.weight", (f"{router}.weight",)),
        Entry(f"{target}.up.weight", pairs, Stacked(Joined(lengths), part.count)),
        Entry(f"{target}.down.weight", downs, Stacked(Same(), part.count)),
    ]


def fused_experts(target: str, source: str, router: str) -> list[Entry]:
    """The same experts, stored as one tensor for all gate and up projections and one for all down projections."""
    return [
        Entry(f"{target}.router.weight", (f"{router}.weight",)),
        Entry(f"{target}.up.weight", (f"{source}.gate_up_proj",)),
        Entry(f"{target}.down.weight", (f"{source}.down_proj",)),
    ]


def output_table(model: ModelSpec, source: str) -> Entry:
    """The output matrix with that name; a tied one may be stored under it instead of the token table."""
    tied = isinstance(model.head, Lm) and model.head.tied
    return Entry("decoder.embedding.tokens" if tied else "head.weight", (f"{source}.weight",))


def head(model: ModelSpec, source: str) -> list[Entry]:
    """The output matrix, unless it is the embedding's table, and its bias, if it has one."""
    if not isinstance(model.head, Lm):
        return []
    entries = linear("head", source, model.head.bias)
    return entries[1:] if model.head.tied else entries


def dense(
    target: str, source: str, part: Dense, names: tuple[str, str], matrix: Transform | None = None
) -> list[Entry]:
    """The two matrices of a plain feed-forward network under `source`, stored according to `matrix`."""
    up, down = names
    return [
        *linear(f"{target}.up", f"{source}.{up}", part.bias, matrix),
        *linear(f"{target}.down", f"{source}.{down}", part.bias, matrix),
    ]


def residual_scaled(entries: Iterable[Entry], factor: float, *, normed: bool = False) -> list[Entry]:
    """A layer's entries; its contributions to the residual stream are scaled. `normed`: whether it is normed before it
    is added."""
    if factor == 1.0:
        return list(entries)
    last = re.compile(r"\.(attention|ffn)\.after\.weight$" if normed else r"\.(out|down)\.(weight|bias)$")
    return [
        replace(entry, transform=Affine(factor, inner=entry.transform)) if last.search(entry.target) else entry
        for entry in entries
    ]


def multiplied(
    entries: Iterable[Entry], factors: tuple[tuple[str, tuple[float, ...], tuple[int, ...]], ...]
) -> list[Entry]:
    """A layer's entries; parameters, or parts of them, are multiplied (`Block.factors`)."""
    return [
        next((_multiplied(entry, own, rows) for name, own, rows in factors if entry.target.endswith(name)), entry)
        for entry in entries
    ]


def _multiplied(entry: Entry, factors: tuple[float, ...], rows: tuple[int, ...]) -> Entry:
    form = entry.transform
    if set(factors) == {1.0}:
        return entry
    if len(factors) == 1:
        return replace(entry, transform=Affine(factors[0], inner=form))
    if rows:
        return replace(entry, transform=ScaledRows(rows, factors))
    assert isinstance(form, Joined)
    parts = (Affine(factor, inner=form.of(place)) for place, factor in enumerate(factors))
    return replace(entry, transform=replace(form, inner=tuple(parts)))
