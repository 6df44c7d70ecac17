"""The messages between the service and its workers: MessagePack with its length before it."""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("!I")
MEMORY = 512 * 1024 * 1024  # bytes that a worker may have beyond what it begins with, unless a job says another number


class Job(msgspec.Struct, array_like=True):
    """Work for a worker.

    Attributes:
        name: which function.
        seconds: after which the worker is killed.
        payload: the function's argument, encoded.
        memory: bytes that it may take.
    """

    name: str
    seconds: float
    payload: msgspec.Raw
    memory: int = MEMORY


class Outcome(msgspec.Struct, array_like=True):
    """The result of a job.

    Attributes:
        result: what the function returned, encoded; nothing if it failed.
        refused: why it refused its argument (its ValueError), if it did.
        out_of_memory: it needed more memory than a worker may have.
        is_last: the worker ends with it.
    """

    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    refused: str | None = None
    out_of_memory: bool = False
    is_last: bool = False


def framed(message: Job | Outcome) -> bytes:
    """A message as it is sent."""
    content = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(content)) + content
