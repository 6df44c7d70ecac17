"""The order in which requests with many inputs submit them to the engine: in turn, and only enough to keep the engine
busy.

The engine serves in the order of arrival. If a request submitted all its inputs at once, the next request, perhaps with
a single short text, would wait for thousands of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque

_AHEAD = 2  # steps' worth of inputs in the engine: the current step and the next one
_LEAST = 2  # maximum inputs in the engine, however short they are
_FIRST = 256  # tokens in the engine before the size of a step is known


class Lane(ABC):
    """The inputs of one request, in order. `tenant`: the request's tenant; None if tenants are not distinguished."""

    tenant: str | None = None

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Inputs that have not been submitted to the engine."""

    @abstractmethod
    def submit_next(self) -> None:
        """Submit the next input and call `Turns.began`. It must not raise: a failure ends only its own request."""


class Turns:
    """Submits inputs, one of each tenant in turn and of each lane of the tenant in turn, whenever the engine has room.

    The number of tokens that fit into a step is observed, not set: a step may have a time limit, and then the machine's
    speed decides. If a step leaves nothing waiting in the engine while inputs wait here, it could have held more.
    `step_inputs`, `step_tokens`: maximum inputs and tokens of one step of the engine.
    """

    def __init__(self, step_inputs: int, step_tokens: int):
        self._step_inputs, self._step_tokens = step_inputs, step_tokens
        self._behind: Turns | None = None
        self._max_inputs = max(_AHEAD * step_inputs, _LEAST)
        self._most_tokens = _AHEAD * step_tokens
        self._max_tokens = min(_FIRST, self._most_tokens)
        self._lanes: OrderedDict[str | None, deque[Lane]] = OrderedDict()  # by tenant; none is empty
        self._inputs = self._tokens = 0

    @property
    def num_waiting(self) -> int:
        """Inputs of all lanes that have not been submitted to the engine."""
        own = sum(lane.num_waiting for lanes in self._lanes.values() for lane in lanes)
        return own + (0 if self._behind is None else self._behind.num_waiting)

    @property
    def behind(self) -> Turns:
        """The turns of background requests. The engine serves their inputs after all others, so they take no room
        here."""
        if self._behind is None:
            self._behind = Turns(self._step_inputs, self._step_tokens)
        return self._behind

    def join(self, lane: Lane) -> None:
        """Include a lane from now on."""
        self._lanes.setdefault(lane.tenant, deque()).append(lane)
        self._go_on()

    def leave(self, lane: Lane) -> None:
        """Remove a lane; unknown lanes are ignored."""
        lanes = self._lanes.get(lane.tenant, ())
        if lane in lanes:
            self._lanes[lane.tenant].remove(lane)
            if not self._lanes[lane.tenant]:
                del self._lanes[lane.tenant]

    def began(self, tokens: int) -> None:
        """An input with this many tokens was submitted."""
        self._inputs += 1
        self._tokens += tokens

    def ended(self, tokens: int) -> None:
        """The engine has finished an input."""
        self._inputs -= 1
        self._tokens -= tokens
        self._go_on()

    def stepped(self, tokens: int, num_waiting: int) -> None:
        """The engine has made a step of this many tokens, while this many requests of any kind wait there."""
        if self._behind is not None:
            self._behind.stepped(tokens, num_waiting)
        if self._lanes:
            wanted = _AHEAD * (tokens if num_waiting else self._max_tokens)
            self._max_tokens = min(max(wanted, 1), self._most_tokens)
            self._go_on()

    def _go_on(self) -> None:
        while self._lanes and self._has_room:
            tenant, lanes = next(iter(self._lanes.items()))
            lane = lanes.popleft()
            if lane.num_waiting:
                lane.submit_next()
            if lane.num_waiting:
                lanes.append(lane)
            if lanes:
                self._lanes.move_to_end(tenant)
            else:
                del self._lanes[tenant]

    @property
    def _has_room(self) -> bool:
        return self._inputs < _LEAST or (self._inputs < self._max_inputs and self._tokens < self._max_tokens)
