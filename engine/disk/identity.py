"""The facts that must be equal so that one process can use another's pages."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.interface.outputs import EngineInfo
from engine.model.gguf.folder import PROJECTOR_LINK

FORMAT = 1  # version of pages' content and of their files
_WEIGHTS = {".safetensors", ".bin", ".pt", ".gguf"}
_HEAD, _SAMPLE, _SAMPLES = 2**20, 2**14, 64  # bytes that are read from a file of weights


def identity(config: EngineConfig, info: EngineInfo, shape: str) -> bytes:
    """16 bytes that differ if pages may differ: for another model or format, other code, or another kind of machine.
    `shape`: `ModelFacts.page_shape`. Raises OSError if the model's files are gone."""
    device = torch.device(info.device)
    facts = [
        FORMAT,
        _code(),
        torch.__version__,
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        [info.dtype, info.kv_cache_dtype, info.quantization, info.block_size, info.max_model_len],
        [config.flash_prefill, config.enforce_eager, config.lora_dtype],
        shape,
        _model(info),
    ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).digest()


def of_states(model: bytes) -> bytes:
    """The identity of the states of a model whose pages have this one."""
    return hashlib.blake2b(b"states" + model, digest_size=16).digest()


def _code() -> str:
    """Digest of the engine's own sources."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _model(info: EngineInfo) -> list[Any]:
    """Facts that change with a model's weights or settings, wherever the folder is: for each file of weights its name,
    size and time, and a digest of samples."""
    folder = Path(info.model_path)
    projector = folder / PROJECTOR_LINK
    beside = [projector.resolve()] if projector.is_symlink() else []
    files: Iterable[Path] = [Path(info.model_file), *beside] if info.model_file else sorted(folder.iterdir())
    found: list[Any] = [_sample(path) for path in files if path.suffix in _WEIGHTS]
    settings = folder / "config.json"
    if settings.exists():
        found.append(hashlib.blake2b(settings.read_bytes(), digest_size=16).hexdigest())
    return found


def _sample(path: Path) -> list[Any]:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        digest.update(file.read(_HEAD))
        for number in range(_SAMPLES):
            file.seek(number * status.st_size // _SAMPLES)
            digest.update(file.read(_SAMPLE))
        file.seek(max(status.st_size - _SAMPLE, 0))
        digest.update(file.read(_SAMPLE))
    return [path.name, status.st_size, status.st_mtime_ns, digest.hexdigest()]
