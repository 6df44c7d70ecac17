"""A subscriber to KV events, as a router would be one: it keeps a mirror of a prefix cache."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)
PATIENCE = 100  # seconds


class Mirror:
    """What a publisher says is cached.

    Args:
        endpoint: of the publisher.
        replay: its replay endpoint, if it has one.
        bind: the publisher connects here, not the other way round.

    Attributes:
        pages: by hash: the parent's hash, the tokens, and the extra keys.
        numbers: of the messages that came, in their order.
        counts: how many events of each type came.
        lost: messages that were not sent live, and had by replay.
        starts: how often the numbers began anew.
        told: every page that was ever stored, by hash.
    """

    def __init__(self, endpoint: str, *, replay: str | None = None, bind: bool = False):
        self.pages: dict[int, tuple[int | None, tuple[int, ...], Any]] = {}
        self.told: dict[int, tuple[int | None, tuple[int, ...], Any]] = {}
        self.numbers: list[int] = []
        self.topics: set[str] = set()
        self.media: set[str] = set()
        self.counts = {"BlockStored": 0, "BlockRemoved": 0, "AllBlocksCleared": 0}
        self.lost = self.starts = 0
        context = zmq.Context.instance()
        self._live = context.socket(zmq.SUB)
        self._live.subscribe(b"")
        self._live.rcvhwm = 0
        (self._live.bind if bind else self._live.connect)(endpoint)
        self._replay = None if replay is None else context.socket(zmq.DEALER)
        if self._replay is not None:
            self._replay.connect(replay)

    def __enter__(self) -> Mirror:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)

    @property
    def endpoint(self) -> str:
        """The address that it is bound to."""
        return self._live.last_endpoint.decode()

    @property
    def next(self) -> int:
        """The number of the message that it waits for."""
        return self.numbers[-1] + 1 if self.numbers else 0

    def read(self, until: int) -> None:
        """Take messages in until all below a number are there."""
        deadline = time.monotonic() + PATIENCE
        while self.next < until:
            assert time.monotonic() < deadline, f"message {self.next} of {until} did not come"
            if self._live.poll(100):
                self._take(self._live.recv_multipart())

    def fetch(self, first: int) -> list[tuple[int, bytes]]:
        """What the publisher sends again from a number on."""
        assert self._replay is not None
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert self._replay.poll(1000 * PATIENCE), "a replay did not end"
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def catch_up(self) -> None:
        """Have what was published before it subscribed, and since."""
        for number, payload in self.fetch(self.next):
            if number >= self.next:
                self._apply(number, payload)

    def _take(self, parts: list[bytes]) -> None:
        topic, number_bytes, payload = parts
        assert len(number_bytes) == 8
        number = int.from_bytes(number_bytes, "big")
        self.topics.add(topic.decode())
        if number > self.next and self._replay is not None:
            for missed, again in self.fetch(self.next):
                if self.next <= missed < number:
                    self.lost += 1
                    self._apply(missed, again)
        if self.numbers and number == 0:  # the engine was started again
            self.starts += 1
            self.pages.clear()
            self.numbers = []
        if number >= self.next:
            self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        assert number == self.next, f"message {number} came, but {self.next} was due"
        self.numbers.append(number)
        moment, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(moment, float)
        assert rank == 0
        assert events, "a message without events"
        for event in events:
            self._change(event)

    def _change(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        self.counts[kind] += 1
        if kind == "AllBlocksCleared":
            assert event == {"type": kind}
            self.pages.clear()
            return
        self.media.add(event["medium"])
        if kind == "BlockRemoved":
            for page in event["block_hashes"]:
                del self.pages[page]  # it was there
            return
        size, hashes, tokens = event["block_size"], event["block_hashes"], event["token_ids"]
        assert len(tokens) == size * len(hashes)
        assert len(event["extra_keys"]) == len(hashes)
        assert event["lora_id"] is None
        assert event["lora_name"] is None
        parent = event["parent_block_hash"]
        for place, (page, keys) in enumerate(zip(hashes, event["extra_keys"], strict=True)):
            assert page not in self.pages, "a page was stored twice"
            assert -(2**63) <= page < 2**63
            self.told[page] = self.pages[page] = (parent, tuple(tokens[place * size : (place + 1) * size]), keys)
            parent = page

    def begins(self, tokens: list[int], size: int) -> int:
        """How many pages of a prompt's beginning are cached, salted ones apart."""
        found, parent = 0, None
        by_content = {(up, own): page for page, (up, own, keys) in self.pages.items() if not keys}
        for start in range(0, len(tokens) - size + 1, size):
            parent = by_content.get((parent, tuple(tokens[start : start + size])))
            if parent is None:
                return found
            found += 1
        return found
