"""The command line: `octavo COMMAND`. Heavy imports wait until a command needs them, and until signals are handled."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from server.config.loading import Loaded, OneLineParser


def version() -> str:
    """The installed version of Octavo."""
    from importlib import metadata

    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 all is well, 1 it could not start or a check failed, 2 wrong settings."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    if command == "--version":
        print(f"octavo {version()}")
        return 0
    if command in COMMANDS:
        if argv is None and command == "serve":  # the process is ours; once it serves, other handlers take over
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, _stop_early)
            _leave_cores_to_the_engine()
        if argv is None and (command in ("config", "doctor") or {"-h", "--help"} & set(arguments)):
            _end_with_the_reader()
        return COMMANDS[command][1](arguments[1:])
    parser = _overview()
    if command in ("-h", "--help"):
        parser.print_help()
        return 0
    parser.error(_no_command(arguments))


def _leave_cores_to_the_engine() -> None:
    from engine import compute_in_one_thread

    compute_in_one_thread()


def _end_with_the_reader() -> None:
    """A pipe whose reader leaves, as `| head` does, ends this process without a trace."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _stop_early(signum: int, frame: FrameType | None) -> NoReturn:
    print("octavo: stopped before it served.", file=sys.stderr)
    raise SystemExit(0)


def _no_command(arguments: list[str]) -> str:
    from server.config.sources import did_you_mean

    if not arguments:
        return f"a command is missing: {', '.join(COMMANDS)}"
    if arguments[0].startswith("-"):
        return f"{arguments[0].partition('=')[0]} must come after the command ({', '.join(COMMANDS)})"
    near = did_you_mean(arguments[0], COMMANDS) or f"; there are {', '.join(COMMANDS)}"
    return f"unknown command {arguments[0]!r}{near}"


def _overview() -> OneLineParser:
    from server.config.loading import OneLineParser

    parser = OneLineParser(prog="octavo", description="Serves transformer models over HTTP.", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (about, _) in COMMANDS.items():
        commands.add_parser(name, help=about)
    return parser


def _load(command: str, arguments: list[str], *, json: bool = False) -> tuple[Loaded, bool]:
    """The settings of a command that takes them all as flags, and whether --json was given; ends the process with
    status 2 and one line if something in them is wrong."""
    from engine import ConfigError
    from server.config.loading import SettingsParser

    about = COMMANDS[command][0]
    parser = SettingsParser(f"octavo {command}", f"{about[0].upper()}{about[1:]}.")
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    try:
        return parser.load(given), json and given.json
    except ConfigError as problem:
        parser.error(str(problem))


def _serve(arguments: list[str]) -> int:
    loaded, _ = _load("serve", arguments)
    from engine import OctavoError
    from server.door.listening import StartupError
    from server.run import serve

    try:
        return serve(loaded.engine, loaded.settings, version(), notes=loaded.notes)
    except (OctavoError, StartupError) as problem:
        paragraph = " ".join(line.strip() for line in str(problem).splitlines())  # libraries' messages have several
        print(f"octavo: cannot start: {paragraph}", file=sys.stderr)
        return 1


def _config(arguments: list[str]) -> int:
    loaded, json = _load("config", arguments, json=True)
    from server.config.show import as_json, as_table

    _print_notes(loaded)
    print(as_json(loaded) if json else as_table(loaded))
    return 0


def _doctor(arguments: list[str]) -> int:
    loaded, json = _load("doctor", arguments, json=True)
    from server.doctor import examine, report

    _print_notes(loaded)
    findings = examine(loaded.engine, loaded.settings)
    print(report(findings, json=json))
    return 1 if any(finding.verdict == "FAIL" for finding in findings) else 0


def _bench(arguments: list[str]) -> int:
    from server.bench.cli import main

    return main(arguments)


def _print_notes(loaded: Loaded) -> None:
    for note in loaded.notes:
        print(f"octavo: {note}", file=sys.stderr)


# name: what it does, and the function that gets the arguments after the name and returns the exit status.
COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "serve": ("serve a model over the OpenAI API; without MODEL the bundled one, which is untrained", _serve),
    "config": ("show every setting, its value and where it came from", _config),
    "doctor": ("check this machine, the settings and the model, and say what to fix", _doctor),
    "bench": ("measure a server: octavo bench serve loads any OpenAI-compatible one", _bench),
}

if __name__ == "__main__":
    sys.exit(main())
