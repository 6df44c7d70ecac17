"""KV events over ZeroMQ: they tell routers which pages the prefix cache holds, so that a prompt can be sent to the
engine that holds its beginning.

Messages are those of current vLLM versions, whose events are maps: three parts, namely the topic, the message's number
as 8 bytes, and `[time, events, rank]` in MessagePack. The engine's thread only puts events into a queue; a thread here
encodes and sends them, and answers subscribers that ask for missed events.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq

from engine.errors import ConfigError
from engine.interface.kv_events import NAME, KVEventsConfig
from engine.scheduling.block_pool import PageHash
from engine.scheduling.page_events import PageEvent, PagesCleared, PagesStored

logger = logging.getLogger("octavo.kv_events")

END = (-1).to_bytes(8, "big", signed=True)  # the number that follows the last message of a replay
RANK = 0  # the rank: there is only one engine
_AT_ONCE = 256  # replayed messages before new ones are sent
_MOST_REPLAYS = 8  # messages at a time
_RETRY = 10  # milliseconds until a slow replay client is tried again
_PATIENCE = 10.0  # seconds without progress after which a slow client is dropped
_MOST_ASKED = 4096  # bytes of an incoming message: a number, or the beginning of a topic
_LOG_INTERVAL = 60.0  # seconds between log lines about outsiders' faults; those in between are only counted
_LOOPBACK = re.compile(r"(ipc|inproc)://|tcp://(127\.|\[?::1\]?:|localhost:|lo:)")
_LAST_WORDS = 1.0  # seconds allowed for the last messages when the engine is closed


class BlockStored(msgspec.Struct, tag=True):
    """Pages were added; the pages of one event follow each other."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None]


class BlockRemoved(msgspec.Struct, tag=True):
    """Pages were removed."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All pages were removed."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def public_hash(page_hash: PageHash) -> int:
    """A page's hash in events: the last 8 of its 16 bytes, big-endian, as an int64."""
    return int.from_bytes(page_hash[-8:], "big", signed=True)


