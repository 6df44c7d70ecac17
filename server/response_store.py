"""Answers of /v1/responses that are kept: a SQLite file, with limits of age and size.

SQLite's calls block, so a thread of its own makes all of them. What a tenant has stored no other one can see, and when
the file is full, the tenant with the most loses its oldest first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine import ConfigError, parse_bytes
from server.config.settings import ServerSettings

logger = logging.getLogger("octavo.server")

T = TypeVar("T")

_APPLICATION = 0x4F637476  # SQLite's application_id of the file
_VERSION = 1  # of its tables
_PATIENCE = 5.0  # seconds to wait for another process's transaction
_RETRY = 0.01  # seconds between two attempts, where SQLite does not wait
_PURGE_INTERVAL = 60.0  # seconds between looks for what is too old
_PURGED_AT_ONCE = 256  # answers in one transaction
_MAX_TURNS = 4096  # of one conversation
_LOG_INTERVAL = 10.0  # seconds; failures in between are not logged again
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    previous TEXT,
    created REAL NOT NULL,
    size INTEGER NOT NULL,
    frame TEXT NOT NULL,
    input TEXT NOT NULL,
    output TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS by_tenant ON responses (tenant, number);
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
CREATE TABLE IF NOT EXISTS usage (tenant TEXT PRIMARY KEY, size INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS kept AFTER INSERT ON responses BEGIN
    INSERT INTO usage (tenant, size) VALUES (new.tenant, new.size)
    ON CONFLICT (tenant) DO UPDATE SET size = size + excluded.size;
END;
CREATE TRIGGER IF NOT EXISTS lost AFTER DELETE ON responses BEGIN
    UPDATE usage SET size = size - old.size WHERE tenant = old.tenant;
    DELETE FROM usage WHERE tenant = old.tenant AND size <= 0;
END;
"""
_CHAIN = """
WITH RECURSIVE turns (depth, previous, size, input, output) AS (
    SELECT 1, previous, length(input) + length(output), input, output FROM responses
    WHERE id = :id AND tenant = :tenant AND created > :oldest
    UNION ALL
    SELECT depth + 1, r.previous, turns.size + length(r.input) + length(r.output), r.input, r.output
    FROM turns JOIN responses r ON r.id = turns.previous
    WHERE r.tenant = :tenant AND r.created > :oldest AND depth < :turns AND turns.size <= :most
)
SELECT previous, size, input, output FROM turns ORDER BY depth
"""


class StoreError(Exception):
    """The store could not do it; its words are for the log, and for people."""


class HistoryError(Exception):
    """A conversation that is not there as a whole.

    Attributes:
        missing: the id of the answer that is not there; None where the conversation is too long.
    """

    def __init__(self, message: str, missing: str | None):
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A stored answer, each part as JSON.

    Attributes:
        frame: the answer without its output.
        input: the items that were sent with it, earlier turns not among them.
        output: the items of the answer.
    """

    frame: str
    input: str
    output: str

    def items(self) -> list[dict[str, Any]]:
        """The input's items."""
        return msgspec.json.decode(self.input, type=list[dict[str, Any]])

    def whole(self) -> bytes:
        """The answer as it was sent."""
        fields = msgspec.json.decode(self.frame, type=dict[str, msgspec.Raw])
        return msgspec.json.encode({**fields, "output": msgspec.Raw(self.output.encode())})


def open_store(settings: ServerSettings) -> ResponseStore | None:
    """The store that the settings ask for, if they do.

    Raises:
        ConfigError: the file cannot be used.
    """
    if settings.response_store is None:
        return None
    size = parse_bytes(settings.response_store_max_size, "response_store_max_size")
    return ResponseStore(settings.response_store, max_age=settings.response_store_max_age, max_size=size)


