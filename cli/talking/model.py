"""The model for a command that chats or completes."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cli.errors import NoServerError, TalkError
from cli.talking.options import default_key, default_url, loading
from cli.talking.patience import once_loaded
from cli.terminal.style import note, say
from engine import ModelLoadError, find_here, lacks_chat_template
from server.config.wording import did_you_mean

if TYPE_CHECKING:
    from cli.talking.wire import ServerPlace, Wire

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_ANSWER = 128  # default maximum tokens of an answer


@dataclass(frozen=True, slots=True)
class Model:
    """A model behind HTTP."""

    wire: Wire  # the connection to the server
    id: str  # the model's id at the server
    card: dict[str, Any]  # the server's description of the model; servers other than Octavo give less
    here: bool = False  # the model was loaded for this command

    @property
    def place(self) -> str:
        """The model's location, in words."""
        return "loaded here" if self.here else f"at {self.wire.place.url}"

    @property
    def context(self) -> int | None:
        """Maximum tokens of prompt and answer; for an encoder-decoder model, of the answer; None if unknown."""
        length = self.card.get("max_model_len")
        return length if isinstance(length, int) else None

    @property
    def encodes(self) -> bool:
        return self.card.get("max_encoder_len") is not None

    def require(self, endpoint: str) -> None:
        """Refuse an endpoint that the model does not support. The error names the supported ones. Raises TalkError:
        suggests an alternative."""
        endpoints = self.card.get("endpoints")
        if not isinstance(endpoints, list) or endpoint in endpoints:
            return
        if COMPLETIONS in endpoints:
            complete = f"octavo complete{' --model MODEL' if self.here else self._same()} PROMPT"
            if not self.encodes:
                raise TalkError(_no_template(self.id, complete))
            raise TalkError(
                f"{self.id} is an encoder-decoder model and does not support conversations. Use: {complete}"
            )
        tasks = ", ".join(self.card.get("tasks") or ()) or "other things"
        served = ", ".join(endpoints) or "none"
        raise TalkError(
            f"{self.id} does not generate text; its tasks are {tasks}. Serve it (octavo serve) and use its "
            f"endpoints: {served}."
        )

    def count(self, body: dict[str, Any]) -> int | None:
        """The number of tokens of a prompt or of messages; None if the server cannot count them."""
        try:
            answer = self.wire.json("POST", "/tokenize", {"model": self.id, **body})
        except TalkError:
            return None
        count = answer.get("count") if isinstance(answer, dict) else None
        return count if isinstance(count, int) else None

    def room(self, prompt: dict[str, Any], begun: str = "") -> int:
        """The default maximum tokens of an answer to this prompt; at least 1. `begun`: the beginning of an
        encoder-decoder model's answer, which takes some of its room."""
        if self.context is None:
            return _ANSWER
        if self.encodes:
            taken = (self.count({"prompt": begun}) or 0) if begun else 0
            left = self.context - 1 - taken  # the decoder begins with a start token
        else:
            left = self.context - (self.count(prompt) or 0)
        return max(1, min(_ANSWER, left))

    def _same(self) -> str:
        return "" if self.here else f" --url {self.wire.place.url}"


def talk(prog: str, given: argparse.Namespace, with_model: Callable[[Model], int], *, chats: bool = False) -> int:
    """Open the model that the flags name and talk with it; returns the command's status (see `talking`). `chats`:
    refuse a model without a chat template before it is loaded."""

    def talk() -> int:
        with open_model(
            given.model, given.url, api_key=given.api_key or default_key(), default_url=default_url(),
            timeout=given.timeout, loading=loading(given), chats=chats,
        ) as model:  # fmt: skip
            return with_model(model)

    return talking(prog, talk)


def talking(prog: str, talk: Callable[[], int]) -> int:
    """A command's status: 1 for a failure, 130 if Ctrl-C stopped it, else the result of `talk`."""
    try:
        return talk()
    except TalkError as problem:
        say(prog, str(problem))
        return 1
    except KeyboardInterrupt:
        note("stopped")
        return 130


