"""The chat loop: read a line, stream an answer, repeat until the input ends."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from cli.errors import NoServerError, TalkError
from cli.talking.answers import ChatAnswer, stream
from cli.talking.conversation import TerminalConversation
from cli.talking.model import Model
from cli.talking.slash import Leave, Slash
from cli.terminal.keys import keys_kept
from cli.terminal.style import harmless, is_rich, note, say, styled
from cli.terminal.wrapping import Wrapping


class Chat:
    """A conversation with a model.

    Lines come from a terminal, with a prompt and a history, or from a pipe. In a pipe each line is one message, and
    stdout gets only the answers.
    """

    def __init__(self, model: Model, conversation: TerminalConversation, settings: dict[str, Any], prog: str):
        self._model = model
        self._conversation = conversation
        self._settings = settings  # fields for the body of every request
        self._prog = prog  # the prefix of error messages
        self._slash = Slash(conversation, settings, model.id, model.card)
        self._asks = sys.stdin.isatty()
        self._line_editor = self._asks and sys.stdout.isatty()

    def run(self) -> int:
        """Chat until the end; returns the exit status, which is 1 if lines came from a pipe and one got no answer."""
        failed = False
        if self._asks:
            self._set_up_editor()
            note(f"{self._model.id}, {self._model.place}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D "
                f"leaves.")  # fmt: skip
        with contextlib.suppress(Leave):
            while (line := self._read()) is not None:
                if line.strip():
                    failed = not self._take(line) or failed
        return 1 if failed and not self._asks else 0

    def _take(self, line: str) -> bool:
        """Run or answer a line; returns whether that worked."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                told, text = self._slash.run(line)
                if told:
                    note(told)
                return text is None or self._answer(text)
            return self._answer(line[1:] if line.startswith("//") else line)
        except NoServerError as problem:
            say(self._prog, f"{problem}: it has stopped or cannot be reached; /retry asks again")
        except TalkError as problem:
            say(self._prog, str(problem))
        return False

    def _answer(self, text: str) -> bool:
        talk = self._conversation
        talk.say("user", text)
        answer = ChatAnswer()
        stopped = False
        try:
            if forgotten := talk.fit(self._model, self._settings.get("max_tokens")):
                what = (
                    "The oldest message and its answer"
                    if forgotten == 1
                    else f"The {forgotten} oldest messages and their answers"
                )
                note(f"({what} were dropped: the context of {self._model.context} tokens is full.)")
            self._print(stream(self._model, {"messages": talk.whole, **self._settings}, answer))
        except KeyboardInterrupt:
            if not self._asks:
                raise
            stopped = True
        except TalkError as problem:
            self._end_line(answer)
            if not answer.text:
                talk.undo()
            context = problem.code == "context_length_exceeded"
            raise type(problem)(
                f"{problem} /reset starts a new conversation." if context else str(problem), problem.code
            ) from None
        finally:
            if answer.text:
                talk.say("assistant", answer.text)
        self._end_line(answer)
        if stopped and not answer.text:
            talk.undo()
        if self._asks:
            end = {"length": " (cut: it reached max_tokens or the context's end)"}.get(answer.finish_reason or "", "")
            note("(stopped)" if stopped else f"{answer.line()}{end}")
        return True

    def _print(self, pieces: Any) -> None:
        wrapping = Wrapping()
        with keys_kept():
            try:
                for piece in pieces:
                    print(wrapping.feed(harmless(piece)), end="", flush=True)
            finally:
                print(wrapping.end(), end="", flush=True)

    @staticmethod
    def _end_line(answer: ChatAnswer) -> None:
        if not answer.text.endswith("\n"):
            print(flush=True)

    def _read(self) -> str | None:
        if not self._asks:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        lines: list[str] = []
        while True:
            try:
                line = self._ask("... " if lines else "> ")
            except EOFError:
                print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                print(file=sys.stderr)
                if not lines:
                    note("(Ctrl-D or /exit leaves)")
                lines = []
                continue
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    def _ask(self, sign: str) -> str:
        if not self._line_editor:  # stdout is only for answers
            print(sign, end="", file=sys.stderr, flush=True)
            return input()
        if not is_rich():
            return input(sign)
        # The bytes 1 and 2 enclose text without width on the line.
        before, _, after = styled("@", "bold green").partition("@")
        return input(f"\x01{before}\x02{sign}\x01{after}\x02")

    def _set_up_editor(self) -> None:
        """Set up the history, and Tab completion of commands, if Python has readline."""
        with contextlib.suppress(ImportError):
            import readline

            def complete(text: str, state: int) -> str | None:
                known = self._slash.completions(readline.get_line_buffer()[: readline.get_begidx()], text)
                return known[state] if state < len(known) else None

            readline.set_completer(complete)
            readline.set_completer_delims(" ")
            libedit = "libedit" in (readline.__doc__ or "")  # macOS and portable builds of Python
            readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
