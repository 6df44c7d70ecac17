"""PEFT's adapter_config.json: which modules an adapter changes, and by how much."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import AdapterError

_Value = TypeVar("_Value", int, float)

FILE = "adapter_config.json"
MOST_RANK = 256
_MOST_BYTES = 1 << 20
_MOST_LENGTH, _MOST_QUANTIFIERS, _MOST_GROUPS = 1000, 3, 3  # maximum size of a pattern, so that matching is fast

# Settings that do not change the answers of a trained adapter.
_HARMLESS = frozenset(
    ("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
     "inference_mode", "lora_dropout", "loftq_config", "lora_ga_config", "corda_config", "megatron_core",
     "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type")
)  # fmt: skip
_READ = frozenset(
    ("alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform",
     "lora_alpha", "modules_to_save", "peft_type", "r", "rank_pattern", "target_modules", "use_rslora")
)  # fmt: skip
_REASONS = {
    "use_dora": "DoRA adapters are",
    "trainable_token_indices": "trained tokens are",
    "target_parameters": "adapters of expert matrices are",
    "layer_replication": "repeated layers are",
    "lora_bias": "biases in adapters are",
    "alora_invocation_tokens": "activated LoRA is",
}
# Initialisations that do not change the base model's weights.
_STARTS = ("gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The settings of one adapter."""

    path: Path
    # rank, alpha: the values for modules without their own pattern
    rank: int
    alpha: float
    # ranks, alphas: the values for modules whose names match a pattern; the first match counts
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]
    root: bool  # whether the scale is alpha / sqrt(rank) instead of alpha / rank
    targets: tuple[str, ...] | str  # the names of the modules, or a pattern of them
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] | None  # only modules of these layers; None for all
    layers_patterns: tuple[str, ...]  # names of lists of layers; empty for any
    saved: tuple[str, ...]  # modules that the adapter replaces whole
    base: str  # the model that the adapter was trained on; "" if the file does not say

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return _first(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of a module's addition."""
        rank = self.rank_of(module)
        return _first(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.root else rank)

    def aims_at(self, module: str) -> bool:
        """Whether the settings name a module; also True if their pattern is too expensive to try."""
        if _matches(self.excluded, module) is True:
            return False
        if isinstance(self.targets, str):
            return self.targets == "all-linear" or _matches(self.targets, module) is not False
        return bool(_matches(self.targets, module)) and self._is_in_layer(module)

    def _is_in_layer(self, module: str) -> bool:
        if self.layers is None:
            return True
        patterns = [rf"(?:^|.*?\.){each}\.(?P<layer>\d+)\." for each in self.layers_patterns]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<layer>\d+)\."]:
            if found := re.match(pattern, module):
                return int(found["layer"]) in self.layers
        return False


def read_settings(path: Path) -> LoraSettings:
    """The settings of a file. Raises AdapterError if the file cannot be read, has a value that PEFT does not write, or
    describes an unsupported kind of adapter."""
    values = _values(path)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{path}: peft_type is {_shown(kind)}. Octavo serves adapters of the type LORA.")
    for name, value in values.items():
        if name in _READ or name in _HARMLESS or not value:
            continue
        reason = _REASONS.get(name, f"the setting {name} is")
        raise AdapterError(
            f"{path}: {reason} not supported ({name} is {_shown(value)}). Merge the adapter into its base model with "
            "PEFT (merge_and_unload), and serve the merged model."
        )
    bias, start = values.get("bias", "none"), values.get("init_lora_weights", True)
    if bias != "none":
        raise AdapterError(f"{path}: biases in adapters are not supported (bias is {_shown(bias)}).")
    if not isinstance(start, bool) and (not isinstance(start, str) or start.lower() not in _STARTS):
        raise AdapterError(
            f"{path}: init_lora_weights is {_shown(start)}, which changes the base model's weights. Convert the "
            "adapter to a plain one, as PEFT's documentation describes."
        )
    root = values.get("use_rslora") or False
    if not isinstance(root, bool):
        raise _wrong(path, "use_rslora", root, "true or false")
    rank = _rank(path, "r", values.get("r", 8))
    alpha = _number(path, "lora_alpha", values.get("lora_alpha", 8))
    layers = values.get("layers_to_transform")
    if isinstance(layers, int) and not isinstance(layers, bool):
        layers = [layers]
    if layers and not (isinstance(layers, list) and all(isinstance(each, int) for each in layers)):
        raise _wrong(path, "layers_to_transform", layers, "a list of layer numbers")
    targets = values.get("target_modules") or ()
    return LoraSettings(
        path=path,
        rank=rank,
        alpha=alpha,
        ranks=_patterns(path, "rank_pattern", values, _rank),
        alphas=_patterns(path, "alpha_pattern", values, _number),
        root=root,
        targets=targets if isinstance(targets, str) else _names(path, "target_modules", targets),
        excluded=_excluded(path, values),
        layers=tuple(layers) if layers else None,
        layers_patterns=tuple(
            _simple(path, "layers_pattern", each)
            for each in _names(path, "layers_pattern", _listed(values.get("layers_pattern")))
        ),
        saved=_names(path, "modules_to_save", values.get("modules_to_save") or ()),
        base=str(values.get("base_model_name_or_path") or ""),
    )


