"""Serve's router that sends a prompt to a replica that has cached its beginning. Serve pickles this module by value and
runs it in its proxies.

Serve passes a router only the headers of an HTTP request. The body is in the same process, in the queue that the proxy
fills for the replica; Serve has no public interface to it. If another version of Serve keeps the body elsewhere,
requests are routed by their session (X-Session-ID) or, without one, to the less busy of two replicas.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import pickle
from collections.abc import Iterable
from typing import Any

from ray._private import worker
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import LocalityMixin, MultiplexMixin, PendingRequest, RequestRouter, RunningReplica

from server.replicas.prefixes import LONGEST, Prefixes, chain

LIMIT = 200_000  # maximum remembered beginnings: 6 million tokens
_SHARE = 0.3  # a prompt of which less is known goes to a less busy replica
_WAIT, _LOOK = 0.01, 0.0005  # seconds to wait for a body, and between two checks for it
_CREDENTIALS = (b"authorization", b"x-api-key")
_CHAIN = "octavo_chain"  # attribute of a request

logger = logging.getLogger("ray.serve")


class PrefixRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """Sends a prompt to the replica that has seen most of it, unless that replica is too busy."""

    def initialize_state(self, slack: int = 8, tenants: bool = True) -> None:
        """Called by Serve with the router's arguments.

        Args:
            slack: how many requests more than the least busy replica a matching replica may have.
            tenants: whether prompts of different API keys share nothing (prefix_cache_scope).
        """
        self._slack = slack
        self._tenants = tenants
        self._prefixes = Prefixes(LIMIT)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Lists of replicas, the best list first. Serve uses the less busy replica of the first list that has a free
        one."""
        fallback: list[list[RunningReplica]] = await PowerOfTwoChoicesRequestRouter.choose_replicas(
            self, candidate_replicas, pending_request
        )
        if pending_request is None or len(candidate_replicas) < 2:
            return fallback
        digests = await self._chain_of(pending_request)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        depth, names = self._prefixes.deepest(digests, by_name.keys())
        if not depth or depth < _SHARE * len(digests):
            return fallback
        loads = {name: self._load(replica) for name, replica in by_name.items()}
        near = [by_name[name] for name in names if loads[name] <= min(loads.values()) + self._slack]
        return [near, *fallback] if near else fallback

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Called by Serve when a replica has taken the request."""
        self._prefixes.add(getattr(pending_request, _CHAIN, ()), replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Called by Serve."""
        super().on_replica_actor_died(replica_id)
        self._prefixes.forget(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over changed replicas; Serve calls this."""
        before = {replica_id.unique_id for replica_id in self._replicas}
        super().update_replicas(replicas)
        for name in before - {replica_id.unique_id for replica_id in self._replicas}:
            self._prefixes.forget(name)

    def _load(self, replica: RunningReplica) -> int:
        return self._replica_queue_len_cache.get(replica.replica_id) or 0

    async def _chain_of(self, request: PendingRequest) -> list[bytes]:
        digests: list[bytes] | None = getattr(request, _CHAIN, None)
        if digests is None:
            digests = await self._look(request)
            setattr(request, _CHAIN, digests)
        return digests

    async def _look(self, request: PendingRequest) -> list[bytes]:
        if not request.metadata.is_http_request or not request.args or not isinstance(request.args[0], bytes):
            return []
        scope = pickle.loads(request.args[0]).asgi_scope  # made by this process itself
        if scope.get("method") != "POST":
            return []
        headers = dict(scope["headers"])
        given = b"\0".join(headers.get(name, b"") for name in _CREDENTIALS) if self._tenants else b""
        tenant = hashlib.blake2b(given).digest()
        body = await _beginning(request.metadata.internal_request_id, headers)
        digests = chain(body, tenant)
        if not digests and request.metadata.session_id:
            digests = [hashlib.blake2b(tenant + request.metadata.session_id.encode(), digest_size=16).digest()]
        return digests


async def _beginning(request_id: str, headers: dict[bytes, bytes]) -> bytes:
    """The part of the body that has arrived, without consuming it: up to `LONGEST` bytes, after at most `_WAIT`."""
    queue = _queue(request_id)
    if queue is None:
        return b""
    length = headers.get(b"content-length", b"")
    wanted = min(int(length), LONGEST) if length.isdigit() else LONGEST
    body = b""
    for _ in range(int(_WAIT / _LOOK)):
        body = _joined(tuple(queue))
        if len(body) >= wanted:
            break
        await asyncio.sleep(_LOOK)
    return body


def _queue(request_id: str) -> Any:
    """The ASGI messages of a request that the replica has not fetched yet; None if they are not found."""
    for actor in worker.global_worker.actors.values():
        queues = getattr(getattr(actor, "http_proxy", None), "asgi_receive_queues", None)
        if queues is not None:
            return getattr(queues.get(request_id), "_message_queue", None)
    return None


def _joined(messages: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)
