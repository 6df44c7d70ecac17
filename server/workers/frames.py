"""The messages between the service and its workers: frames of MessagePack."""

from __future__ import annotations

import msgspec

MEMORY = 512 * 1024 * 1024  # default bytes of a worker's job, in addition to its memory at start


class Job(msgspec.Struct, array_like=True):
    """Work for a worker."""

    name: str
    seconds: float  # time after which the worker is killed
    payload: msgspec.Raw  # the function's argument, encoded
    memory: int = MEMORY  # maximum bytes


class JobOutcome(msgspec.Struct, array_like=True):
    """The result of a job."""

    result: msgspec.Raw = msgspec.Raw(b"\xc0")  # the function's result, encoded; empty if it failed
    refused: str | None = None  # the message if it refused its argument (its ValueError)
    out_of_memory: bool = False  # whether it needed more memory than a worker may have
    is_last: bool = False  # whether the worker ends with it
