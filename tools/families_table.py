#!/usr/bin/env python3
"""Writes README's table of families from the registry that the engine loads models by.

    make docs               or: python3 tools/setup.py docs

What a family can be asked for follows from its parts: those of its architectures' default configs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from engine.errors import UnsupportedModelError
from engine.model.families import FAMILIES
from engine.model.missing import unsupported
from engine.model.spec import Lm, ModelSpec
from engine.model.table import Family
from engine.request import SamplingParams

README = Path(__file__).resolve().parent.parent / "README.md"
COMMAND = "python3 tools/setup.py docs"
BEGIN = "<!-- families: written by `make docs` from the registry; do not edit by hand -->"
END = "<!-- end of families -->"
HEAD = """\
| family | what it brings | architectures | decoding |
|---|---|---|---|
"""

# What can be done with the next token's probabilities, and the setting of a request that asks for it.
MODES = {"greedy": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "beams": "num_beams"}


def table(families: Iterable[Family] = FAMILIES) -> str:
    """Markdown, one line per family that is served; families that are only described are left out.

    Raises:
        UnsupportedModelError: a family claims to be served, and its default model is not.
    """
    return HEAD + "".join(map(line, (family for family in families if family.weights is not None)))


def line(family: Family) -> str:
    """A family's line."""
    names = [name for name in family.architectures if name not in family.headless]
    modes = {name: decoding(default_model(family, name)) for name in names}
    assert len(set(modes.values())) == 1, f"the architectures of {family.name} differ in what they can do: {modes}"
    shown = (family.name, family.brings, ", ".join(f"`{name}`" for name in names), ", ".join(modes[names[0]]))
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in shown)} |\n"


def decoding(model: ModelSpec) -> tuple[str, ...]:
    """How answers of a model with these parts can be chosen: in every way, where it has a language model's head.

    Raises:
        UnsupportedModelError: parts are not implemented.
    """
    if missing := unsupported(model):
        raise UnsupportedModelError(f"needs parts that are not implemented: {', '.join(missing)}")
    settings = {field.name for field in fields(SamplingParams)} if isinstance(model.head, Lm) else set()
    return tuple(mode for mode, setting in MODES.items() if setting in settings)


def default_model(family: Family, architecture: str) -> ModelSpec:
    """The parts of the model that transformers makes of this name by default."""
    mappings: tuple[Any, ...] = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )
    kinds = {name: kind for mapping in mappings for kind, name in mapping.items() if isinstance(name, str)}
    # A name that only older checkpoints have stands for the family's first.
    known = [name for name in (architecture, *family.architectures) if name in kinds]
    if not known:
        raise UnsupportedModelError(f"{family.name}: transformers has none of {', '.join(family.architectures)}")
    return family.spec(CONFIG_MAPPING[kinds[known[0]]](architectures=[architecture]))


def replaced(text: str, content: str) -> str:
    """The text with what is between the markers replaced.

    Raises:
        ValueError: a marker is missing or there twice.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{README.name} must hold each of these lines once: {BEGIN} and {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{content}{END}{rest.split(END)[1]}"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    wanted = replaced(text, table())
    if wanted != text:
        README.write_text(wanted, encoding="utf-8")
    print(f"{README.name}: {'was current' if wanted == text else 'written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
