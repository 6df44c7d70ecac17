"""The memory that models may take together. Every byte is reserved before a load begins, and released when the engine's
process has ended."""

from __future__ import annotations

from dataclasses import dataclass

from engine import OctavoError

_MIB = 2**20


class ModelTooLargeError(OctavoError):
    """A model that would not fit even alone."""


@dataclass(eq=False, slots=True)
class Promise:
    """The memory reserved for one engine. `size`: bytes."""

    size: int


class Budget:
    """Reserves memory. `limit`: bytes; None if not known yet."""

    def __init__(self, limit: int | None):
        self.limit = limit
        self._promises: set[Promise] = set()

    @property
    def taken(self) -> int:
        """The bytes of all reservations."""
        return sum(promise.size for promise in self._promises)

    def check(self, name: str, size: int) -> None:
        """Refuse a model that can never be loaded. Raises TooLargeError with the settings to change."""
        if self.limit is not None and size > self.limit:
            raise ModelTooLargeError(
                f"{name} needs {size / _MIB:.0f} MiB, but all models together may take {self.limit / _MIB:.0f} MiB "
                "(max_memory). Raise --max-memory, or lower the model's kv_cache_memory."
            )

    def promise(self, size: int) -> Promise | None:
        """Reserve this many bytes; None if they are not available."""
        if self.limit is not None and self.taken + size > self.limit:
            return None
        made = Promise(size)
        self._promises.add(made)
        return made

    def give_back(self, promise: Promise) -> None:
        """Release a reservation after its engine has ended."""
        self._promises.discard(promise)
