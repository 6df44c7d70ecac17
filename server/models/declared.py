"""The models of a service as its settings name them: NAME=PATH on the command line, a YAML file, or a folder of
checkpoints."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from engine import ADAPTER_NAME, ConfigError, EngineConfig, ModelLoadError, available_memory, find_here, parse_bytes
from server.config.named import split_named
from server.config.settings import ENGINE_FIELDS, ServerSettings, Settings, SettingsBase
from server.config.sources import read_yaml
from server.config.wording import did_you_mean

MEMORY_SHARE = 0.9  # of the free memory, if max_memory is not set
_CACHE_SHARE = 4  # a KV cache gets at most this share of max_memory ...
_MOST_CACHE = 4 << 30  # ... and at most these bytes, if kv_cache_memory is not set
_PART = re.compile(r"-\d{5}-of-\d{5}$")
# Settings of the service that may differ between its models.
_OF_A_MODEL = frozenset(
    {
        "tool_call_parser", "reasoning_parser", "tool_prompt", "reasoning_budget", "max_num_queued_reqs",
        "max_num_queued_tokens", "max_queue_time", "max_n", "max_answer_size", "grammar_timeout", "max_image_bytes",
        "max_image_pixels", "max_audio_seconds", "prefix_cache_scope", "max_engine_failures", "liveness_timeout",
    }
)  # fmt: skip
_OWN = ("model", "aliases", "pinned", "idle_time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One model of several."""

    name: str  # its id to clients
    engine: EngineConfig
    settings: ServerSettings  # the service's settings for this model
    aliases: tuple[str, ...] = ()
    pinned: bool = False  # whether it is loaded at the start, and stays
    idle_time: float = 300.0  # seconds without a request after which it is unloaded; 0: never


def declare(base: SettingsBase, named: Sequence[str] = ()) -> tuple[Declared, ...]:
    """The models of a service with several, the default one first; none if it serves a single model. Raises ConfigError
    if an entry is wrong, or a setting cannot be used with several models.

    Args:
        base: all settings, which apply to each model unless its entry overrides them.
        named: the arguments NAME=PATH, if there are any.
    """
    if named and base.models is not None:
        raise ConfigError(f"models names {base.models}, but models are also given as arguments. Remove one of them.")
    if named:
        entries = _of_arguments(named)
    elif base.models is not None:
        if base.engine.model != Settings.model_fields["model"].default:
            raise ConfigError(f"models names {base.models}, but MODEL is also set. Remove one of them.")
        entries = _of_file(base.models)
    else:
        entries = {name: {"model": str(path)} for name, path in found_in(base.engine.model).items()}
    if not entries:
        return ()
    _check_whole(base)
    made = tuple(_declared(name, entry, base) for name, entry in entries.items())
    _check_names(made)
    return made


def memory_limit(settings: ServerSettings) -> int:
    """Bytes that all models may take together."""
    if settings.max_memory is not None:
        return parse_bytes(settings.max_memory, "max_memory")
    return int(MEMORY_SHARE * available_memory())


def found_in(folder: str) -> dict[str, Path]:
    """The checkpoints and GGUF files by name, in a folder that is not itself a checkpoint; none if there are fewer than
    two."""
    place = Path(folder).expanduser()
    if not place.is_dir() or (place / "config.json").is_file():
        return {}
    found: dict[str, Path] = {}
    for path in sorted(place.iterdir()):
        name = path.name if path.is_dir() else path.stem
        if _is_model(path) and name not in found and ADAPTER_NAME.fullmatch(name):
            found[name] = path
    return found if len(found) > 1 and _is_collection(place) else {}


def _is_collection(place: Path) -> bool:
    """Whether a folder holds several models. A single checkpoint may consist of folders, too."""
    return not any((place / name).exists() for name in ("modules.json", "gliner_config.json", "model_index.json"))


def _is_model(path: Path) -> bool:
    if path.is_dir():
        try:
            return find_here(str(path)) is not None
        except ModelLoadError:
            return False
    return path.suffix == ".gguf" and not path.name.startswith("mmproj") and _PART.search(path.stem) is None


def _of_arguments(named: Sequence[str]) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for word in named:
        pair = split_named(word)
        if pair is None:
            raise ConfigError(f"several models must each be given as NAME=PATH, got {word!r}.")
        name, path = pair
        if name in entries:
            raise ConfigError(f"two models have the name {name}; names must be unique.")
        entries[name] = {"model": path}
    return entries


