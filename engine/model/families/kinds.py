"""The kind of an unknown model, as far as the settings in its config tell."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from engine.configs.published import published

# Settings of recurrent and state-space layers, types of such layers, and families that have neither.
_STATE = re.compile(r"(^|_)(mamba|ssm|lru|linear_conv|linear_attn|conv_l|time_step|state_size)(_|$)", re.IGNORECASE)
_STATE_LAYERS = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent"})
_ATTENTION_LAYERS = frozenset({"attention", "full_attention", "sliding_attention"})
_STATE_NAMES = re.compile(r"mamba|rwkv|xlstm|retnet", re.IGNORECASE)
# Settings that change no answer.
_OF_TRAINING = re.compile(
    r"drop|init|loss|coef|jitter|pretraining|summary|classifier|use_cache|token_id|_kernels|router_"
)


def keeps_state(config: Any) -> bool:
    """Whether some of a model's layers, of its text part if it has one, keep a state instead of keys and values."""
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
    """The settings of a config that not every config has."""
    return {name: value for name, value in vars(config).items() if name not in _of_any()}


@cache
def settings_of_class(name: str) -> frozenset[str]:
    """Names of the settings that configs of a class of transformers have, and not every config; empty if there is
    none of that name."""
    kind = _class(name)
    return frozenset() if kind is None else frozenset(own_settings(kind()))


def model_type_of(name: str) -> str | None:
    """The type of models that configs of a class of transformers are for; None if there is none of that name."""
    return getattr(_class(name), "model_type", None)


def unknown_settings(config: Any, name: str) -> list[str]:
    """Settings of a config that a class of configs does not have, in their order: those that are on, and not for
    training alone."""
    known = settings_of_class(name)
    return [
        own
        for own, value in own_settings(config).items()
        if own not in known and value not in (None, False, 0, "", [], {}) and not _OF_TRAINING.search(own)
    ]


@cache
def _of_any() -> frozenset[str]:
    """Names of the settings of any config, and of what a published one has beside them."""
    return frozenset(vars(published(_class("PreTrainedConfig")())))


def _class(name: str) -> Any:
    import transformers  # slow, and only for what is refused

    return getattr(transformers, name, None)
