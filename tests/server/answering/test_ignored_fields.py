"""Ignored fields in the answer's header and in the log."""

from __future__ import annotations

import logging

import pytest

from server.api import fields
from server.api.fields import IGNORED_HEADER, ignored_header


@pytest.fixture(autouse=True)
def _nothing_logged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "_logged", set())


def test_each_ignored_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    assert ignored_header(["verbosity", "effort"]) == {IGNORED_HEADER: "effort, verbosity"}
    assert ignored_header(["verbosity", "effort"]) == {IGNORED_HEADER: "effort, verbosity"}
    assert ignored_header(["effort", "mood"]) == {IGNORED_HEADER: "effort, mood"}
    assert ignored_header([]) == {}
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "ignored or lowered: effort, verbosity." in caplog.messages[0]
    assert "ignored or lowered: mood." in caplog.messages[1]


def test_clients_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(300):
        ignored_header([f"field{number}", "a\nforged line"])
    assert len(caplog.messages) == fields._MOST_LOGGED
    assert not any("forged" in message for message in caplog.messages)
