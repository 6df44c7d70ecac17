"""A small HTTP client of an OpenAI-compatible server, over TCP, TLS or a Unix socket; answers are read as they come.

Blocking, so that Ctrl-C ends the reading; closing the connection tells the server that its answer is not wanted.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Generator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from cli.bench.sse import DONE, SseDecoder
from cli.talking.errors import NoServerError, TalkError

CONNECT_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is.

    Attributes:
        url: as it is shown.
        prefix: path before /v1.
        uds: path of its Unix socket, instead of host and port.
    """

    url: str
    host: str = "localhost"
    port: int = 80
    prefix: str = ""
    tls: bool = False
    uds: str = ""

    @classmethod
    def parse(cls, url: str) -> Place:
        """From a URL, with or without /v1 at its end; http:// may be left out.

        Raises:
            TalkError: it is no http or https URL.
        """
        whole = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(whole)
            port = parts.port
        except ValueError as problem:
            raise TalkError(f"--url {url}: {problem}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise TalkError(f"--url must look like http://HOST:PORT or https://HOST/PATH, got {url!r}.")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        tls = parts.scheme == "https"
        return cls(whole.rstrip("/").removesuffix("/v1"), parts.hostname, port or (443 if tls else 80), prefix, tls)


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float):
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Wire:
    """Requests, each over a connection of its own.

    Args:
        timeout: seconds of silence after which an answer is given up.
    """

    def __init__(self, place: Place, api_key: str | None = None, timeout: float = 600.0):
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise TalkError("--api-key must consist of printable ASCII characters.")
        self.place = place
        self._api_key = api_key
        self._timeout = timeout

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request.

        Raises:
            TalkError: it is an error, or none came.
        """
        connection = self._connect()
        try:
            response = self._send(connection, method, path, body)
            return self._value(response, path)
        except (OSError, HTTPException) as problem:
            raise TalkError(self._lost(problem)) from problem
        finally:
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The events of a stream; closing the iterator gives the request up.

        Raises:
            TalkError: the request was refused, or the stream broke off.
        """
        connection = self._connect()
        decoder, ended, finished = SseDecoder(), False, False
        try:
            response = self._send(connection, "POST", path, body)
            if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
                self._value(response, path)
                raise TalkError(f"{self.place.url}{path} answered with no stream.")
            while not ended and (data := response.read1(1 << 16)):
                for event in decoder.feed(data):
                    if event == DONE:
                        ended = True
                        break
                    value = self._event(event)
                    finished = finished or any(choice.get("finish_reason") for choice in value.get("choices") or ())
                    yield value
        except (OSError, HTTPException) as problem:
            raise TalkError(self._lost(problem)) from problem
        finally:
            connection.close()
        if not (ended or finished):
            raise TalkError(f"{self.place.url} closed the connection before the answer's end: was it stopped?")

    def _connect(self) -> HTTPConnection:
        place = self.place
        connection: HTTPConnection
        if place.uds:
            connection = _UnixConnection(place.uds, CONNECT_TIMEOUT)
        elif place.tls:
            context = ssl.create_default_context()
            connection = HTTPSConnection(place.host, place.port, timeout=CONNECT_TIMEOUT, context=context)
        else:
            connection = HTTPConnection(place.host, place.port, timeout=CONNECT_TIMEOUT)
        try:
            connection.connect()
        except OSError as problem:
            connection.close()
            reason = problem.strerror or str(problem)
            raise NoServerError(f"no server answers at {place.url} ({reason.lower()})") from problem
        connection.sock.settimeout(self._timeout)
        return connection

    def _send(self, connection: HTTPConnection, method: str, path: str, body: Any) -> HTTPResponse:
        headers = {"Accept": "*/*", "Connection": "close"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        connection.request(method, self.place.prefix + path, data, headers)
        return connection.getresponse()

    def _value(self, response: HTTPResponse, path: str) -> Any:
        text = response.read().decode("utf-8", "replace")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if response.status in (401, 403):
            raise TalkError(f"{self.place.url} wants an API key: give --api-key, or set OCTAVO_API_KEY.", "no_key")
        if response.status != 200:
            message, code = error_of(value)
            raise TalkError(message or f"{self.place.url}{path} answered with status {response.status}.", code)
        return value

    def _event(self, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except ValueError:
            raise TalkError(f"{self.place.url} sent an event that is no JSON: {data[:80]!r}.") from None
        if not isinstance(value, dict):
            raise TalkError(f"{self.place.url} sent an event that is no object: {data[:80]!r}.")
        if value.get("error"):
            raise TalkError(*error_of(value))
        return value

    def _lost(self, problem: Exception) -> str:
        if isinstance(problem, TimeoutError):
            return f"{self.place.url} was silent for {self._timeout:g} seconds (--timeout)."
        return f"{self.place.url} closed the connection: {problem or type(problem).__name__}."


def error_of(value: Any) -> tuple[str, str]:
    """Message and code of an error's body: OpenAI's shape, FastAPI's, or a text; "" for what it does not hold."""
    code = ""
    if isinstance(value, dict):
        value = value.get("error", value.get("detail", value.get("message", "")))
    if isinstance(value, dict):
        value, code = value.get("message") or json.dumps(value), str(value.get("code") or "")
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text[:600], code
