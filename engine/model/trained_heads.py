"""Heads that were trained to predict later tokens from a model's hidden states, as models of one layer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.families import architecture, build_spec, weight_table
from engine.model.families.common import norm
from engine.model.spec import Joined, Lm, ModelSpec, Pre, Sandwich, Stack, Tokens
from engine.model.table import Entry, WeightTable
from engine.model.weight_files import Checkpoint

EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_MTP_BEHIND = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")  # the weights are those of one more layer
_MTP_APART = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")  # their names begin with mtp
MTP = (*_MTP_BEHIND, *_MTP_APART)
_HIDDEN, _TOKENS, _HEAD = "decoder.embedding.joining", "decoder.embedding.tokens", "head.output.weight"


def mtp(config: Any) -> tuple[ModelSpec, WeightTable]:
    """The layer after a model's last one, which predicts the token after the next one (multi-token prediction,
    arXiv:2412.19437, 2.2), and the names of its weights. Of several such layers, the first one.

    Raises:
        UnsupportedModelError: the config's model has no such layer, or another one.
    """
    name, number = architecture(config), config.num_hidden_layers
    if name not in MTP:
        raise UnsupportedModelError(f"The method mtp is for {', '.join(MTP)}, but the config says {name}.")
    apart = name in _MTP_APART
    # The configs of Qwen3-Next do not state it.
    field, usual = ("mtp_num_hidden_layers", 1) if apart else ("num_nextn_predict_layers", 0)
    found = getattr(config, field, None)
    found = usual if found is None else found
    if not isinstance(found, int) or found < 1:
        raise UnsupportedModelError(f"The method mtp needs {field} of at least 1 in the config, got {found!r}.")
    longer_config = copy.deepcopy(config)
    longer_config.num_hidden_layers = number + 1
    if apart:
        longer_config.layer_types = [*config.layer_types, "full_attention"]
        longer_config.decoder_sparse_step = 1
    longer = build_spec(longer_config)
    assert longer.decoder is not None
    assert isinstance(longer.decoder.embedding, Tokens)
    own = longer.decoder.final_norm
    assert own is not None
    stack = replace(
        longer.decoder,
        embedding=replace(longer.decoder.embedding, joined=Joined(own)),
        blocks=longer.decoder.blocks[-1:],
        final_norm=own if apart else None,
    )
    assert isinstance(longer.head, Lm)
    head = replace(longer.head, tied=False, norm=None if apart else own)
    table, source, target = weight_table(longer_config, longer), f"model.layers.{number}", f"decoder.blocks.{number}."
    stored = "mtp.layers.0" if apart else source
    entries = [
        replace(
            entry,
            target=entry.target.replace(target, "decoder.blocks.0.", 1),
            sources=tuple(name.replace(f"{source}.", f"{stored}.", 1) for name in entry.sources),
        )
        for entry in table.entries
        if entry.target.startswith(target)
    ]
    names: dict[str, tuple[str, ...]]
    tokens, matrix = "model.embed_tokens.weight", "lm_head.weight"
    if apart:
        entries += norm(f"{_HIDDEN}.token_norm", "mtp.pre_fc_norm_embedding", bias=False)
        entries += norm(f"{_HIDDEN}.hidden_norm", "mtp.pre_fc_norm_hidden", bias=False)
        entries += norm("decoder.final_norm", "mtp.norm", bias=False)
        names = {
            f"{_HIDDEN}.projection.weight": ("mtp.fc.weight",),
            _TOKENS: (tokens,),
            "head.weight": (matrix, tokens),
        }
    else:
        entries += norm(f"{_HIDDEN}.token_norm", f"{source}.enorm", bias=False)
        entries += norm(f"{_HIDDEN}.hidden_norm", f"{source}.hnorm", bias=False)
        entries += norm("head.norm", f"{source}.shared_head.norm", bias=False)
        # Checkpoints may have copies of the model's own table and matrix.
        names = {
            f"{_HIDDEN}.projection.weight": (f"{source}.eh_proj.weight",),
            _TOKENS: (f"{source}.embed_tokens.weight", tokens),
            _HEAD: (f"{source}.shared_head.head.weight", matrix, tokens),
        }
    entries += [Entry(to, (stored,)) for to, alternatives in names.items() for stored in alternatives]
    model = replace(longer, decoder=stack, head=head)
    return model, WeightTable(tuple(entries), ignored=(".*",), renamed=table.renamed)


def kept_layers(config: Any, target: Stack) -> tuple[int, ...]:
    """The layers whose input an EAGLE-3 head of this config reads.

    Raises:
        UnsupportedModelError: the model lacks them, or its layers have another form.
    """
    count, name = len(target.blocks), "eagle_aux_hidden_state_layer_ids"
    found = getattr(config, name, None) or _eagle_config(config).get(name) or (2, count // 2, count - 3)
    layers = tuple(found) if isinstance(found, list | tuple) else (found,)
    known = len(layers) == 3 and all(isinstance(layer, int) for layer in layers)
    if not known or not all(0 < one < other < count for one, other in itertools.pairwise(layers)):
        raise UnsupportedModelError(
            f"An EAGLE-3 head reads the input of three layers in order, but these are {list(layers)} of {count}."
        )
    plain = all(
        isinstance(block.placement, Pre | Sandwich) and block.mixing is None and block.bottleneck is None
        for block in target.blocks
    )
    if not plain or target.versions is not None or target.repeated is not None:
        raise UnsupportedModelError("EAGLE-3 heads are for models whose layers have a norm before attention.")
    return layers


def _eagle_config(config: Any) -> Mapping[str, Any]:
    found = getattr(config, "eagle_config", None)
    return found if isinstance(found, Mapping) else {}


def eagle3(config: Any, target: ModelSpec, tokens: Callable[[Tensor], None]) -> tuple[ModelSpec, WeightTable]:
    """An EAGLE-3 head (arXiv:2503.01840): a LLaMA layer whose attention reads the next token beside the hidden state.

    Args:
        config: of the head.
        target: the model that it drafts for.
        tokens: fills the token table if the head has none of its own.

    Raises:
        UnsupportedModelError: it is another kind of head, or does not fit the model.
    """
    name = (getattr(config, "architectures", None) or ["none"])[0]
    if name not in EAGLE3:
        raise UnsupportedModelError(f"The method eagle3 needs a head of {EAGLE3[0]}, but its config says {name}.")
    assert target.decoder is not None
    width = getattr(config, "target_hidden_size", None) or config.hidden_size
    expected = (
        ("num_hidden_layers", config.num_hidden_layers, 1),
        ("target_hidden_size" if width != config.hidden_size else "hidden_size", width, target.decoder.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("norm_before_residual", bool(getattr(config, "norm_before_residual", False)), False),
        ("use_aux_hidden_state", _eagle_config(config).get("use_aux_hidden_state", True), True),
    )
    for field, value, wanted in expected:
        if value != wanted:
            raise UnsupportedModelError(f"{field} of the EAGLE-3 head must be {wanted} for this model, got {value}.")
    plain = copy.deepcopy(config)
    plain.architectures = ["LlamaForCausalLM"]
    one = build_spec(plain)
    assert one.decoder is not None
    assert isinstance(one.decoder.embedding, Tokens)
    own = one.decoder.final_norm
    assert own is not None
    stack = replace(
        one.decoder,
        embedding=replace(one.decoder.embedding, joined=Joined(own, entrance=3 * width)),
        blocks=(replace(one.decoder.blocks[0], reads_tokens=True),),
        final_norm=None,
    )
    count = getattr(config, "draft_vocab_size", None) or config.vocab_size
    if not isinstance(count, int) or not 0 < count <= config.vocab_size:
        raise UnsupportedModelError(
            f"draft_vocab_size of the EAGLE-3 head must be from 1 to {config.vocab_size} (vocab_size), got {count!r}."
        )
    head = Lm(tied=False, norm=own, choices=None if count == config.vocab_size else count)
    layer, before = "decoder.blocks.0.", "decoder.blocks.0.attention.before.weight"
    entries = [
        replace(entry, sources=tuple(name.replace("model.layers.0.", "midlayer.", 1) for name in entry.sources))
        for entry in weight_table(plain, one).entries
        if entry.target.startswith(layer) and entry.target != before
    ]
    entries += [
        Entry(before, ("midlayer.hidden_norm.weight",)),
        Entry(f"{_HIDDEN}.token_norm.weight", ("midlayer.input_layernorm.weight",)),
        Entry(f"{_HIDDEN}.entrance.weight", ("fc.weight",)),
        Entry(_TOKENS, ("embed_tokens.weight",), default=tokens),
        Entry("head.norm.weight", ("norm.weight",)),
        Entry(_HEAD, ("lm_head.weight",)),
    ]
    renamed = ((r"^model\.", ""), (r"^layers\.0\.", "midlayer."))
    model = replace(one, decoder=stack, head=head)
    return model, WeightTable(tuple(entries), ignored=(".*",), renamed=renamed)


def chosen_tokens(path: Path, count: int, vocabulary: int) -> Tensor:
    """The ids of the `count` tokens that an EAGLE-3 head may draft (`d2t`, differences from their own numbers).

    Raises:
        ModelLoadError: there is no such tensor, it has another form, or an id is outside the vocabulary.
    """
    with Checkpoint(path) as checkpoint:
        found = next((name for name in checkpoint.names if name.rpartition(".")[2] == "d2t"), None)
        if found is None:
            raise ModelLoadError(f"{path} lacks the tensor d2t, which names the {count} tokens of its vocabulary.")
        file, stored = checkpoint.names[found]
    with safe_open(file, "pt") as tensors:
        differences = tensors.get_tensor(stored)
    if differences.shape != (count,) or differences.is_floating_point():
        raise ModelLoadError(
            f"{path}: d2t must hold {count} integers (draft_vocab_size), but is stored as {list(differences.shape)}, "
            f"{differences.dtype}."
        )
    tokens: Tensor = torch.arange(count) + differences.long()
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise ModelLoadError(f"{path}: d2t names tokens outside the vocabulary of {vocabulary}.")
    return tokens
