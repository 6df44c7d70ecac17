"""Settings of KV events: which events about pages of the prefix cache are published, and where. The form is vLLM's."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from engine.errors import ConfigError
from engine.interface.json_settings import decoded

NAME = "kv_events_config"
_TRANSPORTS = re.compile(r"(tcp|ipc|inproc)://\S+")
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
_LARGEST = 2**31 - 1  # range of a ZeroMQ socket option


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """The settings for publishing the contents of the prefix cache."""

    enable_kv_cache_events: bool = False
    # zmq, or null to publish nothing (default: zmq if events are enabled)
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = DEFAULT_ENDPOINT  # ZeroMQ address of the PUB socket
    # bind the PUB socket, or connect it to a subscriber (default: as in vLLM, bind addresses with *, ::, ipc:// or
    # inproc://; also bind `DEFAULT_ENDPOINT`)
    bind: bool | None = None
    replay_endpoint: str | None = None  # address of a ROUTER socket that sends missed events again
    buffer_steps: int = 10_000  # number of messages kept for replay
    hwm: int = 100_000  # maximum messages that wait for a slow subscriber; it loses more until it asks for a replay
    max_queue_size: int = 100_000  # maximum messages that wait to be sent; more are left to replay
    topic: str = ""  # the first part of each message (default: `default_topic`)

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_cache_events, bool):
            raise _wrong("enable_kv_cache_events", "true or false", self.enable_kv_cache_events)
        if self.publisher not in ("zmq", "null", None):
            raise _wrong("publisher", '"zmq" or "null"', self.publisher)
        if not isinstance(self.bind, bool | None):
            raise _wrong("bind", "true or false", self.bind)
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if (name == "endpoint" or value is not None) and not (
                isinstance(value, str) and _TRANSPORTS.fullmatch(value)
            ):
                raise _wrong(name, "a ZeroMQ address such as tcp://*:5557 or ipc:///run/octavo/kv", value)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
                raise _wrong(name, f"an integer from 1 to {_LARGEST}", value)
        if not isinstance(self.topic, str):
            raise _wrong("topic", "a text", self.topic)

    @property
    def binds(self) -> bool:
        """Whether the PUB socket is bound, not connected."""
        if self.bind is not None:
            return self.bind
        address = self.endpoint
        return address == DEFAULT_ENDPOINT or bool(re.match("(ipc|inproc)://", address) or re.search(r"\*|::", address))

    @property
    def publishes(self) -> bool:
        """Whether events are published anywhere."""
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_kv_events(given: Any) -> KVEventsConfig:
    """The settings in a mapping, or in a JSON object as text. Raises ConfigError if it is neither, or a setting in it
    is unknown or out of range."""
    values = decoded(NAME, given)
    known = [field.name for field in fields(KVEventsConfig)]
    for name in values:
        if name not in known:
            raise ConfigError(f"{NAME} has no field {name!r}; its fields are {', '.join(known)}.")
    return KVEventsConfig(**values)


def default_topic(model: str, port: int | None, environ: Mapping[str, str]) -> str:
    """kv@POD@MODEL, by which llm-d identifies the replica.

    Args:
        model: the model's id for clients.
        port: port of the HTTP service; None if there is none.
        environ: its POD_IP is the pod's address; without it, this machine's name is used.
    """
    address = environ.get("POD_IP", "")
    pod = (f"{address}:{port}" if port else address) if address else socket.gethostname()
    return f"kv@{pod}@{model}"


def _wrong(name: str, wanted: str, value: object) -> ConfigError:
    return ConfigError(f"{NAME}: {name} must be {wanted}, got {value!r}.")
