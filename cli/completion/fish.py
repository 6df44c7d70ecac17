"""The script for fish: source it, or put it into ~/.config/fish/completions/octavo.fish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cli.completion.shape import Argument, CommandShape, Flag

_HEAD = """\
# fish completion of octavo; made by `octavo completion fish`.
function __octavo_at --description 'Whether these are the words of the command so far'
    set -l words (commandline -opc)
    set -e words[1]
    set -l found
    for word in $words
        string match -q -- '-*' $word; and continue
        set found $found $word
        contains -- "$found" @NESTED@; or break
    end
    test "$found" = "$argv[1]"
end
complete -c octavo -f
"""


def script(shapes: Sequence[CommandShape]) -> str:
    nested = " ".join(_quoted(shape.words) for shape in shapes if shape.next and shape.words) or "''"
    lines = [line for shape in shapes for line in _lines(shape)]
    return _HEAD.replace("@NESTED@", nested) + "\n".join(lines) + "\n"


def _lines(shape: CommandShape) -> Iterator[str]:
    here = f"complete -c octavo -n {_quoted(f'__octavo_at {_quoted(shape.words)}')}"
    for word, about in shape.next:
        yield f"{here} -a {word} -d {_quoted(about)}"
    for argument in shape.arguments:
        if action := _action(argument):
            yield f"{here} {action}"
    for flag in shape.flags:
        yield f"{here} {_names(flag)} -d {_quoted(flag.about)}{_takes(flag)}"


def _names(flag: Flag) -> str:
    return " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)


def _takes(flag: Flag) -> str:
    if flag.takes is None:
        return ""
    return f" {'-r' if flag.takes.files else '-x'} {_action(flag.takes)}".rstrip()


def _action(argument: Argument) -> str:
    if argument.values:
        return f"-a {_quoted(' '.join(argument.values))}"
    return {"file": "-F", "folder": "-a '(__fish_complete_directories)'", "": ""}[argument.files]


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
