"""A config as `transformers` reads it, in plain values: its users do not need `transformers`, and it can be sent to
another process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from engine.configs.listing import list_models_once
from engine.configs.values import check_values, read_values
from engine.errors import ModelLoadError, UnsupportedModelError

# Properties that every config class computes and that parts of a model depend on.
_OF_ANY = ("model_type", "num_labels", "is_heterogeneous")


class PublishedConfig:
    """The settings of a config under the names of its class, with its defaults.

    Args:
        own: the result of `vars`, by name; values are numbers, texts, lists, mappings and configs of parts.
        other: aliases of these, and values derived from them.
    """

    def __init__(self, own: Mapping[str, Any], other: Mapping[str, Any]):
        vars(self).update(own)
        self._other = dict(other)

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_other"][name]
        except KeyError:
            raise AttributeError(f"the config has no {name}") from None

    @property
    def parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its own settings, and those of the other config: everything that an equal config is made of."""
        own = {name: value for name, value in vars(self).items() if name != "_other"}
        return own, dict(self._other)


def read(folder: Path, *, known: bool) -> PublishedConfig:
    """The config of a checkpoint folder; code in the checkpoint never runs. `known`: see
    `engine.configs.values.check_values`. Raises ModelLoadError if there is no readable config, or it contains an
    impossible number; UnsupportedModelError if the config requires the checkpoint's own code."""
    file = folder / "config.json"
    check_values(file, read_values(file), known=known)
    list_models_once()
    from transformers import AutoConfig  # slow to import

    try:
        return published(AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True))
    except Exception as error:  # transformers raises many kinds of errors, all of them about this file
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"{folder} contains its own model code (auto_map in config.json), which Octavo never runs. Use a "
                f"checkpoint with an architecture that transformers supports."
            ) from error
        first = str(error).strip().split("\n\n")[0] or type(error).__name__
        raise ModelLoadError(f"{file} cannot be read: {first}") from error


def published(config: Any) -> PublishedConfig:
    """The plain form of a `transformers` config."""
    from transformers import PreTrainedConfig

    kind = type(config)
    own = {name: _plain(value) for name, value in vars(config).items()}
    names = {*config.attribute_map, *_OF_ANY, *(set(dir(kind)) - set(dir(PreTrainedConfig)))}
    other: dict[str, Any] = {}
    for name in names - own.keys():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a deprecated name
            value = getattr(config, name, None)
        if not name.startswith("_") and not callable(value):
            other[name] = _plain(value)
    if config.is_heterogeneous:
        other["layer_overrides"] = _plain(config.to_dict().get("per_layer_config"))
    return PublishedConfig(own, other)


def _plain(value: Any) -> Any:
    from transformers import PreTrainedConfig

    match value:
        case Enum():
            return _plain(value.value)
        case None | bool() | int() | float() | str():
            return value
        case PreTrainedConfig():
            return published(value)
        case Mapping():
            return {name: _plain(inner) for name, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(inner) for inner in value]
    if hasattr(value, "to_dict"):  # of quantised weights
        return _plain(value.to_dict())
    return str(value).removeprefix("torch.")  # a dtype
