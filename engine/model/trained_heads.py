"""Heads that were trained to predict later tokens from a model's hidden states, as models of one layer."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import architecture, build_spec, weight_table
from engine.model.families.common import norm
from engine.model.spec import Joined, Lm, ModelSpec, Tokens
from engine.model.table import Entry, WeightTable

MTP = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
_HIDDEN, _HEAD = "decoder.embedding.joining", "head.output.weight"


def mtp(config: Any) -> tuple[ModelSpec, WeightTable]:
    """The layer after a model's last one, which predicts the token after the next one (multi-token prediction,
    arXiv:2412.19437, 2.2), and the names of its weights.

    Raises:
        UnsupportedModelError: the config's model has no such layer, or another one.
    """
    name, number = architecture(config), config.num_hidden_layers
    if name not in MTP:
        raise UnsupportedModelError(f"The method mtp is for {' and '.join(MTP)}, but the config says {name}.")
    if (found := getattr(config, "num_nextn_predict_layers", None) or 0) != 1:
        raise UnsupportedModelError(f"The method mtp needs num_nextn_predict_layers 1 in the config, got {found}.")
    longer_config = copy.deepcopy(config)
    longer_config.num_hidden_layers = number + 1
    longer = build_spec(longer_config)
    assert longer.decoder is not None
    assert isinstance(longer.decoder.embedding, Tokens)
    own = longer.decoder.final_norm
    assert own is not None
    stack = replace(
        longer.decoder,
        embedding=replace(longer.decoder.embedding, joined=Joined(own)),
        blocks=longer.decoder.blocks[-1:],
        final_norm=None,
    )
    assert isinstance(longer.head, Lm)
    head = replace(longer.head, tied=False, norm=own)
    table, source, target = weight_table(longer_config, longer), f"model.layers.{number}", f"decoder.blocks.{number}."
    entries = [
        replace(entry, target=entry.target.replace(target, "decoder.blocks.0.", 1))
        for entry in table.entries
        if entry.target.startswith(target)
    ]
    entries += norm(f"{_HIDDEN}.token_norm", f"{source}.enorm", bias=False)
    entries += norm(f"{_HIDDEN}.hidden_norm", f"{source}.hnorm", bias=False)
    entries.append(Entry(f"{_HIDDEN}.projection.weight", (f"{source}.eh_proj.weight",)))
    entries += norm("head.norm", f"{source}.shared_head.norm", bias=False)
    # Checkpoints may have copies of the model's own table and matrix.
    tokens, matrix = "model.embed_tokens.weight", "lm_head.weight"
    names: dict[str, tuple[str, ...]] = {"decoder.embedding.tokens": (f"{source}.embed_tokens.weight", tokens)}
    names[_HEAD] = (f"{source}.shared_head.head.weight", matrix, tokens)
    entries += [Entry(to, (stored,)) for to, alternatives in names.items() for stored in alternatives]
    model = replace(longer, decoder=stack, head=head)
    return model, WeightTable(tuple(entries), ignored=(".*",), renamed=table.renamed)
