"""The families, by the architecture name in a checkpoint's config; each file is found automatically."""

from __future__ import annotations

import difflib
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from engine.errors import OctavoError, UnsupportedModelError
from engine.model.families.classification import base_model, classifier, joint_classifier, with_head, with_joint_head
from engine.model.families.entities import entity_head, entity_weights, with_entities
from engine.model.families.kinds import keeps_state, model_type_of, own_settings, settings_of_class, unknown_settings
from engine.model.families.language_part import ARCHITECTURES, vision_of, whole_of, without_vision
from engine.model.families.sight import with_sight
from engine.model.missing import unsupported
from engine.model.spec import LabelledSpans, Lm, ModelSpec, Pool
from engine.model.stored.methods import find_scheme
from engine.model.stored.scheme import Scheme
from engine.model.table import Family, WeightTable


def _discover() -> tuple[Family, ...]:
    """The rows FAMILIES of this package's modules, and the FAMILY of each module that has one, in the order of their
    names."""
    found: list[Family] = []
    for module in pkgutil.iter_modules(__path__):
        content = vars(import_module(f"{__name__}.{module.name}"))
        found += content.get("FAMILIES", ())
        found += [content["FAMILY"]] if "FAMILY" in content else []
    return tuple(sorted(found, key=lambda family: family.name.lower()))


FAMILIES: tuple[Family, ...] = _discover()
_BY_ARCHITECTURE: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}


def supported() -> list[str]:
    """Supported architecture names."""
    return sorted(name for name, family in _BY_ARCHITECTURE.items() if family.weights is not None)


def nearest(name: str) -> str | None:
    """The supported architecture most similar to `name`: one of the same family; None if none is similar.

    Names are compared by their words, without the task: "Qwen2VLForConditionalGeneration" is similar to
    "Qwen2ForCausalLM" because both begin with "qwen 2". The name is all that is known about an unknown architecture.
    """
    words = _words(name)
    likeness = {other: _likeness(words, _words(other)) for other in _with_head()}
    best = max(likeness, key=lambda other: likeness[other])
    common, _, ratio = likeness[best]
    return best if common or ratio > _NEAR else None


_NEAR = 0.75  # minimum similarity of two names without a common first word, such as pixtral and mixtral
_PURPOSE = re.compile(r"(LMHead|DoubleHeads|PreTrained|For[A-Z][A-Za-z]+)?(Model)?$")


def _words(name: str) -> list[str]:
    """GPTNeoXForCausalLM to gpt, neo, x: the name of the model without its task."""
    stem = _PURPOSE.sub("", name, count=1) or name
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d{1,9}", stem)]


def _likeness(words: list[str], others: list[str]) -> tuple[int, int, float]:
    """The similarity of two names: the number of equal first words, the distance of the versions that follow, and the
    similarity as a whole."""
    common = 0
    while common < min(len(words), len(others)) and words[common] == others[common]:
        common += 1
    one, other = (int(w[common]) if common < len(w) and w[common].isdecimal() else 1 for w in (words, others))
    first = others[0]
    # A family's name may also have a prefix or a suffix: mllama, phimoe.
    if not common and len(first) > 2 and any(word.startswith(first) or word.endswith(first) for word in words):
        common = 1
    return common, -abs(one - other), difflib.SequenceMatcher(None, "".join(words), "".join(others)).ratio()


def _with_head() -> list[str]:
    """Supported architectures with their own heads."""
    return [name for name in supported() if name not in _BY_ARCHITECTURE[name].headless]


def nearest_by_settings(config: Any) -> str | None:
    """The supported architecture whose configs share most settings with this one; None if none shares enough.

    For an architecture whose name is not similar to any: many are LLaMA's blocks under another name. Only names of
    settings are compared, and only those that not every config has.
    """
    likeness = {name: _shared(config, name) for name in _with_head()}
    best = max(likeness, key=lambda name: likeness[name])
    return best if likeness[best] > _SHARED else None


_SHARED = 0.4  # share of the settings that either has; encoder-decoders share less with any
_DOUBT = 0.2  # a similar name counts less than this difference of shares: gpt-oss is not GPT-NeoX


def _shared(config: Any, name: str) -> float:
    """The share of settings that a config has in common with those of a supported architecture."""
    own, others = own_settings(config), settings_of_class(_config_name(name))
    return len(own.keys() & others) / (len(own.keys() | others) or 1)


def _config_name(name: str) -> str:
    return _PURPOSE.sub("", name, count=1) + "Config"


