"""Answers that are lists of items, as JSON."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from server.answering.pooling import PoolingRun

_write = functools.partial(json.dumps, separators=(",", ":"), allow_nan=False)


def listed(run: PoolingRun, items: Iterable[Mapping[str, Any]], name: str = "data") -> bytes:
    """The body of an answer that holds these items under that name.

    Each is written on its own, so that a thread with thousands of them lets others run in between, and that no more
    than one of them is held as anything but its text.
    """
    return joined(run, (_write(item).encode() for item in items), name)


def joined(run: PoolingRun, written: Iterable[bytes], name: str = "data") -> bytes:
    """The same of items that are JSON already."""
    rest = {
        "id": run.request_id,
        "object": "list",
        "created": run.created,
        "model": run.service.model_id,
        "usage": run.usage.model_dump(),
    }
    return b'%b,"%b":[%b]}' % (_write(rest)[:-1].encode(), name.encode(), b",".join(written))