@contextlib.contextmanager
def open_model(
    name: str | None,
    url: str | None,
    *,
    api_key: str | None,
    default_url: str,
    timeout: float,
    loading: list[str],
    chats: bool = False,
) -> Iterator[Model]:
    """The model for the command. With a URL, or if no model is named and a server runs at the default address, it is
    the server's model. Otherwise the named model, or the bundled one, is loaded for the duration of the block. Raises
    TalkError if there is no model; suggests what to do.

    Args:
        name: a folder or a hub id; with a URL, a model id of that server.
        loading: further flags of `octavo serve` for a model that is loaded here.
    """
    from cli.talking.wire import ServerPlace, Wire  # importing httpx takes as long as the rest of --help

    if url is not None:
        if loading:
            flag = loading[0].partition("=")[0]
            raise TalkError(
                f"{flag} is for a model that this command loads, but --url names a server. Remove one of them."
            )
        place = ServerPlace.parse(url)
        try:
            model = _when_loaded(Wire(place, api_key, timeout), name, timeout)
        except NoServerError as problem:
            raise NoServerError(f"{problem}. {_how_to_start(place)}") from None
        yield model
        return
    if name is None and not loading:
        found: Model | None = None
        with contextlib.suppress(NoServerError):
            found = _when_loaded(Wire(ServerPlace.parse(default_url), api_key, timeout), None, timeout)
        if found is not None:
            yield found
            return
    if name is None and not loading:
        note(f"No server answers at {default_url}; loading {_named(name)}.")
    with serving(name, loading, timeout=timeout, chats=chats) as model:
        yield model


@contextlib.contextmanager
def serving(
    name: str | None,
    loading: list[str],
    address: tuple[str, int] | None = None,
    *,
    timeout: float = 600.0,
    chats: bool = False,
) -> Iterator[Model]:
    """A model that is loaded for the duration of the block. Raises TalkError if the model cannot be loaded.

    Args:
        name: a folder, a GGUF file or a hub id; None for the bundled model.
        loading: further flags of `octavo serve`.
        address: host and port to serve at; None for a private socket.
        chats: refuse a model without a chat template.
    """
    from cli.talking.private import private_server
    from cli.talking.wire import Wire

    if name is not None:
        try:
            found = find_here(name)  # finds a wrong name before any process starts
        except ModelLoadError as problem:
            raise TalkError(str(problem)) from None
        if found is None:
            note(f"{name} is not a local path; asking the Hugging Face hub.")
        if chats and found is not None and not _sets_template(loading) and lacks_chat_template(found):
            raise TalkError(_no_template(name, f"octavo complete --model {name} PROMPT"))
    with private_server([*([name] if name else []), *loading], _named(name), address) as place:
        model = _of_server(Wire(place, None if address is None else default_key(), timeout), None)
        yield Model(model.wire, model.id, model.card, here=address is None)


def _sets_template(loading: list[str]) -> bool:
    """Whether flags, variables or a config file may give the model a template."""
    return any(flag.startswith("--chat-template=") for flag in loading) or any(
        os.environ.get(f"OCTAVO_{name}") for name in ("CHAT_TEMPLATE", "TOKENIZER", "CONFIG")
    )


def _no_template(name: str, complete: str) -> str:
    return (
        f"{name} has no chat template, so it does not support conversations. Use: {complete}. If you know its "
        "template, set --chat-template, for example to chatml"
    )


def _named(name: str | None) -> str:
    return name or os.environ.get("OCTAVO_MODEL") or "the bundled model"


def _when_loaded(wire: Wire, name: str | None, timeout: float) -> Model:
    return once_loaded(lambda: _of_server(wire, name), wire.place.url, timeout)


def _of_server(wire: Wire, name: str | None) -> Model:
    answer = wire.json("GET", "/v1/models")
    cards = answer.get("data") if isinstance(answer, dict) else None
    cards = [card for card in cards or () if isinstance(card, dict) and isinstance(card.get("id"), str)]
    if not cards:
        raise TalkError(f"{wire.place.url}/v1/models lists no models. Is it an OpenAI-compatible server? (--url)")
    if name is None:
        return Model(wire, cards[0]["id"], cards[0])
    ids = [card["id"] for card in cards]
    if name not in ids:
        near = did_you_mean(name, ids) or f"; it has {', '.join(ids[:8])}"
        raise TalkError(f"{wire.place.url} has no model {name!r}{near}")
    return Model(wire, name, cards[ids.index(name)])


def _how_to_start(place: ServerPlace) -> str:
    if place.host not in ("localhost", "127.0.0.1", "::1"):
        return f"Check --url, or start one on {place.host}: octavo serve --host {place.host} --port {place.port}"
    port = "" if place.port == 8000 else f" --port {place.port}"
    return f"Start one: octavo serve{port}, or remove --url to load a model in this command."
