"""A folder that keeps pages of the KV cache: bounded, checksummed, and safe to share and to lose at any moment.

    FOLDER/lock             the lock of all writers; holds the bytes in use and a number that each change raises
    FOLDER/key              32 random bytes, the key of page hashes and of checksums
    FOLDER/MODEL/HASH       a page: header and content. MODEL is the digest of what must be equal (`identity`)

A process that adds or removes a file holds the lock. So a file with an unfinished name belongs to a process that was
killed, and the sum of all files never exceeds the limit. Readers take no lock: a page appears by one rename, and its
checksum covers the model, its hash and its content.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import heapq
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

KEY_BYTES = 32
_HEADER = struct.Struct("<8s16s16sQ16s")  # magic, model, hash, bytes of content, checksum
_MAGIC = b"OCTAVOK1"
_COUNTS = struct.Struct("<QQ")  # of the lock: bytes in use, changes
_BLOCK = 4096  # a file takes whole blocks of this size
_UNFINISHED = ".new-"
_MODEL, _PAGE = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{32}")
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
LOCK_SECONDS = 5.0  # another process holds the lock for one page, or while it lists the folder


class PageStore:
    """One model's pages in a folder, which other models and other processes may share. Methods may be called by several
    threads. Raises OSError if the folder cannot be made or read, or it contains no key and none can be written.

    Attributes:
        known: hashes of this model's pages, as far as this process has seen.
        bytes_used: bytes of all pages in the folder, as of the last change that this process has seen.
        damaged: how many files had a wrong checksum.
    """

    def __init__(self, folder: Path, limit: int, model: bytes, page_bytes: int):
        self.folder = folder  # created if it does not exist; other files in it are not touched
        self.limit = limit  # maximum bytes of all pages in the folder, including those of other models
        self.writable = True
        self.damaged = self.bytes_used = 0
        self.known: set[bytes] = set()
        self._model = model  # 16 bytes, the digest of everything that must be equal so that a page can be used
        self._size = page_bytes  # bytes of a page's content
        self._cost = _cost(_HEADER.size + page_bytes)
        self._own = folder / model.hex()
        self._mutex = threading.RLock()
        self._oldest: list[tuple[int, str, int]] = []  # a heap of (mtime, path, cost)
        self._changes = -1
        self._lock = -1
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                self.key = _make_key(folder)
                self._own.mkdir(mode=0o700, exist_ok=True)
                self._scan()
        except OSError:
            self.close()
            self.writable = False
            self.key = _read_key(folder)  # else a folder that can only be read would be useless
            self.known = self._list()

    def close(self) -> None:
        """Close the lock's file."""
        with self._mutex:
            if self._lock >= 0:
                os.close(self._lock)
            self._lock = -1

    @property
    def hash_key(self) -> bytes:
        """Key of this model's page hashes: equal for all processes with this folder and model."""
        return hashlib.blake2b(self._model, key=self.key, digest_size=KEY_BYTES).digest()

    def write(self, page_hash: bytes, content: Bytes) -> bool:
        """Store a page; returns False if it is stored already, or larger than the limit. Least recently used pages are
        removed to make room. Raises OSError if it cannot be written; nothing was changed."""
        if not self.writable or self._cost > self.limit:
            return False
        with self._locked():
            path = self._path(page_hash)
            if path.exists():
                self.known.add(page_hash)
                return False
            used = self._make_room(self.limit - self._cost)
            if used is None:
                return False
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._own, 0o700)  # another process has removed it while it was empty
            head = _HEADER.pack(_MAGIC, self._model, page_hash, self._size, self._checksum(page_hash, content))
            self._count(used + self._cost)  # first, so that a kill leaves a count that is too high
            temporary = self._own / f"{_UNFINISHED}{os.getpid()}"
            try:
                _remove(temporary)
                _write(temporary, [memoryview(head), content.data])
                modified = os.stat(temporary).st_mtime_ns
                os.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    _remove(temporary)
                    self._count(used)
                raise
            self.known.add(page_hash)
            heapq.heappush(self._oldest, (modified, str(path), self._cost))
        return True

    def read(self, page_hash: bytes, content: Bytes) -> bool:
        """Fill `content` with a page; returns False if it does not exist, is incomplete, or is not what was written.
        Raises OSError if the disk fails."""
        path = self._path(page_hash)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _FLAGS)
        except OSError as error:
            self.known.discard(page_hash)
            if isinstance(error, FileNotFoundError):
                return False
            raise
        try:
            status = os.fstat(file)
            head = bytearray(_HEADER.size)
            whole = stat.S_ISREG(status.st_mode) and status.st_size == len(head) + content.nbytes
            whole = whole and _read(file, [memoryview(head), content.data])
        finally:
            os.close(file)
        if whole:
            expected = _HEADER.pack(_MAGIC, self._model, page_hash, self._size, self._checksum(page_hash, content))
            if bytes(head) == expected:
                return True
        self.damaged += 1
        self.known.discard(page_hash)
        if self.writable:
            with contextlib.suppress(OSError):
                self._remove(path)
        return False

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark these consecutive pages as used now: the last of them is removed first."""
        if not self.writable or not hashes:
            return
        now = None
        for number, page_hash in enumerate(hashes):
            with contextlib.suppress(OSError):
                path = self._path(page_hash)
                if now is None:
                    os.utime(path)
                    now = path.stat().st_mtime_ns
                else:
                    os.utime(path, ns=(now, now - number * 1000))

    def refresh(self) -> None:
        """Read the folder again if another process has changed it. Raises OSError if it cannot be listed."""
        with self._mutex:
            if self._lock < 0:
                return
            self.bytes_used, changes = self._counts()
            if changes != self._changes:
                self.known = self._list()
                self._oldest = []  # what others wrote may be older
                self._changes = changes

    def _path(self, page_hash: bytes) -> Path:
        return self._own / page_hash.hex()

    def _checksum(self, page_hash: bytes, content: Bytes) -> bytes:
        digest = hashlib.blake2b(_MAGIC + self._model + page_hash, key=self.key, digest_size=16)
        digest.update(content.data)
        return digest.digest()

    def _list(self) -> set[bytes]:
        try:
            return {bytes.fromhex(name) for name in os.listdir(self._own) if _PAGE.fullmatch(name)}
        except FileNotFoundError:
            return set()

    # ---------------------------------------------------------------- under the lock

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """A context for a change, in which no other thread or process makes one. Raises OSError if the lock cannot be
        acquired."""
        with self._mutex:
            self._take_lock()
            try:
                if len(os.pread(self._lock, _COUNTS.size, 0)) != _COUNTS.size:  # new
                    self._scan()
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _take_lock(self) -> None:
        path, end = self.folder / "lock", time.monotonic() + LOCK_SECONDS
        while True:
            if self._lock < 0:
                self._lock = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.002)
                continue
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._lock), os.stat(path)):
                    return
            os.close(self._lock)  # somebody has removed it, so others lock a new one
            self._lock = -1

    def _counts(self) -> tuple[int, int]:
        data = os.pread(self._lock, _COUNTS.size, 0) if self._lock >= 0 else b""
        used, changes = _COUNTS.unpack(data) if len(data) == _COUNTS.size else (0, 0)
        return used, changes

    def _count(self, used: int) -> None:
        _, changes = self._counts()
        os.pwrite(self._lock, _COUNTS.pack(used, changes + 1), 0)
        self.bytes_used = used
        if self._changes == changes:  # else another process has changed something that `refresh` must see
            self._changes = changes + 1

    def _scan(self) -> None:
        """List all pages, remove what killed processes have left, and count the bytes."""
        found, used = [], 0
        for folder in os.scandir(self.folder):
            if not _MODEL.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            empty = True
            for entry in os.scandir(folder):
                if entry.name.startswith(_UNFINISHED):
                    os.unlink(entry.path)
                elif _PAGE.fullmatch(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    cost = _cost(status.st_size)
                    found.append((status.st_mtime_ns, entry.path, cost))
                    used += cost
                    empty = False
            if empty and folder.name != self._own.name:
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        heapq.heapify(found)
        self._oldest = found
        self.known = self._list()
        self._count(used)
        self._changes = self._counts()[1]

    def _make_room(self, most: int) -> int | None:
        """Remove pages until the others take at most this many bytes; returns the bytes in use, or None if that is
        impossible."""
        used, scanned = self._counts()[0], False
        removed = False
        while used > most:
            if not self._oldest:
                if scanned:
                    return None
                self._scan()
                used, scanned = self._counts()[0], True
                continue
            modified, path, cost = heapq.heappop(self._oldest)
            try:
                status = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if status.st_mtime_ns != modified:
                heapq.heappush(self._oldest, (status.st_mtime_ns, path, cost))
                continue
            os.unlink(path)
            self._forget(path)
            used, removed = max(used - cost, 0), True
        if removed:
            self._count(used)
        return used

    def _remove(self, path: Path) -> None:
        with self._locked():
            cost = _cost(path.stat(follow_symlinks=False).st_size)
            os.unlink(path)
            self._count(max(self._counts()[0] - cost, 0))

    def _forget(self, path: str) -> None:
        folder, name = os.path.split(path)
        if folder == str(self._own):
            self.known.discard(bytes.fromhex(name))


def used_bytes(folder: Path) -> int:
    """The bytes of all pages in a folder, as counted by its writers; 0 if there are none."""
    try:
        data = (folder / "lock").read_bytes()
    except FileNotFoundError:
        return 0
    return int(_COUNTS.unpack(data)[0]) if len(data) == _COUNTS.size else 0


def _cost(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _make_key(folder: Path) -> bytes:
    """The folder's key, created if it does not exist. The caller holds the lock."""
    try:
        return _read_key(folder)
    except FileNotFoundError:
        key, temporary = os.urandom(KEY_BYTES), folder / f"{_UNFINISHED}key"
        _remove(temporary)
        _write(temporary, [memoryview(key)])
        os.rename(temporary, folder / "key")
        return key


def _read_key(folder: Path) -> bytes:
    """Raises OSError: there is no key; FileNotFoundError also if it is incomplete."""
    file = os.open(folder / "key", os.O_RDONLY | os.O_NONBLOCK | _FLAGS)
    try:
        key = os.read(file, KEY_BYTES + 1)
    finally:
        os.close(file)
    if len(key) != KEY_BYTES:
        raise FileNotFoundError(f"{folder / 'key'} has {len(key)} bytes, not {KEY_BYTES}")
    return key


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _write(path: Path, parts: list[memoryview[Any]]) -> None:
    """Write a new file for this user only. OSError: it could not be written completely."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    try:
        for part in parts:
            rest = part.cast("B")
            while rest:
                rest = rest[os.write(file, rest) :]
    finally:
        os.close(file)


def _read(file: int, parts: list[memoryview[Any]]) -> bool:
    """Fill buffers from the beginning of a file; returns whether it had enough."""
    for part in parts:
        rest = part.cast("B")
        while rest:
            count = os.readv(file, [rest])
            if not count:
                return False
            rest = rest[count:]
    return True
