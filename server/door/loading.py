"""Answers each connection while the model loads: 503, the progress, and when to retry."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from functools import partial
from socket import socket

from engine.host.loading import Tell
from server.config.settings import ServerSettings

RETRY_AFTER = 5  # seconds
_PATIENCE = 5.0  # seconds for a client to send its request and read the answer
_LAST_MOMENT = 0.5  # seconds for answers to end once the model has loaded
_MOST_HEAD = 65536
_MOST_CONNECTIONS = 256  # maximum connections at a time; others are closed
_MOST_BODY = 1 << 20  # maximum bytes of a request that are read before its connection is closed


@contextlib.contextmanager
def answering_while_loading(listener: socket, settings: ServerSettings, model_id: str) -> Iterator[Tell]:
    """Answer connections to a bound socket in a thread within the block; the socket stays open afterwards. Returns a
    function that takes the percentage of the loaded weights. The answers then include the percentage. `settings`: the
    settings with the certificate, if there is one."""
    tls = None
    if settings.ssl_certfile is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_keyfile_password)
    keys = settings.api_key or settings.api_key_file is not None
    shown = "The model" if keys else f"The model {model_id}"  # only clients with a key may see its name
    said = _Said(shown)
    loop = asyncio.new_event_loop()
    opened = loop.run_until_complete(
        # A copy of the socket, which asyncio closes at the end.
        asyncio.start_server(partial(_answer, said, set()), sock=listener.dup(), ssl=tls, limit=_MOST_HEAD)
    )
    thread = threading.Thread(target=loop.run_forever, name="while-loading", daemon=True)
    thread.start()
    try:
        yield said.loaded
    finally:
        asyncio.run_coroutine_threadsafe(_finish(opened), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _finish(opened: asyncio.Server) -> None:
    """Stop accepting, and let answers that have begun end."""
    opened.close()
    me = asyncio.current_task()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_MOMENT):
            while running := asyncio.all_tasks() - {me}:  # a task that accepts a connection starts one that answers it
                await asyncio.wait(running)
    late = asyncio.all_tasks() - {me}
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)


class _Said:
    """The current answer. `response`: its headers and body."""

    def __init__(self, model: str):
        self._model = model
        self.response = _response(model, None)

    def loaded(self, percent: int) -> None:
        """Include this progress in answers from now on."""
        self.response = _response(self._model, percent)


def _response(model: str, percent: int | None) -> tuple[bytes, bytes]:
    done = "" if percent is None else f" ({percent}% of its weights)"
    error = {
        "message": f"{model} is loading{done}. Try again in {RETRY_AFTER} s.",
        "type": "server_error",
        "param": None,
        "code": "loading",
        "percent": percent,
    }
    body = json.dumps({"error": error}).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\n"
        f"Retry-After: {RETRY_AFTER}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode(), body


async def _answer(
    said: _Said, open_: set[asyncio.StreamWriter], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    if len(open_) >= _MOST_CONNECTIONS:
        writer.close()
        return
    open_.add(writer)
    try:
        async with asyncio.timeout(_PATIENCE):
            request = await reader.readuntil(b"\r\n\r\n")
            head, body = said.response
            writer.write(head if request.startswith(b"HEAD ") else head + body)
            await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            left = _MOST_BODY  # closing a connection with unread bytes resets it, and the answer may be lost
            while left > 0 and (data := await reader.read(65536)):
                left -= len(data)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return  # the client has gone, is slow, or does not speak HTTP
    except asyncio.CancelledError:
        return  # the model has loaded; asyncio would log a cancelled task as an error
    finally:
        open_.remove(writer)
        writer.close()
