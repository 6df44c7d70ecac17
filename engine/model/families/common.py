"""The parts that several families read from their configs and tables in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.model.families.rope_settings import rotated, scaling_of, settings_of, theta_of
from engine.model.normalisation import Norm
from engine.model.positions import Rotary
from engine.model.spec import (
    Activation,
    Attention,
    Block,
    Clamped,
    Corrected,
    Dense,
    EachHead,
    Experts,
    FeedForward,
    Gated,
    Likeliest,
    Lm,
    ModelSpec,
    Placement,
    Pre,
    Routing,
    Stack,
    Tokens,
)
from engine.model.table import Affine, Entry, Joined, Reshaped, Same, Stacked, Transform, Transposed, WeightTable

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


def even_head_dim(hidden_size: int, heads: int) -> int:
    """Features of a head, where the heads share the residual stream's evenly.

    Raises:
        UnsupportedModelError: they cannot.
    """
    if hidden_size % heads:
        raise UnsupportedModelError(
            f"The checkpoint's config has {hidden_size} hidden features, which {heads} attention heads cannot share "
            "evenly: the first must be a multiple of the second."
        )
    return hidden_size // heads


def rotary(
    config: Any,
    head_dim: int,
    layer_type: str | None = None,
    *,
    partial: bool = False,
    interleaved: bool = False,
    in_float32: bool = False,
) -> Rotary:
    """The rotary part of a config whose `rope_parameters` are flat, or nested by layer type.

    Args:
        head_dim: features of a head.
        layer_type: whose parameters are meant, where they are nested.
        partial: the family rotates only a share of the features, `partial_rotary_factor`.
        interleaved: the family rotates pairs of neighbouring features.
        in_float32: the family rotates in float32, whatever the format of queries and keys.

    Raises:
        UnsupportedModelError: a scaling that is not implemented, or one whose settings do not fit.
    """
    settings = settings_of(config, layer_type)
    dim = rotated(settings, head_dim, partial=partial)
    return Rotary(
        dim=dim,
        theta=theta_of(config, settings),
        interleaved=interleaved,
        scaling=scaling_of(config, settings, dim),
        in_float32=in_float32,
    )


def plain_decoder(
    config: Any,
    attentions: Iterable[Attention],
    ffn: FeedForward | Iterable[FeedForward],
    *,
    norm: Norm | None = None,
    placement: Placement | None = None,
    scale: float = 1.0,
    residual_scale: float = 1.0,
    head: Lm | None = None,
) -> ModelSpec:
    """A decoder whose blocks differ in their attentions and feed-forward networks only.

    Args:
        ffn: one for all blocks, or one for each.
        norm: of each sublayer and the end; None: RMS norms.
        placement: of the norms; None: one before each sublayer.
        scale: of the embedding.
        residual_scale: of each block.
        head: None: one without a bias or a scale.
    """
    norm = norm or Norm("rms", config.rms_norm_eps)
    attentions = list(attentions)
    networks = list(ffn) if isinstance(ffn, Iterable) else [ffn] * len(attentions)
    placement = placement or Pre(norm, norm)
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size, scale=scale),
        blocks=tuple(
            Block(placement=placement, attention=attention, ffn=own, residual_scale=residual_scale)
            for attention, own in zip(attentions, networks, strict=True)
        ),
        final_norm=norm,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=head or Lm(tied=config.tie_word_embeddings))


def sliding_window(size: int | None, *, causal: bool = True) -> Window | None:
    """The window of a config's `sliding_window`, which counts the token itself; None for none.

    Raises:
        UnsupportedModelError: it is below 1.
    """
    if size is None:
        return None
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModelError(f"sliding_window of the config must be at least 1, or null for none; got {size!r}.")
    return Window(left=size - 1, right=0 if causal else size - 1)


def layer_window(config: Any, layer_type: str, *, causal: bool = True) -> Window | None:
    """The window of a layer of this type, as `layer_types` of a config names it.

    Raises:
        UnsupportedModelError: another type, or a window of no size.
    """
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


def layer_windows(config: Any) -> list[Window | None]:
    """The window of each layer, by `layer_types`; none where there are no types.

    Raises:
        UnsupportedModelError: a layer of another type, too few or too many of them, or a window of no size.
    """
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if len(types) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"layer_types in the checkpoint's config must have one entry for each of num_hidden_layers "
            f"{config.num_hidden_layers}, but has {len(types)}."
        )
    return [layer_window(config, layer_type) for layer_type in types]


def routed(
    expert: Dense | Gated | Clamped,
    *,
    count: int,
    active: int,
    normalize: bool = True,
    routing: Routing | None = None,
    router_bias: bool = False,
) -> Experts:
    """Experts of which each token goes to `active`, `num_experts_per_tok` in configs.

    Raises:
        UnsupportedModelError: there are not so many.
    """
    if not 1 <= active <= count:
        raise UnsupportedModelError(
            f"num_experts_per_tok of the config must be from 1 to the number of experts, {count}; got {active}."
        )
    return Experts(expert, count, active, normalize, routing or Likeliest(), router_bias)


def corrected(config: Any, count: int) -> Corrected:
    """Routing by sigmoid scores with a correction, in groups: `n_group`, `topk_group`, `routed_scaling_factor`.

    Raises:
        UnsupportedModelError: the groups do not fit the experts.
    """
    groups, kept = groups_of(config, count, leaders=2)
    return Corrected(groups=groups, open_groups=kept, least=1e-20, scale=config.routed_scaling_factor)


def groups_of(config: Any, count: int, *, leaders: int) -> tuple[int, int]:
    """`n_group` and `topk_group`: how many groups experts lie in, and how many of those a token sees.

    Args:
        leaders: experts of a group that speak for it.

    Raises:
        UnsupportedModelError: the groups do not fit the experts.
    """
    groups, kept = config.n_group, config.topk_group
    if not (isinstance(groups, int) and groups >= 1 and count % groups == 0):
        raise UnsupportedModelError(f"n_group of the config must divide the number of experts, {count}; got {groups}.")
    if not (isinstance(kept, int) and 1 <= kept <= groups):
        raise UnsupportedModelError(f"topk_group of the config must be from 1 to n_group {groups}; got {kept}.")
    each = count // groups
    if kept < groups and (each < leaders or config.num_experts_per_tok > kept * each):
        raise UnsupportedModelError(
            f"n_group {groups} of the config must leave at least {leaders} of the {count} experts in a group, and "
            f"topk_group {kept} at least num_experts_per_tok {config.num_experts_per_tok} experts in those that are "
            "chosen."
        )
    return groups, kept


def qkv(target: str, sources: tuple[str, str, str], part: Attention) -> list[Entry]:
    """Separate query, key and value projections (names without .weight) in one fused matrix."""
    lengths = (part.heads * part.head_dim, part.kv_heads * part.head_dim, part.kv_heads * part.head_dim)
    kinds = ("weight", "bias") if part.qkv_bias else ("weight",)
    return [Entry(f"{target}.{k}", tuple(f"{s}.{k}" for s in sources), Joined(lengths), shard_axis=0) for k in kinds]


def cross(target: str, names: tuple[str, str, str, str], part: Attention) -> list[Entry]:
    """Cross-attention, stored as query, key, value and output projections of these names."""
    queries, keys, values, out = names
    length = part.kv_heads * part.head_dim
    kinds = ("weight", "bias") if part.qkv_bias else ("weight",)
    return [
        *linear(f"{target}.queries", queries, part.qkv_bias, 0),
        *(Entry(f"{target}.kv.{k}", (f"{keys}.{k}", f"{values}.{k}"), Joined((length, length)), 0) for k in kinds),
        *linear(f"{target}.out", out, part.out_bias, 1),
    ]


def token_tables(model: ModelSpec, shared: str, encoder: str, decoder: str) -> list[Entry]:
    """The token tables of an encoder-decoder model by these names: one for both stacks, stored under any of them, or
    one for each, of which either may be stored as the shared one."""
    if not model.shared_tokens:
        stacks = {"encoder": encoder, "decoder": decoder}
        return [
            Entry(f"{name}.embedding.tokens", (source,), shard_axis=0)
            for name, own in stacks.items()
            for source in (own, shared)
        ]
    return [Entry("decoder.embedding.tokens", (source,), shard_axis=0) for source in (shared, decoder, encoder)]


def linear(
    target: str, source: str, bias: bool, shard_axis: int | None, transform: Transform | None = None
) -> list[Entry]:
    """A matrix and its bias, which is divided only where the outputs are.

    Args:
        transform: of the matrix, and of the bias unless the matrix is only transposed.
    """
    how = transform or Same()
    entries = [Entry(f"{target}.weight", (f"{source}.weight",), how, shard_axis=shard_axis)]
    if bias:
        of_bias = Same() if isinstance(how, Transposed) else how
        axis = 0 if shard_axis == 0 else None
        entries.append(Entry(f"{target}.bias", (f"{source}.bias",), of_bias, shard_axis=axis))
    return entries


def norm(target: str, source: str, *, bias: bool, weight: bool = True) -> list[Entry]:
    """A norm's weight and bias, as far as it has them."""
    kinds = {"weight": weight, "bias": bias}
    return [Entry(f"{target}.{kind}", (f"{source}.{kind}",)) for kind, present in kinds.items() if present]


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


