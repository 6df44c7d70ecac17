"""The kind of an unknown model, as far as its config reveals it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from engine.configs.published import published

# Settings of recurrent and state-space layers, names of such layer types, and families that have neither.
_STATE = re.compile(r"(^|_)(mamba|ssm|lru|linear_conv|linear_attn|conv_l|time_step|state_size)(_|$)", re.IGNORECASE)
_STATE_LAYERS = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent"})
_ATTENTION_LAYERS = frozenset({"attention", "full_attention", "sliding_attention"})
_STATE_NAMES = re.compile(r"mamba|rwkv|xlstm|retnet", re.IGNORECASE)
# Settings that change no answer.
_OF_TRAINING = re.compile(
    r"drop|init|loss|coef|jitter|pretraining|summary|classifier|use_cache|token_id|_kernels|router_"
)


def keeps_state(config: Any) -> bool:
    """Whether some layers of a model (or of its text part, if it has one) keep a state instead of keys and values."""
    config = getattr(config, "text_config", None) or config
    kinds = (getattr(config, name, None) for name in ("layer_types", "layers_block_type", "block_types"))
    layers = {str(kind) for kind in next((found for found in kinds if found), ())}
    if layers & _STATE_LAYERS:
        return True
    if layers and layers <= _ATTENTION_LAYERS:
        return False
    names = (getattr(config, "model_type", ""), *(getattr(config, "architectures", None) or ()))
    return any(map(_STATE_NAMES.search, names)) or any(map(_STATE.search, own_settings(config)))


def own_settings(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name not in _of_any()}


@cache
def settings_of_class(name: str) -> frozenset[str]:
    """Names of the settings of a transformers config class that not every config has; empty if there is no such
    class."""
    kind = _class(name)
    return frozenset() if kind is None else frozenset(own_settings(kind()))


def model_type_of(name: str) -> str | None:
    """The model type of a transformers config class; None if there is no such class."""
    return getattr(_class(name), "model_type", None)


def unknown_settings(config: Any, name: str) -> list[str]:
    """Settings of a config that a config class lacks, in order: only those that are on and not just for training."""
    known = settings_of_class(name)
    return [
        own
        for own, value in own_settings(config).items()
        if own not in known and value not in (None, False, 0, "", [], {}) and not _OF_TRAINING.search(own)
    ]


@cache
def _of_any() -> frozenset[str]:
    """Names of the settings that every config, or every published one, has."""
    return frozenset(vars(published(_class("PreTrainedConfig")())))


def _class(name: str) -> Any:
    import transformers  # slow, and only used for refusals

    return getattr(transformers, name, None)
