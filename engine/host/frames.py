"""Messages between two processes on a stream socket. The length of each message precedes it."""

from __future__ import annotations

import asyncio
import socket

_HEADER = 4  # bytes of a message's length
_PART = 2**20  # bytes that are read at once


def framed(content: bytes) -> bytes:
    """A message with its length before it."""
    return len(content).to_bytes(_HEADER, "big") + content


def receive(line: socket.socket, most: int = 2**32) -> bytes | None:
    """Wait for the next message. None if the other side is gone, or the message is longer than `most` bytes."""
    header = _read(line, _HEADER)
    length = 0 if header is None else int.from_bytes(header, "big")
    return None if header is None or length > most else _read(line, length)


def _read(line: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        try:
            part = line.recv(min(count - len(data), _PART))
        except OSError:  # reset, or shut down by another thread
            return None
        if not part:
            return None
        data += part
    return bytes(data)


async def receive_later(line: socket.socket) -> bytes | None:
    """Wait for the next message on a non-blocking socket. None if the other side is gone."""
    header = await _read_later(line, _HEADER)
    return None if header is None else await _read_later(line, int.from_bytes(header, "big"))


async def _read_later(line: socket.socket, count: int) -> bytes | None:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < count:
        part = await loop.sock_recv(line, min(count - len(data), _PART))
        if not part:
            return None
        data += part
    return bytes(data)


def take_frames(unread: bytearray) -> list[bytes]:
    """Remove all complete messages from the received bytes and return them."""
    found, begin = [], 0
    while (body := begin + _HEADER) <= len(unread):
        end = body + int.from_bytes(unread[begin:body], "big")
        if end > len(unread):
            break
        found.append(bytes(unread[body:end]))
        begin = end
    del unread[:begin]
    return found
