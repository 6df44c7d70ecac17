"""Decides by names which GGUF file of a folder is a model."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

from engine.errors import ModelLoadError

SUFFIX = ".gguf"
PROJECTOR = "mmproj"
"""The beginning of the names of image projectors, which are in their models' folders."""
NO_PROJECTOR = "none"
"""The setting that serves a model without images."""
_SHOWN = 5
_MOST_METADATA = 1 << 28  # bytes; a vocabulary of 262 thousand tokens takes 10 million

PART = re.compile(r"-\d{5}-of-(\d{5})$")
"""The end of the stem of a file that is one part of a model, with the number of parts."""


def single_file(folder: Path) -> Path | None:
    """The GGUF file that is a folder's model; None if the folder contains safetensors or no GGUF file. Raises
    ModelLoadError if there are several, or parts of one."""
    found = sorted(file for file in folder.glob(f"*{SUFFIX}") if not file.name.startswith(PROJECTOR))
    if not found or any(folder.glob("*.safetensors*")):
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:_SHOWN])
        whole = [file for file in found if PART.search(file.stem) is None]
        if not whole:
            raise ModelLoadError(
                f"{folder} contains a model in parts ({names}). Join them to one file: llama-gguf-split "
                f"--merge {found[0]} WHOLE."
            )
        raise ModelLoadError(f"{folder} contains {len(found)} GGUF files ({names}). Choose one, such as {whole[0]}.")
    return found[0]


def projectors_beside(model: Path) -> list[Path]:
    """The image projectors in the folder of a GGUF file."""
    return sorted(file for file in model.parent.glob(f"{PROJECTOR}*{SUFFIX}") if file.is_file())


def projector_for(model: Path, given: str | None) -> Path | None:
    """The image projector of a GGUF file; None for none. `given`: its path, or `NO_PROJECTOR`; None: the only one in
    the file's folder. Raises ModelLoadError if the path does not exist."""
    if given == NO_PROJECTOR:
        return None
    if given is None:
        beside = projectors_beside(model)
        return beside[0] if len(beside) == 1 else None
    path = Path(given).expanduser()
    if not path.is_file():
        raise ModelLoadError(f"The image projector {path} does not exist. Correct --mmproj.")
    return path


def mentions_chat_template(path: Path) -> bool:
    """Whether the metadata of a GGUF file contains a chat template; also True if the file cannot be searched.

    Metadata come before the list of tensors, so the search ends at its first well-known name.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.find(b"token_embd.weight", 0, _MOST_METADATA)
            return end < 0 or content.find(b"tokenizer.chat_template", 0, end) >= 0
    except (OSError, ValueError):  # ValueError: an empty file
        return True  # loading it will report the error
