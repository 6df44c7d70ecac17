"""Models on this machine: folders in Hugging Face's layout, and GGUF files."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from engine.errors import ModelLoadError
from engine.model.gguf.files import SUFFIX, single_file
from engine.model.gguf.on_hub import named_file


def find_here(model: str) -> Path | None:
    """The folder or the GGUF file that a model's name means; None if it means one on the hub.

    Raises:
        ModelLoadError: it is a path, and there is no model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if (file := single_file(path)) is not None:
            return file
        if not is_checkpoint(path):
            raise ModelLoadError(
                f"The folder {path} has no config.json, so it is not a checkpoint in Hugging Face's format. Give the "
                f"folder that contains config.json and the safetensors files, or a GGUF file."
            )
        return path
    if path.suffix == SUFFIX and path.exists():
        return path
    if path.exists():
        raise ModelLoadError(
            f"{path} is a file, but not a {SUFFIX} file. Give the folder that contains config.json, or a {SUFFIX} file."
        )
    if named_file(model) is not None:
        return None
    if path.suffix == SUFFIX:
        raise ModelLoadError(f"The file {path} does not exist.{near(path)}")
    if _looks_like_path(model):
        advice = near(path) or " Give a folder with config.json, or a model on the hub, such as org/name."
        raise ModelLoadError(f"The folder {path} does not exist.{advice}")
    return None


def is_checkpoint(path: Path) -> bool:
    """It holds a config, or says in which of its folders there is one."""
    return any((path / name).is_file() for name in ("config.json", "modules.json", "gliner_config.json"))


def near(path: Path) -> str:
    """ " Did you mean ...?" if a checkpoint or a GGUF file beside a path that is not there has a similar name."""
    try:
        beside = [
            other.name
            for other in path.parent.iterdir()
            if (other.suffix == SUFFIX or is_checkpoint(other) or any(other.glob(f"*{SUFFIX}")))
        ]
    except OSError:
        return ""
    found = difflib.get_close_matches(path.name, beside, n=1)
    return f" Did you mean {path.parent / found[0]}?" if found else ""


def _looks_like_path(model: str) -> bool:
    parts = model.replace("\\", "/").split("/")
    return (
        model.startswith((".", "~", os.sep))
        or model.endswith("/")
        or os.path.isabs(model)
        or len(parts) > 2
        or "\\" in model
    )
