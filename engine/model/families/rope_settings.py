"""Converts a config's settings of rotary positions (`rope_parameters`) to a scaling.

Names, defaults and formulas are those of transformers' `modeling_rope_utils`. A missing or invalid setting is refused
by name, because a guess would only show as worse answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from engine.errors import UnsupportedModelError
from engine.model.positions import (
    BandScaling,
    DynamicScaling,
    LinearScaling,
    LongScaling,
    Scaling,
    ShareScaling,
    YarnScaling,
)


def settings_of(config: Any, layer_type: str | None) -> Mapping[str, Any]:
    """The settings for layers of this type, which may be the same for all. Raises UnsupportedModelError if there are
    settings by layer type, but none for this one."""
    settings: Mapping[str, Any] = config.rope_parameters or {}
    nested = sorted(n for n, value in settings.items() if isinstance(value, Mapping) or n.endswith("_attention"))
    if not nested:
        return settings
    found = settings.get(layer_type) if layer_type is not None else None
    if not isinstance(found, Mapping):
        wanted = "one set for all layers" if layer_type is None else f"some for {layer_type}"
        raise UnsupportedModelError(
            f"rope_parameters in the checkpoint's config contains settings for {', '.join(nested)}, but this "
            f"architecture needs {wanted}."
        )
    return found


def theta_of(config: Any, settings: Mapping[str, Any]) -> float:
    """The base of the frequencies."""
    if "rope_theta" in settings:
        return _number(settings, "rope_theta", above=1.0)
    return _number({"rope_theta": getattr(config, "rope_theta", None) or 10_000.0}, "rope_theta", above=1.0)


def rotated(settings: Mapping[str, Any], head_dim: int, *, partial: bool, shares: bool = False) -> int:
    """The number of a head's features that rotate.

    Args:
        partial: whether the family rotates only a share of them, `partial_rotary_factor`.
        shares: it rotates some pairs of all of them (`ShareScaling`).
    """
    share = settings.get("partial_rotary_factor")
    if share is None or shares:  # the others are not rotated
        share = 1.0
    elif share != 1.0 and not partial:
        raise UnsupportedModelError(f"partial_rotary_factor must be 1 for this architecture, got {share}.")
    dim = int(head_dim * share)
    if dim % 2 or not 2 <= dim <= head_dim:
        raise UnsupportedModelError(
            f"Rotary positions need an even number of features, from 2 to the {head_dim} of a head, but "
            f"partial_rotary_factor {share} gives {dim}."
        )
    return dim


def pairs_of(settings: Mapping[str, Any], dim: int) -> tuple[tuple[int, int], ...]:
    """The axis, of three, of each pair of `dim` rotated features (`mrope_section`). An axis has a run of pairs, or the
    axes alternate (`mrope_interleaved`). () if the settings name no axes or do not fit; then positions have one
    axis."""
    sections = settings.get("mrope_section")
    counted = isinstance(sections, list | tuple) and all(isinstance(n, int) and n >= 0 for n in sections)
    if not counted or len(sections or ()) % 3 or sum(sections or ()) != dim // 2:
        return ()
    assert sections is not None
    axes = [place % 3 for place, count in enumerate(sections) for _ in range(count)]
    if settings.get("mrope_interleaved"):
        axes = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(dim // 2)]
    return tuple((axis, pair) for pair, axis in enumerate(axes))


def scaling_of(config: Any, settings: Mapping[str, Any], dim: int, *, shares: bool = False) -> Scaling | None:
    """The scaling of the frequencies of `dim` rotated features. `shares`: the family knows rotations of some pairs
    (`ShareScaling`). Raises UnsupportedModelError if a scaling is not implemented, or its settings are missing or
    invalid."""
    match settings.get("rope_type", settings.get("type", "default")):
        case "default":
            return None
        case "linear":
            return LinearScaling(_number(settings, "factor"))
        case "proportional" if shares:
            share = settings.get("partial_rotary_factor", 1.0)
            if not _is_number(share) or not 0 < share <= 1:
                raise UnsupportedModelError(
                    "partial_rotary_factor must be a number above 0 and at most 1 for rope_type proportional, got "
                    f"{share!r}."
                )
            return ShareScaling(int(share * dim // 2), _number(settings, "factor", 1.0))
        case "dynamic":
            if dim == 2:
                raise UnsupportedModelError("rope_type dynamic needs more than 2 rotated features.")
            # As in the reference, the length of pretraining is max_position_embeddings, whatever other settings say.
            return DynamicScaling(_number(settings, "factor"), _length(config, "max_position_embeddings"))
        case "llama3":
            low = _number(settings, "low_freq_factor")
            return BandScaling(
                factor=_number(settings, "factor"),
                low=low,
                high=_number(settings, "high_freq_factor", above=low),
                original_length=_original_length(config, settings),
            )
        case "yarn":
            factor = _factor(config, settings)
            return YarnScaling(
                factor=factor,
                fast=_turns(settings, "beta_fast", 32),
                slow=_turns(settings, "beta_slow", 1),
                original_length=_original_length(config, settings),
                attention_factor=_yarn_attention_factor(settings, factor),
                # The reference looks for this setting beside the settings by layer type, not in them.
                truncate=bool(config.rope_parameters.get("truncate", True)),
            )
        case "longrope":
            return LongScaling(
                short=_divisors(settings, "short_factor", dim),
                long=_divisors(settings, "long_factor", dim),
                original_length=_original_length(config, settings),
                attention_factor=_long_attention_factor(config, settings),
            )
        case kind:
            raise UnsupportedModelError(
                f"The checkpoint's config asks for rope_type {kind!r}, which is not implemented. "
                "Implemented: default, linear, dynamic, llama3, yarn, longrope."
            )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(settings: Mapping[str, Any], name: str, default: float | None = None, *, above: float = 0.0) -> float:
    """A setting; `default` replaces a missing one, null or 0."""
    value = settings.get(name)
    if default is not None and not value:
        return float(default)
    if not _is_number(value) or value <= above:
        kind = settings.get("rope_type", "default")
        raise UnsupportedModelError(
            f"{name} in the config's rope_parameters must be a number above {above:g} (rope_type {kind}): {value!r}."
        )
    return float(value)


def _turns(settings: Mapping[str, Any], name: str, default: float) -> float:
    """The number of rotations of a feature over the original length."""
    turns = _number(settings, name, default)
    if not 1e-18 <= turns <= 1e18:  # the logarithm of others does not exist
        raise UnsupportedModelError(f"{name} in the config's rope_parameters must be from 1e-18 to 1e18: {turns!r}.")
    return turns


def _length(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not _is_number(value) or value < 2:
        raise UnsupportedModelError(f"{name} in the config must be a number of tokens above 1, got {value!r}.")
    return int(value)


def _original_length(config: Any, settings: Mapping[str, Any]) -> int:
    """Context length in pretraining. The value beside the settings takes precedence, unless the settings are by layer
    type."""
    by_layer_type = settings is not config.rope_parameters
    if not by_layer_type and getattr(config, "original_max_position_embeddings", None) is not None:
        return _length(config, "original_max_position_embeddings")
    if settings.get("original_max_position_embeddings") is None:
        return _length(config, "max_position_embeddings")
    return int(_number(settings, "original_max_position_embeddings", above=1.0))


def _factor(config: Any, settings: Mapping[str, Any]) -> float:
    """The config's own factor, else the stretching of the context."""
    if settings.get("factor") is None:
        return _length(config, "max_position_embeddings") / _original_length(config, settings)
    return _number(settings, "factor")


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    """The config's own factor, else the recommendation of arXiv:2309.00071 (3.4)."""
    if settings.get("attention_factor") is not None:
        return _number(settings, "attention_factor")

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    above, below = settings.get("mscale"), settings.get("mscale_all_dim")
    if above and below:
        return grown(_number(settings, "mscale")) / grown(_number(settings, "mscale_all_dim"))
    return grown(1.0)


def _long_attention_factor(config: Any, settings: Mapping[str, Any]) -> float:
    """The config's own factor, else the recommendation of arXiv:2402.13753."""
    if settings.get("attention_factor") is not None:
        return _number(settings, "attention_factor")
    factor = _factor(config, settings)
    return math.sqrt(1 + math.log(factor) / math.log(_original_length(config, settings))) if factor > 1.0 else 1.0


def _divisors(settings: Mapping[str, Any], name: str, dim: int) -> tuple[float, ...]:
    values = settings.get(name)
    if not isinstance(values, list | tuple) or not all(_is_number(value) and value > 0 for value in values):
        raise UnsupportedModelError(f"{name} in the config's rope_parameters must be a list of numbers above 0.")
    if len(values) != dim // 2:
        raise UnsupportedModelError(
            f"{name} in the config's rope_parameters must hold {dim // 2} values, one per pair of rotated features, "
            f"but holds {len(values)}."
        )
    return tuple(float(value) for value in values)
