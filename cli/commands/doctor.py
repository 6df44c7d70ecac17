"""`octavo doctor`: problems that would prevent or impair a start."""

from __future__ import annotations

from cli.settings import SettingsParser, load, print_notes, settings_parser


def parser() -> SettingsParser:
    return settings_parser("doctor", json=True)


def run(arguments: list[str]) -> int:
    """Check and report; returns 1 if something would prevent the start."""
    made = parser()
    loaded, given = load(made, arguments)
    from cli.doctor import examine, report
    from engine import ConfigError
    from server.models.declared import declare

    print_notes(loaded)
    try:
        several = declare(loaded.settings, loaded.named)
    except ConfigError as problem:
        made.error(str(problem))
    findings = examine(loaded.engine, loaded.settings, several)
    print(report(findings, json=given.json))
    return 1 if any(finding.verdict == "FAIL" for finding in findings) else 0
