"""Files of a few kilobytes to megabytes that promise, or unpack to, far more."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
import zlib
from functools import cache

import numpy as np
import PIL.Image
import soundfile

MIB = 2**20
_SOLID = (30, 60, 90)


def _saved(image: PIL.Image.Image, form: str, **settings: bool) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **settings)
    return file.getvalue()


def _small(form: str) -> bytearray:
    return bytearray(_saved(PIL.Image.new("RGB", (16, 16), _SOLID), form))


# ---------------------------------------------------------------- PNG

_MARK = b"\x89PNG\r\n\x1a\n"


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack("!I", len(content)) + name + content + struct.pack("!I", zlib.crc32(name + content))


def _head(width: int, height: int, bits: int = 1, kind: int = 0) -> bytes:
    return _MARK + _chunk(b"IHDR", struct.pack("!IIBBBBB", width, height, bits, kind, 0, 0, 0))


def _black(width: int, height: int) -> bytes:
    """The rows of a picture of one bit a pixel, packed."""
    return zlib.compress(bytes(height * (1 + -(-width // 8))), 9)


def png(side: int) -> bytes:
    """A whole picture of one colour."""
    return _head(side, side) + _chunk(b"IDAT", _black(side, side)) + _chunk(b"IEND", b"")


def png_beside(side: int, *before: bytes) -> bytes:
    """A whole picture behind other chunks."""
    return _head(side, side) + b"".join(before) + _chunk(b"IDAT", _black(side, side)) + _chunk(b"IEND", b"")


@cache
def _zeros(size: int) -> bytes:
    return zlib.compress(bytes(size), 9)


def png_text(kind: str, size: int, count: int = 1) -> bytes:
    """A picture with texts, or colour profiles, that unpack to so many bytes each."""
    packed = _zeros(size)
    content = {
        "zTXt": b"Comment\0\0" + packed,
        "iTXt": b"Comment\0\1\0\0\0" + packed,
        "iCCP": b"profile\0\0" + packed,
    }[kind]
    return png_beside(8, _chunk(kind.encode(), content) * count)


def png_with_more_rows(side: int, size: int) -> bytes:
    """A picture whose packed rows go on for so many bytes after its last one."""
    rows = side * (1 + -(-side // 8))
    return _head(side, side) + _chunk(b"IDAT", zlib.compress(bytes(rows + size), 9)) + _chunk(b"IEND", b"")


def apng(side: int, frames: int) -> bytes:
    """An animation in which each frame is a whole picture."""
    packed, number = _black(side, side), 0
    parts = [_head(side, side), _chunk(b"acTL", struct.pack("!II", frames, 0))]
    for frame in range(frames):
        parts.append(_chunk(b"fcTL", struct.pack("!IIIIIHHBB", number, side, side, 0, 0, 1, 10, 0, 0)))
        number += 1
        if frame:
            parts.append(_chunk(b"fdAT", struct.pack("!I", number) + packed))
            number += 1
        else:
            parts.append(_chunk(b"IDAT", packed))
    return b"".join((*parts, _chunk(b"IEND", b"")))


# ---------------------------------------------------------------- other images


def gif(side: int, frames: int) -> bytes:
    """The same as a GIF."""
    whole = _saved(PIL.Image.new("P", (side, side)), "GIF")
    begin = whole.index(b"\x2c", 13 + 3 * (2 << (whole[10] & 7)))  # behind the palette
    return whole[:begin] + whole[begin:-1] * frames + b"\x3b"


def webp(side: int, frames: int) -> bytes:
    """The same as a WebP."""
    whole = _saved(PIL.Image.new("RGB", (side, side), _SOLID), "WEBP", lossless=True)
    picture = whole[12:]
    assert picture.startswith(b"VP8L")

    def part(name: bytes, content: bytes) -> bytes:
        return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)

    edge = struct.pack("<I", side - 1)[:3]
    frame = part(b"ANMF", bytes(6) + edge + edge + b"\x0a\0\0" + b"\0" + picture)
    content = b"WEBP" + part(b"VP8X", b"\x02\0\0\0" + edge + edge) + part(b"ANIM", bytes(6)) + frame * frames
    return b"RIFF" + struct.pack("<I", len(content)) + content


def webp_promise(kind: bytes, side: int) -> bytes:
    """A header of each kind that WebP has, and nothing behind it."""
    edge = struct.pack("<I", side - 1)
    match kind:
        case b"VP8X":
            content = b"\x10\0\0\0" + edge[:3] + edge[:3]
        case b"VP8L":
            content = b"\x2f" + struct.pack("<I", (side - 1) | (side - 1) << 14)
        case _:
            content = b"\x10\0\0\x9d\x01\x2a" + struct.pack("<HH", side, side)
    content = content.ljust(40, b"\0")
    content = b"WEBP" + kind + struct.pack("<I", len(content)) + content
    return b"RIFF" + struct.pack("<I", len(content)) + content


def jpeg_promise(side: int) -> bytes:
    """The data of 16 x 16 pixels under a header of far more."""
    data = _small("JPEG")
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack("!HH", side, side)
    return bytes(data)


def gif_promise(side: int) -> bytes:
    """The same as a GIF, whose screen and picture are that large."""
    data = bytearray(gif(16, 1))
    begin = data.index(b"\x2c", 13 + 3 * (2 << (data[10] & 7)))
    for at in (6, begin + 5):
        data[at : at + 4] = struct.pack("<HH", side, side)
    return bytes(data)


def bmp_promise(side: int) -> bytes:
    """The same as a BMP."""
    data = _small("BMP")
    data[18:26] = struct.pack("<ii", side, side)
    return bytes(data)


def tiff_promise() -> bytes:
    """A TIFF of 2**32 - 1 pixels a side."""
    most = 2**32 - 1
    tags = [(256, 4, 1, most), (257, 4, 1, most), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8)]
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)


def ico_promise() -> bytes:
    """An icon that says it has 65,535 pictures, the first of them a PNG of 30,000 x 30,000."""
    inner = png(30_000)
    return struct.pack("<HHHBBBBHHII", 0, 1, 65_535, 0, 0, 0, 0, 1, 32, len(inner), 22) + inner


def largest(form: str) -> bytes:
    """No bomb: as many pixels as are allowed, with something in each part of the picture."""
    image = PIL.Image.linear_gradient("L").resize((8_000, 4_000)).convert("RGBA" if form != "JPEG" else "RGB")
    return _saved(image, form)


# ---------------------------------------------------------------- archives


@cache
def gzipped(size: int) -> bytes:
    """Zeros, packed by gzip."""
    return gzip.compress(bytes(size))


@cache
def zipped(size: int, count: int) -> bytes:
    """An archive of so many files of zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(count):
            archive.writestr(f"{number}.wav", bytes(size))
    return file.getvalue()


