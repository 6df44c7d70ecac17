"""Decides whether requests are traced. OpenTelemetry is imported only if they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import ConfigError
from server.config.settings import ServerSettings

if TYPE_CHECKING:
    from server.tracing.otlp import Tracing


def start_tracing(settings: ServerSettings, version: str) -> Tracing | None:
    """The object that traces requests; None if `otlp_traces_endpoint` is not set. Raises ConfigError if the packages
    are not installed, or one of OpenTelemetry's own variables is invalid."""
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        from server.tracing.otlp import Tracing
    except ImportError as problem:
        raise ConfigError(
            f"otlp_traces_endpoint ({settings.otlp_traces_endpoint}) needs packages that are not installed "
            f"({problem.name}): pip install 'octavo[otel]', or remove --otlp-traces-endpoint."
        ) from problem
    try:
        return Tracing(settings.otlp_traces_endpoint, version)
    except ValueError as problem:
        raise ConfigError(f"OpenTelemetry rejects one of its environment variables (OTEL_...): {problem}.") from problem
