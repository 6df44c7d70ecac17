"""Decides which web pages may use the service, by the host name in the request (Host) and the page's site (Origin).

A browser lets a page send requests to any server. The Origin header reveals a page of another site. A page whose name
was pointed at this machine after it was loaded (DNS rebinding) counts as the same site; only the Host header reveals
it.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from server.config.settings import ServerSettings
from server.door.auth import HEALTH_PATHS, routed_path
from server.door.request_id import client_address
from server.errors import ApiError, shown

logger = logging.getLogger("octavo.server")

# Response headers that a page of an allowed origin may read, beyond those that browsers always show.
EXPOSED = (
    "X-Request-ID", "Retry-After", "X-Octavo-Ignored-Fields",
    "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens",
)  # fmt: skip
PREFLIGHT_SECONDS = 600
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_PLACE = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*?)\.?)(?::(\d*))?")  # an address in brackets or a name, then a port


class HostGate:
    """Answers 403 to a request with a foreign host name or from a foreign web page, before its key and its body are
    read. It also answers preflights of allowed origins, and lets their pages read all answers, including errors.

    The health endpoints are exempt: probes send any Host, and their answers are not secret.

    Args:
        app: the app behind it.
        settings: the listening address, allowed_hosts and allowed_origins.
        keys: whether API keys are set. Then Host is checked only if allowed_hosts is set. Browsers never add a key by
            themselves, so a foreign page without a key is refused anyway.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, *, keys: bool):
        self._app = app
        # A proxy is in front of a Unix socket and may send any name; a browser cannot reach the socket.
        open_to_all = "*" in settings.allowed_hosts or settings.uds is not None or (keys and not settings.allowed_hosts)
        self._names = None if open_to_all else answered_names(settings)
        self._origins = frozenset(settings.allowed_origins)
        self._cors = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),  # clients have their own headers, and the origin is trusted
            expose_headers=EXPOSED,
            allow_private_network=True,
            max_age=PREFLIGHT_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origins, hosts = _values(scope, b"origin"), _values(scope, b"host")
        allowed = len(origins) == 1 and ("*" in self._origins or origins[0] in self._origins)
        problem = None
        if routed_path(scope) not in HEALTH_PATHS:
            problem = self._foreign_host(hosts) or (None if allowed else _foreign_origin(scope, origins, hosts))
        if problem is not None:
            extra = {"status": 403, "code": problem.code, "path": scope["path"], "client": client_address(scope)}
            logger.warning("Refused: %s", problem.message, extra=extra)
            await problem.response()(scope, receive, send)
        else:
            await (self._cors if allowed else self._app)(scope, receive, send)

    def _foreign_host(self, hosts: list[str]) -> ApiError | None:
        # A client without Host, which HTTP/1.0 allows, is not a browser.
        if self._names is None or not hosts or (len(hosts) == 1 and self._is_ours(hosts[0])):
            return None
        message = (
            f"This server does not answer to the host {shown(', '.join(hosts))}. If that is its name, start it with "
            "--allowed-hosts (OCTAVO_ALLOWED_HOSTS); other names are refused, since any web page could use the "
            "server under them."
        )
        return ApiError(403, message, code="host_not_allowed")

    def _is_ours(self, host: str) -> bool:
        name = (_parts(host) or ("",))[0]
        # An IP address is not resolved, so no other site can use it as its name.
        names, below = self._names or frozenset(), (name[at.end() :] for at in re.finditer(r"\.", name))
        return _is_address(name) or name in names or any(f"*.{rest}" in names for rest in below)


def answered_names(settings: ServerSettings) -> frozenset[str]:
    """The host names that the service accepts, in lower case; `*.` before a name accepts all names below it. IP
    addresses need no entry."""
    own = {"localhost", "*.localhost", socket.gethostname().lower(), settings.host.lower()}
    return frozenset(own | set(settings.allowed_hosts))


def _foreign_origin(scope: Scope, origins: list[str], hosts: list[str]) -> ApiError | None:
    if not origins:
        return None
    # The browser's own statement comes first, because a proxy in front may have replaced Host. No page can forge it.
    site = _values(scope, b"sec-fetch-site")
    if len(origins) == len(hosts) == 1 and (
        site == ["same-origin"] or (not site and _is_same_site(origins[0], hosts[0]))
    ):
        return None
    message = (
        f"Web pages of {shown(', '.join(origins))} may not use this server. To allow them, start it with "
        "--allowed-origins (OCTAVO_ALLOWED_ORIGINS)."
    )
    return ApiError(403, message, code="origin_not_allowed")


def _is_same_site(origin: str, host: str) -> bool:
    # The scheme is the one outside, which a proxy in front may not pass on; ports are enough.
    scheme, _, place = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    ours = _parts(host)
    return port is not None and ours is not None and _parts(place, port) == (ours[0], ours[1] or port)


def _parts(place: str, port: str = "") -> tuple[str, str] | None:
    """The name in lower case and the port of a Host header; None if the header is invalid. `port` is the default."""
    found = _PLACE.fullmatch(place.lower())
    return None if found is None else (found[1] or found[2] or "", found[3] or port)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key.lower() == name]