def experts(target: str, source: str, part: Experts, names: tuple[str, str, str], router: str) -> list[Entry]:
    """Gated experts, one group of matrices each under `source`.N, and their router.

    Args:
        names: of each expert's gate, up and down projection.
        router: the router's name.
    """
    gate, up, down = names
    each = range(part.count)
    lengths = (part.expert.width, part.expert.width)
    pairs = tuple(f"{source}.{i}.{name}.weight" for i in each for name in (gate, up))
    downs = tuple(f"{source}.{i}.{down}.weight" for i in each)
    return [
        Entry(f"{target}.router.weight", (f"{router}.weight",)),
        Entry(f"{target}.up.weight", pairs, Stacked(Joined(lengths), part.count), shard_axis=1),
        Entry(f"{target}.down.weight", downs, Stacked(Same(), part.count), shard_axis=2),
    ]


def fused_experts(target: str, source: str, router: str) -> list[Entry]:
    """The same experts stored as one tensor for all gate and up projections, and one for all down projections."""
    return [
        Entry(f"{target}.router.weight", (f"{router}.weight",)),
        Entry(f"{target}.up.weight", (f"{source}.gate_up_proj",), shard_axis=1),
        Entry(f"{target}.down.weight", (f"{source}.down_proj",), shard_axis=2),
    ]


