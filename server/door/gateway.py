"""Headers of gateways and clients that are logged with a request: X-Session-ID and X-Gateway-*."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

SESSION = b"x-session-id"
PREFIX = b"x-gateway-"
MOST_HEADERS = 8  # maximum X-Gateway-* headers of a request
MOST_CHARACTERS = 128  # maximum characters of a value
_NAME = re.compile(rb"[a-z0-9-]{1,64}")
# Never logged, whatever a gateway sends.
_SECRET = re.compile(rb"key|token|auth|secret|passw|cookie|credential")


def gateway_fields(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Fields of log lines: `session_id`, and `gateway` with the X-Gateway-* headers, without that prefix.

    Long values are cut, and characters other than printable ASCII are replaced. If a header is repeated, only the first
    counts. Headers whose names suggest a secret are left out.
    """
    session: str | None = None
    gateway: dict[str, str] = {}
    for given, value in headers:
        name = given.lower()
        if name == SESSION:
            session = session or _shown(value)
        elif name.startswith(PREFIX):
            rest = name[len(PREFIX) :]
            if len(gateway) < MOST_HEADERS and _NAME.fullmatch(rest) and not _SECRET.search(rest):
                gateway.setdefault(rest.decode(), _shown(value))
    fields: dict[str, Any] = {"session_id": session} if session else {}
    return fields | {"gateway": gateway} if gateway else fields


def _shown(value: bytes) -> str:
    cut = value[:MOST_CHARACTERS]
    text = "".join(chr(byte) if 32 <= byte < 127 else "?" for byte in cut).strip()
    return text + "..." if len(value) > len(cut) else text
