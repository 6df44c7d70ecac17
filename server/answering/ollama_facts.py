"""Facts about the served model as Ollama's clients list them, read from its files."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine import EngineConfig, EngineInfo, read_template
from engine.process.predict import MemoryPrediction
from server.answering.formats import reading_formats
from server.answering.infilling import Infilling
from server.api.ollama_schemas import OllamaDetails
from server.config.settings import ServerSettings
from server.context import Service

_WEIGHTS = (".safetensors", ".gguf")
_MOST_HEADER = 64 * 2**20  # bytes of a safetensors file's header
# Of GGUF's convention for file names: the number of parameters, the format of the weights.
_SIZE = re.compile(r"(?:^|[-_.])((?:[0-9]+x)?[0-9]+(?:\.[0-9]+)?[KMBT])(?=[-_.]|$)", re.IGNORECASE)
_ENCODING = re.compile(r"(?:^|[-_.])((?:I?Q[0-9]|TQ[0-9]|MXFP4|BF16|F16|F32)[A-Z0-9_]*)(?=[-.]|$)", re.IGNORECASE)
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The files of a model."""

    size: int  # bytes of the weights
    digest: str  # 64 hexadecimal digits that change with the files' names, sizes and times
    modified: str  # the newest file's time, in RFC 3339
    parameters: int | None  # the number of parameters; None if the files do not say
    config: dict[str, Any]  # the model's config.json


@functools.lru_cache(maxsize=8)
def read_files(folder: str, file: str | None) -> FileFacts:
    """The facts of a folder, or of the GGUF file that it stands for. It reads headers only."""
    path = Path(folder)
    found = [Path(file)] if file is not None else sorted(one for one in path.glob("*") if one.suffix in _WEIGHTS)
    stats = [(one.name, one.stat()) for one in found if one.is_file()]
    named = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    newest = max((stat.st_mtime for _, stat in stats), default=0.0)
    config = _json_object(path / "config.json")
    plain = "quantization_config" not in config and all(one.suffix == ".safetensors" for one in found)
    return FileFacts(
        size=sum(stat.st_size for _, stat in stats),
        digest=hashlib.sha256(json.dumps(named).encode()).hexdigest(),
        modified=datetime.fromtimestamp(newest, UTC).isoformat().replace("+00:00", "Z"),
        parameters=sum(map(_count, found)) if plain and found else None,
        config=config,
    )


def files_of(info: EngineInfo) -> FileFacts:
    """The facts of the loaded model's files."""
    return read_files(info.model_path, info.model_file)


def details_of(info: EngineInfo, name: str, parent: str = "") -> OllamaDetails:
    """The details of a model.

    Args:
        name: the model's own name.
        parent: the base model's name, for an adapter.
    """
    facts = files_of(info)
    stem = name if info.model_file is None else Path(info.model_file).stem
    family = _family(facts)
    return OllamaDetails(
        parent_model=parent,
        format="safetensors" if info.model_file is None else "gguf",
        family=family,
        families=[family] if family else [],
        parameter_size=_size_label(facts.parameters) or _found(_SIZE, stem),
        quantization_level=_found(_ENCODING, stem) if info.model_file is not None else _level(info),
    )


def model_info(info: EngineInfo) -> dict[str, Any]:
    """The facts of the config, by the names of GGUF's metadata."""
    facts = files_of(info)
    family = _family(facts) or "model"
    config = facts.config.get("text_config", facts.config)
    found: dict[str, Any] = {
        "general.architecture": family,
        "general.parameter_count": facts.parameters,
        f"{family}.context_length": info.max_model_len,
        f"{family}.embedding_length": info.embedding_size or info.hidden_size,
        f"{family}.vocab_size": info.vocab_size,
        f"{family}.block_count": config.get("num_hidden_layers"),
        f"{family}.feed_forward_length": config.get("intermediate_size"),
        f"{family}.attention.head_count": config.get("num_attention_heads"),
        f"{family}.attention.head_count_kv": config.get("num_key_value_heads"),
    }
    return {name: value for name, value in found.items() if value}


def expected_capabilities(config: EngineConfig, settings: ServerSettings, found: MemoryPrediction) -> list[str]:
    """The abilities of a model that has never been loaded, without those that only its tokenizer tells ("insert")."""
    template = written_template(config.chat_template, found.path)
    formats = reading_formats(template, settings.tool_call_parser, settings.reasoning_parser, settings.tool_prompt)
    writes = "generate" in found.tasks
    able = {
        "completion": writes,
        "tools": writes and bool(template) and formats.calls is not None,
        "thinking": writes and bool(template) and formats.reasoning is not None,
        "embedding": "embed" in found.tasks and not writes,
        "vision": found.sees,
    }
    return [name for name, has in able.items() if has]


def written_template(chosen: str | None, folder: str) -> str:
    """The chat template of a model that is not loaded; "" if it has none.

    Args:
        chosen: the setting `chat_template`.
        folder: the folder with the model's config.json; "" if it is not known.
    """
    if chosen is not None:
        return read_template(chosen)
    path = Path(folder)
    own = path / "chat_template.jinja"
    try:
        found = own.read_text(encoding="utf-8") if own.is_file() else None
    except (OSError, ValueError):  # it only describes
        found = None
    found = found or _json_object(path / "tokenizer_config.json").get("chat_template")
    return found if isinstance(found, str) else ""


def capabilities(service: Service) -> list[str]:
    """The abilities of the model, in Ollama's words."""
    info, formats = service.client.info, service.answers.formats
    chats = service.tokenizer is not None and service.tokenizer.chat_template is not None
    writes = "generate" in info.tasks and info.speech is None
    able = {
        "completion": writes,
        "tools": writes and chats and formats.calls is not None,
        "thinking": writes and chats and formats.reasoning is not None,
        "insert": writes and Infilling.of(service.tokenizer) is not None,
        "embedding": "embed" in info.tasks and not writes,
        "vision": service.sees,
    }
    return [name for name, has in able.items() if has]


def _family(facts: FileFacts) -> str:
    kind = facts.config.get("model_type")
    return kind if isinstance(kind, str) else ""


def _level(info: EngineInfo) -> str:
    return (
        (info.quantization or "").upper() if info.quantization not in (None, "stored") else _DTYPES.get(info.dtype, "")
    )


def _found(pattern: re.Pattern[str], name: str) -> str:
    found = pattern.search(name)
    return "" if found is None else found[1].upper()


def _size_label(parameters: int | None) -> str:
    """The number of parameters, such as 134.5M."""
    if not parameters:
        return ""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return str(parameters)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # it only describes; the engine has read it with more care
        return {}
    return found if isinstance(found, dict) else {}


def _count(path: Path) -> int:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _MOST_HEADER)))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0
