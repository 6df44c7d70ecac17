"""The order in which requests with many inputs hand them to the engine: in turn, and no more than keep the engine busy.

The engine serves in the order of arrival. Were all the inputs of a request handed over at once, the next request,
with one short text or with a prompt to continue, would wait for thousands of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque

_AHEAD = 2  # steps' worth of inputs in the engine: the one that it computes, and the next
_LEAST = 2  # inputs in the engine, however long they are
_FIRST = 256  # tokens in the engine before it is known how many a step holds


class Lane(ABC):
    """The inputs of one request, in order.

    Attributes:
        tenant: on whose behalf; None if tenants are not told apart.
    """

    tenant: str | None = None

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Inputs that have not been handed to the engine."""

    @abstractmethod
    def submit_next(self) -> None:
        """Hand the next one over, saying `Turns.began`. It must not raise: a request's own failure ends it alone."""


class Turns:
    """Hands over inputs, one of each tenant in turn, of its lanes in turn, whenever the engine has room.

    How many tokens a step holds is seen, not set: a step's time may be limited, and then it holds what the machine
    computes meanwhile. A step that leaves nothing waiting in the engine, while something waits here, might have held
    more.

    Args:
        step_inputs, step_tokens: most inputs and tokens of one step of the engine.
    """

    def __init__(self, step_inputs: int, step_tokens: int):
        self._max_inputs = max(_AHEAD * step_inputs, _LEAST)
        self._most_tokens = _AHEAD * step_tokens
        self._max_tokens = min(_FIRST, self._most_tokens)
        self._lanes: OrderedDict[str | None, deque[Lane]] = OrderedDict()  # by tenant, none of them empty
        self._inputs = self._tokens = 0

    @property
    def num_waiting(self) -> int:
        """Inputs of all lanes that have not been handed to the engine."""
        return sum(lane.num_waiting for lanes in self._lanes.values() for lane in lanes)

    def join(self, lane: Lane) -> None:
        """Give a lane its turns from now on."""
        self._lanes.setdefault(lane.tenant, deque()).append(lane)
        self._go_on()

    def leave(self, lane: Lane) -> None:
        """Give it no more; unknown lanes are ignored."""
        lanes = self._lanes.get(lane.tenant, ())
        if lane in lanes:
            self._lanes[lane.tenant].remove(lane)
            if not self._lanes[lane.tenant]:
                del self._lanes[lane.tenant]

    def began(self, tokens: int) -> None:
        """An input of so many tokens was handed over."""
        self._inputs += 1
        self._tokens += tokens

    def ended(self, tokens: int) -> None:
        """The engine is done with it."""
        self._inputs -= 1
        self._tokens -= tokens
        self._go_on()

    def stepped(self, tokens: int, num_waiting: int) -> None:
        """The engine has made a step of so many tokens, and so many requests of any kind wait for one there."""
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
