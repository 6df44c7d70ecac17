"""The files and batches of all tenants: a folder with a SQLite file, and a file for each upload and result.

One thread makes all of SQLite's calls. Several processes may have the folder open; the one that holds its lock answers
the batches. Each answer is committed on its own, under the number of its line, so that a line has one answer whatever
ends the service.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from engine import ConfigError, parse_bytes
from server.batches.lines import check_line, places, read_line
from server.config.settings import ServerSettings
from server.errors import ApiError

T = TypeVar("T")
Row = dict[str, Any]

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_APPLICATION = 0x4F637442  # SQLite's application_id of the file
_VERSION = 1
_PATIENCE = 10.0  # seconds to wait for another process's transaction
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    name TEXT NOT NULL, bytes INTEGER NOT NULL, created INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, status TEXT NOT NULL,
    input TEXT NOT NULL, object TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS answers (
    batch INTEGER NOT NULL, line INTEGER NOT NULL, good INTEGER NOT NULL, text TEXT NOT NULL,
    PRIMARY KEY (batch, line)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS unfinished ON batches (status) WHERE status IN
    ('validating', 'in_progress', 'finalizing', 'cancelling');
"""


def open_batches(settings: ServerSettings) -> BatchStore | None:
    """The store that the settings ask for, if they do. Raises ConfigError if the folder cannot be used."""
    if settings.batch_store is None:
        return None
    return BatchStore(settings.batch_store, parse_bytes(settings.batch_store_max_size, "batch_store_max_size"))


