"""Folders in this user's cache that no other user can write to."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def cache_folder(name: str) -> Path:
    """$XDG_CACHE_HOME/octavo/NAME, or ~/.cache/octavo/NAME; it need not exist. Raises RuntimeError if there is no home
    folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / name


def make_private(folder: Path) -> None:
    """Create the folder, for this user only, if it does not exist. Raises OSError if it cannot be created, belongs to a
    user other than this one or root, or is writable for others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


def make_spare(name: str) -> Path:
    """Create $TMPDIR/octavo-UID/NAME, for this user only, if the cache is not writable. Its files may be gone after a
    reboot. Raises OSError if it cannot be created, or others could have created or could replace it."""
    place = Path(tempfile.gettempdir())
    mode = place.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise PermissionError(f"other users can rename files in {place}, because it has no sticky bit")
    folder = place / f"octavo-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()  # a link leads elsewhere
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not private to this user")
    (folder / name).mkdir(mode=0o700, exist_ok=True)
    return folder / name


def check_private(folder: Path) -> None:
    """Refuse a folder that others may have written to. Raises OSError if it does not exist, belongs to a user other
    than this one or root, or is writable for others."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{folder} belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o022:
        raise PermissionError(f"other users can write to {folder} (mode {status.st_mode & 0o777:o})")