class KVEventPublisher:
    """Publishes the events of pages. `publish` is called by one thread, and never waits.

    A message that finds the queue or a slow subscriber's buffer full is not sent live: subscribers notice the missing
    number, and can get the message by replay while it is among the last `buffer_steps`. Raises ConfigError if an
    address cannot be used. `block_size`: tokens per page.

    Attributes:
        num_messages: how many messages were published, which is also the number of the next one.
        num_dropped: how many messages were not sent live because the queue was full.
    """

    def __init__(self, config: KVEventsConfig, topic: str, block_size: int):
        self.num_messages = self.num_dropped = 0
        self._topic = topic.encode()
        self._size = block_size
        self._medium = ""
        self._most = config.max_queue_size
        self._queue: SimpleQueue[_Message | None] = SimpleQueue()
        self._kept: deque[_Message] | None = deque(maxlen=config.buffer_steps) if config.replay_endpoint else None
        self._lock = threading.Lock()  # of the kept messages
        self._logged = float("-inf")
        self._num_unlogged = 0
        self._replays: deque[_Replay] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._thread: threading.Thread | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._publisher = self._socket(zmq.PUB, config.endpoint)
            self._publisher.set_hwm(config.hwm)
            self._open(self._publisher, "endpoint", config.endpoint, bind=config.binds)
            self._router: zmq.Socket[bytes] | None = None
            if config.replay_endpoint is not None:
                self._router = self._socket(zmq.ROUTER, config.replay_endpoint)
                # For a client that reads slowly, the publisher waits rather than leave gaps.
                self._router.router_mandatory = True
                self._open(self._router, "replay_endpoint", config.replay_endpoint, bind=True)
        except BaseException:
            self._close_sockets()
            raise

    def start(self, medium: str) -> None:
        """Start sending. `medium`: where the pages are, such as "GPU" or "CPU"."""
        self._medium = medium
        self._thread = threading.Thread(target=self._run, name="octavo-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[PageEvent]) -> None:
        """Send events as one message, as soon as they can be sent."""
        message = _Message(self.num_messages, time.time(), events)
        self.num_messages += 1
        if self._kept is not None:
            with self._lock:
                self._kept.append(message)
        if self._queue.qsize() >= self._most:
            self.num_dropped += 1
            return
        self._queue.put(message)
        self._call()

    def close(self) -> None:
        """Send the remaining events for a moment, and end."""
        if self._thread is not None:
            self._queue.put(None)
            self._call()
            self._thread.join(_LAST_WORDS)
            self._thread = None
        self._close_sockets()

    def _call(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the thread has been woken often enough
            self._wake.send(b"\0")

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        # Uses the process's context, so that inproc:// reaches its other sockets.
        made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._sockets.append(made)
        made.maxmsgsize = _MOST_ASKED
        made.linger = int(1000 * _LAST_WORDS)
        made.ipv6 = "[" in address or "::" in address
        return made

    def _open(self, closed: zmq.Socket[bytes], name: str, address: str, *, bind: bool) -> None:
        try:
            (closed.bind if bind else closed.connect)(address)
            if bind and not _LOOPBACK.match(address):
                logger.warning(
                    "%s: %s %s is open to other machines. Events contain the tokens of prompts and answers, and "
                    "need no key: close the port to all but the router, or bind 127.0.0.1 or ipc://.",
                    NAME, name, address,
                )  # fmt: skip
        except zmq.ZMQError as error:
            verb = "bound" if bind else "connected to"
            raise ConfigError(
                f"{NAME}: {name} {address!r} cannot be {verb}: {error.strerror or error}. Set another {name}."
            ) from error

    def _close_sockets(self) -> None:
        for opened in self._sockets:
            opened.close()
        self._woken.close()
        self._wake.close()

    # ---------------------------------------------------------------- on the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken.fileno(), zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        goes_on = True
        while goes_on:
            progress = False
            try:
                goes_on, progress = self._send_queued(), self._replay()
            except Exception:  # a fault in one message must not stop the others
                self._complain("A KV event could not be published.", exc_info=True)
            if goes_on and not progress:
                poller.poll(_RETRY if self._replays else None)

    def _send_queued(self) -> bool:
        """Send the waiting events. False once no more can arrive."""
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        while True:
            try:
                message = self._queue.get_nowait()
            except Empty:
                return True
            if message is None:
                return False
            self._publisher.send_multipart([self._topic, message.number, self._encode(message)])

    def _replay(self) -> bool:
        """Answer subscribers that have missed messages; returns whether there may be more to send at once."""
        if self._router is None:
            return False
        while len(self._replays) < _MOST_REPLAYS:
            try:
                *envelope, first = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(first) == 8 and envelope:
                self._replays.append(_Replay(envelope, self._since(int.from_bytes(first, "big"))))
            else:
                self._complain("A request for KV events is ignored: it must be a number of 8 bytes, big-endian.")
        progress = False
        for _ in range(len(self._replays)):
            replay = self._replays.popleft()
            sent = self._send_some(replay)
            progress |= sent > 0
            if sent:
                replay.moved = time.monotonic()
            if not replay.is_over and time.monotonic() - replay.moved < _PATIENCE:
                self._replays.append(replay)
        return progress

    def _complain(self, message: str, *, exc_info: bool = False) -> None:
        """Log a problem, at most once a minute."""
        now = time.monotonic()
        if now - self._logged < _LOG_INTERVAL:
            self._num_unlogged += 1
            return
        more = f" {self._num_unlogged} earlier lines of this kind were left out." if self._num_unlogged else ""
        self._logged, self._num_unlogged = now, 0
        logger.warning("%s%s", message, more, exc_info=exc_info)

    def _send_some(self, replay: _Replay) -> int:
        """Continue a replay; returns how many parts were sent."""
        assert self._router is not None
        for sent in range(_AT_ONCE):
            if replay.next is None:
                message = next(replay.messages, None)
                replay.next = [END, b""] if message is None else [message.number, self._encode(message)]
            try:
                self._router.send_multipart([*replay.envelope, *replay.next], zmq.NOBLOCK)
            except zmq.Again:
                return sent
            except zmq.ZMQError as error:  # the client is gone
                logger.debug("A replay of KV events ends: %s.", error)
                replay.is_over = True
                return sent
            if replay.next[0] == END:
                replay.is_over = True
                return sent + 1
            replay.next = None
        return _AT_ONCE

    def _since(self, number: int) -> Iterator[_Message]:
        assert self._kept is not None
        with self._lock:
            kept = list(self._kept)
        return (message for message in kept if int.from_bytes(message.number, "big") >= number)

    def _encode(self, message: _Message) -> bytes:
        if message.payload is None:
            events = [self._event(event) for event in message.events]
            message.payload = self._encoder.encode([message.time, events, RANK])
            message.events = []
        return message.payload

    def _event(self, event: PageEvent) -> KVEvent:
        if isinstance(event, PagesCleared):
            return AllBlocksCleared()
        hashes = [public_hash(page_hash) for page_hash in event.hashes]
        if not isinstance(event, PagesStored):
            return BlockRemoved(hashes, self._medium)
        keys: list[tuple[str, ...] | None] = [None] * len(hashes)
        for page, digest in event.beside.items():
            keys[page] = (digest.hex(),)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if event.parent is None else public_hash(event.parent),
            token_ids=event.token_ids.tolist(),
            block_size=self._size,
            lora_id=None,
            medium=self._medium,
            lora_name=None,
            extra_keys=keys,
        )


class _Message:
    __slots__ = ("events", "number", "payload", "time")

    def __init__(self, number: int, now: float, events: list[PageEvent]):
        self.number = number.to_bytes(8, "big")  # 8 bytes, big-endian
        self.time = now
        self.events = events  # empty once they are encoded
        self.payload: bytes | None = None  # None before


class _Replay:
    """A replay of missed events to a subscriber."""

    def __init__(self, envelope: list[bytes], messages: Iterator[_Message]):
        self.envelope = envelope  # message parts that route to the subscriber
        self.messages = messages  # the messages still to be sent
        self.next: list[Any] | None = None  # the encoded message to be sent next, if any
        self.moved = time.monotonic()  # when progress was last made, in `time.monotonic()` seconds
        self.is_over = False  # whether nothing more is to be sent
