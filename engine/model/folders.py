"""Folders of checkpoints, as they lie in Hugging Face's layout."""

from __future__ import annotations

import difflib
from pathlib import Path


def near(path: Path) -> str:
    """ " Did you mean ...?" if beside a folder that is not there one of a similar name holds a checkpoint, else ""."""
    try:
        beside = [other.name for other in path.parent.iterdir() if other.is_dir() and is_checkpoint(other)]
    except OSError:
        return ""
    found = difflib.get_close_matches(path.name, beside, n=1)
    return f" Did you mean {path.parent / found[0]}?" if found else ""


def is_checkpoint(path: Path) -> bool:
    """It holds a config, or says in which of its folders there is one."""
    return any((path / name).is_file() for name in ("config.json", "modules.json", "gliner_config.json"))
