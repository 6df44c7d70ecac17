"""Decoders whose weights have other names than LLaMA's, including GPT-2 and its relatives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.alibi import slopes
from engine.model.families.common import (
    activation,
    dense_network,
    even_head_dim,
    linear,
    lm,
    multi_head,
    rotary,
    sliding_window,
    tokens,
    with_head,
)
from engine.model.families.decoder import decoder, pairs
from engine.model.families.encoder_decoder import FAIRSEQ
from engine.model.families.names import DecoderNames, decoder_table
from engine.model.normalisation import Norm
from engine.model.positions import Learned, Rotary, RoundedSlopes, Sinusoidal, Slopes, SpannedSinusoidal
from engine.model.spec import (
    Activation,
    Attention,
    Dense,
    ModelSpec,
    NormedResidual,
    Parallel,
    PerHead,
    Placement,
    Post,
    Pre,
    Tokens,
)
from engine.model.table import Conv1d, Interleaved, Transform, WeightTable


def _layer_norm(c: Any) -> Norm:
    return Norm("layer", c.layer_norm_epsilon, bias=True)


def _learned(c: Any) -> Tokens:
    return tokens(c, positions=Learned(c.max_position_embeddings))


def _group_by_group(part: Attention) -> Transform:
    """Queries together with the key and the value that they share."""
    return Interleaved(part.kv_heads, part.heads // part.kv_heads, part.head_dim)


# ---------------------------------------------------------------- GPT-2 and relatives

# Causal masks that old checkpoints store as buffers are unread.
GPT2 = DecoderNames(
    stem="transformer",
    tokens="wte",
    positions="wpe.weight",
    final_norm="ln_f",
    layers="h",
    qkv="attn.c_attn",
    out="attn.c_proj",
    norms=("ln_1", "ln_2"),
    ffn=("mlp.c_fc", "mlp.c_proj"),
    unread=(r"h\.\d+\.attn\.(bias|masked_bias)",),
)


def _gpt2(c: Any) -> list[Attention]:
    scale = (c.hidden_size // c.num_attention_heads) ** -0.5 if c.scale_attn_weights else 1.0
    by_layer = range(1, c.num_hidden_layers + 1) if c.scale_attn_by_inverse_layer_idx else [1] * c.num_hidden_layers
    return [multi_head(c, scale=scale / divisor) for divisor in by_layer]


def _gpt_neo(c: Any) -> list[Attention]:
    """Unscaled scores, and some layers with a window."""
    kinds = c.attention_layers
    if others := sorted(set(kinds) - {"global", "local"}):
        raise UnsupportedModelError(f"attention_types of the config holds {others[0]!r}; implemented: global, local.")
    if len(kinds) != c.num_layers:
        raise UnsupportedModelError(
            f"attention_types of the config must name num_layers {c.num_layers} layers, but names {len(kinds)}."
        )
    return [
        multi_head(c, scale=1.0, sees=sliding_window(c.window_size) if kind == "local" else None, qkv_bias=False)
        for kind in kinds
    ]


def _four_times(c: Any, width: int | None) -> Dense:
    """A network of that width, by default four times hidden_size."""
    return Dense(4 * c.hidden_size if width is None else width, activation(c.activation_function), bias=True)


CORES = 4  # CodeGen stores queries, values and keys for each core of the machine that it was trained on


def _gptj(c: Any) -> Attention:
    if c.model_type == "codegen" and c.n_head % CORES:
        raise UnsupportedModelError(f"n_head must be a multiple of {CORES} for this architecture, got {c.n_head}.")
    head_dim, turned = even_head_dim(c.n_embd, c.n_head), c.rotary_dim
    if not turned or turned < 0 or turned % 2 or turned > head_dim:
        raise UnsupportedModelError(
            f"rotary_dim must be an even number from 2 to the {head_dim} features of a head, got {turned}."
        )
    # The base is not a setting of the config.
    return multi_head(c, position=Rotary(turned, 10_000.0, interleaved=True), bias=False)


def _gptj_weights(model: ModelSpec) -> WeightTable:
    """Queries, keys and values as separate matrices, as in GPT-J, or as in CodeGen."""
    names = replace(
        GPT2,
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        out="attn.out_proj",
        ffn=("mlp.fc_in", "mlp.fc_out"),
        unread=(r"h\.\d+\.attn\.(bias|masked_bias|causal_mask)",),
    )
    table = decoder_table(model, names)
    fused = [
        entry
        for i, block in enumerate(model.trunk.blocks)
        for entry in linear(
            f"decoder.blocks.{i}.attention.inner.qkv",
            f"transformer.h.{i}.attn.qkv_proj",
            False,
            Interleaved(CORES, 1, block.attention.heads * block.attention.head_dim // CORES, order=(0, 2, 1)),
        )
    ]
    return replace(table, entries=(*table.entries, *fused))


# Possible values of the first GPT's `afn`; gelu is the approximation by tanh.
AFN: dict[str, Activation] = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu", "swish": "silu"}


def _gpt(c: Any) -> Dense:
    if c.afn not in AFN:
        raise UnsupportedModelError(f"afn of the config must be one of {', '.join(AFN)}; got {c.afn!r}.")
    return Dense(4 * c.n_embd, AFN[c.afn], bias=True)


def _gpt_neox(c: Any) -> Attention:
    head_dim = c.hidden_size // c.num_attention_heads
    # Not a setting of this family, but rotary positions would obey it.
    if (getattr(c, "head_dim", None) or head_dim) != head_dim:
        raise UnsupportedModelError(
            f"head_dim must be hidden_size / num_attention_heads = {head_dim} for this architecture, got {c.head_dim}."
        )
    return multi_head(c, position=rotary(c, head_dim, partial=True), bias=c.attention_bias)


def _persimmon(c: Any) -> Attention:
    head_dim = even_head_dim(c.hidden_size, c.num_attention_heads)
    norm = PerHead(Norm("layer", c.layer_norm_eps, bias=True)) if c.qk_layernorm else None
    return multi_head(c, position=rotary(c, head_dim, partial=True), qk_norm=norm)


# ---------------------------------------------------------------- Falcon


def _falcon(c: Any) -> Attention:
    heads, head_dim = c.num_attention_heads, even_head_dim(c.hidden_size, c.num_attention_heads)
    # The bias is scaled like the scores.
    position = RoundedSlopes(slopes(heads), head_dim**-0.5) if c.alibi else rotary(c, head_dim)
    return multi_head(c, kv_heads=_falcon_kv_heads(c), position=position, bias=bool(c.bias))


def _falcon_kv_heads(c: Any) -> int:
    heads, kv_heads = c.num_attention_heads, c.num_kv_heads
    if c.new_decoder_architecture:
        if not kv_heads or heads % kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads must be a multiple of num_kv_heads, got {heads} and {kv_heads}."
            )
        return int(kv_heads)
    if c.multi_query:
        return 1
    if kv_heads != heads:
        raise UnsupportedModelError(
            f"num_kv_heads is {kv_heads} and num_attention_heads {heads}: without multi_query and "
            "new_decoder_architecture they must be equal."
        )
    return int(heads)


def _falcon_placement(c: Any, norm: Norm) -> Placement:
    norms = c.num_ln_in_parallel_attn
    if not c.new_decoder_architecture:
        if not c.parallel_attn:
            return Pre(norm, norm)
        if norms == 2:
            raise UnsupportedModelError("num_ln_in_parallel_attn may be 2 only with new_decoder_architecture.")
        return Parallel((norm,))
    if not c.parallel_attn:
        raise UnsupportedModelError("parallel_attn must be true with new_decoder_architecture, but is false.")
    if norms not in (None, 1, 2):
        raise UnsupportedModelError(f"num_ln_in_parallel_attn must be 1 or 2, got {norms}.")
    return Parallel((norm,) if norms == 1 else (norm, norm))


def _falcon_norms(placement: Placement) -> tuple[str, ...]:
    two = isinstance(placement, Parallel) and len(placement.norms) == 2
    return ("ln_attn", "ln_mlp") if two else ("input_layernorm", "post_attention_layernorm")


# Frequencies that old checkpoints store as buffers are unread.
FALCON = DecoderNames(
    stem="transformer",
    tokens="word_embeddings",
    final_norm="ln_f",
    layers="h",
    qkv="self_attention.query_key_value",
    qkv_form=_group_by_group,
    out="self_attention.dense",
    norms=_falcon_norms,
    ffn=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    unread=(r"(h\.\d+\.self_attention\.)?(maybe_rotary|rotary_emb)\.inv_freq",),
)


# ---------------------------------------------------------------- BLOOM, OPT, XGLM


def _bloom_refusals(c: Any) -> None:
    if c.slow_but_exact and c.pretraining_tp > 1:
        # The reference then omits the biases of the output projections, but every model was trained with them.
        raise UnsupportedModelError(
            f"slow_but_exact with pretraining_tp {c.pretraining_tp} is not implemented. Set slow_but_exact to "
            "false: it was meant to change no more than rounding."
        )


OFFSET = 2  # rows of OPT's, XGLM's and BioGPT's position tables that no token uses


def _opt_embedding(c: Any) -> Tokens:
    return tokens(
        c,
        width=c.word_embed_proj_dim,
        positions=Learned(c.max_position_embeddings + OFFSET, OFFSET),
        projection=c.hidden_size if c.word_embed_proj_dim != c.hidden_size else None,
    )


def _opt_norm(c: Any) -> Norm:
    learned = c.layer_norm_elementwise_affine
    return Norm("layer", 1e-5, bias=learned, weight=learned)  # the eps is not a setting of the config


OPT = DecoderNames(
    stem="model.decoder",
    positions="embed_positions.weight",
    final_norm="final_layer_norm",
    qkv=FAIRSEQ.qkv,
    out=FAIRSEQ.out,
    norms=FAIRSEQ.norms,
    ffn=FAIRSEQ.ffn,
    # A format marker that the first checkpoints store as a buffer.
    unread=("version",),
)


def _opt_weights(model: ModelSpec) -> WeightTable:
    table = decoder_table(model, OPT)
    if model.trunk.projection is None:
        return table
    mapped = linear("decoder.embedding.projection", "model.decoder.project_in", False)
    mapped += linear("decoder.projection", "model.decoder.project_out", False)
    return replace(table, entries=(*table.entries, *mapped))


def _xglm_refusals(c: Any) -> None:
    if c.model_type != "xglm":
        return
    if c.add_cross_attention:
        raise UnsupportedModelError("add_cross_attention must be false: there is no encoder to attend to.")
    if c.pad_token_id is not None and c.pad_token_id >= OFFSET:
        raise UnsupportedModelError(
            f"pad_token_id must be below {OFFSET} for this architecture, got {c.pad_token_id}: the position in "
            "that row of the table would be blank."
        )


def _xglm_embedding(c: Any) -> Tokens:
    rows = c.max_position_embeddings + OFFSET
    return tokens(
        c,
        scale=c.hidden_size**0.5 if c.scale_embedding else 1.0,
        positions=SpannedSinusoidal(rows, OFFSET) if c.model_type == "xglm" else Learned(rows, OFFSET),
    )


def _xglm_ffn(c: Any) -> Dense:
    if c.model_type == "xglm":
        return Dense(c.ffn_dim, activation(c.activation_function), bias=True)
    return dense_network(c)


XGLM = replace(OPT, stem="model", positions="embed_positions.weights", final_norm="layer_norm", unread=())
BIOGPT = replace(XGLM, stem="biogpt", positions="embed_positions.weight", head="output_projection")


def _xglm_weights(model: ModelSpec) -> WeightTable:
    assert isinstance(model.trunk.embedding, Tokens)
    xglm = isinstance(model.trunk.embedding.positions, SpannedSinusoidal)
    return decoder_table(model, XGLM if xglm else BIOGPT)


FAMILIES = (
    decoder(
        "GPT-2",
        ("GPT2LMHeadModel", "GPT2Model"),
        "learned positions, layer norms, GELU",
        attention=_gpt2,
        ffn=lambda c: _four_times(c, c.n_inner or None),
        norm=_layer_norm,
        embedding=_learned,
        crosses=lambda c: c.add_cross_attention,
        names=replace(GPT2, matrix=Conv1d()),
    ),
    # arXiv:2301.03988. The second name is from before transformers supported the family.
    decoder(
        "GPT-BigCode",
        ("GPTBigCodeForCausalLM", "GPTBigCodeLMHeadModel", "GPTBigCodeModel"),
        "multi-query attention, learned positions",
        attention=lambda c: multi_head(
            c,
            kv_heads=1 if c.multi_query else c.num_attention_heads,
            scale=(c.hidden_size // c.num_attention_heads) ** -0.5 if c.scale_attn_weights else 1.0,
        ),
        ffn=lambda c: _four_times(c, c.n_inner),
        norm=_layer_norm,
        embedding=_learned,
        crosses=lambda c: c.add_cross_attention,
        names=replace(GPT2, qkv_form=_group_by_group, unread=(r"(h\.\d+\.attn\.)?(bias|masked_bias)",)),
    ),
    decoder(
        "GPT-Neo",
        pairs("GPTNeo"),
        "learned positions, sliding windows in some layers, unscaled attention scores",
        attention=_gpt_neo,
        ffn=lambda c: _four_times(c, c.intermediate_size),
        norm=_layer_norm,
        embedding=_learned,
        names=replace(
            GPT2,
            qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
            out="attn.attention.out_proj",
            unread=(r"h\.\d+\.attn\.attention\.(bias|masked_bias)",),
        ),
    ),
    decoder(
        "GPT-J and CodeGen",
        pairs("GPTJ", "CodeGen"),
        "parallel blocks with one norm, partial and interleaved rotary positions, a bias in the head",
        attention=_gptj,
        ffn=lambda c: _four_times(c, c.n_inner),
        norm=_layer_norm,
        placement=lambda c, norm: Parallel((norm,)),
        head=lambda c: lm(c, bias=with_head(c)),
        weights=_gptj_weights,
    ),
    # The first one (Radford et al. 2018): a norm after each sum, none at the end.
    decoder(
        "GPT",
        ("OpenAIGPTLMHeadModel", "OpenAIGPTModel"),
        "learned positions, norms after the residual",
        attention=multi_head,
        ffn=_gpt,
        norm=_layer_norm,
        placement=lambda c, norm: Post(norm, norm),
        embedding=_learned,
        final_norm=lambda c: None,
        names=replace(
            GPT2,
            tokens="tokens_embed",
            positions="positions_embed.weight",
            matrix=Conv1d(),
            unread=(r"h\.\d+\.attn\.bias", r"position_ids"),
        ),
    ),
    # arXiv:2204.06745
    decoder(
        "GPT-NeoX",
        pairs("GPTNeoX"),
        "parallel blocks with two norms, partial rotary positions, interleaved QKV",
        attention=_gpt_neox,
        ffn=dense_network,
        norm=lambda c: Norm("layer", c.layer_norm_eps, bias=True),
        placement=lambda c, norm: Parallel((norm, norm)) if c.use_parallel_residual else Pre(norm, norm),
        names=DecoderNames(
            stem="gpt_neox",
            tokens="embed_in",
            final_norm="final_layer_norm",
            qkv="attention.query_key_value",
            qkv_form=_group_by_group,
            out="attention.dense",
            ffn=FALCON.ffn,
            # Causal masks and frequencies that old checkpoints store as buffers.
            unread=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
            renamed=((r"^embed_out\.", "lm_head."),),
        ),
    ),
    decoder(
        "Persimmon",
        pairs("Persimmon"),
        "QK norms with biases, partial rotary positions, squared ReLU, interleaved QKV",
        attention=_persimmon,
        ffn=dense_network,
        norm=lambda c: Norm("layer", c.layer_norm_eps, bias=True),
        names=DecoderNames(
            final_norm="final_layernorm",
            qkv="self_attn.query_key_value",
            qkv_form=_group_by_group,
            out="self_attn.dense",
            qk_norm="self_attn.{}_layernorm",
            ffn=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ),
    ),
    # arXiv:2311.16867
    decoder(
        "Falcon",
        pairs("Falcon"),
        "multi-query attention, parallel blocks with one or two norms, scaled ALiBi",
        attention=_falcon,
        ffn=lambda c: Dense(c.ffn_hidden_size, activation(c.activation), bias=bool(c.bias)),
        norm=_layer_norm,
        placement=_falcon_placement,
        names=FALCON,
    ),
    # arXiv:2211.05100. Only some configs contain the length that the published models were trained with.
    decoder(
        "BLOOM",
        pairs("Bloom"),
        "ALiBi, normalised embeddings",
        attention=lambda c: multi_head(c, position=Slopes(slopes(c.num_attention_heads))),
        ffn=lambda c: Dense(4 * c.hidden_size, "gelu_tanh", bias=True),
        norm=_layer_norm,
        placement=lambda c, norm: (
            NormedResidual(norm, norm) if c.apply_residual_connection_post_layernorm else Pre(norm, norm)
        ),
        embedding=lambda c: tokens(c, norm=_layer_norm(c)),
        context_length=lambda c: getattr(c, "seq_length", None) or 2048,
        refuse=_bloom_refusals,
        names=replace(
            FALCON,
            embedding_norm="word_embeddings_layernorm",
            # Causal masks that old checkpoints store as buffers.
            unread=(r"h\.\d+\.self_attention\.scale_mask_softmax\.causal_mask",),
        ),
    ),
    # arXiv:1909.05858. The eps of all norms except the last is not a setting of the config.
    decoder(
        "CTRL",
        ("CTRLLMHeadModel", "CTRLModel"),
        "scaled embeddings with sinusoidal positions, ReLU, a bias in the head",
        attention=multi_head,
        ffn=lambda c: Dense(c.dff, "relu", bias=True),
        norm=lambda c: Norm("layer", 1e-6, bias=True),
        final_norm=_layer_norm,
        embedding=lambda c: tokens(c, scale=c.n_embd**0.5, positions=Sinusoidal(c.n_positions)),
        head=lambda c: lm(c, bias=with_head(c)),
        names=DecoderNames(
            stem="transformer",
            tokens="w",
            positions="pos_encoding",
            final_norm="layernorm",
            layers="h",
            qkv=("multi_head_attention.Wq", "multi_head_attention.Wk", "multi_head_attention.Wv"),
            out="multi_head_attention.dense",
            norms=("layernorm1", "layernorm2"),
            ffn=("ffn.0", "ffn.2"),
            unread=(),
        ),
    ),
    # arXiv:2205.01068. Checkpoints that were saved without a head begin at "decoder.".
    decoder(
        "OPT",
        pairs("OPT"),
        "learned positions with an offset, ReLU, norms before or after the sublayers, projected embeddings",
        attention=lambda c: multi_head(c, bias=c.enable_bias),
        ffn=lambda c: Dense(c.ffn_dim, activation(c.activation_function), bias=c.enable_bias),
        norm=_opt_norm,
        placement=lambda c, norm: Pre(norm, norm) if c.do_layer_norm_before else Post(norm, norm),
        embedding=_opt_embedding,
        final_norm=lambda c: _opt_norm(c) if c.do_layer_norm_before and not c._remove_final_layer_norm else None,
        projection=lambda c: c.word_embed_proj_dim if c.word_embed_proj_dim != c.hidden_size else None,
        weights=_opt_weights,
    ),
    # arXiv:2112.10668, arXiv:2210.10341. BioGPT's layer_norm_eps has no effect in the reference either.
    decoder(
        "XGLM and BioGPT",
        pairs("XGLM", "BioGpt"),
        "scaled embeddings with sinusoidal or offset learned positions, GELU",
        attention=multi_head,
        ffn=_xglm_ffn,
        norm=lambda c: Norm("layer", 1e-5, bias=True),
        embedding=_xglm_embedding,
        refuse=_xglm_refusals,
        weights=_xglm_weights,
    ),
)
