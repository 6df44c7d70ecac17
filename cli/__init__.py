"""The command line: `octavo COMMAND`. It imports the server and the engine; neither imports it."""

from __future__ import annotations


def version() -> str:
    """The installed version of Octavo."""
    from importlib import metadata

    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