def projected_experts(target: str, source: str, part: Experts, correction: str | None = None) -> list[Entry]:
    """Experts stored as gate_proj, up_proj and down_proj under `source`.experts.N or as one, routed by `source`.gate.

    Args:
        correction: the name of the correction of scores under `source`.
    """
    router = f"{source}.gate"
    entries = [
        *experts(target, f"{source}.experts", part, ("gate_proj", "up_proj", "down_proj"), router),
        *fused_experts(target, f"{source}.experts", router),
    ]
    return entries if correction is None else [*entries, Entry(f"{target}.correction", (f"{source}.{correction}",))]


def projected_attention(target: str, source: str, part: Attention) -> list[Entry]:
    """Attention that stores q_proj, k_proj, v_proj and o_proj under `source`, and q_norm and k_norm if it has them."""
    names = (f"{source}.q_proj", f"{source}.k_proj", f"{source}.v_proj")
    entries = [
        *qkv(f"{target}.qkv", names, part),
        *linear(f"{target}.out", f"{source}.o_proj", part.out_bias, shard_axis=1),
    ]
    if isinstance(part.qk_norm, EachHead):
        entries += head_norms(f"{target}.qk_norm", source, part, "{}_norm")
    elif part.qk_norm is not None:
        kinds = {"bias": part.qk_norm.norm.bias, "weight": part.qk_norm.norm.weight}
        entries += norm(f"{target}.qk_norm.queries", f"{source}.q_norm", **kinds)
        entries += norm(f"{target}.qk_norm.keys", f"{source}.k_norm", **kinds)
    return entries


