"""An engine client whose engine runs in the test's own process and event loop: several models can be served at once."""

from __future__ import annotations

import asyncio
from typing import Any

from engine import CacheMap, Engine, EngineConfig, EngineDeadError, EngineStats, OctavoError
from engine.interface.adapters import AdapterInfo
from engine.interface.request import EngineInput, PoolingParams, SamplingParams
from engine.process.client_interface import Deliver, EngineClient, Progress


class LocalClient(EngineClient):
    """Steps its engine between other things that the event loop does.

    Attributes:
        asked: what was submitted, by request id.
        with_adapter: the adapters of these requests.
        abandoned: ids of requests that were given up.
        hold: while it is clear, no step is made.
    """

    def __init__(self, config: EngineConfig):
        self.engine = Engine(config)
        self.info = self.engine.info
        self.asked: dict[str, tuple[EngineInput, SamplingParams | PoolingParams]] = {}
        self.with_adapter: list[str | None] = []
        self.abandoned: list[str] = []
        self.held = False
        self.dead = False
        self._waiting: dict[str, Deliver] = {}
        self._task: asyncio.Task[None] | None = None

    def submit(
        self,
        request_id: str,
        input: EngineInput,
        params: SamplingParams | PoolingParams,
        deliver: Deliver,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
        tenant: str | None = None,
        adapter: str | None = None,
    ) -> None:
        if self.dead:
            raise EngineDeadError("dead")
        self.asked[request_id] = (input, params)
        self.with_adapter.append(adapter)
        try:
            self.engine.add_request(
                request_id,
                input,
                params,
                priority=priority,
                cache_salt=cache_salt,
                deadline=deadline,
                tenant=tenant,
                adapter=adapter,
            )
        except OctavoError as problem:
            asyncio.get_running_loop().call_soon(deliver, problem)
            return
        self._waiting[request_id] = deliver
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self.engine.has_unfinished_requests():
            await asyncio.sleep(0)
            if self.held:
                continue
            deltas = self.engine.step_deltas()
            if self.on_news is not None:
                self.on_news(deltas, self.engine.stats())
            for delta in deltas:
                deliver = self._waiting.get(delta.request_id)
                if delta.finished:
                    self._waiting.pop(delta.request_id, None)
                if deliver is not None:
                    deliver(delta)

    def abandon(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None) is not None:
            self.abandoned.append(request_id)
            self.engine.abort_request(request_id)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self.engine.abort_request(request_id, choice)

    @property
    def adapters(self) -> dict[str, AdapterInfo]:  # type: ignore[override]
        return self.engine.adapters

    async def load_adapter(self, name: str, path: str) -> None:
        self.engine.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        self.engine.unload_adapter(name)

    async def settled(self) -> None:
        return

    def give_up(self, cause: str) -> None:
        raise AssertionError(f"nobody gives this engine up: {cause}")

    async def cache_map(self) -> CacheMap:
        if self.dead:
            raise EngineDeadError("dead")
        return self.engine.cache_map()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def progress(self) -> Progress:
        return Progress(idle=not self.engine.has_unfinished_requests(), seconds=0.0)

    @property
    def is_alive(self) -> bool:
        return not self.dead

    async def close(self) -> None:
        self.engine.close()

    def forget(self) -> None:
        """Begin anew with what tests look at."""
        self.asked.clear()
        self.with_adapter.clear()
        self.abandoned.clear()

    def sources(self) -> list[Any]:
        """The inputs that were submitted, in order."""
        return [source for source, _ in self.asked.values()]
