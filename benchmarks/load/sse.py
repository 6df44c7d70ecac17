"""Server-sent events from bytes that arrive in arbitrary pieces."""

from __future__ import annotations

DONE = b"[DONE]"


class SseDecoder:
    """Collects bytes and gives the data of whole events (WHATWG HTML, 9.2.6).

    Comments, and fields other than `data`, are skipped. An event that the stream's end cuts off is never
    given.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that `data` completes, in order."""
        text = self._rest + data
        if not self._begun:
            if b"\xef\xbb\xbf".startswith(text[:3]) and len(text) < 3:
                self._rest = text  # perhaps a byte order mark
                return []
            text, self._begun = text.removeprefix(b"\xef\xbb\xbf"), True
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # perhaps half of a line's end
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *blocks, self._rest = text.split(b"\n\n")
        self._rest += held
        events = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:  # what nearly all events look like
                events.append(block[6:])
            else:
                lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    events.append(b"\n".join(lines))
        return events
