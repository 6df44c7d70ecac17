"""The installed version."""

from __future__ import annotations


def version() -> str:
    """The installed version of Octavo."""
    from importlib import metadata

    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
