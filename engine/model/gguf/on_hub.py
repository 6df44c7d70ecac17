"""GGUF files on the hub. A repository has many; the model's name selects one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from engine.errors import ModelLoadError
from engine.model.gguf.files import PART, PROJECTOR, SUFFIX

_NAMED = re.compile(rf"([\w.-]+/[\w.-]+)(?::([\w.-]+)|/([^\\]+{re.escape(SUFFIX)}))")
_SHOWN = 12


def named_file(model: str) -> tuple[str, str] | None:
    """The repository, and the name or pattern of the file in it; None if the text does not name a GGUF file on the hub.

    As in llama.cpp and vLLM, `org/name:Q4_K_M` names the file whose name ends so; `org/name/*Q4_K_M.gguf` names one by
    its path. A path below an existing local folder is not a name on the hub.
    """
    match = _NAMED.fullmatch(model)
    if match is None or model.startswith(".") or Path(model).parts[0] == ".." or Path(match[1]).parent.is_dir():
        return None
    return match[1], match[2] or match[3]


def choose(names: Iterable[str], repository: str, wanted: str) -> str | None:
    """The single matching GGUF file of a repository, by its path there; None if none matches. Raises ModelLoadError if
    several files match, or the model is split into several files."""
    found = sorted(name for name in names if _is_model(name) and _means(wanted, name))
    if not found:
        return None
    if parts := next((part[1] for name in found if (part := PART.search(_stem(name)))), None):
        raise ModelLoadError(
            f"{repository} contains {found[0]} in {int(parts)} parts. Download and join them first: "
            "llama-gguf-split --merge FIRST WHOLE."
        )
    if len(found) > 1:
        raise ModelLoadError(
            f"{wanted} matches several files of {repository}: {_some(found)}. Choose one: {repository}/{found[0]}"
        )
    return found[0]


def nothing_chosen(names: Iterable[str], repository: str, wanted: str) -> str:
    """The error message if `choose` finds no file."""
    there = sorted(filter(_is_model, names))
    held = f"its GGUF files are {_some(there)}" if there else "it has no GGUF files"
    return f"{repository} does not contain the GGUF file {wanted}: {held}."


def _means(wanted: str, name: str) -> bool:
    if wanted.endswith(SUFFIX):
        return fnmatchcase(name, wanted)
    return re.search(rf"(^|[-.]){re.escape(wanted)}(-\d{{5}}-of-\d{{5}})?$", _stem(name), re.IGNORECASE) is not None


def _is_model(name: str) -> bool:
    return name.endswith(SUFFIX) and not PurePosixPath(name).name.startswith(PROJECTOR)


def _stem(name: str) -> str:
    return PurePosixPath(name).stem


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
