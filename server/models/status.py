"""The state of a model as clients and operators see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine import EngineInfo

State = Literal["unloaded", "loading", "loaded", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One served model at this moment. Times are Unix seconds, sizes bytes.

    Attributes:
        name: its id to clients.
        state: "failed" after a failed load, or if its engine was given up; the next load may succeed.
        reason: the cause, if it has failed, or cannot be loaded; else "".
        aliases: other names that select it.
        source: the folder, GGUF file or hub id.
        pinned: whether it is loaded at the start and never unloaded to save memory.
        percent: percentage of the weights that are loaded, while it loads; None before that is known.
        memory: the memory that it takes, or would take: weights, KV cache and process together; None before it is
            known.
        size: bytes of its weights; None before it is known.
        tasks: what it can do; empty before it is known.
        endpoints: paths of the endpoints that it serves; empty before its first load.
        max_model_len: its longest context in tokens; None before it is known.
        loaded_at, last_used: None while it is not loaded.
        expires_at: when it will be unloaded if no request comes; None if it stays, or is not loaded.
        running: number of requests that use it now.
        info: its engine's facts, or those of its last engine, or expected ones; None before anything is known.
        adapters: the folders of the adapters that its settings name.
        chat_template: the setting of that name.
        abilities: its abilities in Ollama's words; empty before they are known.
    """

    name: str
    state: State
    reason: str = ""
    aliases: tuple[str, ...] = ()
    source: str = ""
    pinned: bool = False
    percent: int | None = None
    memory: int | None = None
    size: int | None = None
    tasks: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    max_model_len: int | None = None
    loaded_at: float | None = None
    last_used: float | None = None
    expires_at: float | None = None
    running: int = 0
    info: EngineInfo | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    abilities: tuple[str, ...] = ()
