"""`octavo chat`: a conversation in the terminal."""

from __future__ import annotations

from cli.talking.conversation import Conversation
from cli.talking.loop import Chat
from cli.talking.model import CHAT, Model, talk
from cli.talking.options import add_decoding, add_place, settings_of
from cli.terminal.parser import OneLineParser

PROG = "octavo chat"
DESCRIPTION = """\
Talks with a model, token by token. In the chat, /help tells what can be done; Ctrl-C stops an answer, Ctrl-D leaves.
Lines that are piped in are messages, one after the other, and stdout gets the answers.

  octavo chat                                    what serves on this machine, else the bundled model
  octavo chat path/to/model --dtype bfloat16     a model that is loaded for this chat
  octavo chat --url http://gpu-box:8000          another machine's
  echo "Who sings?" | octavo chat --seed 7
"""


def parser() -> OneLineParser:
    """Model, place and decoding."""
    made = OneLineParser(prog=PROG, usage=f"{PROG} [MODEL] [flags]", description=DESCRIPTION)
    made.add_argument("model", metavar="MODEL", nargs="?", help="folder or hub id, loaded here; with --url an id there")
    made.add_argument("--system", metavar="TEXT", help="the system message: what the model is to be")
    add_place(made)
    add_decoding(made, beams=True)
    return made


def run(arguments: list[str]) -> int:
    """Talk; 0 done, 1 it could not, 2 wrong flags, 130 stopped by Ctrl-C."""
    made = parser()
    given = made.parse_args(arguments)
    settings = settings_of(made, given)

    def with_model(model: Model) -> int:
        model.require(CHAT)
        return Chat(model, Conversation(given.system), settings, PROG).run()

    return talk(PROG, given, with_model)
