"""Whether an answer is what the OpenAPI document says of its request."""

from __future__ import annotations

import math
from typing import Any

import httpx
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from server.answering.terms import TIMEOUT_HEADER

_OF_THE_DOCUMENT = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
_SHORT = 60.0  # seconds; a request that may take longer always ends in time


def validate(case: Any, answer: Any) -> bool:
    """Check an answer; False where the request's own time was over, which tells nothing else of it.

    Args:
        case: of schemathesis.
        answer: to it.
    """
    over = answer.status_code == httpx.codes.GATEWAY_TIMEOUT
    if over:
        assert _allowed(case) < _SHORT, (case, answer.text)
    case.validate_response(answer, checks=_OF_THE_DOCUMENT if over else [not_a_server_error, *_OF_THE_DOCUMENT])
    return not over


def _allowed(case: Any) -> float:
    """Seconds that the request has by its body and its header."""
    given = [case.body.get("request_timeout")] if isinstance(case.body, dict) else []
    given.append((case.headers or {}).get(TIMEOUT_HEADER))
    return min((float(seconds) for seconds in given if seconds is not None), default=math.inf)
