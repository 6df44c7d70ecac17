"""Images in conversations: marks in the texts of messages, and the parts that chat templates want in their places."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequestError

Messages = list[dict[str, Any]]

# A template that walks through contents, as lists of parts.
_WALKS = re.compile(r"""\bin\s+\w+(\.content|\[['"]content['"]\])""")
_PROBE = "probe0x"
_MOST_KNOWN = 64
_known: dict[tuple[str, str | None], tuple[bool, bool]] = {}


class Pictures:
    """The images of a conversation, in the order of their marks. `mark`: stands in texts for an image. It is random, so
    no client's text contains it."""

    def __init__(self) -> None:
        self.mark = f"[image {secrets.token_hex(8)}]"
        self.images: list[Any] = []

    def add(self, image: Any) -> str:
        """Take an image in; the mark for it."""
        self.images.append(image)
        return self.mark

    def joined(self, parts: Sequence[str]) -> str:
        """Texts and marks as one text: only texts are joined with line breaks."""
        made = ""
        for number, part in enumerate(parts):
            apart = number and part != self.mark and parts[number - 1] != self.mark
            made += f"\n{part}" if apart else part
        return made


def only_image(messages: Sequence[Mapping[str, Any]], pictures: Pictures) -> tuple[Any, str]:
    """The image of a conversation with a model that reads one image, and the text beside it. Raises
    InvalidRequestError if there are several messages, or more or fewer images."""
    if len(messages) != 1 or len(pictures.images) != 1:
        raise InvalidRequestError(
            "this model reads one image, and perhaps a text beside it. Send a single "
            f"message with one image, got {len(messages)} messages with {len(pictures.images)} images.",
            param="messages",
            code="invalid_messages",
        )
    return pictures.images[0], str(messages[0]["content"]).replace(pictures.mark, "")


def with_parts(
    template: str,
    messages: Messages,
    render: Callable[[Messages], str],
    *,
    mark: str | None = None,
    text: str | None = None,
) -> Messages:
    """The messages with contents as this template reads them: lists of parts for all if it shows no other contents, and
    for those with images. A template that knows no images gets the image token in the text.

    Args:
        render: renders messages with the template; ValueError if it refuses them.
        mark: stands for an image in the texts of messages; None: there are none.
        text: the model's image token.
    """
    if mark is None and not _WALKS.search(template):
        return messages
    lists, images = _reads(template, text if mark is not None else None, render)
    if mark is not None and not images:
        messages = [
            {**one, "content": one["content"].replace(mark, text or "")} if isinstance(one.get("content"), str) else one
            for one in messages
        ]
        mark = None
    return [_parted(one, mark) if lists or (mark and mark in (one.get("content") or "")) else one for one in messages]


def _parted(message: dict[str, Any], mark: str | None) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    texts = [content] if mark is None else content.split(mark)
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        if number:
            parts.append({"type": "image"})
        if text or len(texts) == 1:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def _reads(template: str, text: str | None, render: Callable[[Messages], str]) -> tuple[bool, bool]:
    """Whether a template shows contents that are lists and none that are texts; and whether it shows images."""
    key = template, text
    if key not in _known:
        shown = _shown(render, _PROBE)
        parts = [{"type": "text", "text": _PROBE}]
        lists = _PROBE not in shown and _is_whole(_shown(render, parts))
        images = False
        if text is not None:
            seen = _shown(render, [{"type": "image"}, *parts])
            images = _is_whole(seen) and seen.count(text) == 1
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = lists, images
    return _known[key]


def _shown(render: Callable[[Messages], str], content: Any) -> str:
    try:
        return render([{"role": "user", "content": content}])
    except ValueError:
        return ""


def _is_whole(text: str) -> bool:
    """The probe's text is in it, and not the list that held it."""
    return _PROBE in text and "'type'" not in text and '"type"' not in text
