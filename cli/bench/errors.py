"""What can end a benchmark before it has measured anything."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot run, for a reason that one paragraph explains."""


class OptionError(BenchError):
    """Options that are malformed or contradict each other; names the option and the value."""
