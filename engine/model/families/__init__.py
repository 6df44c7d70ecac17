"""The families, by the architecture name in a checkpoint's config."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import gemma2, gpt2, llama, modernbert, t5
from engine.model.spec import Lm, ModelSpec
from engine.model.table import Family
from engine.model.transformer import unsupported

_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama.FAMILY,
    "LlamaModel": llama.FAMILY,
    "GPT2LMHeadModel": gpt2.FAMILY,
    "GPT2Model": gpt2.FAMILY,
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma2Model": gemma2.FAMILY,
    "T5ForConditionalGeneration": t5.FAMILY,
    "ModernBertModel": modernbert.FAMILY,
    "ModernBertForMaskedLM": modernbert.FAMILY,
    "ModernBertForSequenceClassification": modernbert.FAMILY,
}

# Names of models without a head: they can generate where the head is the embedding's table.
_HEADLESS = frozenset({"LlamaModel", "GPT2Model", "Gemma2Model"})


def supported() -> list[str]:
    """Architecture names that can be loaded."""
    return sorted(name for name, family in _FAMILIES.items() if family.weights is not None)


def architecture(config: Any) -> str:
    """The architecture name in a transformers config, "" if it holds none."""
    return next(iter(getattr(config, "architectures", None) or ()), "")


def find(config: Any) -> Family:
    """The family of a config.

    Raises:
        UnsupportedModelError: no family has this architecture.
    """
    name = architecture(config)
    if name not in _FAMILIES:
        problem = f"The architecture {name!r} is not supported." if name else 'config.json holds no "architectures".'
        raise UnsupportedModelError(f"{problem} Supported: {', '.join(supported())}.")
    return _FAMILIES[name]


def describe(config: Any) -> ModelSpec:
    """The parts of a config's model, implemented or not.

    Raises:
        UnsupportedModelError: unknown architecture, or a setting that no part expresses.
    """
    return find(config).spec(config)


def build_spec(config: Any) -> ModelSpec:
    """The parts of a config's model, all of them implemented.

    Raises:
        UnsupportedModelError: names what is missing.
    """
    model = describe(config)
    name = architecture(config)
    if missing := unsupported(model):
        raise UnsupportedModelError(
            f"{name} needs parts that are not implemented yet: {', '.join(missing)}. "
            f"Supported architectures: {', '.join(supported())}."
        )
    if name in _HEADLESS and isinstance(model.head, Lm) and not model.head.tied:
        raise UnsupportedModelError(
            f"{name} has no language-model head, and tie_word_embeddings is false, so it cannot generate text. "
            "Use the checkpoint of the full model."
        )
    return model
