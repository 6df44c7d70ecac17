"""Requests to an OpenAI-compatible server with httpx, over TCP, TLS or a Unix socket; answers are read as they arrive.

Requests block, so that Ctrl-C interrupts reading; closing the connection cancels the answer at the server.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from cli.errors import DroppedError, LoadingError, NoServerError, TalkError, error_of

CONNECT_TIMEOUT = 10.0  # seconds
_EVENTS = "text/event-stream"
_LLAMA_CPP_LOADS = "Loading model"


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """The address of a server."""

    url: str  # the URL for messages, without /v1
    host: str = "localhost"
    port: int = 80
    uds: str = ""  # path of a Unix socket, used instead of host and port

    @classmethod
    def parse(cls, url: str) -> ServerPlace:
        """Parse a URL, with or without /v1 at its end; http:// may be left out. Raises TalkError if the text is not an
        http or https URL."""
        whole = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(whole)
            port = parts.port
        except ValueError as problem:
            raise TalkError(f"--url {url}: {problem}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise TalkError(f"--url must look like http://HOST:PORT or https://HOST/PATH, got {url!r}.")
        default = 443 if parts.scheme == "https" else 80
        return cls(whole.rstrip("/").removesuffix("/v1").rstrip("/"), parts.hostname, port or default)


class Wire:
    """Requests, each over its own connection. Raises TalkError if the key cannot be sent, or the URL names no host.
    `timeout`: seconds of silence after which the request is abandoned."""

    def __init__(self, place: ServerPlace, api_key: str | None = None, timeout: float = 600.0):
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise TalkError("--api-key must consist of printable ASCII characters.")
        self.place = place
        self._timeout = timeout
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        # The system's certificates, read only when needed.
        tls = ssl.create_default_context() if place.url.startswith("https:") and not place.uds else False
        limits = httpx2.Limits(max_keepalive_connections=0)
        try:
            self._http = httpx2.Client(
                base_url="http://localhost" if place.uds else place.url,
                headers=headers,
                timeout=httpx2.Timeout(timeout, connect=CONNECT_TIMEOUT),
                transport=httpx2.HTTPTransport(tls, limits=limits, uds=place.uds or None),
            )
        except httpx2.InvalidURL as problem:
            raise TalkError(f"--url {place.url}: {problem}.") from None

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request. Raises TalkError if the server returned an error or did not answer."""
        with self._problems():
            content = None if body is None else json.dumps(body)
            return self._value(self._http.request(method, path, content=content), path)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
        """The status of an answer, its request's id and its body, whatever the status is. Raises TalkError: none
        came."""
        with self._problems():
            response = self._http.request("POST", path, content=json.dumps(body))
            try:
                value = json.loads(response.text)
            except ValueError:
                value = response.text
            return response.status_code, response.headers.get("X-Request-ID", ""), value

    def events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The events of a stream; closing the iterator cancels the request. Raises TalkError if the request was
        refused, or the stream broke off."""
        finished = False
        with self._problems(), self._http.stream("POST", path, content=json.dumps(body)) as response:
            if not response.headers.get("Content-Type", "").startswith(_EVENTS):
                response.read()
                self._value(response, path)
                raise TalkError(f"{self.place.url}{path} did not answer with a stream.")
            for event in httpx2.EventSource(response, max_event_size=None):
                if event.data == "[DONE]":
                    return
                value = self._event(event.data)
                finished = finished or any(choice.get("finish_reason") for choice in value.get("choices") or ())
                yield value
        if not finished:
            raise TalkError(f"{self.place.url} closed the connection before the end of the answer. Was it stopped?")

    @contextmanager
    def _problems(self) -> Iterator[None]:
        url = self.place.url
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout, UnicodeError) as problem:  # Unicode: a host name
            reason = re.sub(r"^\[Errno -?\d+\] ", "", str(problem)).lower()
            raise NoServerError(f"no server answers at {url} ({reason})") from problem
        except httpx2.TimeoutException as problem:
            raise TalkError(f"{url} sent nothing for {self._timeout:g} seconds (--timeout).") from problem
        except httpx2.HTTPError as problem:
            reason = str(problem).rstrip(".") or type(problem).__name__
            raise DroppedError(f"{url} closed the connection: {reason}.") from problem

    def _value(self, response: httpx2.Response, path: str) -> Any:
        try:
            value = json.loads(response.text)
        except ValueError:
            value = response.text
        if response.status_code in (401, 403):
            raise TalkError(f"{self.place.url} requires an API key. Set --api-key or OCTAVO_API_KEY.", "no_key")
        if response.status_code != 200:
            message, code = error_of(value)
            is_page = isinstance(value, str) and value.lstrip().startswith("<")
            if is_page or (response.status_code == 404 and not code):
                raise TalkError(
                    f"{self.place.url}{path} answered with status {response.status_code}. Is it an OpenAI-compatible "
                    "server? (--url)"
                )
            if response.status_code == 503 and (code == "loading" or message.startswith(_LLAMA_CPP_LOADS)):
                error = value.get("error") if isinstance(value, dict) else None
                percent = error.get("percent") if isinstance(error, dict) else None
                raise LoadingError(message, percent if isinstance(percent, int) else None)
            raise TalkError(message or f"{self.place.url}{path} answered with status {response.status_code}.", code)
        return value

    def _event(self, data: str) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except ValueError:
            raise TalkError(f"{self.place.url} sent an event that is not JSON: {data[:80]!r}.") from None
        if not isinstance(value, dict):
            raise TalkError(f"{self.place.url} sent an event that is not an object: {data[:80]!r}.")
        if value.get("error"):
            raise TalkError(*error_of(value))
        return value
