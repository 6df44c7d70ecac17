"""`octavo run`: serve a model, and chat with it in the same terminal."""

from __future__ import annotations

from cli.commands.chat import chat_parser, chatting
from cli.talking.model import serving, talking
from cli.talking.options import add_loading, default_port, loading
from cli.terminal.parser import OneLineParser

PROG = "octavo run"
DESCRIPTION = """\
Serve a model and chat with it in this terminal. The server stops when the chat ends. In the chat, /help lists the
commands and Ctrl-D leaves. To serve without a chat, use octavo serve; to chat without opening a port, octavo chat.

  octavo run path/to/model.gguf
  octavo run org/name-GGUF:Q4_K_M --port 9000
  octavo run path/to/model --chat-template chatml
"""


def parser() -> OneLineParser:
    """The parser of model, address and decoding."""
    return chat_parser(PROG, DESCRIPTION, "folder, GGUF file or hub id [the bundled model]", _add_address)


def _add_address(made: OneLineParser) -> None:
    group = made.add_argument_group("address")
    group.add_argument("--host", metavar="HOST", default="127.0.0.1", help="address to listen on [%(default)s]")
    group.add_argument(
        "--port", metavar="N", type=int, default=default_port(), help="0 picks a free port [%(default)s]"
    )
    add_loading(made)


def run(arguments: list[str]) -> int:
    """Serve the model and chat with it. Returns 0, 1 for a failure, 2 for wrong flags, or 130 if Ctrl-C stopped it."""
    made = parser()
    given = made.parse_args(arguments)
    chat = chatting(made, given)
    if not 0 <= given.port <= 65535:
        made.error(f"--port must be from 0 to 65535, got {given.port}")

    def serve() -> int:
        with serving(given.model, loading(given), (given.host, given.port), chats=True) as model:
            return chat(model)

    return talking(PROG, serve)
