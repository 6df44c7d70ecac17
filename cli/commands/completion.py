"""`octavo completion SHELL`: the script that a shell reads once."""

from __future__ import annotations

from importlib import import_module

from cli.terminal.parser import OneLineParser

PROG = "octavo completion"
SHELLS = ("bash", "zsh", "fish")
DESCRIPTION = """\
Print the script that completes octavo's commands, flags and values in a shell. Save it as follows, and open a new
shell:

  bash    octavo completion bash > ~/.local/share/bash-completion/completions/octavo
  zsh     octavo completion zsh > "${fpath[1]}/_octavo"
  fish    octavo completion fish > ~/.config/fish/completions/octavo.fish

To try it in the current shell: source <(octavo completion bash); in fish, octavo completion fish | source.
"""


def parser() -> OneLineParser:
    """The parser of the shell's name."""
    made = OneLineParser(prog=PROG, usage=f"{PROG} {'|'.join(SHELLS)}", description=DESCRIPTION)
    made.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    return made


def run(arguments: list[str]) -> int:
    given = parser().parse_args(arguments)
    from cli.completion.shape import shapes

    print(import_module(f"..completion.{given.shell}", __package__).script(list(shapes())), end="")
    return 0
