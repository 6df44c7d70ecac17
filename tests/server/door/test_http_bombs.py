"""Bombs over HTTP, to services in processes of their own: small files that promise, or unpack to, far more. Each gets a
clear answer, and all the service's processes together grow by a bounded amount."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import bombs
from support.bombs import MIB
from support.image_text import make_image_model
from support.service import PATIENCE, Service, serving
from support.speech import make_speech_checkpoint

pytestmark = pytest.mark.slow

LIMIT = 60  # seconds of sound
TOO_LARGE, NO_IMAGE, TOO_LONG, NO_SOUND = "image_too_large", "invalid_image", "audio_too_long", "invalid_audio"
PIXELS = r"at most 32000000 are allowed \(max_image_pixels\)\. Make it smaller, or raise --max-image-pixels"
UNPACKED = r"unpacks to more than 1048576 bytes"
SECONDS = r"seconds or more, but the limit is 60 \(max_audio_seconds\)\. Send it in parts, or raise --max-audio-seconds"
JOINED = r"it consists of \d{5,6} files; at most 10000 are allowed"

# What makes the file; what the refusal says, or None if it is taken, and its code; how many MiB all processes may grow.
IMAGES: dict[str, tuple[Callable[[], bytes], str | None, str, int]] = {
    "a PNG of one colour": (lambda: bombs.png(30_000), f"has 30000 x 30000 pixels, but {PIXELS}", TOO_LARGE, 100),
    "a WebP's header": (lambda: bombs.webp_promise(b"VP8X", 2**24), f"{2**24} x {2**24} pix.*{PIXELS}", TOO_LARGE, 100),
    "a WebP's header within Pillow's limits": (
        lambda: bombs.webp_promise(b"VP8L", 12_000), f"has 12000 x 12000 pixels, but {PIXELS}", TOO_LARGE, 100,
    ),
    "a WebP's header alone": (lambda: bombs.webp_promise(b"VP8L", 5_600), "damaged", NO_IMAGE, 700),
    "a JPEG's header": (lambda: bombs.jpeg_promise(65_500), f"has 65500 x 65500 pixels, but {PIXELS}", TOO_LARGE, 100),
    "a JPEG with hardly any data": (lambda: bombs.jpeg_promise(5_600), None, "", 400),
    "a GIF's header": (lambda: bombs.gif_promise(65_535), f"has 65535 x 65535 pixels, but {PIXELS}", TOO_LARGE, 100),
    "a BMP's header": (lambda: bombs.bmp_promise(2**31 - 1), f"{2**31 - 1} x .*{PIXELS}", TOO_LARGE, 100),
    "a TIFF": (bombs.tiff_promise, "not JPEG, PNG, WEBP, GIF, BMP", NO_IMAGE, 100),
    "an icon": (bombs.ico_promise, "not JPEG, PNG, WEBP, GIF, BMP", NO_IMAGE, 100),
    "a packed text": (lambda: bombs.png_text("zTXt", 400 * MIB), UNPACKED, TOO_LARGE, 100),
    "a packed text in UTF-8": (lambda: bombs.png_text("iTXt", 400 * MIB), UNPACKED, TOO_LARGE, 100),
    "a packed profile": (lambda: bombs.png_text("iCCP", 400 * MIB), UNPACKED, TOO_LARGE, 100),
    "many packed texts": (lambda: bombs.png_text("zTXt", 1_000_000, 2_000), UNPACKED, TOO_LARGE, 250),
    "more rows than a picture has": (lambda: bombs.png_with_more_rows(100, 400 * MIB), None, "", 100),
    # Of an animation the first picture counts: all of them take 16 GB.
    "pictures of a PNG": (lambda: bombs.apng(2_000, 1_000), None, "", 200),
    "pictures of a GIF": (lambda: bombs.gif(2_000, 1_000), None, "", 200),
    "pictures of a WebP": (lambda: bombs.webp(2_000, 1_000), None, "", 200),
    "zeros in gzip": (lambda: bombs.gzipped(400 * MIB), "not JPEG", NO_IMAGE, 100),
    "zeros in an archive": (lambda: bombs.zipped(100 * MIB, 4), "not JPEG", NO_IMAGE, 100),
}  # fmt: skip
SOUNDS: dict[str, tuple[Callable[[], bytes], str | None, str, int]] = {
    "hours of FLAC": (lambda: bombs.flac(2.0), f"has 7200 {SECONDS}", TOO_LONG, 250),
    "hours of MP3": (lambda: bombs.mp3(15 * MIB), f"has 15729 {SECONDS}", TOO_LONG, 250),
    "an hour of WAV": (lambda: bombs.wav(15 * MIB), f"has 3932 {SECONDS}", TOO_LONG, 250),
    "a FLAC's header": (bombs.flac_promise, f"has 4294967 {SECONDS}", TOO_LONG, 250),
    "an MP3's header": (bombs.mp3_promise, f"has 603980 {SECONDS}", TOO_LONG, 250),
    "a WAV's header of 4 GiB": (lambda: bombs.wav_promise(2.0), None, "", 250),  # two seconds are there
    "a WAV of 65,535 channels": (lambda: bombs.wav_head(65_535, 16_000), "cannot be decoded as audio", NO_SOUND, 250),
    "a WAV of 4 GHz": (lambda: bombs.wav_head(1, 2**32 - 1), "cannot be decoded as audio", NO_SOUND, 250),
    "hours of Ogg": (lambda: bombs.ogg_files(4 * MIB, 20.0), SECONDS, TOO_LONG, 250),
    "an Ogg of many files": (lambda: bombs.ogg_files(15 * MIB, 0.01), JOINED, NO_SOUND, 250),
    "a FLAC of many files": (lambda: bombs.flac_files(15 * MIB), JOINED, NO_SOUND, 250),
    "an Ogg of empty pages": (lambda: bombs.ogg_pages(15 * MIB), "cannot be decoded as audio", NO_SOUND, 250),
    "zeros in gzip": (lambda: bombs.gzipped(400 * MIB), "cannot be decoded as audio", NO_SOUND, 250),
    "zeros in an archive": (lambda: bombs.zipped(100 * MIB, 4), "cannot be decoded as audio", NO_SOUND, 250),
}


# ---------------------------------------------------------------- the memory of several processes


def family_of(pid: int) -> dict[int, int]:
    """A process and all that came of it, each with its parent."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = {pid: parents.get(pid, 0)}
    while more := {child: parent for child, parent in parents.items() if parent in found and child not in found}:
        found |= more
    return found


