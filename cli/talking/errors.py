"""What ends a talk, in a sentence."""

from __future__ import annotations


class TalkError(Exception):
    """What went wrong, and what to do about it.

    Attributes:
        code: the server's code for it, "" where there is none.
    """

    def __init__(self, message: str, code: str = ""):
        super().__init__(message)
        self.code = code


class NoServerError(TalkError):
    """Nothing answers there."""