class ResponseStore:
    """Answers by id, those of each tenant apart.

    Args:
        path: of the file; made if it is not there, for this user alone.
        max_age: seconds that an answer is kept.
        max_size: bytes of all answers together.
        clock: seconds since 1970.

    Raises:
        ConfigError: the file cannot be opened, or something else made it.
    """

    def __init__(
        self, path: str | Path, *, max_age: float, max_size: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = Path(path)
        self._max_age = max_age
        self._max_size = max_size
        self._clock = clock
        self._logged = float("-inf")
        self._has_remains = True  # text that was deleted may be in the write-ahead log, or in pages behind it
        self._database = self._open()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="response-store")

    # ---------------------------------------------------------------- what is asked of it

    async def put(
        self, id_: str, tenant: str | None, *, previous: str | None, frame: str, input: str, output: str
    ) -> None:
        """Keep an answer; others go if there is no room.

        Raises:
            StoreError: it cannot be kept.
        """
        kept = Kept(frame=frame, input=input, output=output)
        await self._run(self._put, id_, tenant or "", previous, kept)

    async def get(self, id_: str, tenant: str | None) -> Kept | None:
        """An answer of this tenant; None where there is none, or it is too old.

        Raises:
            StoreError: the file cannot be read.
        """
        return await self._run(self._get, id_, tenant or "")

    async def delete(self, id_: str, tenant: str | None) -> bool:
        """Whether there was one to delete. What went on from it cannot be gone on from any more.

        Raises:
            StoreError: the file cannot be written.
        """
        return await self._run(self._delete, id_, tenant or "")

    async def history(self, id_: str, tenant: str | None, max_size: int) -> list[dict[str, Any]]:
        """The items of a conversation up to and with this answer, the oldest first.

        Args:
            max_size: characters that it may have as JSON.

        Raises:
            HistoryError: a part of it is not there, or it is too long.
            StoreError: the file cannot be read.
        """
        return await self._run(self._history, id_, tenant or "", max_size)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Around the service's life: what is too old goes meanwhile, and the file is closed at the end."""
        task = asyncio.create_task(self._purge_all())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await asyncio.to_thread(self._close)

    # ---------------------------------------------------------------- in its thread

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        def guarded() -> T:
            try:
                return work(*args)
            except sqlite3.Error as problem:
                raise StoreError(f"{self._path}: {problem}") from problem

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def _open(self) -> sqlite3.Connection:
        try:
            # SQLite gives its other files the same rights.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            database = sqlite3.connect(self._path, _PATIENCE, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as problem:
            raise ConfigError(f"response_store {str(self._path)!r} cannot be opened: {problem}.") from problem
        try:
            self._prepare(database)
        except sqlite3.Error as problem:
            database.close()
            raise ConfigError(
                f"response_store {str(self._path)!r} cannot be used: {problem}. If it is damaged, move it away; a new "
                "one is made."
            ) from problem
        except ConfigError:
            database.close()
            raise
        return database

    def _prepare(self, database: sqlite3.Connection) -> None:
        # Several processes may open a new file at once, and each of them makes what is not there yet.
        database.execute("BEGIN")
        application, version, num_tables = (
            database.execute(question).fetchone()[0]
            for question in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_schema")
        )
        database.execute("COMMIT")
        if num_tables and application != _APPLICATION:
            raise ConfigError(f"response_store {str(self._path)!r} is a database of something else: name another file.")
        if num_tables and version != _VERSION:
            raise ConfigError(
                f"response_store {str(self._path)!r} was made by another version of Octavo (its tables are version "
                f"{version}, this one's are {_VERSION}): name another file."
            )
        # A crash of the machine may lose the last answers, and damages nothing. What is deleted is overwritten.
        _write_ahead(database)
        for setting in ("synchronous = NORMAL", "secure_delete = ON", "temp_store = MEMORY"):
            database.execute(f"PRAGMA {setting}")
        if not num_tables:
            made = f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_VERSION};"
            database.executescript(f"BEGIN IMMEDIATE; {_TABLES} {made} COMMIT;")

    def _close(self) -> None:
        self._thread.shutdown()
        self._database.close()

    @contextmanager
    def _transaction(self) -> Any:
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            yield database
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:  # a full disk may have ended it already
                database.execute("ROLLBACK")
            raise

    @property
    def _oldest(self) -> float:
        return self._clock() - self._max_age

    def _put(self, id_: str, tenant: str, previous: str | None, kept: Kept) -> None:
        size = sum(len(text.encode()) for text in (kept.frame, kept.input, kept.output))
        if size > self._max_size:
            raise StoreError(f"an answer of {size} bytes is larger than the store ({self._max_size} bytes)")
        row = (id_, tenant, previous, self._clock(), size, kept.frame, kept.input, kept.output)
        with self._transaction() as database:
            database.execute(
                "INSERT INTO responses (id, tenant, previous, created, size, frame, input, output) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            self._has_remains |= self._purge(database) > 0
            while database.execute("SELECT total(size) FROM usage").fetchone()[0] > self._max_size:
                self._evict(database, id_)
                self._has_remains = True

    def _evict(self, database: sqlite3.Connection, but: str) -> None:
        """Delete the oldest answer of the tenant that has the most, or the oldest of all if that one has no other."""
        (tenant,) = database.execute("SELECT tenant FROM usage ORDER BY size DESC LIMIT 1").fetchone()
        question = "DELETE FROM responses WHERE number = (SELECT number FROM responses WHERE id != :but {} LIMIT 1)"
        names = {"but": but, "tenant": tenant}
        if not database.execute(question.format("AND tenant = :tenant ORDER BY number"), names).rowcount:
            database.execute(question.format("ORDER BY number"), names)

    def _get(self, id_: str, tenant: str) -> Kept | None:
        row = self._database.execute(
            "SELECT frame, input, output FROM responses WHERE id = ? AND tenant = ? AND created > ?",
            (id_, tenant, self._oldest),
        ).fetchone()
        return None if row is None else Kept(frame=row[0], input=row[1], output=row[2])

    def _delete(self, id_: str, tenant: str) -> bool:
        with self._transaction() as database:
            deleted = database.execute(
                "DELETE FROM responses WHERE id = ? AND tenant = ? AND created > ?", (id_, tenant, self._oldest)
            )
            found = bool(deleted.rowcount)
        if found:
            self._overwrite()
        return found

    def _overwrite(self) -> None:
        """Carry the log over into the file and empty it: both hold deleted text until then. Where another process is
        in the way for long, the next purge tries again."""
        self._has_remains = True
        busy, _, _ = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self._has_remains = bool(busy)

    def _history(self, id_: str, tenant: str, max_size: int) -> list[dict[str, Any]]:
        asked = {"id": id_, "tenant": tenant, "oldest": self._oldest, "turns": _MAX_TURNS, "most": max_size}
        turns = self._database.execute(_CHAIN, asked).fetchall()
        if not turns:
            raise HistoryError(f"there is no stored response {id_}", id_)
        previous, size = turns[-1][:2]
        if size > max_size:
            raise HistoryError(f"its conversation has more than {max_size} characters of JSON", None)
        if previous is not None and len(turns) == _MAX_TURNS:
            raise HistoryError(f"its conversation has more than {_MAX_TURNS} turns", None)
        if previous is not None:
            raise HistoryError(f"an earlier response of its conversation, {previous}, is not stored any more", previous)
        return [
            item
            for turn in reversed(turns)
            for part in turn[2:]
            for item in msgspec.json.decode(part, type=list[dict[str, Any]])
        ]

    def _purge(self, database: sqlite3.Connection) -> int:
        return database.execute(
            "DELETE FROM responses WHERE number IN (SELECT number FROM responses WHERE created <= ? LIMIT ?)",
            (self._oldest, _PURGED_AT_ONCE),
        ).rowcount

    def _purge_once(self) -> int:
        with self._transaction() as database:
            count = self._purge(database)
        self._has_remains |= count > 0
        if self._has_remains and count < _PURGED_AT_ONCE:
            self._overwrite()
        return count

    async def _purge_all(self) -> None:
        while True:
            try:
                while await self._run(self._purge_once) == _PURGED_AT_ONCE:
                    pass
            except StoreError as problem:
                self.complain(problem)
            await asyncio.sleep(min(_PURGE_INTERVAL, self._max_age))

    def complain(self, problem: StoreError) -> None:
        """Log a failure, but not each of many."""
        now = time.monotonic()
        if now - self._logged >= _LOG_INTERVAL:
            self._logged = now
            logger.error("The store of responses failed: %s", problem)


def _write_ahead(database: sqlite3.Connection) -> None:
    """Let readers go on beside a writer. SQLite itself does not wait here where another process has the file."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as problem:
            if problem.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        else:
            return
        time.sleep(_RETRY)
