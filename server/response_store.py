"""Stored answers of /v1/responses: a SQLite file, with limits of age and size.

SQLite's calls block, so a separate thread makes all of them. No tenant can see another's responses. When the file is
full, the tenant with the most data loses its oldest responses first.
"""

from __future__ import annotations

import asyncio
import fcntl
import glob
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine import ConfigError, parse_bytes
from server import conversation_store
from server.config.settings import ServerSettings
from server.conversation_store import Conversations, in_thread
from server.store_sizes import USAGE, counting

logger = logging.getLogger("octavo.server")

T = TypeVar("T")

_APPLICATION = 0x4F637476  # SQLite's application_id of the file
_VERSION = 2  # version of its tables
_PATIENCE = 5.0  # seconds to wait for another process's transaction
_RETRY = 0.01  # seconds between two attempts where SQLite itself does not wait
_PURGE_INTERVAL = 60.0  # seconds between checks for old data
_PURGED_AT_ONCE = 256  # answers deleted in one transaction
_MAX_TURNS = 4096  # maximum turns of one conversation
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
    output TEXT NOT NULL,
    owner TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS events (
    response INTEGER NOT NULL, number INTEGER NOT NULL, event TEXT NOT NULL, PRIMARY KEY (response, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_tenant ON responses (tenant, number);
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
CREATE INDEX IF NOT EXISTS by_owner ON responses (owner) WHERE owner IS NOT NULL;
"""
_TABLES += counting("responses", "events", "response")
_INTERRUPTED = {
    "code": "server_error",
    "message": "The server stopped before the answer was complete; send the request again.",
}
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


_OLDEST = """
SELECT * FROM (
    SELECT 'responses', number, created AS age FROM responses WHERE id != :but {whose} ORDER BY number LIMIT 1
) UNION ALL SELECT * FROM (
    SELECT 'conversations', number, used FROM conversations WHERE id != :but {whose} ORDER BY used LIMIT 1
) ORDER BY age LIMIT 1
"""


class StoreError(Exception):
    """An operation of the store failed; the message is for the log and for people."""


class HistoryError(Exception):
    """A conversation that is incomplete or too long."""

    def __init__(self, message: str, missing: str | None, running: bool = False):
        super().__init__(message)
        self.missing = missing  # the id of the missing answer; None if the conversation is too long
        self.running = running  # whether that answer is still being generated


class _Made(msgspec.Struct):
    background: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A stored answer, each part as JSON."""

    frame: str  # the answer without its output
    input: str  # the input items of its own request, without earlier turns
    output: str
    ended: bool = True  # whether the answer is complete

    @property
    def background(self) -> bool:
        """Whether the answer was generated in the background."""
        return bool(msgspec.json.decode(self.frame, type=_Made).background)

    def items(self) -> list[dict[str, Any]]:
        """The input's items."""
        return msgspec.json.decode(self.input, type=list[dict[str, Any]])

    def whole(self) -> bytes:
        """The answer as it was sent."""
        fields = msgspec.json.decode(self.frame, type=dict[str, msgspec.Raw])
        return msgspec.json.encode({**fields, "output": msgspec.Raw(self.output.encode())})


def open_store(settings: ServerSettings) -> ResponseStore | None:
    """The store from the settings, if they name one. Raises ConfigError if the file cannot be used."""
    if settings.response_store is None:
        return None
    size = parse_bytes(settings.response_store_max_size, "response_store_max_size")
    return ResponseStore(settings.response_store, max_age=settings.response_store_max_age, max_size=size)


class ResponseStore:
    """Answers by id, separate for each tenant, and conversations. Raises ConfigError if the file cannot be opened, or
    another program made it. `path`: path of the file; created if missing, for this user only."""

    def __init__(
        self, path: str | Path, *, max_age: float, max_size: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = Path(path)
        self._max_age = max_age  # seconds that an answer is stored
        self._max_size = max_size  # maximum bytes of all answers together
        self._clock = clock  # seconds since 1970
        self._logged = float("-inf")
        self._presence = Presence(self._path)
        self._making: set[str] = set()  # answers that this process is generating
        self._has_remains = True  # whether deleted text may remain in the write-ahead log, or in pages of the file
        self._database = self._open()
        # the conversations of /v1/conversations, in the same file
        self.conversations = Conversations(
            self._database, self._run, self._transaction, clock, lambda: self._oldest, self._make_room, self._overwrite
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="response-store")

    # ---------------------------------------------------------------- public methods

    async def begin(
        self, id_: str, tenant: str | None, *, previous: str | None, frame: str, input: str, events: Sequence[str]
    ) -> None:
        """Store an answer that is being generated. If this process ends before `update` marks the answer as ended, the
        answer has failed. `events`: the first events of its stream; empty if no stream can be resumed. Raises
        StoreError if it cannot be stored."""
        self._making.add(id_)
        try:
            kept = Kept(frame=frame, input=input, output="[]")
            await self._run(self._begin, id_, tenant or "", previous, kept, events)
        except BaseException:
            self._making.discard(id_)
            raise

    async def update(
        self,
        id_: str,
        tenant: str | None,
        *,
        frame: str | None = None,
        output: str | None = None,
        events: Sequence[str] = (),
        first: int = 0,
    ) -> bool:
        """Store new data of an answer that is being generated; returns whether the answer still exists. Raises
        StoreError if they cannot be stored. An answer that has ended then counts as failed. `events`: further events of
        its stream."""
        try:
            return await self._run(self._update, id_, tenant or "", frame, output, events, first)
        finally:
            if output is not None:
                self._making.discard(id_)

    async def get(self, id_: str, tenant: str | None) -> Kept | None:
        """An answer of this tenant; None if it does not exist or is too old. Raises StoreError if the file cannot be
        read."""
        return await self._run(self._get, id_, tenant or "")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """A context for the service's lifetime: old data is deleted meanwhile, and the file is closed at the end."""
        task = asyncio.create_task(self._purge_all())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await asyncio.to_thread(self._close)

    # ---------------------------------------------------------------- in the store's thread

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        def guarded() -> T:
            try:
                return work(*args)
            except (sqlite3.Error, OSError) as problem:
                raise StoreError(f"{self._path}: {problem}") from problem

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def _open(self) -> sqlite3.Connection:
        try:
            # SQLite gives its other files the same permissions.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            database = sqlite3.connect(self._path, _PATIENCE, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as problem:
            raise ConfigError(f"response_store {str(self._path)!r} cannot be opened: {problem}.") from problem
        try:
            self._prepare(database)
        except sqlite3.Error as problem:
            database.close()
            raise ConfigError(
                f"response_store {str(self._path)!r} cannot be used: {problem}. If it is damaged, move it away, and "
                f"a new one is created."
            ) from problem
        except ConfigError:
            database.close()
            raise
        return database

    def _prepare(self, database: sqlite3.Connection) -> None:
        # Several processes may open a new file at once; each creates the tables that are missing.
        database.execute("BEGIN")
        application, version, num_tables = (
            database.execute(question).fetchone()[0]
            for question in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_schema")
        )
        database.execute("COMMIT")
        if num_tables and application != _APPLICATION:
            raise ConfigError(f"response_store {str(self._path)!r} is not a database of Octavo. Choose another file.")
        if num_tables and version != _VERSION:
            raise ConfigError(
                f"response_store {str(self._path)!r} was made by another version of Octavo (it has version "
                f"{version}, this one needs {_VERSION}). Choose another file."
            )
        # A crash of the machine may lose the last answers, but damages nothing. Deleted data is overwritten.
        _write_ahead(database)
        for setting in ("synchronous = NORMAL", "secure_delete = ON", "temp_store = MEMORY"):
            database.execute(f"PRAGMA {setting}")
        if not num_tables:
            made = f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_VERSION};"
            database.executescript(f"BEGIN IMMEDIATE; {USAGE} {_TABLES} {conversation_store.TABLES} {made} COMMIT;")

    def _close(self) -> None:
        self._thread.shutdown()
        self._database.close()
        self._presence.close()

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

    @in_thread
    def put(self, id_: str, tenant: str | None, *, previous: str | None, frame: str, input: str, output: str) -> None:
        """Store an answer; others are deleted if there is no room. Raises StoreError if it cannot be stored."""
        kept = Kept(frame=frame, input=input, output=output)
        with self._transaction() as database:
            self._insert(database, id_, tenant or "", previous, kept, owner=None)
            self._has_remains |= self._purge(database) > 0
            self._make_room(database, id_)

    def _begin(self, id_: str, tenant: str, previous: str | None, kept: Kept, events: Sequence[str]) -> None:
        with self._transaction() as database:
            number = self._insert(database, id_, tenant, previous, kept, owner=self._presence.announce())
            self._append(database, number, events, 0)
            self._make_room(database, id_)

    def _insert(
        self, database: sqlite3.Connection, id_: str, tenant: str, previous: str | None, kept: Kept, owner: str | None
    ) -> int:
        size = _size(kept.frame, kept.input, kept.output)
        self._check_size(size)
        row = (id_, tenant, previous, self._clock(), size, kept.frame, kept.input, kept.output, owner)
        inserted = database.execute(
            "INSERT INTO responses (id, tenant, previous, created, size, frame, input, output, owner) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row,
        )
        assert inserted.lastrowid is not None
        return inserted.lastrowid

    def _update(
        self, id_: str, tenant: str, frame: str | None, output: str | None, events: Sequence[str], first: int
    ) -> bool:
        with self._transaction() as database:
            row = database.execute(
                "SELECT number, frame, output, size FROM responses WHERE id = ? AND tenant = ?", (id_, tenant)
            ).fetchone()
            if row is None:
                return False
            number, old_frame, old_output, size = row
            frame = old_frame if frame is None else frame
            size += _size(frame, output or old_output) - _size(old_frame, old_output)
            self._check_size(size + _size(*events))
            database.execute(
                "UPDATE responses SET frame = ?, output = ?, size = ?, owner = iif(?, NULL, owner) WHERE number = ?",
                (frame, output or old_output, size, output is not None, number),
            )
            self._append(database, number, events, first)
            self._make_room(database, id_)
        return True

    def _append(self, database: sqlite3.Connection, number: int, events: Sequence[str], first: int) -> None:
        if events:
            rows = [(number, first + index, event) for index, event in enumerate(events)]
            database.executemany("INSERT INTO events (response, number, event) VALUES (?, ?, ?)", rows)
            database.execute("UPDATE responses SET size = size + ? WHERE number = ?", (_size(*events), number))

    def _check_size(self, size: int) -> None:
        if size > self._max_size:
            raise StoreError(f"an answer of {size} bytes is larger than the store ({self._max_size} bytes)")

    def _make_room(self, database: sqlite3.Connection, but: str) -> None:
        while database.execute("SELECT total(size) FROM usage").fetchone()[0] > self._max_size:
            self._evict(database, but)
            self._has_remains = True

    def _evict(self, database: sqlite3.Connection, but: str) -> None:
        """Delete the oldest answer or conversation: of the tenant with the most data, or of all tenants if that one has
        no other."""
        (tenant,) = database.execute("SELECT tenant FROM usage ORDER BY size DESC LIMIT 1").fetchone()
        names = {"but": but, "tenant": tenant}
        for whose in ("AND tenant = :tenant", ""):
            found = database.execute(_OLDEST.format(whose=whose), names).fetchone()
            if found is not None:
                database.execute(f"DELETE FROM {found[0]} WHERE number = ?", (found[1],))
                return
        raise StoreError(f"{but} is larger than the store ({self._max_size} bytes)")

    def _get(self, id_: str, tenant: str) -> Kept | None:
        def ask() -> Any:
            return self._database.execute(
                "SELECT frame, input, output, owner FROM responses WHERE id = ? AND tenant = ? AND created > ?",
                (id_, tenant, self._oldest),
            ).fetchone()

        row = ask()
        if row is not None and self._is_abandoned(id_, row[3]):
            self._fail_abandoned()
            row = ask()
        return None if row is None else Kept(frame=row[0], input=row[1], output=row[2], ended=row[3] is None)

    @in_thread
    def events(self, id_: str, tenant: str | None, after: int) -> tuple[list[str], bool] | None:
        """The events of an answer's stream after this number, and whether they are the last; None if the answer or its
        stream does not exist. Raises StoreError if the file cannot be read."""
        kept = self._get(id_, tenant or "")
        rows = self._database.execute(
            "SELECT event FROM events JOIN responses r ON response = r.number "
            "WHERE id = ? AND events.number > ? ORDER BY events.number",
            (id_, after),
        ).fetchall()
        if kept is None or (not rows and not self._has_stream(id_)):
            return None
        return [event for (event,) in rows], kept.ended

    def _has_stream(self, id_: str) -> bool:
        question = "SELECT 1 FROM events JOIN responses r ON response = r.number WHERE id = ? LIMIT 1"
        return self._database.execute(question, (id_,)).fetchone() is not None

    def _is_abandoned(self, id_: str, owner: str | None) -> bool:
        """Whether this answer has not ended, but its process has: nothing generates it any more."""
        if owner is None:
            return False
        return id_ not in self._making if owner == self._presence.name else not self._presence.is_there(owner)

    def _fail_abandoned(self) -> None:
        self._presence.sweep()
        with self._transaction() as database:
            rows = database.execute(
                "SELECT number, id, owner, frame, (SELECT max(number) FROM events WHERE response = r.number) "
                "FROM responses r WHERE owner IS NOT NULL"
            ).fetchall()
            for number, id_, owner, frame, last in rows:
                if self._is_abandoned(id_, owner):
                    failed = {**msgspec.json.decode(frame), "status": "failed", "error": _INTERRUPTED}
                    text = msgspec.json.encode(failed).decode()
                    growth = _size(text) - _size(frame)
                    database.execute(
                        "UPDATE responses SET frame = ?, owner = NULL, size = size + ? WHERE number = ?",
                        (text, growth, number),
                    )
                    if last is not None:
                        kind = "response.failed"
                        data = {"type": kind, "sequence_number": last + 1, "response": failed | {"output": []}}
                        event = f"event: {kind}\ndata: {msgspec.json.encode(data).decode()}\n\n"
                        self._append(database, number, [event], last + 1)

    @in_thread
    def delete(self, id_: str, tenant: str | None) -> bool:
        """Delete an answer; returns whether it existed. Responses that continue it can no longer be continued. Raises
        StoreError if the file cannot be written."""
        with self._transaction() as database:
            question = "DELETE FROM responses WHERE id = ? AND tenant = ? AND created > ?"
            deleted = database.execute(question, (id_, tenant or "", self._oldest))
            found = bool(deleted.rowcount)
        if found:
            self._overwrite()
        return found

    def _overwrite(self) -> None:
        """Copy the log into the file and empty it, because both contain deleted text until then. If another process
        blocks this for long, the next purge tries again."""
        self._has_remains = True
        busy, _, _ = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self._has_remains = bool(busy)

    @in_thread
    def history(self, id_: str, tenant: str | None, max_size: int) -> list[dict[str, Any]]:
        """The items of a conversation up to and including this answer, oldest first. `max_size`: maximum characters as
        JSON. Raises HistoryError if a part of it is missing, or it is too long; StoreError if the file cannot be
        read."""
        asked = {"id": id_, "tenant": tenant or "", "oldest": self._oldest, "turns": _MAX_TURNS, "most": max_size}
        kept = self._get(id_, tenant or "")
        if kept is None:
            raise HistoryError(f"no stored response has the id {id_}", id_)
        if not kept.ended:
            raise HistoryError("it has not ended yet", id_, running=True)
        turns = self._database.execute(_CHAIN, asked).fetchall()
        previous, size = turns[-1][:2]
        if size > max_size:
            raise HistoryError(f"its conversation has more than {max_size} characters of JSON", None)
        if previous is not None and len(turns) == _MAX_TURNS:
            raise HistoryError(f"its conversation has more than {_MAX_TURNS} turns", None)
        if previous is not None:
            raise HistoryError(f"an earlier response of its conversation, {previous}, is no longer stored", previous)
        return [
            item
            for turn in reversed(turns)
            for part in turn[2:]
            for item in msgspec.json.decode(part, type=list[dict[str, Any]])
        ]

    def _purge(self, database: sqlite3.Connection) -> int:
        return max(
            database.execute(
                f"DELETE FROM {table} WHERE number IN (SELECT number FROM {table} WHERE {age} <= ? LIMIT ?)",
                (self._oldest, _PURGED_AT_ONCE),
            ).rowcount
            for table, age in (("responses", "created"), ("conversations", "used"))
        )

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
                await self._run(self._fail_abandoned)
            except StoreError as problem:
                self.complain(problem)
            await asyncio.sleep(min(_PURGE_INTERVAL, self._max_age))

    def complain(self, problem: StoreError) -> None:
        """Log a failure, but not each of many."""
        now = time.monotonic()
        if now - self._logged >= _LOG_INTERVAL:
            self._logged = now
            logger.error("The response store failed: %s", problem)


class Presence:
    """Shows which of the processes that share a store's file still run. Each process has a file beside the store, which
    is locked while the process lives."""

    def __init__(self, path: Path):
        self._path = path
        self._lock: int | None = None
        self.name = uuid.uuid4().hex

    def announce(self) -> str:
        """The name of this process, which others can see from now on."""
        while self._lock is None:
            lock = os.open(self._file(self.name), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                self._lock = lock
            else:  # another process mistook it for a remnant before it was locked
                os.close(lock)
        return self.name

    def sweep(self) -> None:
        """Remove the data of processes that no longer run."""
        for path in self._path.parent.glob(f"{glob.escape(self._path.name)}-*.lock"):
            self.is_there(path.stem.removeprefix(f"{self._path.name}-"))

    def is_there(self, name: str) -> bool:
        """Whether the process with this name still runs. If not, its data is removed."""
        try:
            lock = os.open(self._file(name), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            self._file(name).unlink(missing_ok=True)
            return False
        finally:
            os.close(lock)

    def close(self) -> None:
        """Remove this process from the list."""
        if self._lock is not None:
            self._file(self.name).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _file(self, name: str) -> Path:
        return self._path.with_name(f"{self._path.name}-{name}.lock")


def _size(*texts: str) -> int:
    return sum(len(text.encode()) for text in texts)


def _write_ahead(database: sqlite3.Connection) -> None:
    """Let readers continue beside a writer. SQLite itself does not wait here if another process has the file open."""
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
