"""The script for bash, 3.2 and later; it needs no other package."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from cli.completion.shape import Argument, CommandShape

_SCRIPT = """\
# bash completion of octavo; made by `octavo completion bash`.
_octavo() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" command="" word i
    # bash takes --flag=value apart
    if [[ $cur == "=" ]]; then
        cur=""
    elif [[ $prev == "=" && COMP_CWORD -ge 2 ]]; then
        prev="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="${COMP_WORDS[i]}"
        [[ $word == -* ]] && continue
        command="${command:+$command }$word"
        case "$command" in
            @NESTED@) ;;
            *) break ;;
        esac
    done
    COMPREPLY=()
    case "$command $prev" in
@AFTER_FLAGS@
    esac
    if [[ $cur == -* ]]; then
        case "$command" in
@FLAGS@
        esac
        return
    fi
    case "$command" in
@NEXT@
    esac
}
_octavo_words() {
    local word
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -W "$1" -- "$2")
}
_octavo_paths() {
    local path
    compopt -o filenames 2>/dev/null
    while IFS= read -r path; do COMPREPLY+=("$path"); done < <(compgen "$1" -- "$2")
}
complete -F _octavo octavo
"""


def script(shapes: Sequence[CommandShape]) -> str:
    after, flags, following = [], [], []
    for shape in shapes:
        command = shlex.quote(shape.words)
        for flag in shape.flags:
            if flag.takes is not None:
                names = "|".join(shlex.quote(f"{shape.words} {name}") for name in flag.names)
                after.append(f"        {names}) {_reply(flag.takes)}return ;;")
        names = " ".join(name for flag in shape.flags for name in flag.names)
        flags.append(f'            {command}) _octavo_words {shlex.quote(names)} "$cur" ;;')
        if shape.next:
            words = " ".join(name for name, _ in shape.next)
            following.append(f'        {command}) _octavo_words {shlex.quote(words)} "$cur" ;;')
        elif shape.arguments and _reply(shape.arguments[0]):
            following.append(f"        {command}) {_reply(shape.arguments[0])};;")
    nested = "|".join(shlex.quote(shape.words) for shape in shapes if shape.next and shape.words) or '""'
    text = _SCRIPT.replace("@NESTED@", nested).replace("@AFTER_FLAGS@", "\n".join(after))
    return text.replace("@FLAGS@", "\n".join(flags)).replace("@NEXT@", "\n".join(following))


def _reply(argument: Argument) -> str:
    if argument.values:
        return f'_octavo_words {shlex.quote(" ".join(argument.values))} "$cur"; '
    if argument.files:
        return f'_octavo_paths {"-d" if argument.files == "folder" else "-f"} "$cur"; '
    return ""
