"""A router's memory of the replicas that have seen the beginning of a prompt.

A prompt is identified by the bytes of the request's body, from the first field that contains a prompt. They are neither
parsed nor tokenised, so a look-up costs microseconds, whatever a client sends.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import blake2b

PIECE = 128  # bytes; about 30 tokens of English, two pages
LONGEST = 256 * PIECE  # bytes of a prompt that are compared
# Claude Code's first system block, which the prompt leaves out (server.answering.message_input). It differs between
# conversations, and so would every digest after it.
_BILLING = re.compile(rb'"x-anthropic-billing-header:(?:[^"\\]|\\.)*"')
_FIELDS = re.compile(rb'"(?:system|instructions|tools|messages|prompt|input)"\s*:')


def chain(body: bytes, tenant: bytes = b"") -> list[bytes]:
    """A digest for each beginning of the prompt: its first piece, its first two, and so on; only whole pieces count.
    `tenant`: the tenant of the prompt. Equal prompts of two tenants share no digests."""
    field = _FIELDS.search(body)
    if field is None:
        return []
    digest, digests = blake2b(tenant, digest_size=16), []
    prompt = _BILLING.sub(b"", body[field.start() : field.start() + LONGEST])
    for start in range(0, len(prompt) - PIECE + 1, PIECE):
        digest.update(prompt[start : start + PIECE])
        digests.append(digest.digest())
    return digests


class Prefixes:
    """The beginnings of prompts that replicas have seen. The oldest are dropped, as in the caches. `limit`: maximum
    remembered beginnings; each takes some 300 bytes."""

    def __init__(self, limit: int):
        self._limit = limit
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def deepest(self, chain: Sequence[bytes], replicas: Collection[str]) -> tuple[int, set[str]]:
        """The largest number of pieces of the prompt that one of these replicas has seen, and the replicas that have
        seen as many."""
        depth, found = 0, set[str]()
        for digest in chain:
            holders = self._holders.get(digest, set()).intersection(replicas)
            if not holders:
                break
            depth, found = depth + 1, holders
        return depth, found

    def add(self, chain: Sequence[bytes], replica: str) -> None:
        """The replica has seen the prompt."""
        for digest in reversed(chain):  # the shortest last, so that it is dropped after its continuations
            self._holders.setdefault(digest, set()).add(replica)
            self._holders.move_to_end(digest)
        while len(self._holders) > self._limit:
            self._holders.popitem(last=False)

    def forget(self, replica: str) -> None:
        for digest in [digest for digest, holders in self._holders.items() if replica in holders]:
            holders = self._holders[digest]
            holders.discard(replica)
            if not holders:
                del self._holders[digest]