class BatchStore:
    """Files and batches by id, those of each tenant apart. Raises ConfigError if the folder cannot be used, or
    something else made its file. `folder`: made if it is not there, for this user alone."""

    def __init__(self, folder: str | Path, max_size: int, clock: Callable[[], float] = time.time):
        self._folder = Path(folder)
        self._max_size = max_size  # bytes of the files of a tenant
        self._clock = clock  # seconds since 1970
        self._lock: int | None = None
        self._tidy = False  # whether leftovers have been removed
        path = self._folder / "batches.db"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._database = sqlite3.connect(path, timeout=_PATIENCE, check_same_thread=False, isolation_level=None)
            self._database.row_factory = sqlite3.Row
            (application,) = self._database.execute("PRAGMA application_id").fetchone()
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            (tables,) = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and (application, version) != (_APPLICATION, _VERSION):
                raise ConfigError(f"batch_store: {path} is not a file of batches of this version of Octavo.")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA secure_delete = ON")
            self._database.executescript(
                f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_VERSION};{_TABLES}"
            )
        except (OSError, sqlite3.Error) as problem:
            raise ConfigError(f"batch_store: {self._folder} cannot be used ({problem}).") from problem
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-store")

    async def do(self, work: Callable[..., T], *given: Any) -> T:
        """The result of a method of this store, called in its thread. Raises ApiError if the folder or its file
        failed."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)
        except (OSError, sqlite3.Error) as problem:
            message = f"The batch store failed: {problem}. See --batch-store."
            raise ApiError(503, message, code="batch_store_failed") from problem

    def close(self) -> None:
        """Close the file and give the lock back; idempotent."""
        self._thread.shutdown()
        self._database.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def hold(self) -> bool:
        """Whether this process answers the batches; it does if no other one does."""
        if self._lock is None:
            lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            self._lock = lock
        if not self._tidy:
            self._tidy = self._remove_leftovers()
        return True

    def _remove_leftovers(self) -> bool:
        """Remove the files that a killed process wrote and did not list. Returns whether it could: another process may
        receive an upload at the moment."""
        with self._uploading(fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
            listed = {row["id"] for row in self._rows("SELECT id FROM files")} if alone else set()
            for path in self._folder.glob("file-*") if alone else ():
                if path.name not in listed:
                    path.unlink()
        return alone

    @contextmanager
    def _uploading(self, how: int) -> Iterator[bool]:
        """Hold the lock of uploads, which others may share (`LOCK_SH`); False if it is not free (`LOCK_NB`)."""
        lock = os.open(self._folder / "uploads", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, how)
        except BlockingIOError:
            yield False
        else:
            yield True
        finally:
            os.close(lock)

    def now(self) -> int:
        """Seconds since 1970."""
        return int(self._clock())

    def path(self, id_: str) -> Path:
        """The place of a file's content."""
        return self._folder / id_

    # ---------------------------------------------------------------- files

    def add_file(self, tenant: str | None, name: str, content: bytes) -> Row:
        """Keep an upload. Raises ApiError if the tenant's files would take too much."""
        (held,) = self._one("SELECT coalesce(sum(bytes), 0) FROM files WHERE tenant = ?", tenant or "")
        if held + len(content) > self._max_size:
            message = (
                f"The file has {len(content)} bytes, and the stored files {held}; together at most {self._max_size} "
                "are allowed per API key (batch_store_max_size). Delete files, or raise --batch-store-max-size."
            )
            raise ApiError(400, message, param="file", code="store_full")
        id_ = f"file-{uuid.uuid4().hex}"
        with self._uploading(fcntl.LOCK_SH):
            with self._written(id_) as write:
                write(content)
            with self._transaction():
                return self._register(id_, tenant or "", "batch", name, len(content))

    def file(self, id_: str, tenant: str | None) -> Row | None:
        found = self._rows("SELECT * FROM files WHERE id = ? AND tenant = ?", id_, tenant or "")
        return found[0] if found else None

    def files(
        self, tenant: str | None, after: str | None, limit: int, purpose: str | None, ascending: bool
    ) -> tuple[list[Row], bool]:
        """A page of a tenant's files, and whether there are more. Raises KeyError if there is no file `after`."""
        more = () if purpose is None else (purpose,)
        return self._page("files", "" if purpose is None else "AND purpose = ?", more, tenant, after, limit, ascending)

    def content(self, id_: str) -> bytes:
        return self.path(id_).read_bytes()

    def delete_file(self, id_: str, tenant: str | None) -> bool:
        """Delete a tenant's file; whether there was one. Raises ApiError if a batch still needs it."""
        if self.file(id_, tenant) is None:
            return False
        marks = ", ".join("?" * len(UNFINISHED))
        using = self._rows(f"SELECT id FROM batches WHERE input = ? AND status IN ({marks})", id_, *UNFINISHED)
        if using:
            message = f"The file is the input of {using[0]['id']}, which has not ended. Cancel that batch first."
            raise ApiError(400, message, param="file_id", code="file_in_use")
        with self._transaction():
            self._database.execute("DELETE FROM files WHERE id = ?", (id_,))
        self.path(id_).unlink(missing_ok=True)
        return True

    # ---------------------------------------------------------------- batches

    def add_batch(self, tenant: str | None, fields: Row, most: int) -> Row:
        """Begin a batch. `fields`: of its object; `input_file_id` names a file of the tenant. Raises ApiError if there
        are too many."""
        marks = ", ".join("?" * len(UNFINISHED))
        query = f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN ({marks})"
        with self._transaction():
            (count,) = self._one(query, tenant or "", *UNFINISHED)
            if count >= most:
                message = (
                    f"{count} batches have not ended; at most {most} may be unfinished per API key "
                    "(batch_max_unfinished). Wait for one, or raise --batch-max-unfinished."
                )
                raise ApiError(429, message, code="too_many_batches", headers={"Retry-After": "60"})
            made = {"id": f"batch_{uuid.uuid4().hex}", **fields, "status": "validating"}
            self._database.execute(
                "INSERT INTO batches (id, tenant, status, input, object) VALUES (?, ?, ?, ?, ?)",
                (made["id"], tenant or "", "validating", made["input_file_id"], json.dumps(made)),
            )
        return self._batch(made["id"], tenant or "")

    def batch(self, id_: str, tenant: str | None) -> Row | None:
        """A tenant's batch as its object; None if there is none with this id."""
        found = self._rows("SELECT * FROM batches WHERE id = ? AND tenant = ?", id_, tenant or "")
        return self._object(found[0]) if found else None

    def batches(self, tenant: str | None, after: str | None, limit: int) -> tuple[list[Row], bool]:
        """A page of a tenant's batches, the last one first, and whether there are more. Raises KeyError if there is no
        batch `after`."""
        rows, more = self._page("batches", "", (), tenant, after, limit, ascending=False)
        return [self._object(row) for row in rows], more

    def cancel(self, id_: str, tenant: str | None) -> Row | None:
        """Ask for a batch's end; its object; None if there is none with this id."""
        with self._transaction():
            found = self.batch(id_, tenant)
            if found is None or found["status"] not in ("validating", "in_progress"):
                return found
            self._set(id_, status="cancelling", cancelling_at=self.now())
        return self.batch(id_, tenant)

    def unfinished(self) -> list[Row]:
        """The batches that have not ended, oldest first, with their `number` and `tenant`."""
        marks = ", ".join("?" * len(UNFINISHED))
        rows = self._rows(f"SELECT * FROM batches WHERE status IN ({marks}) ORDER BY number", *UNFINISHED)
        return [json.loads(row["object"]) | {"number": row["number"], "tenant": row["tenant"] or None} for row in rows]

    def update(self, id_: str, expected: str, **fields: Any) -> bool:
        """Change a batch's object if it has the expected status. Returns whether it had that status."""
        with self._transaction():
            rows = self._rows("SELECT status FROM batches WHERE id = ?", id_)
            if not rows or rows[0]["status"] != expected:
                return False
            self._set(id_, **fields)
        return True

    def answered(self, number: int) -> set[int]:
        """The lines of a batch that have an answer."""
        return {row["line"] for row in self._rows("SELECT line FROM answers WHERE batch = ?", number)}

    def answer(self, number: int, line: int, good: bool, text: str) -> None:
        with self._transaction():
            self._database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", (number, line, int(good), text))

    def finish(self, batch: Row, status: str, missing: Callable[[str], str] | None = None) -> None:
        """Write the files of a batch and end it. After an interruption, the same call does the same again.

        Args:
            batch: of `unfinished`.
            missing: makes the entry of a line without an answer, from its custom_id; None: it gets none.
        """
        number, tenant = batch["number"], batch["tenant"] or ""
        stem = batch["id"].removeprefix("batch_")
        written: dict[str, tuple[str, int]] = {}
        for field, good, ending in (("output_file_id", 1, "output"), ("error_file_id", 0, "error")):
            id_ = f"file-{stem}-{ending}"
            lines: Iterable[str] = (row["text"] for row in self._each(number, good))
            if not good and missing is not None:
                lines = _chained(lines, self._missing(batch, missing))
            size = 0
            with self._written(id_) as write:
                for line in lines:
                    size += write(f"{line}\n".encode())
            if size:
                written[field] = id_, size
            else:
                self.path(id_).unlink()
        with self._transaction():
            counts = self._counts(number)
            for id_, size in written.values():
                self._register(id_, tenant, "batch_output", f"{id_.removeprefix('file-')}.jsonl", size)
            ids = {field: id_ for field, (id_, _) in written.items()}
            total = batch["request_counts"]["total"]
            shown = {"total": total, **counts}
            self._set(batch["id"], status=status, request_counts=shown, **ids, **{f"{status}_at": self.now()})
            self._database.execute("DELETE FROM answers WHERE batch = ?", (number,))

    # ---------------------------------------------------------------- parts

    def _missing(self, batch: Row, entry: Callable[[str], str]) -> Iterator[str]:
        done = self.answered(batch["number"])
        for place, line in places(self.path(batch["input_file_id"])):
            if place.number in done:
                continue
            try:
                value = read_line(line)
            except ValueError:  # the batch has ended before its file was checked
                continue
            if check_line(value, None) is None:
                yield entry(value["custom_id"])

    def _each(self, number: int, good: int) -> Iterator[sqlite3.Row]:
        query = "SELECT text FROM answers WHERE batch = ? AND good = ? ORDER BY line"
        yield from self._database.execute(query, (number, good))

    def _counts(self, number: int) -> dict[str, int]:
        query = "SELECT coalesce(sum(good), 0), count(*) FROM answers WHERE batch = ?"
        good, count = self._one(query, number)
        return {"completed": good, "failed": count - good}

    def _object(self, row: Row) -> Row:
        found: Row = json.loads(row["object"])
        if row["status"] in UNFINISHED:
            found["request_counts"] = found["request_counts"] | self._counts(row["number"])
        return found

    def _batch(self, id_: str, tenant: str) -> Row:
        found = self.batch(id_, tenant)
        assert found is not None
        return found

    def _set(self, id_: str, **fields: Any) -> None:
        (text,) = self._one("SELECT object FROM batches WHERE id = ?", id_)
        changed = json.loads(text) | fields
        self._database.execute(
            "UPDATE batches SET object = ?, status = ? WHERE id = ?", (json.dumps(changed), changed["status"], id_)
        )

    def _register(self, id_: str, tenant: str, purpose: str, name: str, size: int) -> Row:
        self._database.execute(
            "INSERT OR REPLACE INTO files (id, tenant, purpose, name, bytes, created) VALUES (?, ?, ?, ?, ?, ?)",
            (id_, tenant, purpose, name, size, self.now()),
        )
        return self._rows("SELECT * FROM files WHERE id = ?", id_)[0]

    @contextmanager
    def _written(self, id_: str) -> Iterator[Callable[[bytes], int]]:
        """A new file of that id, which appears when it is complete and on the disk."""
        path = self.path(f"{id_}.part")
        try:
            with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                yield file.write
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        path.rename(self.path(id_))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _page(
        self,
        table: str,
        where: str,
        given: tuple[Any, ...],
        tenant: str | None,
        after: str | None,
        limit: int,
        ascending: bool,
    ) -> tuple[list[Row], bool]:
        if after is not None:
            found = self._rows(f"SELECT number FROM {table} WHERE id = ? AND tenant = ?", after, tenant or "")
            if not found:
                raise KeyError(after)
            where += f" AND number {'>' if ascending else '<'} ?"
            given += (found[0]["number"],)
        order = "ASC" if ascending else "DESC"
        query = f"SELECT * FROM {table} WHERE tenant = ? {where} ORDER BY number {order} LIMIT ?"
        rows = self._rows(query, tenant or "", *given, limit + 1)
        return rows[:limit], len(rows) > limit

    def _rows(self, query: str, *given: Any) -> list[Row]:
        return [dict(row) for row in self._database.execute(query, given)]

    def _one(self, query: str, *given: Any) -> tuple[Any, ...]:
        return tuple(self._database.execute(query, given).fetchone())


def _chained(*parts: Iterable[str]) -> Iterator[str]:
    for part in parts:
        yield from part
