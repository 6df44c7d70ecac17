"""The script for zsh: source it after compinit, or put it into a folder of $fpath as _octavo."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cli.completion.shape import Argument, CommandShape, Flag


def script(shapes: Sequence[CommandShape]) -> str:
    lines = ["#compdef octavo", "# zsh completion of octavo; made by `octavo completion zsh`.", ""]
    for shape in reversed(shapes):  # a function stands before its callers
        lines += _function(shape)
    return "\n".join([
        *lines,
        'if [[ "${funcstack[1]}" == "_octavo" ]]; then',
        '    _octavo "$@"',
        "elif (( $+functions[compdef] )); then",
        "    compdef _octavo octavo",
        "fi",
        "",
    ])  # fmt: skip


def _name(words: str) -> str:
    return "_octavo" + "".join(f"_{word}" for word in words.split())


def _function(shape: CommandShape) -> list[str]:
    name = _name(shape.words)
    flags = [line for flag in shape.flags for line in _flag(flag)]
    if not shape.next:
        rest = [_quoted(f":{argument.name.lower()}:{_action(argument)}") for argument in shape.arguments]
        return [f"{name}() {{", "    _arguments \\", *_continued(flags + rest), "}", ""]
    described = [_quoted(f"{word}:{about.replace(':', ' -')}") for word, about in shape.next]
    cases = [f"        {word}) {_name(f'{shape.words} {word}')} ;;" for word, _ in shape.next]
    return [
        f"{name}() {{",
        "    local curcontext=$curcontext state line",
        "    typeset -A opt_args",
        "    _arguments -C \\",
        *_continued([*flags, "'1:command:->command'", "'*::argument:->argument'"]),
        "    case $state in",
        "    command)",
        "        local -a commands=(",
        *(f"            {item}" for item in described),
        "        )",
        "        _describe -t commands command commands",
        "        ;;",
        "    argument)",
        "        case $line[1] in",
        *cases,
        "        esac",
        "        ;;",
        "    esac",
        "}",
        "",
    ]


def _continued(items: Sequence[str]) -> list[str]:
    return [f"        {item}" + (" \\" if place < len(items) - 1 else "") for place, item in enumerate(items)]


def _flag(flag: Flag) -> list[str]:
    about = re.sub(r"([\[\]:\\])", r"\\\1", flag.about)
    takes = "" if flag.takes is None else f":{flag.takes.name.lower()}:{_action(flag.takes)}"
    star = "*" if flag.repeats else ""
    equals = "=" if takes else ""  # --flag value and --flag=value
    return [_quoted(f"{star}{name}{equals if name.startswith('--') else ''}[{about}]{takes}") for name in flag.names]


def _action(argument: Argument) -> str:
    if argument.values:
        return f"({' '.join(argument.values)})"
    return {"file": "_files", "folder": "_files -/", "": " "}[argument.files]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
