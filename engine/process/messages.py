"""The messages between the engine's process and its client: typed MessagePack, checked on arrival.

The dataclasses of `engine.interface.request` and `engine.interface.outputs` are sent unchanged; the structs here only
wrap them. Nothing is ever unpickled.

There are two connections between the processes. The *lifeline*, a stream socket, carries one `Start` and one `Known` to
the engine. Back come some `Loading`, then one `Ready` or `Failed`, and later a `Failed` if the engine ends. When it
closes, the other side is gone. ZeroMQ carries each client's commands (`Command`) to the engine, and one `News` per step
back.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from engine import errors
from engine.config import EngineConfig
from engine.configs.published import PublishedConfig
from engine.errors import EngineDeadError, InvalidRequestError, OctavoError
from engine.host.frames import framed, receive
from engine.host.logs import LogFormat
from engine.interface.adapters import AdapterInfo
from engine.interface.cache_map import CacheMap
from engine.interface.inputs import as_signal
from engine.interface.outputs import EngineInfo, EngineStats, RequestDelta, SignalKind
from engine.interface.request import (
    AudioInput,
    EngineInput,
    PixelInput,
    PoolingParams,
    SamplingParams,
    Seq2SeqInput,
    TokenInput,
)
from engine.interface.vision import MOST_CROP_BYTES, PlacedImage

T = TypeVar("T")

GOODBYE = b"\xff"  # the client's farewell on the lifeline, if it can send one; no length begins like this
_LARGEST = 2**24  # bytes; a longer message on the lifeline is not ours


class Start(msgspec.Struct, tag=True):
    """The first message to a new engine process."""

    config: EngineConfig  # the engine's settings
    address: str  # the ZeroMQ address to bind
    folder: str  # the folder of the socket; the engine removes it if its client is gone
    log_level: int  # the root logger's level
    # the format of log lines on stderr (see `engine.host.logs`); None leaves logging unchanged
    log_format: LogFormat | None
    # paths of the adapters that an earlier process had loaded, by name. Adapters that no longer exist are left out.
    adapters: dict[str, str] = {}


class Known(msgspec.Struct, tag=True):
    """The facts that the client has read while the engine's process imported its modules. `config`: the content of its
    config.json, as a `PublishedConfig`; None if the engine has to read it."""

    folder: str = ""
    config: Any = None


class Loading(msgspec.Struct, tag=True):
    """The engine is loading the weights; `percent` of their bytes are loaded."""

    percent: int


class Ready(msgspec.Struct, tag=True):
    """The engine is loaded and has bound its socket."""

    info: EngineInfo
    stats: EngineStats


class Failed(msgspec.Struct, tag=True):
    """An error that is sent: of a request, or the one that ends the engine. `kind` is the name of a class in
    `engine.errors`."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: OctavoError) -> Failed:
        return cls(type(error).__name__, str(error), getattr(error, "param", None), getattr(error, "code", None))

    def error(self) -> OctavoError:
        """The error as an exception of the original type."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, OctavoError)):
            return EngineDeadError(f"{self.kind}: {self.message}")
        if issubclass(kind, InvalidRequestError):
            return kind(self.message, param=self.param, code=self.code)
        return kind(self.message)


class Signal(msgspec.Struct, omit_defaults=True):
    """A `PixelInput` or an `AudioInput` as float32 values in C order. `decoder_token_ids`, `encoder_token_ids`: as
    there."""

    kind: SignalKind
    shape: tuple[int, ...]
    data: bytes
    decoder_token_ids: list[int] | None = None
    encoder_token_ids: list[int] | None = None

    @classmethod
    def of(cls, input: PixelInput | AudioInput) -> Signal:
        """The message for an input. Raises InvalidRequestError if the input holds something other than numbers, or more
        than `MOST_SIGNAL_BYTES`."""
        values, begin = as_signal(input.signal), input.decoder_token_ids
        kind: SignalKind = "image" if isinstance(input, PixelInput) else "audio"
        text = input.encoder_token_ids if isinstance(input, PixelInput) else None
        lists = (None if ids is None else list(ids) for ids in (begin, text))
        return cls(kind, values.shape, values.tobytes(), *lists)

    @property
    def input(self) -> PixelInput | AudioInput:
        """The original input. Raises InvalidRequestError if the number of bytes does not match."""
        if any(size < 0 for size in self.shape) or 4 * math.prod(self.shape) != len(self.data):
            raise InvalidRequestError(
                f"{len(self.data)} bytes are not the float32 numbers of a signal of shape {list(self.shape)}.",
                param="input",
                code="invalid_value",
            )
        values = np.frombuffer(self.data, np.float32).reshape(self.shape)
        if self.kind == "image":
            return PixelInput(values, self.decoder_token_ids, self.encoder_token_ids)
        return AudioInput(values, self.decoder_token_ids)


class ImageMessage(msgspec.Struct, array_like=True):
    """A `PlacedImage`: its pixels are bytes in C order."""

    offset: int
    length: int
    shape: tuple[int, int, int, int]
    size: tuple[int, int]
    data: bytes

    @classmethod
    def of(cls, image: PlacedImage) -> ImageMessage:
        """The message for an image. Raises InvalidRequestError if its pixels are no uint8 array of four axes, or more
        than `MOST_CROP_BYTES`."""
        pixels = np.asarray(image.pixels)
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.nbytes > MOST_CROP_BYTES:
            raise InvalidRequestError(
                f"an image's pixels must be a uint8 array of four axes with at most {MOST_CROP_BYTES} bytes, got "
                f"{pixels.dtype} of {list(pixels.shape)}.",
                param="images",
                code="invalid_value",
            )
        height, width = image.size
        return cls(image.offset, image.length, pixels.shape, (int(height), int(width)), pixels.tobytes())

    @property
    def image(self) -> PlacedImage:
        """The image that this message carries. Raises InvalidRequestError if the number of bytes does not match the
        shape."""
        if any(size < 0 for size in self.shape) or math.prod(self.shape) != len(self.data):
            raise InvalidRequestError(
                f"{len(self.data)} bytes are not the pixels of crops of shape {list(self.shape)}.",
                param="images",
                code="invalid_value",
            )
        pixels = np.frombuffer(self.data, np.uint8).reshape(self.shape)
        return PlacedImage(self.offset, self.length, pixels, self.size)


class AddRequest(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """`Engine.add_request`. Exactly one input and one kind of parameters is set: a union of dataclasses could not be
    distinguished on arrival. `tokens` comes without its text, which the engine does not need, and without its
    images, which are `images`."""

    request_id: str
    tokens: TokenInput | None = None
    seq2seq: Seq2SeqInput | None = None
    signal: Signal | None = None
    sampling: SamplingParams | None = None
    pooling: PoolingParams | None = None
    priority: int = 0
    cache_salt: str | None = None
    deadline: float | None = None
    tenant: str | None = None
    adapter: str | None = None
    images: list[ImageMessage] = []

    @property
    def input(self) -> EngineInput:
        """The input for `add_request`."""
        if self.signal is not None:
            return self.signal.input
        if self.tokens is not None and self.images:
            return replace(self.tokens, images=tuple(image.image for image in self.images))
        given = self.tokens or self.seq2seq
        assert given is not None  # `encode_add` sets exactly one
        return given

    @property
    def params(self) -> SamplingParams | PoolingParams:
        """The parameters for `add_request`."""
        given = self.sampling or self.pooling
        assert given is not None
        return given


class JoinEngine(msgspec.Struct, tag=True):
    """A client's first message: from now on, it is told of every step. This message is not counted among its
    commands."""


class Dismiss(msgspec.Struct, tag=True):
    """A client is gone: its requests end, and nothing more is accepted from it. `client`: its name on the socket."""

    client: bytes


class Abort(msgspec.Struct, tag=True):
    """`Engine.abort_request`."""

    request_id: str
    choice: int | None = None


class Look(msgspec.Struct, tag=True):
    """Request one map of the cache."""


class Warm(msgspec.Struct, tag=True):
    """Prepare for grammars: a conversation that may need one has arrived."""


class LoadAdapter(msgspec.Struct, tag=True):
    """`Engine.load_adapter`. `call`: identifies the answer: an empty `RequestDelta`, or an error."""

    call: str
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag=True):
    """`Engine.unload_adapter`; `call` is as in `LoadAdapter`."""

    call: str
    name: str


Command = JoinEngine | AddRequest | Abort | Look | Warm | Dismiss | LoadAdapter | UnloadAdapter


class News(msgspec.Struct, omit_defaults=True):
    """A client's news of a step, or of a batch of commands."""

    # the deltas of all its requests that have some; a delta without choices says that the request was accepted
    deltas: list[RequestDelta]
    failed: dict[str, Failed]  # the requests that were refused or could not be added
    stats: EngineStats  # the counters afterwards, over all clients' requests
    num_commands: int  # how many of its commands the engine has carried out so far
    cache_map: CacheMap | None = None  # the current map, if a `Look` was among the commands
    adapters: list[AdapterInfo] | None = None  # the loaded adapters, unless the client knows them