def _alternatives(config: Any) -> str:
    """A sentence about the architecture nearest to a config's, and whether it could be used instead."""
    name = architecture(config)
    if text := getattr(config, "text_config", None):
        kind = getattr(text, "model_type", "")
        inner = next((other for other in _with_head() if model_type_of(_config_name(other)) == kind), None)
        if inner is not None:
            return f"A checkpoint with only its language part ({inner}) is supported."
        return "Its language part is not supported either."
    near = nearest(name)
    if near is not None and _words(near) == _words(name):
        return f"{near}, of the same family, is supported, but has another head."
    alike = nearest_by_settings(config)
    if alike is not None and (near is None or _shared(config, near) < _shared(config, alike) - _DOUBT):
        near = alike
    if near is None:
        return "No supported architecture is similar."
    unknown = unknown_settings(config, _config_name(near))
    if unknown:
        more = f" (and {len(unknown) - 3} more)" if len(unknown) > 3 else ""
        return (
            f"The most similar one, {near}, cannot replace it: it does not know the setting "
            f"{', '.join(unknown[:3])}{more}."
        )
    return (
        f"The most similar one, {near}, has the same settings; whether it computes the same, only transformers "
        "can tell."
    )


def architecture(config: Any) -> str:
    """The architecture name in a transformers config, "" if there is none."""
    return next(iter(getattr(config, "architectures", None) or ()), "")


def is_known(values: Mapping[str, Any]) -> bool:
    """Whether a family describes the architecture in a config.json."""
    named = values.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    return name in ARCHITECTURES or name in _BY_ARCHITECTURE or (base_model(name) or "") in _BY_ARCHITECTURE


def find(config: Any) -> Family:
    """The family of a config. Raises UnsupportedModelError if no family has this architecture."""
    name = architecture(config)
    if not name:
        raise UnsupportedModelError(f'config.json has no "architectures". Add the name of its architecture. {_LIST}')
    family = _BY_ARCHITECTURE.get(name) or _BY_ARCHITECTURE.get(base_model(name) or "")
    if family is None:
        raise _unknown(config)
    return family


def stored_scheme(config: Any) -> Scheme | None:
    """The scheme in which a checkpoint stores quantised weights; None for plain weights. Raises UnsupportedModelError
    if the scheme is not supported, or the family does not support it."""
    family = _BY_ARCHITECTURE.get(architecture(config))
    return find_scheme(config, reads_mxfp4=family is not None and family.reads_mxfp4)


_NO_ATTENTION = "no layer is attention"
# Missing parts that architectures need, by the beginnings of their names.
_REASONS = {
    "AXK1": "the sum of the experts and of the network for every token is normed, too",
    "BitNet": "results of attention and of the gates are normed before their last matrix",
    "DeepseekV32": "a sparse index chooses the tokens that attention sees",
    "DeepseekV4": "a sparse index chooses the tokens that attention sees, of which some are compressed",
    "DiffLlama": "attention is the difference of two softmaxes",
    "FalconMamba": _NO_ATTENTION,
    "Florence2": "its encoder reads an image's vectors (DaViT's) before those of a text",
    "GlmMoeDsa": "a sparse index chooses the tokens that attention sees",
    "Granite4Vision": "a second transformer, with queries of its own, reads its image tower",
    "GraniteDocling": "a router chooses one of two paths from its image tower to the decoder",
    "LongcatFlash": "layers have two attentions, and some experts return their input",
    "Mamba": _NO_ATTENTION,
    "MiMoV2Flash": "values have a different size from keys",
    "MiniMaxM3": "a sparse index chooses the tokens that attention sees",
    "RWKV": _NO_ATTENTION,
    "Rwkv": _NO_ATTENTION,
    "Zamba": "several layers share the weights of one attention layer, which also reads the embeddings",
    "xLSTM": _NO_ATTENTION,
}


def _unknown(config: Any) -> UnsupportedModelError:
    name = architecture(config)
    stateful, why = keeps_state(config), ""
    reasons = [reason for begin, reason in _REASONS.items() if name.startswith(begin)]
    if reasons:
        why = f": {reasons[0]}"
    elif stateful:
        why = (
            ": it keeps a state (recurrent or state-space layers) of a kind that is not implemented; implemented: "
            "gated short convolutions, gated delta rules, selective scans, RG-LRU and lightning attention"
        )
    elif getattr(config, "text_config", None):
        why = ": it reads more than text"
    instead = "No supported architecture can replace it." if stateful else _alternatives(config)
    return UnsupportedModelError(f"The architecture {name!r} is not supported{why}. {instead} {_LIST}")


