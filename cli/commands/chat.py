"""`octavo chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from cli.talking.conversation import TerminalConversation
from cli.talking.loop import Chat
from cli.talking.model import CHAT, Model, talk
from cli.talking.options import add_decoding, add_place, settings_of
from cli.terminal.parser import OneLineParser

PROG = "octavo chat"
DESCRIPTION = """\
Chat with a model in the terminal. In the chat, /help lists the commands, Ctrl-C stops an answer and Ctrl-D leaves.
If stdin is a pipe, each line is a message and stdout gets only the answers.

  octavo chat                             the local server, or the bundled model
  octavo chat path/to/model.gguf          load a model for this chat
  octavo chat --url http://gpu-box:8000   a server on another machine
  echo "Who sings?" | octavo chat --seed 7
"""


def chat_parser(prog: str, description: str, model: str, add_more: Callable[[OneLineParser], None]) -> OneLineParser:
    """The flags of a command that chats.

    Args:
        model: the help text of the argument MODEL.
        add_more: adds the command's own flags.
    """
    made = OneLineParser(prog=prog, usage=f"{prog} [MODEL] [flags]", description=description)
    made.add_argument("model", metavar="MODEL", nargs="?", help=model)
    made.add_argument("--system", metavar="TEXT", help="system message, which tells the model how to behave")
    add_more(made)
    add_decoding(made, beams=True)
    return made


def chatting(made: OneLineParser, given: argparse.Namespace) -> Callable[[Model], int]:
    """The conversation that the flags describe; ends the process with status 2 if they are wrong."""
    settings = settings_of(made, given)

    def chat(model: Model) -> int:
        model.require(CHAT)
        return Chat(model, TerminalConversation(given.system), settings, made.prog).run()

    return chat


def parser() -> OneLineParser:
    """The parser of model, server and decoding."""
    about = "folder, GGUF file or hub id to load here; with --url, the id of a model there"
    return chat_parser(PROG, DESCRIPTION, about, add_place)


def run(arguments: list[str]) -> int:
    """Talk. Returns 0, 1 for a failure, 2 for wrong flags, or 130 if Ctrl-C stopped it."""
    made = parser()
    given = made.parse_args(arguments)
    return talk(PROG, given, chatting(made, given), chats=True)
