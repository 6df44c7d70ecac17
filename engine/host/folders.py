"""Folders in this user's cache, into which no other user may put anything."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
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
        OSError: it cannot be made, it belongs to another user than this one or root, or others can write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


def make_spare(name: str) -> Path:
    """Make $TMPDIR/octavo-UID/NAME, for this user alone, where the cache cannot be written to. Its files may be gone
    after the next start of the machine.

    Raises:
        OSError: it cannot be made, or others could have put it there or could take its place.
    """
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
    """Refuse a folder that others may have put something into.

    Raises:
        OSError: it is not there, it belongs to another user than this one or root, or others can write to it.
    """
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{folder} belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o022:
        raise PermissionError(f"other users can write to {folder} (mode {status.st_mode & 0o777:o})")
