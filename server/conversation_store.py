"""Conversations of /v1/conversations: their items, in the file of stored responses, with its limits and tenants."""

from __future__ import annotations

import functools
import sqlite3
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import msgspec

from server.store_sizes import counting

TABLES = """
CREATE TABLE IF NOT EXISTS conversations (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    size INTEGER NOT NULL,
    metadata TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS conversations_by_tenant ON conversations (tenant, used);
CREATE INDEX IF NOT EXISTS conversations_by_age ON conversations (used);
CREATE TABLE IF NOT EXISTS items (
    number INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL,
    id TEXT NOT NULL,
    item TEXT NOT NULL,
    UNIQUE (conversation, id)
) STRICT;
CREATE INDEX IF NOT EXISTS items_by_place ON items (conversation, number);
CREATE TRIGGER IF NOT EXISTS item_kept AFTER INSERT ON items BEGIN
    UPDATE conversations SET size = size + length(CAST(new.item AS BLOB)) WHERE number = new.conversation;
END;
CREATE TRIGGER IF NOT EXISTS item_lost AFTER DELETE ON items BEGIN
    UPDATE conversations SET size = size - length(CAST(old.item AS BLOB)) WHERE number = old.conversation;
END;
"""
TABLES += counting("conversations", "items", "conversation")
_ROW = 64  # bytes that a conversation counts in addition to its items

T = TypeVar("T")
P = ParamSpec("P")

Item = dict[str, Any]


class ConversationTooLargeError(Exception):
    """A conversation would exceed the limit on items or bytes."""


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation without its items."""

    id: str
    created: int
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class Page:
    """Some items, and whether more follow."""

    items: list[Item]
    more: bool


class Runs(Protocol):
    """Runs calls in the store's thread."""

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        """The result of the call."""