# ---------------------------------------------------------------- sound

RATE = 16_000


def _written(form: str, kind: str, seconds: float, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", rate, 1, kind, format=form) as out:
        left = round(seconds * rate)
        while left:
            out.write(np.zeros(min(left, 60 * rate), np.int16))
            left -= min(left, 60 * rate)
    return file.getvalue()


def flac(hours: float) -> bytes:
    """Silence."""
    return _written("FLAC", "PCM_16", hours * 3600)


def flac_promise() -> bytes:
    """A second that says it has 2**36 - 1 samples."""
    data = bytearray(_written("FLAC", "PCM_16", 1.0))
    data[21], data[22:26] = data[21] | 0x0F, b"\xff" * 4
    return bytes(data)


def flac_files(size: int) -> bytes:
    """As many files of one sample as fit, one behind the other."""
    one = _written("FLAC", "PCM_16", 1 / RATE)
    return one * (size // len(one))


def ogg_files(size: int, seconds: float) -> bytes:
    """As many files of so much silence as fit, one behind the other."""
    one = _written("OGG", "OPUS", seconds)
    return one * (size // len(one))


def ogg_pages(size: int) -> bytes:
    """As many pages without content as fit."""
    return b"OggS" + (bytes(23) + b"OggS") * (size // 27 - 1) + bytes(23)


_MP3 = b"\xff\xf3\x18\xc4".ljust(36, b"\0")  # a frame of silence of 8 kbit/s: 576 samples


def mp3(size: int) -> bytes:
    """As much silence as fits."""
    return _MP3 * (size // len(_MP3))


def mp3_promise() -> bytes:
    """Few frames, and a header that counts 2**24."""
    head = bytearray(b"\xff\xf3\x88\xc4".ljust(288, b"\0"))
    head[13:25] = b"Info" + struct.pack("!II", 1, 2**24)
    return bytes(head) + _MP3 * 100


def wav(size: int) -> bytes:
    """Silence of 8 bits at the lowest rate, as much as fits."""
    return _written("WAV", "PCM_U8", (size - 100) / 4_000, 4_000)


def wav_promise(seconds: float) -> bytes:
    """So much sound, whose header says that 4 GiB follow."""
    data = bytearray(_written("WAV", "PCM_16", seconds))
    for at in (4, data.index(b"data") + 4):
        data[at : at + 4] = b"\xff" * 4
    return bytes(data)


def wav_head(channels: int, rate: int) -> bytes:
    """A second's bytes under a header of so many channels and samples a second."""
    data = bytearray(_written("WAV", "PCM_16", 1.0))
    data[22:28] = struct.pack("<HI", channels, rate)
    return bytes(data)
