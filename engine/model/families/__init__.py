"""The families, by the architecture name in a checkpoint's config; one file a family, found by itself."""

from __future__ import annotations

import difflib
import pkgutil
from importlib import import_module
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.spec import Lm, ModelSpec
from engine.model.table import Family
from engine.model.transformer import unsupported


def _discover() -> tuple[Family, ...]:
    """The FAMILY of each module of this package that has one, in the order of their names."""
    modules = (import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    found = (getattr(module, "FAMILY", None) for module in modules)
    return tuple(sorted((f for f in found if isinstance(f, Family)), key=lambda family: family.name.lower()))


FAMILIES: tuple[Family, ...] = _discover()
_BY_ARCHITECTURE: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}


def supported() -> list[str]:
    """Architecture names that can be loaded."""
    return sorted(name for name, family in _BY_ARCHITECTURE.items() if family.weights is not None)


def nearest(name: str) -> str:
    """The supported architecture whose name is most like `name`."""
    return max(supported(), key=lambda other: difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio())


def architecture(config: Any) -> str:
    """The architecture name in a transformers config, "" if it holds none."""
    return next(iter(getattr(config, "architectures", None) or ()), "")


def find(config: Any) -> Family:
    """The family of a config.

    Raises:
        UnsupportedModelError: no family has this architecture.
    """
    name = architecture(config)
    if not name:
        raise UnsupportedModelError(f'config.json holds no "architectures". Supported: {", ".join(supported())}.')
    if name not in _BY_ARCHITECTURE:
        raise UnsupportedModelError(
            f"The architecture {name!r} is not supported; the nearest one that is: {nearest(name)}. "
            f"Supported: {', '.join(supported())}."
        )
    return _BY_ARCHITECTURE[name]


def describe(config: Any) -> ModelSpec:
    """The parts of a config's model, implemented or not.

    Raises:
        UnsupportedModelError: unknown architecture, or a setting that no part expresses.
    """
    family = find(config)
    _refuse_overrides(config)
    return family.spec(config)


def _refuse_overrides(config: Any) -> None:
    """transformers heeds these in any config, although no family has them as settings of its own."""
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError("The config sets is_causal to false; only causal attention is implemented.")
    if getattr(config, "is_heterogeneous", False):
        raise UnsupportedModelError("The config has a per_layer_config, which is not implemented.")


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
            f"The nearest architecture that is: {nearest(name)}. Supported architectures: {', '.join(supported())}."
        )
    if name in find(config).headless and isinstance(model.head, Lm) and not model.head.tied:
        raise UnsupportedModelError(
            f"{name} has no language-model head, and tie_word_embeddings is false, so it cannot generate text. "
            "Use the checkpoint of the full model."
        )
    return model
