"""The keyword arguments of `LLM`: Octavo's settings, and vLLM's arguments with values that change nothing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError

_ANY = object()
_ONE = (1,)
_OFF = (None, False)
# vLLM's arguments that are not settings here: the values that change nothing (or `_ANY` for all), and the reason
# against others.
_HARMLESS: dict[str, tuple[Any, str]] = {
    "pipeline_parallel_size": (_ONE, "a model runs on one device"),
    "data_parallel_size": (_ONE, "start several services instead"),
    "enable_expert_parallel": (_OFF, "a model runs on one device"),
    "trust_remote_code": (_OFF, "code of a checkpoint is never run"),
    "enable_chunked_prefill": ((None, True), "long prompts always come in chunks"),
    "cpu_offload_gb": ((None, 0), "weights stay on one device"),
    "enable_lora": ((None, False, True), "it turns adapters on or off"),
    "fully_sharded_loras": (_OFF, "a model runs on one device"),
    "max_cpu_loras": (_ANY, ""),
    "lora_dtype": (("auto", None), "adapters are computed in float32"),
    "hf_overrides": ((None, {}), "the checkpoint's config is used unchanged"),
    "mm_processor_kwargs": ((None, {}), "the checkpoint's preprocessor is used unchanged"),
    "limit_mm_per_prompt": ((None, {}), "prompts cannot contain images"),
    "logits_processors": ((None, []), "use structured outputs or SamplingParams"),
    "pooler_config": ((None, {}), "the checkpoint says how to pool; parameters can be passed to embed and encode"),
    "tokenizer_mode": (("auto", "hf"), "the tokenizer of transformers is used"),
    "tokenizer_revision": ((None,), "name a folder that holds the tokenizer"),
    "load_format": (("auto", "safetensors", "gguf"), "weights are read from safetensors and GGUF"),
    "config_format": (("auto", "hf"), "the config is config.json or a GGUF file's"),
    "runner": (_ANY, ""),  # the model decides
    "convert": (("auto", "none"), "the model determines this"),
    "task": (_ANY, ""),
    "swap_space": (_ANY, ""),  # nothing is swapped
    "disable_log_stats": (_ANY, ""),
    "disable_custom_all_reduce": (_ANY, ""),
    "max_logprobs": (_ANY, ""),
    "max_parallel_loading_workers": (_ANY, ""),
    "max_seq_len_to_capture": (_ANY, ""),
    "compilation_config": (_ANY, ""),
}
_ALIASES = {"kv_cache_memory_bytes": "kv_cache_memory"}
_DTYPES = {"half": "float16", "float": "float32"}


def engine_config(model: str, given: Mapping[str, Any]) -> EngineConfig:
    """The engine's settings. Raises ConfigError if an argument is unknown, or has a value that would change Octavo's
    behaviour."""
    known = {field.name: field.default for field in fields(EngineConfig)}
    settings: dict[str, Any] = {"max_step_time": 0.0}
    for name, value in given.items():
        own = _ALIASES.get(name, name)
        if own in known:
            if value is None and known[own] is not None:
                continue  # vLLM's None is the default
            settings[own] = _DTYPES.get(str(value), value) if own == "dtype" else value
            continue
        if name not in _HARMLESS:
            near = difflib.get_close_matches(name, [*known, *_HARMLESS], n=1)
            raise ConfigError(f"LLM has no argument {name}{f'; did you mean {near[0]}?' if near else '.'}")
        allowed, reason = _HARMLESS[name]
        if allowed is not _ANY and value not in allowed:
            raise ConfigError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}: {reason}.")
    if given.get("enable_lora") and settings.get("max_loras") is None and not settings.get("lora_modules"):
        settings["max_loras"] = 1
    return EngineConfig(model=str(model), **settings)
