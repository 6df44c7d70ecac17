"""The parts of an answer: text, reasoning, calls of functions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Text:
    """New text of the answer."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """New text of the model's reasoning before its answer."""

    text: str


@dataclass(slots=True)
class Call:
    """News of one call, as OpenAI streams them: the first has its id and the function's name, others have more of the
    arguments.

    Attributes:
        index: which of the answer's calls, from 0.
        id: by which the result will name it; None but in the first news.
        name: of the function; None but in the first news.
        arguments: new text of them, JSON as a whole.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Part = Text | Reasoning | Call
