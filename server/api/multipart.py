"""Bodies of multipart/form-data (RFC 7578): fields and one file, in as much memory as the body.

python-multipart 0.0.34 needs bounded memory too. But it accepts a form without an end, refuses a preamble (RFC 2046,
5.1.1) and does not limit parts, so the checks, limits and messages below would still be needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message

from server.errors import ApiError, shown

MOST_PARTS = 64
MOST_HEAD = 8 * 1024  # maximum bytes of a part's headers
MOST_TEXT = 64 * 1024  # maximum bytes of a field that is not a file
MOST_PARAMETERS = 64  # maximum headers of a part: each takes microseconds to parse


@dataclass(frozen=True, slots=True)
class Upload:
    """A file as sent."""

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class MultipartForm:
    """The content of a form: texts and files by field name, in order."""

    texts: dict[str, list[str]]
    files: dict[str, Upload]


def read_form(content: bytes, content_type: str) -> MultipartForm:
    """Parse a body as a form. `content_type`: the header, which contains the boundary between parts. Raises ApiError
    with the reason if the body is not such a form, or exceeds a limit."""
    kind = _headers(b"Content-Type: " + content_type.encode("latin-1", "replace"))
    boundary = kind.get_boundary()
    if kind.get_content_type() != "multipart/form-data" or not boundary:
        raise _wrong(f"The body must be a form with Content-Type: multipart/form-data, got {shown(content_type)}.")
    form = MultipartForm({}, {})
    separator = b"\r\n--" + boundary.encode("latin-1", "replace")
    at = 0 if content.startswith(separator[2:]) else content.find(separator) + 2
    if at == 1:
        raise _wrong("The form has no parts: the boundary from Content-Type does not occur in the body.")
    at += len(separator) - 2
    count = 0
    while not content.startswith(b"--", at):
        count += 1
        if count > MOST_PARTS:
            raise _wrong(f"The form has more than {MOST_PARTS} parts.")
        begin, end = content.find(b"\r\n", at), content.find(separator, at)
        head_end = content.find(b"\r\n\r\n", at, at + MOST_HEAD)
        if end < 0 or begin < 0 or content[at:begin].strip(b" \t"):
            raise _wrong("The form does not end with its boundary.")
        if not begin <= head_end < end:
            raise _wrong(f"A part of the form has no headers, or more than {MOST_HEAD} bytes of them.")
        _add(form, content[begin + 2 : head_end + 2], content[head_end + 4 : end])
        at = end + len(separator)
    return form


def _add(form: MultipartForm, head: bytes, value: bytes) -> None:
    headers = _headers(head)
    name = headers.get_param("name", header="content-disposition")
    if headers.get_content_disposition() != "form-data" or not isinstance(name, str):
        raise _wrong("A part of the form lacks a Content-Disposition: form-data header with a name.")
    file_name = headers.get_param("filename", header="content-disposition")
    if file_name is not None:
        if name in form.files:
            raise _wrong(f"The form has several files named {shown(name)}; send one.", name)
        form.files[name] = Upload(file_name if isinstance(file_name, str) else "", value)
        return
    if len(value) > MOST_TEXT:
        raise _wrong(
            f"{shown(name)} has {len(value)} bytes; fields other than files may have at most {MOST_TEXT}.", name
        )
    try:
        text = value.decode()
    except UnicodeDecodeError as problem:
        reason = f"{problem.reason} at byte {problem.start}"
        raise _wrong(f"{shown(name)} is not valid UTF-8: {reason}.", name) from None
    form.texts.setdefault(name, []).append(text)


def _headers(lines: bytes) -> Message:
    if lines.count(b";") > MOST_PARAMETERS:
        raise _wrong(f"The headers of the form, or of a part of it, have more than {MOST_PARAMETERS} parameters.")
    message = Message()
    for line in lines.replace(b"\r\n ", b" ").replace(b"\r\n\t", b" ").split(b"\r\n"):
        name, colon, value = line.decode("utf-8", "replace").partition(":")
        if colon:
            message[name.strip()] = value.strip().replace("\n", " ").replace("\r", " ")
    return message


def _wrong(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_body")
