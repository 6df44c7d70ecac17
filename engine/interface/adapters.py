"""The low-rank adapters that an engine has loaded, by name and slot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.errors import AdapterError, InvalidRequestError
from engine.interface.values import brief


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """The facts about a loaded adapter.

    Attributes:
        name: the name that requests use.
        path: the folder or file that it came from.
        rank: the largest rank of its products.
        digest: a hash of everything in it that changes answers.
        num_bytes: bytes of its tensors in memory.
        slot: its slot in each product, from 1 on; 0: it has none yet.
    """

    name: str
    path: str
    rank: int
    digest: bytes
    num_bytes: int
    slot: int = 0


class AdapterRegistry:
    """The adapters of an engine."""

    def __init__(self, max_loras: int):
        self._max = max_loras
        self._loaded: dict[str, AdapterInfo] = {}
        self._reserved: set[str] = set()  # the names of adapters that are being read

    def __iter__(self) -> Iterator[AdapterInfo]:
        return iter(self._loaded.values())

    def reserve(self, name: str, replacing: str | None = None) -> None:
        """Reserve the name and a slot for a new adapter, until `add` or `cancel`. `replacing`: an adapter that will be
        unloaded before. Raises AdapterError if no slot is free, or the name is taken."""
        if not isinstance(name, str) or not name:
            raise AdapterError(f"an adapter's name must be a text of at least one character, got {brief(name)}.")
        if name in self._loaded:
            raise AdapterError(f"an adapter named {brief(name)} is loaded. Unload it first, or choose another name.")
        if name in self._reserved:
            raise AdapterError(f"an adapter named {brief(name)} is being loaded. Wait for it, or choose another name.")
        if not self._max:
            raise AdapterError(
                f"adapter {brief(name)} cannot be loaded: max_loras is 0. Start the engine with --max-loras of at "
                "least 1."
            )
        taken = len(self._loaded) + len(self._reserved)
        if taken - (replacing in self._loaded) >= self._max:
            raise AdapterError(
                f"adapter {brief(name)} cannot be loaded: {taken} adapters are loaded, and max_loras is "
                f"{self._max}. Unload one, or raise --max-loras."
            )
        self._reserved.add(name)

    def cancel(self, name: str) -> None:
        """Give a reservation back."""
        self._reserved.discard(name)

    def free_slot(self) -> int:
        """A free slot for an adapter with a reservation."""
        used = {info.slot for info in self}
        return next(slot for slot in range(1, self._max + 1) if slot not in used)

    def add(self, info: AdapterInfo) -> None:
        """Record that an adapter has been loaded into its slot."""
        self._reserved.discard(info.name)
        self._loaded[info.name] = info

    def pop(self, name: str) -> AdapterInfo:
        """Forget an adapter. Raises AdapterError if no adapter has this name."""
        if name not in self._loaded:
            raise AdapterError(f"no adapter named {brief(name)} is loaded. {self._names()}")
        return self._loaded.pop(name)

    def find(self, name: str | None) -> AdapterInfo | None:
        """The adapter that a request names; None for the base model. Raises InvalidRequestError if no adapter has this
        name."""
        if name is None:
            return None
        if not isinstance(name, str) or name not in self._loaded:
            message = f"no adapter named {brief(name)} is loaded. {self._names()}"
            raise InvalidRequestError(message, param="adapter", code="adapter_not_found")
        return self._loaded[name]

    def _names(self) -> str:
        if not self._loaded:
            return "No adapters are loaded."
        return f"The loaded adapters are {', '.join(map(brief, self._loaded))}."
