"""The parts of an answer: text, reasoning, function calls."""

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
    """New data of one call, as OpenAI streams it: the first part has the id and the function's name, later ones have
    more of the arguments.

    Attributes:
        index: the call's index in the answer, from 0.
        id: the id that the result refers to; None after the first part.
        name: the function's name; None after the first part.
        arguments: new text of the arguments; all texts together are JSON.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Part = Text | Reasoning | Call
