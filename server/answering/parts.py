"""The parts of an answer: text, reasoning, function calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TextPart:
    """New text of the answer."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """New text of the model's reasoning before its answer."""

    text: str


@dataclass(slots=True)
class CallPart:
    """New data of one call, as OpenAI streams it: the first part has the id and the function's name, later ones have
    more of the arguments."""

    index: int  # the call's index in the answer, from 0
    id: str | None = None  # the id that the result refers to; None after the first part
    name: str | None = None  # the function's name; None after the first part
    arguments: str = ""  # new text of the arguments; all texts together are JSON


Part = TextPart | Reasoning | CallPart