def _plain(value: Any) -> Any:
    """The form in which MessagePack can encode configs and other types of sequences and mappings."""
    if isinstance(value, PublishedConfig):
        return msgspec.msgpack.Ext(_CONFIG, _encoder.encode(value.parts))
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence | set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to the engine")


def _config(code: int, data: memoryview) -> PublishedConfig:
    if code != _CONFIG:
        raise ValueError(f"there is no extension {code}")
    return PublishedConfig(*_parts.decode(data))


_CONFIG = 1  # the MessagePack extension type
# Fields of inputs, as the engine names them.
_PARAMS = {"token_ids": "prompt", "encoder_token_ids": "prompt", "decoder_token_ids": "decoder_prompt"}
_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_any = msgspec.msgpack.Decoder()
_news = msgspec.msgpack.Decoder(News)
_replies: msgspec.msgpack.Decoder[Loading | Ready | Failed] = msgspec.msgpack.Decoder(Loading | Ready | Failed)
_start = msgspec.msgpack.Decoder(Start)
_known = msgspec.msgpack.Decoder(Known, ext_hook=_config)
_parts = msgspec.msgpack.Decoder(tuple[dict[str, Any], dict[str, Any]], ext_hook=_config)


def encode(message: Command | News | Known) -> bytes:
    return _encoder.encode(message)


