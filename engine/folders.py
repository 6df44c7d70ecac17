"""Folders in this user's cache, into which nobody else may put anything."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """$XDG_CACHE_HOME/octavo/NAME, or ~/.cache/octavo/NAME; it need not be there.

    Raises:
        RuntimeError: there is no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / name


def make_private(folder: Path) -> None:
    """Make the folder for this user alone if it is not there.

    Raises:
        OSError: it cannot be made, it belongs to someone else than this user or root, or others can write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Refuse a folder that others may have put something into.

    Raises:
        OSError: it is not there, it belongs to someone else than this user or root, or others can write to it.
    """
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{folder} belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o022:
        raise PermissionError(f"other users can write to {folder} (mode {status.st_mode & 0o777:o})")
