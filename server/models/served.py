"""One model of several: its state, and the requests that use it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine import EngineInfo
from engine.process.client import ProcessEngineClient
from engine.process.predict import MemoryPrediction
from server.context import Service
from server.models.budget import Promise
from server.models.declared import Declared
from server.models.status import ModelStatus, State

_FIRST_PAUSE = 5.0  # seconds after a failed load before a request starts another; each further failure doubles it
_LONGEST_PAUSE = 300.0


@dataclass(eq=False, slots=True)
class Running:
    """A model that is loaded.

    Attributes:
        promise: the reserved memory.
        watches: tasks that end with it.
        loaded_at: Unix seconds.
    """

    client: ProcessEngineClient
    service: Service
    promise: Promise
    watches: tuple[asyncio.Task[None], ...] = ()
    loaded_at: float = field(default_factory=time.time)


class Served:
    """One model.

    Attributes:
        running: None while it is not loaded.
        bringing: the task that loads it, if there is one.
        prediction: its predicted memory; None before it is known.
        endpoints, info, abilities: the facts of its last load, or expected ones.
        uses: number of requests that use it or wait for it.
        waiting: number of those that wait.
        idle_time: seconds without a request after which it is unloaded; None: never.
    """

    def __init__(self, model: Declared, stir: Callable[[], None]):
        self.model = model  # its settings
        self._stir = stir  # called when a request has ended
        self.running: Running | None = None
        self.bringing: asyncio.Task[None] | None = None
        self.prediction: MemoryPrediction | None = None
        self.endpoints: tuple[str, ...] = ()
        self.info: EngineInfo | None = None
        self.abilities: tuple[str, ...] = ()
        self.percent: int | None = None
        self.uses = self.waiting = self.num_loads = 0
        self.idle_time: float | None = None
        self._last_used = time.monotonic()
        self._failure = ""
        self._failures = 0  # in a row
        self._again = 0.0  # when a request may start another load

    @property
    def name(self) -> str:
        """The model's id for clients."""
        return self.model.name

    @property
    def state(self) -> State:
        """The present state."""
        if self.running is not None:
            return "loaded" if self.running.client.is_alive else "loading"
        if self.bringing is not None:
            return "loading"
        return "failed" if self._failure else "unloaded"

    @property
    def failure(self) -> str:
        """The reason why it has failed or its engine is restarting; else ""."""
        if self.running is not None:
            return self.running.client.death or ""
        return self._failure

    @property
    def pause(self) -> float:
        """Seconds until a request starts another load, after a failed one."""
        return max(self._again - time.monotonic(), 0.0) if self._failure else 0.0

    @property
    def wanted(self) -> bool:
        """Whether a load is needed."""
        return self.uses > 0 or self.model.pinned

    @property
    def may_go(self) -> bool:
        """Whether it is loaded and nothing uses it."""
        return self.running is not None and not self.uses and self.running.client.progress.idle

    @property
    def last_used(self) -> float:
        """`time.monotonic()` seconds."""
        return self._last_used

    @property
    def has_expired(self) -> bool:
        """Whether it has been idle for too long."""
        return self.may_go and self.idle_time is not None and time.monotonic() >= self._last_used + self.idle_time

    def begin(self) -> None:
        """A request uses it."""
        self.uses += 1

    def end(self) -> None:
        """A request has ended."""
        self.uses -= 1
        self._last_used = time.monotonic()
        if not self.uses:
            self._stir()

    @contextmanager
    def using(self) -> Iterator[None]:
        """A context in which it is used."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def opened(self, running: Running) -> None:
        """Record that the model has been loaded."""
        self.running, self._failure, self._failures, self.percent = running, "", 0, None
        self.num_loads += 1
        self._last_used = time.monotonic()
        self.idle_time = None if self.model.pinned else self.model.idle_time or None

    def failed(self, reason: str) -> None:
        """Record that a load has failed, or that the engine was given up."""
        self.running, self._failure = None, reason
        self._again = time.monotonic() + min(_FIRST_PAUSE * 2**self._failures, _LONGEST_PAUSE)
        self._failures += 1

    def forgive(self) -> None:
        """Forget a failure, so that the next request loads it again."""
        self._failure = ""

    def _reason(self) -> str:
        if self.running is not None or self.state == "failed":
            return self.failure
        return self.prediction.problem if self.prediction is not None and self.bringing is None else ""

    def status(self) -> ModelStatus:
        """The model's state in the form that routes show."""
        model, running, found = self.model, self.running, self.prediction
        known = found is not None and not found.problem and not found.unknown
        if running is not None:
            tasks, longest = tuple(map(str, running.client.info.tasks)), running.client.info.max_model_len
        elif found is not None and known:
            tasks, longest = found.tasks, found.max_model_len
        else:
            tasks, longest = (), None
        idle = None if running is None else self.idle_time
        since = 0.0 if self.uses else time.monotonic() - self._last_used
        return ModelStatus(
            name=model.name,
            state=self.state,
            reason=self._reason(),
            aliases=model.aliases,
            source=model.engine.model,
            pinned=model.pinned,
            percent=self.percent,
            memory=found.memory if found is not None and known else None,
            size=found.weights if found is not None and known else None,
            tasks=tasks,
            endpoints=self.endpoints,
            max_model_len=longest,
            loaded_at=None if running is None else running.loaded_at,
            last_used=None if running is None else time.time() - since,
            expires_at=None if idle is None else time.time() - since + idle,
            running=self.uses,
            info=self.info,
            adapters=model.engine.adapters,
            chat_template=model.engine.chat_template,
            abilities=self.abilities,
        )