def memory(pid: int, name: str) -> int:
    """Bytes of resident memory now (VmRSS), or at most since the peak was forgotten (VmHWM); 0 where it has ended."""
    try:
        found = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


class Growth:
    """How much all processes of a service grow meanwhile.

    Peaks are looked at again and again, since a worker that is given up ends with its own. They are added, although
    they may have been at different times; a worker that is forked meanwhile begins with its parent's memory.
    """

    def __init__(self, service: Service):
        self._pid = service.process.pid
        family = family_of(self._pid)
        for pid in family:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget the peak
        self._before = {pid: memory(pid, "VmRSS") for pid in family}
        self._peaks: dict[int, int] = {}
        self._parents = dict(family)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Growth:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    @property
    def mib(self) -> int:
        """Of all processes together."""
        grown = 0
        for pid, peak in self._peaks.items():
            begun = self._before.get(pid, self._before.get(self._parents[pid], 0))
            grown += max(peak - begun, 0)
        return grown // MIB

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self._look()

    def _look(self) -> None:
        for pid, parent in family_of(self._pid).items():
            self._parents.setdefault(pid, parent)
            self._peaks[pid] = max(self._peaks.get(pid, 0), memory(pid, "VmHWM"))


# ---------------------------------------------------------------- services


def serve(path: Path, log: Path, *settings: str) -> Iterator[Service]:
    with serving(str(path), "--dtype", "float32", "--kv-cache-memory", "64MiB", *settings, log=log) as service:
        yield service


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("images")
    service = serve(make_image_model("vit", folder).path, folder / "service.log")
    for one in service:
        assert show(one, bombs.png(100)).status_code == 200  # workers are there
        yield one


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("sounds")
    model = make_speech_checkpoint("whisper", folder / "whisper")
    for one in serve(model.path, folder / "service.log", "--max-audio-seconds", str(LIMIT)):
        assert play(one, bombs.wav_promise(1.0)).status_code == 200
        yield one


def show(service: Service, content: bytes) -> httpx.Response:
    body = {"input": {"image": base64.b64encode(content).decode()}}
    return httpx.post(f"{service.url}/v1/classify", json=body, timeout=PATIENCE)


def play(service: Service, content: bytes) -> httpx.Response:
    fields = {"language": "en", "temperature": "0"}
    files = {"file": ("sound.mp3", content, "audio/mpeg")}
    return httpx.post(f"{service.url}/v1/audio/transcriptions", data=fields, files=files, timeout=PATIENCE)


def check(answer: httpx.Response, words: str | None, code: str, status: int) -> None:
    if words is None:
        assert answer.status_code == 200, answer.text
        return
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == code
    assert re.search(words, error["message"]), error["message"]


@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str, images: Service) -> None:
    make, words, code, most = IMAGES[name]
    content = make()
    assert len(content) < 10 * MIB
    with Growth(images) as growth:
        answer = show(images, content)
    check(answer, words, code, 400)
    assert growth.mib < most
    assert show(images, bombs.png(100)).status_code == 200


@pytest.mark.parametrize("name", SOUNDS)
def test_sounds(name: str, sounds: Service) -> None:
    make, words, code, most = SOUNDS[name]
    content = make()
    assert len(content) < 16 * MIB
    with Growth(sounds) as growth:
        answer = play(sounds, content)
    check(answer, words, code, 413 if code == TOO_LONG else 400)
    assert growth.mib < most
    assert play(sounds, bombs.wav_promise(1.0)).status_code == 200


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_the_largest_image_that_is_allowed(form: str, images: Service) -> None:
    """Of every format: to decode it is not too costly."""
    with Growth(images) as growth:
        answer = show(images, bombs.largest(form))
    assert answer.status_code == 200, answer.text
    assert growth.mib > 100  # so peaks are seen
