"""GLiNER (arXiv:2311.08526): an encoder with a head that scores spans of words for labels.

Its library saves both as one model, whose gliner_config.json contains the encoder's config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.configs.published import published
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.interface.outputs import EntitiesInfo
from engine.model.spec import LabelledSpans, ModelSpec
from engine.model.table import Entry, WeightTable
from engine.model.weight_files import INDEX_FILE, SINGLE_FILE

FILE = "gliner_config.json"
_SETTINGS = "entity_settings"  # in the encoder's config: the file's settings of the head

_ENCODER = "token_rep_layer.bert_layer.model."
KIND = "gliner_uni_encoder_span"  # for the library's models; older files say less
_KINDS = (None, "gliner", KIND)
# Other parts that the library can build, by setting, and the values that are supported.
_SERVED: dict[str, tuple[Any, ...]] = {
    "labels_encoder": (None,),
    "labels_encoder_config": (None,),
    "labels_decoder": (None,),
    "labels_decoder_config": (None,),
    "relations_layer": (None,),
    "span_encoder_config": (None,),
    "span_mode": ("markerV0",),
    "subtoken_pooling": ("first",),
    "words_splitter_type": ("whitespace",),
    "embed_ent_token": (True,),
    "fuse_layers": (False, None),
    "post_fusion_schema": ("", None),
    "precomputed_prompts_mode": (False, None),
}
# The library's own values if a config lacks these settings.
_DEFAULTS = {
    "span_mode": "markerV0",
    "subtoken_pooling": "first",
    "words_splitter_type": "whitespace",
    "embed_ent_token": True,
    "hidden_size": 512,
    "num_rnn_layers": 1,
    "max_width": 12,
    "max_len": 384,
    "class_token_index": -1,
    "ent_token": "<<ENT>>",
    "sep_token": "<<SEP>>",
}
# Maximum tokens of an input per word read at once, including labels, if positions have no limit: the library reads such
# inputs at any length.
_TOKENS_PER_WORD = 4


def encoder_config(path: Path, values: Mapping[str, Any]) -> Any:
    """The encoder's config, which keeps the file's settings of the head. `path`: the checkpoint's folder. Raises
    ModelLoadError if the file has another form. UnsupportedModelError if another kind of GLiNER, or an unknown
    encoder."""
    file = path / FILE
    _refuse_others(file, values)
    inner = values.get("encoder_config")
    if not isinstance(inner, dict):
        raise ModelLoadError(f"{file} holds no encoder_config. {_CONVERT}")
    if not any((path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        raise ModelLoadError(f"{path} holds no {SINGLE_FILE}; files of torch (*.bin) are not read. {_CONVERT}")
    kind = inner.get("model_type", "deberta-v2")
    if not isinstance(kind, str) or kind not in ENCODERS:
        raise UnsupportedModelError(
            f"{file}: model_type of encoder_config is {kind!r}; supported encoders: {', '.join(ENCODERS)}."
        )
    settings = {name: value for name, value in inner.items() if name not in ("model_type", "architectures")}
    from transformers import AutoConfig  # slow to import

    try:
        config: Any = published(AutoConfig.for_model(kind, **settings))
    except Exception as error:  # transformers raises many kinds of errors, all of them about these values
        raise UnsupportedModelError(f"{file}: encoder_config cannot be read: {error}") from error
    config.architectures = [ENCODERS[kind]]
    setattr(config, _SETTINGS, {**_DEFAULTS, **values})
    return config


_CONVERT = (
    "Write the checkpoint once as safetensors, where the package gliner is installed: "
    'GLiNER.from_pretrained("...").save_pretrained(folder, safe_serialization=True), and give that folder.'
)
# The architecture of each kind of encoder.
ENCODERS = {
    "deberta-v2": "DebertaV2Model",
    "bert": "BertModel",
    "modernbert": "ModernBertModel",
    "xlm-roberta": "XLMRobertaModel",
}


def _refuse_others(file: Path, values: Mapping[str, Any]) -> None:
    kind = values.get("model_type")
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"{file}: model_type is {kind!r}; of GLiNER's models, those with one encoder that score spans of words are "
            f"served ({KIND})."
        )
    for name, served in _SERVED.items():
        value = values.get(name, _DEFAULTS.get(name))
        if value not in served:
            raise UnsupportedModelError(f"{file}: {name} is {value!r}, but must be {' or '.join(map(repr, served))}.")


def entity_head(config: Any) -> LabelledSpans | None:
    """The head for an encoder's config from a GLiNER checkpoint; None for other configs. Raises UnsupportedModelError
    if its settings contradict each other."""
    values = getattr(config, _SETTINGS, None)
    if values is None:
        return None
    features, recurrent, mark = (values[name] for name in ("hidden_size", "num_rnn_layers", "class_token_index"))
    for name in ("ent_token", "sep_token"):
        if not isinstance(values[name], str) or not values[name]:
            raise UnsupportedModelError(f"{FILE}: {name} must be the text of a token, got {values[name]!r}.")
    if recurrent and features % 2:
        raise UnsupportedModelError(
            f"{FILE}: hidden_size is {features}, but must be even for an LSTM that reads in both directions."
        )
    if not isinstance(mark, int) or not 0 <= mark < config.vocab_size:
        raise UnsupportedModelError(
            f"{FILE}: class_token_index is {mark!r}, but must be the id of {values['ent_token']}, one of the encoder's "
            f"{config.vocab_size} (vocab_size)."
        )
    reading = EntitiesInfo(
        label_mark=values["ent_token"],
        text_mark=values["sep_token"],
        label_token_id=mark,
        max_words=values["max_len"],
        max_width=values["max_width"],
    )
    return LabelledSpans(features=features, recurrent=recurrent, reading=reading)


def with_entities(model: ModelSpec, head: LabelledSpans, trained: int | None) -> ModelSpec:
    """An encoder with that head. If positions have no limit, its length is the one that the head was made for."""
    if model.max_positions is None:
        trained = max(trained or 0, _TOKENS_PER_WORD * head.reading.max_words)
    return replace(model, head=head, context_length=trained)


def entity_weights(table: WeightTable, head: LabelledSpans, hidden: int) -> WeightTable:
    """The encoder's weights with that head. The library stores the encoder without its family's prefix."""
    entries = list(table.entries)
    if head.features != hidden:
        entries += _pair("head.projection", "token_rep_layer.projection")
    for layer in range(head.recurrent):
        for direction in ("", "_reverse"):
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                name = f"{kind}_l{layer}{direction}"
                entries.append(Entry(f"head.recurrent.{name}", (f"rnn.lstm.{name}",)))
    for target, source in (
        ("start", "span_rep_layer.span_rep_layer.project_start"),
        ("end", "span_rep_layer.span_rep_layer.project_end"),
        ("span", "span_rep_layer.span_rep_layer.out_project"),
        ("label", "prompt_rep_layer"),
    ):
        # ReLU and dropout are between the two in the library.
        entries += [*_pair(f"head.{target}.inner", f"{source}.0"), *_pair(f"head.{target}.outer", f"{source}.3")]
    return replace(
        table, entries=tuple(entries), renamed=((f"^{re.escape(_ENCODER)}", table.prefix), *table.renamed), head=None
    )


def _pair(target: str, source: str) -> list[Entry]:
    return [Entry(f"{target}.{name}", (f"{source}.{name}",)) for name in ("weight", "bias")]
