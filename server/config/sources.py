"""Sources of settings besides flags: environment variables and a YAML file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic_settings import BaseSettings, EnvSettingsSource

from engine import ConfigError
from server.config.wording import did_you_mean

PREFIX = "OCTAVO_"
# Variables that are not settings of the service, but that the engine reads when it loads its kernels
# (engine.backends.native.loading).
_ELSEWHERE = frozenset({"OCTAVO_NATIVE", "OCTAVO_NATIVE_ISA"})
# Variables that Kubernetes sets in every container for a Service whose name begins with "octavo".
_SERVICE_LINK = re.compile(r"OCTAVO_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set a variable for a Service, so that it is not a setting."""
    name = name.upper()
    return bool(_SERVICE_LINK.fullmatch(name)) or (name.endswith("_PORT") and bool(_SERVICE_ADDRESS.match(value)))


class VariableSource(EnvSettingsSource):
    """OCTAVO_* variables; an empty one counts as unset."""

    def __init__(self, settings_cls: type[BaseSettings]):
        super().__init__(settings_cls)
        self.env_vars = {name: value for name, value in self.env_vars.items() if not is_service_link(name, value or "")}


def unknown_variables(environ: Mapping[str, str], known: Collection[str]) -> list[str]:
    """A sentence for each OCTAVO_* variable without effect. `known`: names of the variables that are settings."""
    sentences = []
    for name, value in sorted(environ.items()):
        if not name.upper().startswith(PREFIX) or not value or name in _ELSEWHERE:
            continue
        if name.upper() in known:
            if is_service_link(name, value):
                sentences.append(
                    f"{name} is {value!r}, which Kubernetes sets for a Service called octavo, and is ignored. Give the "
                    "Service another name, or set enableServiceLinks: false."
                )
        elif not is_service_link(name, value):
            sentences.append(f"{name} is an unknown setting and is ignored{did_you_mean(name.upper(), known) or '.'}")
    return sentences


def read_file(path: str, known: Iterable[str]) -> dict[str, Any]:
    """The settings in a YAML file, by name. Keys may be spelled max_num_seqs or max-num-seqs; a key without a value
    counts as unset. Raises ConfigError if the file cannot be read, is not YAML, or has an unknown setting."""
    names = [name for name in known if name != "config"]
    values: dict[str, Any] = {}
    for key, value in _parse(path).items():
        name = str(key).replace("-", "_")
        if name == "config":
            raise ConfigError(f"{path}: a settings file cannot include another one (config).")
        if name not in names:
            raise ConfigError(f"{path}: unknown setting {key!s}{did_you_mean(name, names) or '.'}")
        if name in values:
            raise ConfigError(f"{path}: {name} is set twice.")
        values[name] = value
    return {name: value for name, value in values.items() if value is not None}


def read_yaml(path: str, setting: str) -> dict[Any, Any]:
    """The mapping in a YAML file. `setting`: the setting that names the file, for messages. Raises ConfigError if it
    cannot be read, or is not such YAML."""
    return _parse(path, setting)


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys; YAML itself would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is set twice", problem_mark=key.start_mark)
            seen.append(key.value)
        return super().construct_mapping(node, deep)


def _parse(path: str, setting: str = "config") -> dict[Any, Any]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{setting} names {path}, which cannot be read: {reason}.") from error
    try:
        content = yaml.load(text, _Loader)  # a SafeLoader: plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        # The error may quote a secret from the file that should have been in quotation marks: *word, !word.
        reason = re.sub(r" (['\"])(?!.\1|<).+\1", "", error.problem or error.context or "no YAML")
        raise ConfigError(f"{path}{place}: {reason}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as an invalid character, or 2024-99-99
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        example = "max_num_seqs: 32" if setting == "config" else "chat: path/to/model"
        raise ConfigError(f"{path} must contain lines such as {example}, got a {type(content).__name__}.")
    return content
