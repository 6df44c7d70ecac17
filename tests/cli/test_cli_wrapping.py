"""Lines of a streamed text that break between words."""

from __future__ import annotations

import pytest

from cli.terminal.wrapping import Wrapping

TEXT = """\
The quick brown fox jumps over it.

    - an item   with spaces, long enough
```py
print('code is never broken, however long')
```
and then a-very-long-word-that-fits-no-line-at-all it goes on"""
WRAPPED = """\
The quick brown fox
jumps over it.

    - an item   with
spaces, long enough
```py
print('code is never broken, however long')
```
and then
a-very-long-word-that-fits-no-line-at-all
it goes on"""


def wrapped(text: str, size: int, monkeypatch: pytest.MonkeyPatch, *, terminal: bool = True) -> str:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    wrapping = Wrapping()
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return "".join(map(wrapping.feed, pieces)) + wrapping.end()


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(("text", "expected"), [(TEXT, WRAPPED), ("文" * 11 + ", x", "文" * 10 + "\n文, x")])
def test_lines_break_between_words(text: str, expected: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrapped(text, size, monkeypatch) == expected


def test_a_pipe_gets_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrapped(TEXT, 5, monkeypatch, terminal=False) == TEXT


def test_a_word_of_any_length_is_shown_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    wrapping = Wrapping()
    shown = "".join(wrapping.feed("x" * 10) for _ in range(100))
    assert len(shown) >= 1000 - 256
    assert shown + wrapping.end() == "x" * 1000