def _of_file(path: str) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in read_yaml(path, "models").items():
        if isinstance(entry, str):
            entry = {"model": entry}
        if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
            raise ConfigError(f"{path}: {name} must be a path, or settings such as model: PATH.")
        entries[str(name)] = {key.replace("-", "_"): value for key, value in entry.items() if value is not None}
        if "model" not in entries[str(name)]:
            raise ConfigError(f"{path}: {name} lacks model: the folder, GGUF file or hub id to serve.")
        if not isinstance(source := entries[str(name)]["model"], str):
            raise ConfigError(f"{path}: {name}: model must be a folder, a GGUF file or a hub id, got {source!r}.")
    if not entries:
        raise ConfigError(f"{path} lists no models. Write lines such as chat: path/to/model.")
    return entries


def _check_whole(base: SettingsBase) -> None:
    if base.served_model_name is not None:
        raise ConfigError("served_model_name names a single model, but there are several; each has its own name.")
    if base.api_server_count > 1:
        raise ConfigError(
            f"api_server_count is {base.api_server_count}, but one HTTP process serves several models. Remove it."
        )


class _Given(Settings):  # type: ignore[misc, valid-type]
    """Settings that come only from keywords: variables have been read already, and an entry takes precedence over
    them."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *others: Any, **named: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def _declared(name: str, entry: dict[str, Any], base: SettingsBase) -> Declared:
    if not ADAPTER_NAME.fullmatch(name):
        raise ConfigError(f"a model's name must be at most 128 letters, digits, and . _ - / :, got {name!r}.")
    own = {key: entry[key] for key in _OWN if key in entry}
    given = {key: value for key, value in entry.items() if key not in _OWN}
    _check_settings(name, given)
    values = {key: getattr(base, key) for key in Settings.model_fields if key not in ("config", "demo")}
    try:
        made = _Given(**values | given | {"model": str(own["model"])})
        pinned = _switch(name, own.get("pinned", False))
        engine = _mapped(_with_cache(made.engine, memory_limit(base)), pinned)
        settings = ServerSettings(**{key: getattr(made, key) for key in ServerSettings.model_fields})
    except ConfigError as problem:
        raise ConfigError(f"model {name}: {problem}") from None
    return Declared(
        name=name,
        engine=engine,
        settings=settings,
        aliases=_aliases(name, own.get("aliases", ())),
        pinned=pinned,
        idle_time=_seconds(name, own.get("idle_time", base.model_idle_time)),
    )


def _with_cache(engine: EngineConfig, limit: int) -> EngineConfig:
    """With a size for the KV cache that does not depend on the free memory when the model is loaded."""
    if engine.kv_cache_memory is not None or engine.num_gpu_blocks_override is not None:
        return engine
    return replace(engine, kv_cache_memory=min(limit // _CACHE_SHARE, _MOST_CACHE))


def _mapped(engine: EngineConfig, pinned: bool) -> EngineConfig:
    """With weights that later loads map from the cache, if the model may be loaded again and the cache is on."""
    if engine.share_weights is not None or pinned or engine.quantization_cache == "off":
        return engine
    return replace(engine, share_weights=True)


def _check_settings(name: str, given: Iterable[str]) -> None:
    allowed = (ENGINE_FIELDS | _OF_A_MODEL) - {"model"}
    for key in given:
        if key in allowed:
            continue
        if key in Settings.model_fields:
            raise ConfigError(f"model {name}: {key} is a setting of the whole service. Set it outside of models.")
        raise ConfigError(f"model {name}: unknown setting {key}{did_you_mean(key, (*allowed, *_OWN)) or '.'}")


def _aliases(name: str, value: Any) -> tuple[str, ...]:
    aliases = [value] if isinstance(value, str) else value
    if not isinstance(aliases, list | tuple) or not all(
        isinstance(alias, str) and ADAPTER_NAME.fullmatch(alias) for alias in aliases
    ):
        raise ConfigError(f"model {name}: aliases must be names, got {value!r}.")
    return tuple(aliases)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"model {name}: pinned must be true or false, got {value!r}.")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ConfigError(f"model {name}: idle_time must be seconds, 0 for never, got {value!r}.")
    return float(value)


def _check_names(models: Sequence[Declared]) -> None:
    owners: dict[str, str] = {}
    for model in models:
        for name in (model.name, *model.aliases, *model.engine.adapters):
            if name in owners:
                raise ConfigError(f"{name} selects both the model {owners[name]} and the model {model.name}.")
            owners[name] = model.name
