"""The messages between a process that answers HTTP (a front) and the one that counts for all (the desk):
MessagePack, typed, checked on arrival."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine import EngineInfo, EngineStats
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
    """The first words to a front.

    Attributes:
        name: the front's among the engine's clients.
        settings: `ServerSettings` as JSON.
        engine_config: `EngineConfig`'s fields that say where the tokenizer is.
        version, model_id, created: as all fronts show them.
        listener: descriptor of the bound socket.
        log_format: of its log lines.
        max_memory: bytes that it may have, beyond what it has at its start; None: no limit.
        place: the front's among all, from 0.
        num_fronts: how many there are.
        shares: file in which they show how many connections each has.
        engine: whose requests it takes.
        tell_facts: it is the one that logs what is served.
    """

    name: bytes
    settings: str
    model: str
    tokenizer: str | None
    revision: str | None
    hf_token: str | None
    skip_tokenizer_init: bool
    chat_template: str | None
    version: str
    model_id: str
    created: int
    listener: int
    log_format: LogFormat
    place: int
    num_fronts: int
    shares: str
    engine: EngineServes
    tell_facts: bool


class Stop(msgspec.Struct, tag=True):
    """Serve no new requests, and end once the running ones have ended."""


class ReloadKeys(msgspec.Struct, tag=True):
    """Read the file with API keys again."""


class Count(msgspec.Struct, tag=True):
    """Asks for `Counted`."""


class CancelHere(msgspec.Struct, tag=True):
    """Asks to end an answer that is streamed here; `Cancelled` answers."""

    response_id: str
    tenant: str | None


# ---------------------------------------------------------------- to the desk


class Ready(msgspec.Struct, tag=True):
    """The front listens."""


class Failed(msgspec.Struct, tag=True):
    """The front cannot start: a setting is wrong."""

    message: str


class GiveUp(msgspec.Struct, tag=True):
    """The engine should be treated as dead."""

    cause: str


class Counted(msgspec.Struct, tag=True):
    """The present counts of a front.

    Attributes:
        connections: of clients.
        inputs_waiting: inputs that have not been handed to the engine.
    """

    connections: int
    inputs_waiting: int


class Cancelled(msgspec.Struct, tag=True):
    """The answer that was ended, as JSON; None: it is not there."""

    answer: bytes | None


class LookAt(msgspec.Struct, tag=True):
    """`Gate.look`; `Done` or `Refused` answers."""

    gate: GateName
    tenant: str | None


class Admit(msgspec.Struct, tag=True):
    """`Gate.admit`; `Done` or `Refused` answers. The place has this number until `Release`."""

    place: int
    gate: GateName
    prompts: int
    tokens: int
    tenant: str | None
    deadline: float | None


class Measured(msgspec.Struct, tag=True):
    """`Place.measured`; `Done` or `Refused` answers."""

    place: int
    tokens: list[int]


class Started(msgspec.Struct, tag=True):
    """`Place.started`."""

    place: int
    index: int


class Progressed(msgspec.Struct, tag=True):
    """`Place.progressed`."""

    place: int
    index: int
    tokens: int


class Finished(msgspec.Struct, tag=True):
    """`Place.finished`."""

    place: int
    index: int


class Release(msgspec.Struct, tag=True):
    """A place is given back."""

    place: int


class BeginKey(msgspec.Struct, tag=True):
    """`CountsKeys.begin`; `KeyBegun` answers. The count has this number until `EndKey`."""

    number: int
    tenant: str
    concurrency: int | None
    per_minute: int | None


class EndKey(msgspec.Struct, tag=True):
    """`CountsKeys.end`."""

    number: int


class Render(msgspec.Struct, tag=True):
    """Asks for the exposition of all metrics; `Rendered` answers."""

    accept: str | None


class CancelElsewhere(msgspec.Struct, tag=True):
    """Asks all other fronts to end an answer; `Cancelled` answers."""

    response_id: str
    tenant: str | None


# ---------------------------------------------------------------- answers of the desk


class Done(msgspec.Struct, tag=True):
    """The desk's consent."""


class Refused(msgspec.Struct, tag=True):
    """An `ApiError`, and the reason for the metrics, if it is counted as a refusal."""

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


class Rendered(msgspec.Struct, tag=True):
    """The exposition and its content type."""

    content: bytes
    content_type: str


Body = (
    EngineServes | EngineDied | Begin | Stop | ReloadKeys | Count | CancelHere
    | Ready | Failed | GiveUp | Counted | Cancelled | LookAt | Admit | Measured | Started | Progressed | Finished
    | Release | BeginKey | EndKey | Render | CancelElsewhere
    | Done | Refused | KeyBegun | Rendered
)  # fmt: skip


class Frame(msgspec.Struct, array_like=True):
    """One message.

    Attributes:
        number: of a question, repeated in its answer; 0: of what expects none.
        answers: it is the answer.
    """

    number: int
    answers: bool
    body: Body


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Frame).decode