def head_norms(target: str, source: str, part: Attention, names: str, *, apart: bool = False) -> list[Entry]:
    """Weights of norms that each head has of its own: in one matrix, or `apart` as a vector for each head.

    Args:
        names: of queries' and keys', with `{}` for q or k.
    """
    entries = []
    for name, letter, heads in (("queries", "q", part.heads), ("keys", "k", part.kv_heads)):
        stem = f"{source}.{names.format(letter)}"
        stored = tuple(f"{stem}.norms.{head}.weight" for head in range(heads)) if apart else (f"{stem}.weight",)
        shape = (part.head_dim,) if apart else (heads, part.head_dim)
        entries.append(Entry(f"{target}.{name}.weight", stored, Reshaped((shape,) * len(stored)), shard_axis=0))
    return entries


def projected_block(target: str, source: str, attention: Attention, ffn: Gated) -> list[Entry]:
    """Attention and feed-forward of a layer that stores them as `self_attn` and a gated `mlp`."""
    return [
        *projected_attention(f"{target}.attention.inner", f"{source}.self_attn", attention),
        *gated(f"{target}.ffn.inner", f"{source}.mlp", ffn),
    ]


def output_table(model: ModelSpec, source: str) -> Entry:
    """The output matrix of that name, under which one that is tied may be stored instead of the token table."""
    tied = isinstance(model.head, Lm) and model.head.tied
    return Entry("decoder.embedding.tokens" if tied else "head.weight", (f"{source}.weight",), shard_axis=0)


def head(model: ModelSpec, source: str) -> list[Entry]:
    """The output matrix, where it is not the embedding's table, and its bias, if it has one."""
    if not isinstance(model.head, Lm):
        return []
    entries = linear("head", source, model.head.bias, shard_axis=0)
    return entries[1:] if model.head.tied else entries


def dense(target: str, source: str, part: Dense, names: tuple[str, str]) -> list[Entry]:
    """The two matrices of a plain feed-forward network under `source`."""
    up, down = names
    return [
        *linear(f"{target}.up", f"{source}.{up}", part.bias, 0),
        *linear(f"{target}.down", f"{source}.{down}", part.bias, 1),
    ]


def residual_scaled(entries: Iterable[Entry], factor: float) -> list[Entry]:
    """A layer's entries, what it adds to the residual stream being scaled."""
    if factor == 1.0:
        return list(entries)
    last = re.compile(r"\.(out|down)\.(weight|bias)$")
    return [
        replace(entry, transform=Affine(factor, inner=entry.transform)) if last.search(entry.target) else entry
        for entry in entries
    ]


def projected_layer(target: str, source: str, block: Block) -> list[Entry]:
    """`projected_block` of a block whose feed-forward network is gated."""
    assert isinstance(block.ffn, Gated)
    return projected_block(target, source, block.attention, block.ffn)


# Norms of a block with one before each sublayer: their places, and the names that they are stored under.
PRE_NORMS = {"attention.before": "input_layernorm", "ffn.before": "post_attention_layernorm"}


def decoder_table(
    model: ModelSpec,
    layer: Callable[[str, str, Block], list[Entry]] = projected_layer,
    norms: Mapping[str, str] = PRE_NORMS,
) -> WeightTable:
    """The weights of a decoder whose norms are all of one kind under LLaMA's names.

    Args:
        layer: the entries of a block's sublayers, given the names of our block and of the stored one.
        norms: of a block.
    """
    assert model.decoder is not None
    last = model.decoder.final_norm
    assert last is not None
    kinds = {"bias": last.bias, "weight": last.weight}
    entries = [
        Entry("decoder.embedding.tokens", ("model.embed_tokens.weight",), shard_axis=0),
        *norm("decoder.final_norm", "model.norm", **kinds),
        *head(model, "lm_head"),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"model.layers.{i}"
        for ours, theirs in norms.items():
            entries += norm(f"{target}.{ours}", f"{source}.{theirs}", **kinds)
        entries += residual_scaled(layer(target, source, block), block.residual_scale)
    return WeightTable(
        tuple(entries),
        prefix="model.",
        # Frequencies that old checkpoints store as buffers.
        ignored=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
        head="lm_head.weight",
    )
