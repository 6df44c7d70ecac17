"""Models on this machine: folders in Hugging Face's layout, and GGUF files."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from engine.errors import ModelLoadError
from engine.model.gguf.files import SUFFIX, mentions_chat_template, single_file
from engine.model.gguf.on_hub import named_file


def find_here(model: str) -> Path | None:
    """The folder or the GGUF file that a model's name refers to; None for a name on the hub. Raises ModelLoadError if
    the name is a path, and there is no model."""
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
    """Whether it contains a config, or names the subfolder that does."""
    return any((path / name).is_file() for name in ("config.json", "modules.json", "gliner_config.json"))


def near(path: Path) -> str:
    """ " Did you mean ...?" if a path that does not exist resembles that of a checkpoint or a GGUF file.

    Its folders may be misspelt too.
    """
    try:
        folder = _existing(path.parent)
        found = None if folder is None else _similar(path.name, filter(_is_model, folder.iterdir()))
    except OSError:
        return ""
    return f" Did you mean {found}?" if found else ""


def _existing(folder: Path) -> Path | None:
    if folder.is_dir():
        return folder
    parent = _existing(folder.parent)
    return None if parent is None else _similar(folder.name, filter(Path.is_dir, parent.iterdir()))


def _similar(name: str, paths: Iterable[Path]) -> Path | None:
    known = {path.name: path for path in paths}
    longer = sorted(other for other in known if other.lower().startswith(Path(name).stem.lower()))
    found = [name] if name in known else difflib.get_close_matches(name, known, n=1) or longer
    return known[found[0]] if found else None


def _is_model(path: Path) -> bool:
    return path.suffix == SUFFIX or is_checkpoint(path) or any(path.glob(f"*{SUFFIX}"))


def lacks_chat_template(path: Path) -> bool:
    """Whether a text model's checkpoint has no chat template, as base models do. It reads no weights. `path`: the
    result of `find_here`. False for models other than text decoders, which have other errors."""
    if path.suffix == SUFFIX:
        return not mentions_chat_template(path)
    if any(path.glob("chat_template*")) or any(path.glob("*.jinja")) or (path / "additional_chat_templates").exists():
        return False
    try:
        names = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"]
        tokenizer = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return False  # loading it will report the error
    decodes = isinstance(names, list) and bool(names) and str(names[0]).endswith(("ForCausalLM", "LMHeadModel"))
    return decodes and isinstance(tokenizer, dict) and not tokenizer.get("chat_template")


def _looks_like_path(model: str) -> bool:
    parts = model.replace("\\", "/").split("/")
    return (
        model.startswith((".", "~", os.sep))
        or model.endswith("/")
        or os.path.isabs(model)
        or len(parts) > 2
        or "\\" in model
    )