def _values(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise AdapterError(f"{path} cannot be read ({error.strerror}).") from error
    if len(content) > _MOST_BYTES:
        raise AdapterError(f"{path} has more than {_MOST_BYTES} bytes, so it is not a file that PEFT wrote.")
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not valid JSON ({error}). Save the adapter again.") from error
    if not isinstance(values, dict):
        raise AdapterError(f"{path} contains a {type(values).__name__}, not an object of settings.")
    return values


def _excluded(path: Path, values: Mapping[str, Any]) -> tuple[str, ...] | str:
    excluded = values.get("exclude_modules") or ()
    return excluded if isinstance(excluded, str) else _names(path, "exclude_modules", excluded)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) and value else value or ()


def _names(path: Path, name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise _wrong(path, name, value, "a list of names")
    return tuple(value)


def _patterns(
    path: Path, name: str, values: Mapping[str, Any], read: Callable[[Path, str, Any], _Value]
) -> dict[re.Pattern[str], _Value]:
    """The values of a setting with one value per pattern; a pattern matches the end of a module's name."""
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise _wrong(path, name, found, "an object of patterns")
    return {
        re.compile(rf"(?:.*\.)?(?:{_simple(path, name, pattern)})$"): read(path, f"{name}[{_shown(pattern)}]", value)
        for pattern, value in found.items()
    }


def _rank(path: Path, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(path, name, value, "a whole number above 0")
    if value > MOST_RANK:
        raise AdapterError(f"{path}: {name} is {_shown(value)}. Octavo serves adapters up to rank {MOST_RANK}.")
    return value


def _number(path: Path, name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        raise _wrong(path, name, value, "a number below 1e9")
    return float(value)


def _wrong(path: Path, name: str, value: Any, wanted: str) -> AdapterError:
    return AdapterError(f"{path}: {name} must be {wanted}, got {_shown(value)}.")


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _simple(path: Path, name: str, pattern: str) -> str:
    """The pattern, if matching it takes no noticeable time. Raises AdapterError if it might."""
    if not _is_simple(pattern):
        raise AdapterError(
            f"{path}: the pattern {_shown(pattern)} of {name} is not supported. Octavo reads patterns with at most "
            f"{_MOST_QUANTIFIERS} quantifiers, none of them after a parenthesis, at most {_MOST_GROUPS} groups, and no "
            "flags or references to groups. List the modules' names instead."
        )
    return pattern


def _is_simple(pattern: str) -> bool:
    plain = re.sub(r"\\.", "", pattern)  # without escaped characters
    quantified = plain.replace("(?", "(")
    if (
        len(pattern) > _MOST_LENGTH
        or plain.count("(") > _MOST_GROUPS
        or re.search(r"\)[*+?{]", plain)
        or len(re.findall(r"[*+?{][+?]?", quantified)) > _MOST_QUANTIFIERS
        or re.search(r"\\\d|\(\?P", pattern)
    ):
        return False
    try:
        re.compile(pattern)
        re.compile(f"x(?:{pattern})")  # rejects flags of the whole pattern
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _matches(names: tuple[str, ...] | str, module: str) -> bool | None:
    """Whether names or a pattern match a module; None for a pattern that is not tried."""
    if isinstance(names, str):
        return bool(re.fullmatch(names, module)) if _is_simple(names) else None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _first(values: Mapping[re.Pattern[str], _Value], module: str, usual: _Value) -> _Value:
    """The value of the first pattern that matches a module's name."""
    return next((value for pattern, value in values.items() if pattern.match(module)), usual)
