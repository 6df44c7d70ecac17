"""Functions that the model calls, with OpenAI's client: a calculator and a look-up.

    octavo serve
    python examples/tools.py

The client comes with `pip install openai`. Another server's URL can be given as the argument.
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from typing import Any

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{URL}/v1", api_key="unused")  # or the key that the server wants
MODEL = client.models.list().data[0].id
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
PEOPLE = {"Ada": "Ada is a baker in the forest.", "Zorblax": "Zorblax is a sailor."}


def calculate(expression: str) -> str:
    """Two whole numbers and +, - or *: never hand what a model wrote to eval."""
    match ast.parse(expression, mode="eval").body:
        case ast.BinOp(left=ast.Constant(value=int(left)), op=sign, right=ast.Constant(value=int(right))):
            return str(OPERATIONS[type(sign)](left, right))
    return "not found"


def look_up(name: str) -> str:
    """The facts that are known about somebody."""
    return PEOPLE.get(name, "not found")


FUNCTIONS = {"calculate": calculate, "look_up": look_up}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": (function.__doc__ or "").strip(),
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string"}},
                "required": [parameter],
                "additionalProperties": False,
            },
        },
    }
    for name, function, parameter in (("calculate", calculate, "expression"), ("look_up", look_up, "name"))
]


def call(name: str, arguments: str) -> str:
    """The result of a call; what went wrong is a result, too, which the model can act on."""
    try:
        return FUNCTIONS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError, SyntaxError) as problem:
        return f"error: {problem}"


def answer(messages: list[Any]) -> str:
    """Ask, and call what the model wants called, until it answers."""
    while True:
        said = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0)
        message = said.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for wanted in message.tool_calls:
            result = call(wanted.function.name, wanted.function.arguments)
            print(f"{wanted.function.name} {wanted.function.arguments} -> {result}")
            messages.append({"role": "tool", "tool_call_id": wanted.id, "content": result})


for question in ("What is 12 * 34?", "Who is Zorblax?", "Hello!"):
    print(f"--- {question}")
    print(answer([{"role": "user", "content": question}]))
