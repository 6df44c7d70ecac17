"""The command line: `octavo COMMAND`. Heavy imports wait until a command needs them and signals are handled."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from cli import version
from cli.commands import COMMANDS, SYNONYMS
from cli.terminal.style import say, take_plain_flag

_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 for success, 1 if the start or a check failed, 2 for wrong settings, 130
    if Ctrl-C stopped it."""
    arguments = take_plain_flag(list(sys.argv[1:] if argv is None else argv))
    if arguments[:1] == ["help"]:  # as in git and cargo
        arguments = [*arguments[1:], "--help"]
    command = arguments[0] if arguments else ""
    if argv is not None:
        return _run(command, arguments)
    _own_the_process(command, arguments)
    try:
        status = _run(command, arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        say(f"octavo {command}", "stopped.")
        return 128 + signal.SIGINT
    except OSError as problem:
        if not isinstance(problem, BrokenPipeError) and problem.errno not in _NOT_WRITTEN:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards what Python flushes at exit
        if isinstance(problem, BrokenPipeError):
            return 128 + signal.SIGPIPE
        failed = f"{problem.filename} failed" if problem.filename else "the output cannot be written"
        say(f"octavo {command}".strip(), f"{failed}: {problem.strerror}.")
        return 1
    return status


def _run(command: str, arguments: list[str]) -> int:
    """Run a command of the process or of a caller."""
    if command == "--version":
        print(f"octavo {version()}")
        return 0
    if command in ("-h", "--help"):
        from cli.commands import print_overview

        print_overview()
        return 0
    if command not in COMMANDS:
        if not arguments:  # only shows information
            from cli.commands import print_overview

            print_overview()
        _refuse(arguments)
    return COMMANDS[command].run(arguments[1:])


def _own_the_process(command: str, arguments: list[str]) -> None:
    """Change signal handlers and streams, which is only allowed in our own process."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # another handler is installed
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    asks_help = bool({"-h", "--help"} & set(arguments))
    if command == "serve" and not asks_help:
        for signum in (signal.SIGTERM, signal.SIGINT):  # a running server replaces these handlers
            signal.signal(signum, _stop_early)
        from engine import compute_in_one_thread  # leave the cores to the engine

        compute_in_one_thread()
    elif command in ("chat", "complete", "quantize", "run") and not asks_help:
        from cli.terminal.ending import end_with  # removes a loaded model or an incomplete folder

        end_with("SIGTERM", "SIGHUP")
    elif hasattr(signal, "SIGPIPE") and (command != "bench" or asks_help):
        # If the reader of a pipe closes it, as `| head` does, this process ends silently.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _stop_early(signum: int, frame: FrameType | None) -> NoReturn:
    print("octavo: stopped before the model was loaded.", file=sys.stderr)
    raise SystemExit(0)


def _refuse(arguments: list[str]) -> NoReturn:
    say("octavo", f"{_no_command(arguments)} (see octavo --help)")
    raise SystemExit(2)


def _no_command(arguments: list[str]) -> str:
    from server.config.wording import did_you_mean

    if not arguments:
        return f"a command is missing: {', '.join(COMMANDS)}"
    name = arguments[0]
    if name in ("-v", "-V", "version"):
        return f"unknown {'flag' if name.startswith('-') else 'command'} {name!r}; did you mean --version?"
    if name.startswith("-"):
        return f"{name.partition('=')[0]} must come after the command ({', '.join(COMMANDS)})"
    if synonym := SYNONYMS.get(name.lower()):
        return f"unknown command {name!r}; did you mean {synonym}?"
    if os.sep in name or name.endswith(".gguf") or Path(name).is_dir():
        return f"unknown command {name!r}; to serve that model: octavo serve {name}"
    near = did_you_mean(name, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
    return f"unknown command {name!r}{near}"


if __name__ == "__main__":
    sys.exit(main())
