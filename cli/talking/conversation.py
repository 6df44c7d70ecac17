"""A conversation's messages, kept within the model's context."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.errors import TalkError
from cli.talking.model import Model

_ROLES = {"system", "developer", "user", "assistant"}
_LEFT = 256  # minimum tokens for an answer, or a quarter of the context if that is less


@dataclass(slots=True)
class TerminalConversation:
    """The messages of a conversation in OpenAI's format; `system`, if any, stands before them."""

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def whole(self) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]

    @property
    def turns(self) -> int:
        """The number of messages from the user."""
        return sum(message["role"] == "user" for message in self.messages)

    def say(self, role: str, text: str) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": text})

    def undo(self) -> str | None:
        """Take back the user's last message and everything after it. Returns its text."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def fit(self, model: Model, max_tokens: int | None) -> int:
        """Drop the oldest turns until an answer has room; returns how many were dropped. `max_tokens`: maximum tokens
        of the answer, if set."""
        if model.context is None:
            return 0
        left = max_tokens or min(_LEFT, model.context // 4)
        forgotten = 0
        while self.turns > 1:
            count = model.count({"messages": self.whole})
            if count is None or count + left <= model.context:
                break
            del self.messages[0]
            while self.messages[0]["role"] != "user":
                del self.messages[0]
            forgotten += 1
        return forgotten

    def save(self, path: Path, model: str) -> None:
        """Write the conversation: as JSON, which `load` reads, if the name ends with .json, else as text. An existing
        file is not overwritten. Raises TalkError if the file cannot be written."""
        if path.suffix == ".json":
            text = json.dumps({"model": model, "messages": self.whole}, indent=2, ensure_ascii=False) + "\n"
        else:
            text = "\n\n".join(f"{message['role']}:\n{message['content']}" for message in self.whole) + "\n"
        try:
            with path.expanduser().open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise TalkError(f"{path} exists: choose another name.") from None
        except OSError as problem:
            raise TalkError(f"{path} cannot be written: {problem.strerror or problem}.") from None

    def load(self, path: Path) -> None:
        """Replace the conversation by one from a file. Raises TalkError if the file holds no conversation."""
        try:
            content: Any = json.loads(path.expanduser().read_text(encoding="utf-8"))
        except OSError as problem:
            raise TalkError(f"{path} cannot be read: {problem.strerror or problem}.") from None
        except ValueError as problem:
            raise TalkError(
                f"{path} is not JSON: {problem}. /save writes JSON to file names that end with .json."
            ) from None
        messages = content.get("messages") if isinstance(content, dict) else content
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise TalkError(
                f'{path} does not contain a list of messages such as {{"role": "user", "content": "Hello"}}.'
            )
        systems = [message["content"] for message in messages if message["role"] in ("system", "developer")]
        self.system = systems[0] if systems else None
        self.messages = [
            {"role": message["role"], "content": message["content"]}
            for message in messages
            if message["role"] in ("user", "assistant")
        ]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in _ROLES and isinstance(value.get("content"), str)
