"""Segments as subtitles."""

from __future__ import annotations

from collections.abc import Sequence

from server.api.speech_schemas import SpokenSegment


def srt(segments: Sequence[SpokenSegment]) -> str:
    """SubRip."""
    return "".join(
        f"{number}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n{_line(segment)}\n\n"
        for number, segment in enumerate(segments, start=1)
    )


def vtt(segments: Sequence[SpokenSegment]) -> str:
    """WebVTT (https://www.w3.org/TR/webvtt1/)."""
    cues = (f"{_time(s.start, '.')} --> {_time(s.end, '.')}\n{_line(s)}\n\n" for s in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _line(segment: SpokenSegment) -> str:
    """A line in which nothing looks like the next cue's times."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _time(seconds: float, mark: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"