def encode_add(request_id: str, input: EngineInput, params: SamplingParams | PoolingParams, **terms: Any) -> bytes:
    """The bytes of an `AddRequest`. Raises InvalidRequestError if it cannot be encoded, for example because a text is
    not valid Unicode."""
    message = AddRequest(request_id=request_id, **terms)
    if isinstance(params, SamplingParams):
        message.sampling = params
    elif isinstance(params, PoolingParams):
        message.pooling = params
    else:
        raise InvalidRequestError(f"params must be SamplingParams or PoolingParams, got {params!r}.", param="params")
    try:
        if isinstance(input, Seq2SeqInput):
            message.seq2seq = input
        elif isinstance(input, PixelInput | AudioInput):
            message.signal = Signal.of(input)
        else:
            given = input if isinstance(input, TokenInput) else TokenInput(input)
            message.images = [ImageMessage.of(image) for image in given.images]
            message.tokens = replace(given, text=None, images=())
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise InvalidRequestError(
            f"the request cannot be sent to the engine: {error}.", code="invalid_value"
        ) from error


def decode_command(data: bytes) -> Command | tuple[str, InvalidRequestError]:
    """The decoded command. For a malformed `AddRequest`: the request's id and the error."""
    try:
        return _commands.decode(data)
    except msgspec.ValidationError as error:
        raw = _any.decode(data)
        reason, _, path = str(error).partition(" - at ")
        param = path.strip("`").removeprefix("$.").partition("[")[0].rpartition(".")[2] or None
        param = _PARAMS.get(param or "", param)
        if param == "prompt" and raw.get("pooling") is not None:
            param = "input"
        problem = InvalidRequestError(f"{param or 'the request'}: {reason}.", param=param, code="invalid_value")
        return str(raw.get("request_id")), problem


def decode_news(data: bytes) -> News:
    """The engine's news. Raises msgspec.DecodeError: the bytes are not valid news."""
    return _news.decode(data)


# ---------------------------------------------------------------- the lifeline


def can_send(message: Known) -> bool:
    """Whether a config can be sent; its numbers have been checked, but not its texts."""
    try:
        return len(_encoder.encode(message)) <= _LARGEST
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return False


def decode_known(data: bytes) -> Known:
    """Decode the bytes of `encode`."""
    return _known.decode(data)


def first_bytes(message: Start | Known | Loading | Ready | Failed) -> bytes:
    """A message in the form that the lifeline carries."""
    return framed(_encoder.encode(message))


def send_framed(line: socket.socket, message: Start | Known | Loading | Ready | Failed) -> None:
    """Write a message to the lifeline; OSError if the other side has ended."""
    line.sendall(first_bytes(message))


def receive_start(line: socket.socket) -> Start | None:
    """The first message, or None if the client is gone."""
    data = receive(line, _LARGEST)
    return None if data is None else _start.decode(data)


def receive_known(line: socket.socket) -> Known | None:
    """The message after the first one, or None if the client is gone or has said goodbye."""
    try:
        if line.recv(1, socket.MSG_PEEK) == GOODBYE:
            return None
    except OSError:
        return None
    data = receive(line, _LARGEST)
    return None if data is None else decode_known(data)


def receive_reply(line: socket.socket) -> Loading | Ready | Failed | None:
    """The engine process's next message, or None if it is gone."""
    data = receive(line, _LARGEST)
    return None if data is None else _replies.decode(data)
