"""`octavo completion SHELL`: the script that a shell reads once."""

from __future__ import annotations

from importlib import import_module

from cli.terminal.parser import OneLineParser

PROG = "octavo completion"
SHELLS = ("bash", "zsh", "fish")
DESCRIPTION = """\
Prints the script that makes a shell complete octavo's commands, flags and values. Put it where the shell finds it, and
open a new one:

  bash    octavo completion bash > ~/.local/share/bash-completion/completions/octavo
  zsh     octavo completion zsh > "${fpath[1]}/_octavo"
  fish    octavo completion fish > ~/.config/fish/completions/octavo.fish

For this shell alone: source <(octavo completion bash), or, in fish, octavo completion fish | source.
"""


def parser() -> OneLineParser:
    """The shell's name."""
    made = OneLineParser(prog=PROG, usage=f"{PROG} {'|'.join(SHELLS)}", description=DESCRIPTION)
    made.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    return made


def run(arguments: list[str]) -> int:
    """Print it."""
    given = parser().parse_args(arguments)
    from cli.completion.shape import shapes

    print(import_module(f"..completion.{given.shell}", __package__).script(list(shapes())), end="")
    return 0
