"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli.errors import TalkError
from cli.talking.conversation import TerminalConversation
from cli.talking.options import BEAMS, PENALTIES, SAMPLING, check
from engine import NUMBER_RANGES, InvalidRequestError
from server.config.wording import did_you_mean

_NUMBERS = tuple(name for name in (*SAMPLING, *PENALTIES, *BEAMS) if name in NUMBER_RANGES)


class Leave(Exception):
    """Ends the chat."""


class Slash:
    """The slash commands; each is a method whose docstring is its help text.

    Args:
        settings: fields of later requests, which /set changes.
        card: the server's description of the model, with its default parameters.
    """

    def __init__(
        self, conversation: TerminalConversation, settings: dict[str, Any], model_id: str, card: Mapping[str, Any]
    ):
        self._conversation = conversation
        self._settings = settings
        self._model_id = model_id
        decoding = card.get("decoding")
        self._defaults: dict[str, Any] = decoding if isinstance(decoding, dict) else {}
        self._given_up = frozenset(card.get("given_up_for_temperature") or ())
        self._commands = {
            name.removeprefix("_do_"): method
            for name, method in inspect.getmembers(self, inspect.ismethod)
            if name.startswith("_do_")
        }

    def completions(self, before: str, word: str) -> list[str]:
        """Completions of a word: commands at the beginning of a line, settings after /set. A single completion ends
        with a space."""
        known = [f"/{name}" for name in (*self._commands, *_NUMBERS)] if not before and word.startswith("/") else []
        if before.split() == ["/set"]:
            known = list(_NUMBERS)
        found = [name for name in known if name.startswith(word)]
        return [f"{found[0]} "] if len(found) == 1 else found

    def run(self, line: str) -> tuple[str, str | None]:
        """Run a command. Returns text for the user, and text to send as if the user had typed it.

        Raises:
            Leave: the user ended the chat.
            TalkError: the command cannot be run; gives the reason.
        """
        name, _, rest = line[1:].partition(" ")
        command = self._commands.get({"quit": "exit", "bye": "exit", "clear": "reset", "?": "help"}.get(name, name))
        if command is None and (setting := name.partition("=")[0].replace("-", "_")) in _NUMBERS:
            return self._do_set(f"{setting} {name.partition('=')[2]} {rest}"), None
        if command is None:
            near = did_you_mean(name, (*self._commands, *_NUMBERS)).replace("mean ", "mean /") or "; /help lists them"
            raise TalkError(f"unknown command /{name}{near} (to send a line that begins with a slash, type //)")
        result = command(rest.strip())
        return result if isinstance(result, tuple) else (result, None)

    def _do_help(self, rest: str) -> str:
        """/help                 list the commands"""
        lines = [str(method.__doc__) for method in self._commands.values()]
        return "\n".join([
            *lines,
            "A backslash at the end of a line continues the message on the next line. Ctrl-C stops an answer, Ctrl-D "
                "leaves.",
        ])  # fmt: skip

    def _do_reset(self, rest: str) -> str:
        """/reset                clear the conversation"""
        self._conversation.messages.clear()
        return "The conversation is cleared."

    def _do_system(self, rest: str) -> str:
        """/system [TEXT]        set the system message, or remove it"""
        self._conversation.system = rest or None
        return "The system message is set." if rest else "The system message is removed."

    def _do_undo(self, rest: str) -> str:
        """/undo                 remove the last message and its answer"""
        if self._conversation.undo() is None:
            raise TalkError("there is no message yet")
        return "The last message and its answer are removed."

    def _do_retry(self, rest: str) -> tuple[str, str]:
        """/retry                ask the last message again"""
        text = self._conversation.undo()
        if text is None:
            raise TalkError("there is no message yet")
        return "", text

    def _do_set(self, rest: str) -> str:
        """/set [NAME VALUE]     show the sampling settings, or change one: /set temperature 0.7 or /temperature 0.7"""
        if not rest:
            shown = [f"{name} = {value}" for name, value in self._settings.items() if name not in _NUMBERS]
            return "\n".join([*shown, *(f"{name} = {self._value(name)}" for name in _NUMBERS)])
        name, _, text = rest.replace("=", " ").partition(" ")
        name, text = name.lstrip("-").replace("-", "_"), text.strip()
        if name not in _NUMBERS:
            near = did_you_mean(name, _NUMBERS) or f"; the settings are {', '.join(_NUMBERS)}"
            raise TalkError(f"unknown setting {name}{near}")
        if not text:
            return f"{name} = {self._value(name)}. To change it: /set {name} VALUE, or default."
        if text == "default":
            self._settings.pop(name, None)
            return f"{name} = {self._value(name)}"
        integer = NUMBER_RANGES[name].integer
        try:
            value = int(text) if integer else float(text)
        except ValueError:
            raise TalkError(f"{name} must be {'an integer' if integer else 'a number'}, got {text!r}") from None
        try:
            check({**self._settings, name: value})
        except InvalidRequestError as problem:
            raise TalkError(str(problem).replace("--", "").rstrip(".")) from None
        self._settings[name] = value
        return f"{name} = {value}"

    def _value(self, name: str) -> str:
        """A setting's value, and whether it is the model's default."""
        if name in self._settings:
            return str(self._settings[name])
        if name == "seed":
            return "random (default)"
        if name in self._given_up and "temperature" in self._settings:
            return f"off, because temperature is set (default without it: {self._defaults.get(name)})"
        if name not in self._defaults:
            return "default"
        return f"{self._defaults[name]:g} (default)"

    def _do_save(self, rest: str) -> str:
        """/save FILE            save the conversation: as JSON if FILE ends with .json, else as text"""
        self._conversation.save(self._path(rest, "save"), self._model_id)
        return f"Saved to {rest}."

    def _do_load(self, rest: str) -> str:
        """/load FILE            continue a conversation that was saved as JSON"""
        self._conversation.load(self._path(rest, "load"))
        return f"Loaded {len(self._conversation.messages)} messages."

    def _do_exit(self, rest: str) -> str:
        """/exit                 leave (same as Ctrl-D)"""
        raise Leave

    @staticmethod
    def _path(rest: str, name: str) -> Path:
        if not rest:
            raise TalkError(f"no file name: /{name} FILE")
        return Path(rest)
