"""`octavo run`: serve a model, and talk with it in the same terminal."""

from __future__ import annotations

from cli.talking.conversation import Conversation
from cli.talking.loop import Chat
from cli.talking.model import CHAT, serving, talking
from cli.talking.options import add_decoding, add_loading, default_port, loading, settings_of
from cli.terminal.parser import OneLineParser

PROG = "octavo run"
DESCRIPTION = """\
Serves a model on a port and talks with it here. The server ends with the chat: /help tells what can be done in it, and
Ctrl-D leaves. octavo serve serves without a chat, octavo chat talks without a port.

  octavo run path/to/model.gguf
  octavo run org/name-GGUF:Q4_K_M --port 9000
  octavo run path/to/model --chat-template chatml
"""


def parser() -> OneLineParser:
    """Model, address and decoding."""
    made = OneLineParser(prog=PROG, usage=f"{PROG} [MODEL] [flags]", description=DESCRIPTION)
    made.add_argument("model", metavar="MODEL", nargs="?", help="folder, GGUF file or hub id [the bundled model]")
    made.add_argument("--system", metavar="TEXT", help="the system message: what the model is to be")
    group = made.add_argument_group("where it serves")
    group.add_argument("--host", metavar="HOST", default="127.0.0.1", help="[%(default)s]")
    group.add_argument("--port", metavar="N", type=int, default=default_port(), help="0 for any free one [%(default)s]")
    add_loading(made)
    add_decoding(made, beams=True)
    return made


def run(arguments: list[str]) -> int:
    """Serve and talk; 0 done, 1 it could not, 2 wrong flags, 130 stopped by Ctrl-C."""
    made = parser()
    given = made.parse_args(arguments)
    settings = settings_of(made, given)
    if not 0 <= given.port <= 65535:
        made.error(f"--port must be from 0 to 65535, got {given.port}")

    def chat() -> int:
        with serving(given.model, loading(given), (given.host, given.port)) as model:
            model.require(CHAT)
            return Chat(model, Conversation(given.system), settings, PROG).run()

    return talking(PROG, chat)
