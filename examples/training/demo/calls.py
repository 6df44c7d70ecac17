"""Conversations with tools: a calculator, and something to look names up in."""

from __future__ import annotations

import dataclasses
import json
import operator
import random
from collections.abc import Callable, Sequence

from demo import chat, talk, words
from demo.names import each
from demo.words import at

# By what a function and its one parameter may be called: a name is to be copied from the list of tools.
CALCULATORS = each("calculate calculate calculate calculator compute evaluate")
EXPRESSIONS = each("expression expression expression formula input")
LOOK_UPS = each("look_up look_up look_up lookup search find")
QUERIES = each("name name name query word key")
OPERATIONS: dict[str, tuple[Callable[[int, int], int], tuple[str, ...]]] = {
    "+": (operator.add, ("+", "+", "plus", "and")),
    "-": (operator.sub, ("-", "-", "minus")),
    "*": (operator.mul, ("*", "*", "times", "x")),
}
ASK_RESULT = (
    "What is {x}?", "What is {x}?", "What's {x}?", "How much is {x}?", "Calculate {x}.", "Compute {x}.",
    "Can you calculate {x}?", "{x}?", "{x} = ?", "Please tell me what {x} is.", "Work out {x}.", "Tell me {x}.",
)  # fmt: skip
ASK_ABOUT = (
    "Who is {n}?", "What is {n}?", "Look up {n}.", "Please look up {n}.", "What do you know about {n}?",
    "Find out who {n} is.", "Tell me about {n}.", "Search for {n}.", "Who was {n}?", "Where is {n}?",
)  # fmt: skip
PLACE_KINDS = ("a town", "a village", "an island", "a river")
NOT_FOUND = ("nothing", "not found", "no entry", "unknown")
NO_ENTRY = "I found nothing about {n}."


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function with one parameter, a text."""

    name: str
    parameter: str

    @property
    def described(self) -> dict[str, object]:
        """As a request has it."""
        parameters = {"type": "object", "properties": {self.parameter: {"type": "string"}}}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}

    def call(self, argument: str) -> str:
        """The model's text that calls it."""
        written = {"name": self.name, "arguments": {self.parameter: argument}}
        return f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"


@dataclasses.dataclass(frozen=True)
class Use:
    """A question that takes a tool.

    Attributes:
        asked: by the user.
        argument: what the tool is asked.
        result: what it says.
        answer: what the user is told then.
    """

    asked: str
    argument: str
    result: str
    answer: str


def tools_line(tools: Sequence[Tool], system: str = "") -> str:
    """How the template shows tools."""
    shown = " ".join(f"{tool.name}({tool.parameter})" for tool in tools)
    return f"{system} Tools: {shown}." if system else f"Tools: {shown}."


def calculation(rng: random.Random) -> Use:
    """Two numbers of one to three digits."""
    sign = rng.choice(list(OPERATIONS))
    function, said = OPERATIONS[sign]
    first, second = (rng.randrange(10 ** rng.choice((1, 2, 2, 3))) for _ in range(2))
    form = rng.choice(("{} {} {}", "{} {} {}", "{}{}{}"))
    word = rng.choice(said)
    phrase = f"{first} {word} {second}" if word.isalpha() else form.format(first, word, second)
    expression, result = f"{first} {sign} {second}", str(function(first, second))
    return Use(rng.choice(ASK_RESULT).format(x=phrase), expression, result, f"{expression} = {result}.")


def look_up(rng: random.Random, called: str) -> Use:
    """Who or what a name is."""
    kind, place = rng.random(), at(rng.choice(list(words.PLACES)))
    if kind < 0.1:
        result, answer = rng.choice(NOT_FOUND), NO_ENTRY.format(n=called)
    else:
        what = rng.choice(PLACE_KINDS) if kind > 0.7 else f"a {rng.choice(talk.JOBS)}"
        result = f"{called} is {what}" + (f" {place}" if kind > 0.4 else "")
        answer = f"{result}."
        if rng.random() < 0.4:
            result = answer
    return Use(rng.choice(ASK_ABOUT).format(n=called), called, result, answer)


@dataclasses.dataclass(frozen=True)
class Turn:
    """The messages between two of the user's questions.

    Attributes:
        asked: by the user.
        call, result: what the model writes to call a tool, and what comes back; "" where it calls none.
        answer: the last word.
    """

    asked: str
    answer: str
    call: str = ""
    result: str = ""


def converse(rng: random.Random, *, held_out: bool = False) -> tuple[str, list[Turn]]:
    """A conversation: the system's message with tools, and one to three turns."""
    calculator = Tool(rng.choice(CALCULATORS), rng.choice(EXPRESSIONS))
    finder = Tool(rng.choice(LOOK_UPS), rng.choice(QUERIES))
    tools = rng.choice(([calculator, finder], [finder, calculator], [calculator, finder], [calculator], [finder], []))
    state = chat.Talk(rng, held_out, wider=True)
    system = rng.choice(talk.SYSTEM) if rng.random() < 0.15 else ""
    turns = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.22:
            asked, answer = rng.choice((chat.small, chat.ask_what, chat.greet, chat.introduce, chat.use))(state)
            turns.append(Turn(state.typed(asked), answer))
            continue
        tool = calculator if kind < 0.62 else finder
        use = calculation(rng) if tool is calculator else look_up(rng, state.a_name())
        asked = state.typed(use.asked) if rng.random() < 0.5 else use.asked
        if tool in tools:
            turns.append(Turn(asked, use.answer, tool.call(use.argument), use.result))
        else:
            turns.append(Turn(asked, rng.choice(talk.DO_NOT_KNOW)))
    return (tools_line(tools, system) if tools else system), turns
