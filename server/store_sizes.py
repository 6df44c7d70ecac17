"""The bytes that each tenant has in the store, counted by SQLite's triggers."""

from __future__ import annotations

USAGE = "CREATE TABLE IF NOT EXISTS usage (tenant TEXT PRIMARY KEY, size INTEGER NOT NULL) STRICT, WITHOUT ROWID;"


def counting(table: str, parts: str, owner: str) -> str:
    """Triggers that count what is added to a table, grows in it or is deleted from it.

    Args:
        table: a table whose rows have a number, a tenant and a size.
        parts: a table whose rows belong to these rows, and are deleted with them.
        owner: the column of that table with their number.
    """
    return f"""
CREATE TRIGGER IF NOT EXISTS {table}_kept AFTER INSERT ON {table} BEGIN
    INSERT INTO usage (tenant, size) VALUES (new.tenant, new.size)
    ON CONFLICT (tenant) DO UPDATE SET size = size + excluded.size;
END;
CREATE TRIGGER IF NOT EXISTS {table}_grown AFTER UPDATE OF size ON {table} BEGIN
    UPDATE usage SET size = size + new.size - old.size WHERE tenant = new.tenant;
END;
CREATE TRIGGER IF NOT EXISTS {table}_lost AFTER DELETE ON {table} BEGIN
    DELETE FROM {parts} WHERE {owner} = old.number;
    UPDATE usage SET size = size - old.size WHERE tenant = old.tenant;
    DELETE FROM usage WHERE tenant = old.tenant AND size <= 0;
END;
"""