def in_thread(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A method that runs in the thread of its store; callers await the result."""

    @functools.wraps(method)
    def begin(self: Any, /, *given: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        return cast(Runs, self._run)(functools.partial(method, self, *given, **named))

    return begin


@dataclass(eq=False)
class Conversations:
    """Conversations by id, separate for each tenant. If a conversation is missing or too old, the result is None."""

    _database: sqlite3.Connection
    _run: Runs
    _transaction: Callable[[], AbstractContextManager[sqlite3.Connection]]
    _now: Callable[[], float]
    _oldest: Callable[[], float]  # conversations last used before this time are too old
    # called at the end of a change: deletes others if there is no room; it gets the id of the item to keep
    _make_room: Callable[[sqlite3.Connection, str], None]
    _overwrite: Callable[[], None]  # called after a deletion, so that no text remains in the file

    def _find(self, id_: str, tenant: str | None) -> tuple[int, float, str, int] | None:
        row: tuple[int, float, str, int] | None = self._database.execute(
            "SELECT number, created, metadata, size FROM conversations WHERE id = ? AND tenant = ? AND used > ?",
            (id_, tenant or "", self._oldest()),
        ).fetchone()
        return row

    @in_thread
    def create(
        self, tenant: str | None, metadata: dict[str, str], items: Sequence[Item], max_size: int | None = None
    ) -> StoredConversation:
        """Create a conversation. `max_size`: maximum bytes as JSON; None for no limit. Raises TooLargeError if it would
        exceed the limit."""
        id_, now, text = f"conv_{uuid.uuid4().hex}", self._now(), _encode(metadata)
        with self._transaction() as database:
            made = database.execute(
                "INSERT INTO conversations (id, tenant, created, used, size, metadata) VALUES (?, ?, ?, ?, ?, ?)",
                (id_, tenant or "", now, now, _ROW + len(text.encode()), text),
            )
            assert made.lastrowid is not None
            self._append(database, made.lastrowid, items, max_size)
            self._make_room(database, id_)
        return StoredConversation(id_, int(now), metadata)

    @in_thread
    def get(self, id_: str, tenant: str | None) -> StoredConversation | None:
        row = self._find(id_, tenant)
        return None if row is None else StoredConversation(id_, int(row[1]), msgspec.json.decode(row[2]))

    @in_thread
    def update(self, id_: str, tenant: str | None, metadata: dict[str, str]) -> StoredConversation | None:
        text = _encode(metadata)
        with self._transaction() as database:
            row = self._find(id_, tenant)
            if row is None:
                return None
            growth = len(text.encode()) - len(row[2].encode())
            database.execute(
                "UPDATE conversations SET metadata = ?, used = ?, size = size + ? WHERE number = ?",
                (text, self._now(), growth, row[0]),
            )
            self._make_room(database, id_)
        self._overwrite()
        return StoredConversation(id_, int(row[1]), metadata)

    @in_thread
    def delete(self, id_: str, tenant: str | None) -> bool:
        """Delete it with its items; returns whether it existed."""
        with self._transaction() as database:
            question = "DELETE FROM conversations WHERE id = ? AND tenant = ? AND used > ?"
            found = bool(database.execute(question, (id_, tenant or "", self._oldest())).rowcount)
        if found:
            self._overwrite()
        return found

    @in_thread
    def add(
        self, id_: str, tenant: str | None, items: Sequence[Item], most: int | None = None, max_size: int | None = None
    ) -> list[Item] | None:
        """Add items at its end; returns them with the ids that they have there. Raises TooLargeError if it would exceed
        a limit.

        Args:
            most: maximum items in it; None for no limit.
            max_size: maximum bytes as JSON; None for no limit.
        """
        with self._transaction() as database:
            row = self._find(id_, tenant)
            if row is None:
                return None
            if most is not None:
                self._check_count(row[0], most, len(items))
            added = self._append(database, row[0], items, max_size)
            database.execute("UPDATE conversations SET used = ? WHERE number = ?", (self._now(), row[0]))
            self._make_room(database, id_)
        return added

    def _append(
        self, database: sqlite3.Connection, number: int, items: Sequence[Item], max_size: int | None
    ) -> list[Item]:
        added = []
        for item in items:
            taken = database.execute("SELECT 1 FROM items WHERE conversation = ? AND id = ?", (number, item["id"]))
            if taken.fetchone() is not None:  # sent a second time
                item = {**item, "id": f"{item['id'].partition('_')[0]}_{uuid.uuid4().hex}"}
            database.execute(
                "INSERT INTO items (conversation, id, item) VALUES (?, ?, ?)", (number, item["id"], _encode(item))
            )
            added.append(item)
        size = database.execute("SELECT size FROM conversations WHERE number = ?", (number,)).fetchone()[0]
        if max_size is not None and size > max_size:
            raise ConversationTooLargeError(
                f"it would have {size} bytes, but at most {max_size} are allowed (max_body_size)"
            )
        return added

    def _check_count(self, number: int, most: int, more: int = 0) -> None:
        question = "SELECT count(*) FROM items WHERE conversation = ?"
        count = self._database.execute(question, (number,)).fetchone()[0] + more
        if count > most:
            raise ConversationTooLargeError(f"it would have {count} items, but at most {most} are allowed")

    @in_thread
    def page(self, id_: str, tenant: str | None, *, after: str | None, limit: int, ascending: bool) -> Page | None:
        """A page of its items. `after`: the id of the item before the page; the item must exist. Raises KeyError if it
        does not exist."""
        row = self._find(id_, tenant)
        if row is None:
            return None
        behind, order = (">", "ASC") if ascending else ("<", "DESC")
        where, values = "conversation = ?", [row[0]]
        if after is not None:
            question = "SELECT number FROM items WHERE conversation = ? AND id = ?"
            place = self._database.execute(question, (row[0], after)).fetchone()
            if place is None:
                raise KeyError(after)
            where, values = f"{where} AND number {behind} ?", [row[0], place[0]]
        question = f"SELECT item FROM items WHERE {where} ORDER BY number {order} LIMIT ?"
        found = self._database.execute(question, (*values, limit + 1)).fetchall()
        return Page([msgspec.json.decode(text) for (text,) in found[:limit]], len(found) > limit)

    @in_thread
    def item(self, id_: str, tenant: str | None, item: str) -> Item | None:
        row = self._find(id_, tenant)
        if row is None:
            return None
        question = "SELECT item FROM items WHERE conversation = ? AND id = ?"
        found = self._database.execute(question, (row[0], item)).fetchone()
        return None if found is None else msgspec.json.decode(found[0], type=Item)

    @in_thread
    def delete_item(self, id_: str, tenant: str | None, item: str) -> StoredConversation | None:
        """Delete one of its items; returns None if it does not exist."""
        with self._transaction() as database:
            row = self._find(id_, tenant)
            if row is None:
                return None
            question = "DELETE FROM items WHERE conversation = ? AND id = ?"
            if not database.execute(question, (row[0], item)).rowcount:
                return None
        self._overwrite()
        return StoredConversation(id_, int(row[1]), msgspec.json.decode(row[2]))

    @in_thread
    def history(self, id_: str, tenant: str | None, most: int, max_size: int) -> list[Item] | None:
        """All of its items, oldest first. Raises TooLargeError if there are more.

        Args:
            most: maximum items.
            max_size: maximum bytes as JSON.
        """
        row = self._find(id_, tenant)
        if row is None:
            return None
        if row[3] > max_size:
            raise ConversationTooLargeError(f"it has {row[3]} bytes, but at most {max_size} are read (max_body_size)")
        self._check_count(row[0], most)
        question = "SELECT item FROM items WHERE conversation = ? ORDER BY number"
        return [msgspec.json.decode(text) for (text,) in self._database.execute(question, (row[0],))]


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()
