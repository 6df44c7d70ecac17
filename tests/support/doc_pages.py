"""What pages of the documentation show: their blocks, the commands in these, and what is said to come back."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MORE = re.compile(r"(?P<before>[\[{,]\s*)\.\.\.(?P<after>\s*[\]}])")
MORE = "..."


def blocks(page: str) -> list[tuple[str, str]]:
    """Language ("" where none is named) and text of each fenced block."""
    return [(match[1], match[2]) for match in _BLOCK.finditer(page)]


def commands(console: str) -> Iterator[tuple[str, str]]:
    """Each command of a block of the language console, and what the block shows below it ("": nothing)."""
    lines = console.splitlines()
    while lines:
        first = lines.pop(0)
        assert first.startswith("$ "), f"neither a command nor what follows one: {first}"
        command = first[2:]
        while not _is_whole(command):
            command += "\n" + lines.pop(0)
        shown = []
        while lines and not lines[0].startswith("$ "):
            shown.append(lines.pop(0))
        yield command, "\n".join(shown)


def _is_whole(command: str) -> bool:
    """The shell would not wait for another line."""
    if command.endswith(("\\", "|")):
        return False
    try:
        shlex.split(command)
    except ValueError:  # a quotation is open
        return False
    return True


def read_shown(text: str) -> Any:
    """JSON in which `...` stands for the rest of a list or of an object; `MORE` stands there in what is returned."""

    def written_out(match: re.Match[str]) -> str:
        more = f'"{MORE}"' if match["after"].endswith("]") else f'"{MORE}": 0'
        return match["before"] + more + match["after"]

    return json.loads(_MORE.sub(written_out, text))


def assert_same_shape(shown: Any, came: Any, place: str = "the answer") -> None:
    """What came has the fields, lengths and kinds of values of what is shown (`read_shown`)."""
    if isinstance(shown, dict):
        assert isinstance(came, dict), f"{place} is no object: {came}"
        wanted = {key for key in shown if key != MORE}
        assert wanted <= set(came) if MORE in shown else wanted == set(came), f"{place} has other fields: {list(came)}"
        for key in wanted:
            assert_same_shape(shown[key], came[key], f"{place}.{key}")
    elif isinstance(shown, list):
        assert isinstance(came, list), f"{place} is no list: {came}"
        wanted_items = [item for item in shown if item != MORE]
        is_cut = len(wanted_items) < len(shown)
        assert len(came) >= len(wanted_items) if is_cut else len(came) == len(wanted_items), f"{place}: {came}"
        for number, item in enumerate(wanted_items):
            assert_same_shape(item, came[number], f"{place}[{number}]")
    elif isinstance(shown, float):
        assert isinstance(came, float), f"{place} is {came!r}, not a number with a fraction"
    else:
        assert type(came) is type(shown), f"{place} is {came!r}, of another kind than {shown!r}"
