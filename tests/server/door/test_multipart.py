"""Forms: what a body of multipart/form-data holds, and what is wrong with others."""

from __future__ import annotations

import tracemalloc

import httpx
import pytest

from server.api.multipart import MOST_PARAMETERS, MOST_PARTS, MOST_TEXT, MultipartForm, Upload, read_form
from server.errors import ApiError

KIND = 'multipart/form-data; boundary="b-1"'


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--b-1\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def refusal(content: bytes, kind: str = KIND) -> str:
    with pytest.raises(ApiError) as caught:
        read_form(content, kind)
    assert caught.value.status_code == 400
    assert caught.value.code == "invalid_body"
    return caught.value.message


def test_what_a_client_sends() -> None:
    sound = bytes(range(256)) * 50 + b"\r\n--b-2\r\n\r\n"
    request = httpx.Request(
        "POST", "http://x", data={"a": "ä", "list[]": ["1", "2"], "empty": ""}, files={"file": ('s "q".wav', sound)}
    )
    form = read_form(request.read(), request.headers["content-type"])
    assert form.texts == {"a": ["ä"], "list[]": ["1", "2"], "empty": [""]}
    assert form.files["file"].content == sound


def test_what_stands_around_parts() -> None:
    content = b"preamble\r\n" + part("a", b"1") + part("file", b"x", '; filename="n.wav"') + b"--b-1--\r\nepilogue"
    assert read_form(content, KIND) == MultipartForm({"a": ["1"]}, {"file": Upload("n.wav", b"x")})


@pytest.mark.parametrize("kind", ["application/json", "", "multipart/form-data", "multipart/mixed; boundary=b-1"])
def test_other_types(kind: str) -> None:
    assert "multipart/form-data" in refusal(part("a", b"1") + b"--b-1--", kind)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no parts"),
        (b"--other--", "has no parts"),
        (part("a", b"1"), "does not end"),
        (part("a", b"1")[:-5], "does not end"),
        (b"--b-1junk\r\n\r\n\r\n--b-1--", "does not end"),
        (b"--b-1\r\nno end of headers\r\n--b-1--", "no headers"),
        (b"--b-1\r\nX: " + b"y" * 9000 + b"\r\n\r\n\r\n--b-1--", "8192 bytes"),
        (b"--b-1\r\nX: y\r\n\r\n1\r\n--b-1--", "Content-Disposition"),
        (b"--b-1\r\nContent-Disposition: form-data\r\n\r\n1\r\n--b-1--", "with a name"),
        (part("a", b"\xff") + b"--b-1--", "UTF-8"),
        (part("a", b"x" * (MOST_TEXT + 1)) + b"--b-1--", f"at most {MOST_TEXT}"),
        (part("a", b"1") * (MOST_PARTS + 1) + b"--b-1--", f"more than {MOST_PARTS} parts"),
        (part("f", b"1", '; filename="a"') * 2 + b"--b-1--", "several files"),
        (b"--b-1\r\n" + b"X: y\r\n" * 100_000 + b"\r\n\r\n--b-1--", "8192 bytes"),
        (part("a", b"1") * 200_000 + b"--b-1--", f"more than {MOST_PARTS} parts"),
        (part("a", b"1", ";a" * MOST_PARAMETERS) + b"--b-1--", f"more than {MOST_PARAMETERS} parameters"),
    ],
)
def test_what_is_wrong_is_said(content: bytes, words: str) -> None:
    assert words in refusal(content)


def test_a_header_of_many_parameters() -> None:
    """Each of them costs time (CVE-2026-53539)."""
    few = KIND + ";a" * (MOST_PARAMETERS - 1)
    assert read_form(part("a", b"1") + b"--b-1--", few).texts == {"a": ["1"]}
    assert f"more than {MOST_PARAMETERS} parameters" in refusal(part("a", b"1") + b"--b-1--", few + ";a")


def test_bodies_of_megabytes_take_no_memory_of_their_own() -> None:
    """A huge preamble or epilogue (CVE-2026-40347), nearly nothing but separators, or no separator at all."""
    field, end, much = part("a", b"1"), b"--b-1--", b"x" * (8 << 20)
    tracemalloc.start()
    try:
        for content in (much + b"\r\n" + field + end, field + end + much):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            assert read_form(content, KIND) == MultipartForm({"a": ["1"]}, {})
            assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
        for content in (part("a", b"\r\n--b-" * 2_000_000), much):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            refusal(content)
            assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
    finally:
        tracemalloc.stop()
