"""Adapters named in calls of `LLM`, loaded when they are first used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import AdapterError, InvalidRequestError

if TYPE_CHECKING:
    from engine.engine import Engine


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter in vLLM's form.

    Attributes:
        lora_name: the adapter's name.
        lora_int_id: ignored; names identify adapters.
        lora_path: its folder or file, which is loaded if no adapter has this name.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


Lora = str | LoRARequest
"""The name of a loaded adapter, an adapter's folder or file, or vLLM's request."""


class AdapterUse:
    """Loads adapters for calls.

    If all slots are taken, an adapter that an earlier call loaded is unloaded.
    """

    def __init__(self, engine: Engine):
        self._engine = engine  # the engine that loads the adapters
        self._own: list[str] = []  # loaded here, least recently used first

    def each(self, lora: Lora | Sequence[Lora | None] | None, count: int, given: object = None) -> list[str | None]:
        """The names of the adapters for this many inputs. `given`: the argument `lora_request`, vLLM's name of `lora`.
        Raises InvalidRequestError if a value is not an adapter, the number differs from the inputs', or both arguments
        are given; AdapterError if an adapter cannot be loaded."""
        if lora is not None and given is not None:
            raise InvalidRequestError("lora and lora_request are the same; set only one of them.", param="lora")
        chosen: object = given if lora is None else lora
        listed = list(chosen) if isinstance(chosen, list | tuple) else [chosen] * count
        if len(listed) != count:
            raise InvalidRequestError(f"there are {count} inputs but {len(listed)} adapters.", param="lora")
        named = [_named(one) for one in listed]
        needed = {one[0] for one in named if one is not None}
        together, most = needed | (set(self._engine.adapters) - set(self._own)), self._engine.info.max_loras
        if len(together) > most > 0:
            raise AdapterError(
                f"the call needs {len(together)} adapters at the same time, with those of lora_modules, but "
                f"max_loras is {most}. Raise max_loras."
            )
        for name, path in dict.fromkeys(filter(None, named)):
            self._load(name, path, needed)
        return [None if one is None else one[0] for one in named]

    def _load(self, name: str, path: str, needed: set[str]) -> None:
        loaded = self._engine.adapters
        if name in self._own:
            self._own.remove(name)
            self._own.append(name)
        if name in loaded:
            if path not in (name, loaded[name].path):
                raise AdapterError(f"the adapter {name} is loaded from {loaded[name].path}, not from {path}.")
            return
        spare = [own for own in self._own if own not in needed]
        oldest = spare[0] if len(loaded) == self._engine.info.max_loras and spare else None
        self._engine.load_adapter(name, path, replacing=oldest)
        if oldest is not None:
            self._own.remove(oldest)
        self._own.append(name)


def _named(lora: object) -> tuple[str, str] | None:
    if lora is None:
        return None
    if isinstance(lora, str) and lora:
        return lora, lora
    name, path = (getattr(lora, attribute, None) for attribute in ("lora_name", "lora_path"))  # vLLM's own class too
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(
            f"lora must be the name or the path of an adapter, or a LoRARequest, got {lora!r}.", param="lora"
        )
    return name, str(path or name)
