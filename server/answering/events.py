"""An answer as a stream of events, in its endpoint's form."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic

from pydantic import BaseModel
from pydantic_core import to_json

from server.answering.generation import Update
from server.answering.pieces import Piece, PieceMaker, PlainText
from server.answering.streaming import COMMENT, failure, sse
from server.api.schemas import StreamOptions
from server.errors import ApiError

# A placeholder for an event's text; no field contains it by chance.
_MARK = uuid.uuid4().hex
# An event's fields besides its pieces: usage and beams.
Extra = Mapping[str, Any]


class Events(ABC, Generic[Piece]):
    """Writes the events of one answer."""

    silence: ClassVar[str] = COMMENT  # sent after a long time without events

    def __init__(self, maker: PieceMaker[Piece]):
        self.maker = maker  # turns updates into pieces

    def opening(self) -> str:
        """The events after the engine has accepted the request; may be empty."""
        return ""

    @abstractmethod
    def news(self, updates: Sequence[Update]) -> str:
        """The events for some updates; may be empty."""

    @abstractmethod
    def closing(self) -> str:
        """The last events."""

    def failing(self, problem: ApiError) -> str:
        """The last events of an incomplete answer."""
        return failure(problem)


class ChunkEvents(Events[Piece]):
    """The events of /v1/completions and /v1/chat/completions: chunks with one choice each, then the usage if requested.

    Args:
        chunk: makes the data of one event; without usage, the field is left out, as at OpenAI.
        options: `stream_options`.
    """

    def __init__(
        self, maker: PieceMaker[Piece], chunk: Callable[[list[Piece], Extra], BaseModel], options: StreamOptions | None
    ):
        super().__init__(maker)
        self._chunk = chunk
        self._with_usage = options is not None and bool(options.include_usage)
        self._continuous = self._with_usage and options is not None and bool(options.continuous_usage_stats)
        self._around: dict[int, tuple[str, str]] = {}  # bytes of a choice's plain text in an event

    def news(self, updates: Sequence[Update]) -> str:
        maker, written = self.maker, []
        for update in updates:
            before, pieces, after = self._usage(), maker.news(update), self._usage()
            live = maker.beams(update)
            if live is not None:
                written.append(self._event([], {**after, "beams": live}))
            written += [self._news_event(piece, before if maker.opens(piece) else after) for piece in pieces]
        return "".join(written)

    def _usage(self) -> Extra:
        return {"usage": self.maker.usage() if self._continuous else None} if self._with_usage else {}

    def closing(self) -> str:
        last = self._event([], {"usage": self.maker.usage()}) if self._with_usage else ""
        return last + sse("[DONE]")

    def _news_event(self, news: Piece | PlainText, usage: Extra) -> str:
        if not isinstance(news, PlainText):
            return self._event([news], usage)
        if usage.get("usage") is not None:
            return self._event([self.maker.plain(news)], usage)
        # A choice's events differ only in their text, so the rest is built once.
        around = self._around.get(news.index)
        if around is None:
            before, after = self._event([self.maker.plain(PlainText(news.index, _MARK))], usage).split(f'"{_MARK}"')
            around = self._around[news.index] = before, after
        return f"{around[0]}{to_json(news.text).decode()}{around[1]}"

    def _event(self, pieces: list[Piece], extra: Extra) -> str:
        return sse(self._chunk(pieces, extra).model_dump_json(exclude_unset=True))