_LIST = "`octavo models` lists what is supported."


def describe(config: Any) -> ModelSpec:
    """The parts of a config's model, implemented or not. Raises UnsupportedModelError if the architecture is unknown,
    or has a setting that no part expresses."""
    family, name = find(config), architecture(config)
    _refuse_overrides(config)
    try:
        entities = entity_head(config)
        model = family.spec(config)
    except OctavoError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Values that the config's class accepts and no check anticipated: a missing setting, a text for a number.
        raise UnsupportedModelError(
            f"The config's settings do not describe a model of the family {family.name} ({type(error).__name__}: "
            f"{error}). Correct config.json, or download the checkpoint again."
        ) from error
    if model.decoder is not None and getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError("The config sets is_causal to false, which is not implemented for decoders.")
    if model.decoder is not None and model.encoder is None:
        model = _with_head_of(name, config, model, headless=name in family.headless)
        return replace(model, vision=vision_of(config)) if model.decoder is not None else model
    if entities is not None:
        return with_entities(model, entities, context_length(config, model))
    if name in _BY_ARCHITECTURE:
        return model
    if family.repeats is None or not name.endswith("ForSequenceClassification"):
        raise _unknown(config)
    return replace(model, head=joint_classifier(config), repeats=family.repeats(config))


def _with_head_of(name: str, config: Any, model: ModelSpec, *, headless: bool) -> ModelSpec:
    """A decoder-only model with this architecture's head, derived from one that its family describes.

    A decoder whose tokens see later ones cannot generate: without a language-model head, it is treated as an encoder.
    """
    assert model.decoder is not None
    causal = all(block.attention.causal for block in model.decoder.blocks if block.attention.heads)
    if name not in _BY_ARCHITECTURE:
        model = replace(model, head=classifier(config, name))
    elif headless and isinstance(model.head, Lm) and not (causal and model.head.tied):
        model = replace(model, head=Pool())
    if causal or isinstance(model.head, Lm):
        return model
    return replace(model, encoder=model.decoder, decoder=None)


def _refuse_overrides(config: Any) -> None:
    """transformers obeys this setting in any config, although no family declares it."""
    if getattr(config, "is_heterogeneous", False) and not str(config.model_type).startswith("gemma4"):
        raise UnsupportedModelError("The config has a per_layer_config, which is not implemented.")


def context_length(config: Any, model: ModelSpec) -> int | None:
    """Context length that a config's model was made for; None if it does not say."""
    length = model.context_length or getattr(config, "max_position_embeddings", None) or model.max_positions
    return None if length is None else int(length)


def build_spec(config: Any) -> ModelSpec:
    """The parts of a config's model, all of them implemented. Raises UnsupportedModelError: names the missing part."""
    model = describe(config)
    name = architecture(config)
    if missing := unsupported(model):
        near = "" if name in _BY_ARCHITECTURE else f"{_alternatives(config)} "
        raise UnsupportedModelError(
            f"{name} needs parts that are not implemented yet: {', '.join(missing)}. {near}{_LIST}"
        )
    if name in find(config).headless and isinstance(model.head, Lm) and not model.head.tied:
        raise UnsupportedModelError(
            f"{name} has no language-model head, and tie_word_embeddings is false, so it cannot generate text. "
            "Use the checkpoint of the complete model."
        )
    return model


def weight_table(config: Any, model: ModelSpec) -> WeightTable:
    """The names of the weights of a config's model. Raises UnsupportedModelError if the family is described but not
    implemented."""
    family = find(config)
    if family.weights is None:
        raise UnsupportedModelError(f"{family.name} cannot be served yet.")
    # A decoder that is treated as an encoder is stored under the same names as other decoders.
    turned = model.decoder is None and family.spec(config).decoder is not None
    stored = replace(model, encoder=None, decoder=model.encoder) if turned else model
    if model.repeats is not None:
        return with_joint_head(family.weights(replace(stored, head=family.spec(config).head)))
    table = family.weights(stored)
    if (whole := whole_of(config)) is not None:
        table = without_vision(table, whole)
        if model.vision is not None:
            table = with_sight(table, model.vision)
    if stored.decoder is not None:
        table = with_head(table, model.head)
    if turned:
        entries = (replace(entry, target=re.sub(r"^decoder\.", "encoder.", entry.target)) for entry in table.entries)
        table = replace(table, entries=tuple(entries))
    if isinstance(model.head, LabelledSpans):
        table = entity_weights(table, model.head, model.trunk.output_size)
    return table
