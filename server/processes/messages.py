"""The messages between a process that answers HTTP (a front) and the process that keeps the shared counts (the desk):
typed MessagePack, checked on arrival."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine import EngineConfig, EngineInfo, EngineStats
from engine.host.logs import LogFormat

GateName = Literal["generating", "pooling", "tokenizing"]


# ---------------------------------------------------------------- to a front


class EngineServes(msgspec.Struct, tag=True):
    """The engine is ready; see `AttachedEngineClient.serves`."""

    address: str
    info: EngineInfo
    stats: EngineStats
    num_restarts: int


class EngineDied(msgspec.Struct, tag=True):
    """The engine has died."""

    cause: str


class Begin(msgspec.Struct, tag=True, kw_only=True):
    """The first message to a front. `config`: the engine's; it locates the tokenizer."""

    name: bytes  # the front's name among the engine's clients
    settings: str  # `ServerSettings` as JSON
    config: EngineConfig
    # version, model_id, created: the same for all fronts
    version: str
    model_id: str
    created: int
    listener: int  # descriptor of the bound socket
    log_format: LogFormat
    place: int  # the front's index, from 0
    num_fronts: int
    shares: str  # the file with each front's number of connections
    engine: EngineServes
    tell_facts: bool  # whether this front logs the facts about the model


class Stop(msgspec.Struct, tag=True):
    """Refuse new requests, and end once the running ones have ended."""


class ReloadKeys(msgspec.Struct, tag=True):
    """Read the file with API keys again."""


class Count(msgspec.Struct, tag=True):
    """Asks for `Counted`."""


class CancelHere(msgspec.Struct, tag=True):
    """Asks to end an answer that this front streams; the answer is `Cancelled`."""

    response_id: str
    tenant: str | None


# ---------------------------------------------------------------- to the desk


class FrontReady(msgspec.Struct, tag=True):
    """The front listens."""


class FrontFailed(msgspec.Struct, tag=True):
    """The front cannot start because a setting is invalid."""

    message: str


class GiveUp(msgspec.Struct, tag=True):
    """The engine should be treated as dead."""

    cause: str


class Counted(msgspec.Struct, tag=True):
    """The current counts of a front."""

    connections: int  # open client connections
    inputs_waiting: int  # inputs that have not been submitted to the engine


class Cancelled(msgspec.Struct, tag=True):
    """The ended answer, as JSON; None if this front does not have it."""

    answer: bytes | None


class LookAt(msgspec.Struct, tag=True):
    """`Gate.look`; the answer is `Done` or `Refused`."""

    gate: GateName
    tenant: str | None


class Admit(msgspec.Struct, tag=True):
    """`Gate.admit`; the answer is `Done` or `Refused`. The reservation has this number until `ReleaseSlots`."""

    number: int
    gate: GateName
    prompts: int
    tokens: int
    tenant: str | None
    deadline: float | None


class Measured(msgspec.Struct, tag=True):
    """`Reservation.measured`; the answer is `Done` or `Refused`."""

    number: int
    tokens: list[int]


class Noted(msgspec.Struct, tag=True):
    """News of a prompt: a call of this method of `Reservation`."""

    number: int
    method: Literal["started", "progressed", "finished"]
    arguments: list[int]


class ReleaseSlots(msgspec.Struct, tag=True):
    """The release of a request's slots."""

    number: int


class BeginKey(msgspec.Struct, tag=True):
    """`CountsKeys.begin`; the answer is `KeyBegun`. The request has this number until `EndKey`."""

    number: int
    tenant: str
    concurrency: int | None
    per_minute: int | None


class EndKey(msgspec.Struct, tag=True):
    """`CountsKeys.end`."""

    number: int


class Render(msgspec.Struct, tag=True):
    """A request for all metrics as text. The answer is `RenderedMetrics`."""

    accept: str | None


class CancelElsewhere(msgspec.Struct, tag=True):
    """Asks all other fronts to end an answer; the answer is `Cancelled`."""

    response_id: str
    tenant: str | None


# ---------------------------------------------------------------- answers of the desk


class Done(msgspec.Struct, tag=True):
    """The desk agrees."""


class Refused(msgspec.Struct, tag=True):
    """An `ApiError`, and the reason for the metrics if it counts as a refusal."""

    status: int
    message: str
    param: str | None
    code: str | None
    headers: dict[str, str] | None
    reason: str | None


class KeyBegun(msgspec.Struct, tag=True):
    """`Begun`; the window as (allowed, limit, remaining, reset)."""

    running: int
    window: tuple[bool, int, int, int] | None
    counted: bool


class RenderedMetrics(msgspec.Struct, tag=True):
    """The metrics as text and the content type."""

    content: bytes
    content_type: str


Body = (
    EngineServes | EngineDied | Begin | Stop | ReloadKeys | Count | CancelHere
    | FrontReady | FrontFailed | GiveUp | Counted | Cancelled | LookAt | Admit | Measured | Noted | ReleaseSlots
    | BeginKey | EndKey | Render | CancelElsewhere
    | Done | Refused | KeyBegun | RenderedMetrics
)  # fmt: skip


class Frame(msgspec.Struct, array_like=True):
    """One message. `number`: the question's number, repeated in its answer; 0 for a message without an answer."""

    number: int
    answers: bool
    body: Body


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Frame).decode
