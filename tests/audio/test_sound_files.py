"""Files of sound: decoded in a worker, in parts, with limits."""

from __future__ import annotations

import asyncio
import io
import os
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import soundfile
from test_audio import sound

from engine.audio import LogMel, decoding, resampling
from server.answering.fair_slots import FairSlots
from server.answering.sound import PART, windows
from server.errors import ApiError
from server.workers.pool import RefusedError, WorkerPool
from server.workers.sound import DecodedPart, SoundPart, decode

RATE = 16_000
# How far a format's samples may be from what was written.
KINDS = {
    ("WAV", "PCM_16"): 1e-4,
    ("WAV", "FLOAT"): 1e-7,
    ("WAVEX", "PCM_24"): 1e-6,
    ("FLAC", "PCM_16"): 1e-4,
    ("MP3", "MPEG_LAYER_III"): 0.1,
    ("OGG", "VORBIS"): 0.1,
    ("OGG", "OPUS"): 0.2,
}


def written(samples: np.ndarray, rate: int = RATE, form: str = "WAV", kind: str = "PCM_16") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=kind)
    return file.getvalue()


def untold(flac: bytes) -> bytes:
    """A FLAC file whose header tells no number of samples."""
    return flac[:21] + bytes((flac[21] & 0xF0, 0, 0, 0, 0)) + flac[26:]


def part_of(data: bytes, start: int = 0, count: int = 60 * RATE, most: float = 60.0) -> DecodedPart:
    return decode(SoundPart(data, RATE, start, count, most))


def samples_of(part: DecodedPart) -> np.ndarray:
    return np.frombuffer(part.samples, dtype=np.float32)


@pytest.mark.parametrize(("form", "kind"), KINDS)
@pytest.mark.parametrize("channels", [1, 2])
def test_formats(form: str, kind: str, channels: int) -> None:
    samples = sound(3.0)
    both = np.stack([samples * (1.5 - i) for i in range(channels)], axis=1)
    found = samples_of(part_of(written(both, form=form, kind=kind)))
    expected = both.mean(axis=1)
    assert abs(len(found) - len(expected)) <= 2_400  # codecs fill their last frame
    error = found[: len(expected)] - expected[: len(found)]
    assert np.sqrt((error**2).mean()) <= KINDS[form, kind]


@pytest.mark.parametrize(
    ("form", "kind", "rate"),
    [
        ("WAV", "PCM_16", 44_100),
        ("FLAC", "PCM_16", 48_000),
        ("MP3", "MPEG_LAYER_III", 22_050),
        ("OGG", "VORBIS", 16_000),
    ],
)
def test_parts_are_the_whole(form: str, kind: str, rate: int) -> None:
    data = written(sound(5.0, rate), rate, form, kind)
    whole = samples_of(part_of(data))
    parts = [samples_of(part_of(data, start, 30_000)) for start in range(0, len(whole) + 1, 30_000)]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-4)


@pytest.mark.slow
def test_a_long_file_is_not_decoded() -> None:
    """Two hours of silence, which take few bytes."""
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", 16_000, 1, "PCM_16", format="FLAC") as out:
        for _ in range(120):
            out.write(np.zeros(60 * 16_000, dtype=np.int16))
    data = file.getvalue()
    assert len(data) < 1_000_000
    part = part_of(data, most=3600.0)
    assert part.seconds == 7200.0
    assert part.samples == b""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "decoded as audio"),
        (b"RIFF" + bytes(100), "decoded as audio"),
        (b"\x00\x01\x02\x03" * 500, "decoded as audio"),
        (b'{"audio": 1}', "decoded as audio"),
        (written(np.zeros(100, np.float32), form="AIFF"), "AIFF"),
        (written(np.zeros(100, np.float32), 2_000), "2000 Hz"),
        (written(np.full(100, np.nan, np.float32), kind="FLOAT"), "not samples (infinite"),
        (written(np.zeros((10, 33), np.float32)), "33 channels"),
    ],
)
def test_what_is_no_sound_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        part_of(data)
    assert words in str(caught.value)


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFFFF0, 0x7FFFF000, 0x80000000])
@pytest.mark.parametrize("kind", ["PCM_16", "PCM_24", "FLOAT"])
def test_a_wav_that_does_not_say_its_length(kind: str, size: int) -> None:
    """As programs write it to a pipe, or leave it where they are killed; what is there is decoded."""
    data = written(sound(1.0), kind=kind)
    at = data.index(b"data") + 4
    for whole in (0, size, at - 4):
        untold = b"RIFF" + struct.pack("<I", whole) + data[8:at] + struct.pack("<I", size) + data[at + 4 :]
        np.testing.assert_array_equal(samples_of(part_of(untold)), samples_of(part_of(data)))


def test_a_wav_without_sound_may_hold_more() -> None:
    empty = written(np.zeros(0, np.float32))
    more = empty + b"LIST" + struct.pack("<I", 4) + b"INFO"
    for data in (empty, more[:4] + struct.pack("<I", len(more) - 8) + more[8:]):
        assert part_of(data).samples == b""


@pytest.mark.parametrize(("form", "kind"), KINDS)
@pytest.mark.parametrize("left", [0.4, 0.9, 0.99])
def test_what_breaks_off_is_refused(form: str, kind: str, left: float) -> None:
    data = written(sound(5.0), form=form, kind=kind)
    assert part_of(data).samples
    with pytest.raises(ValueError, match="cannot be decoded as audio" if form == "FLAC" else "is truncated"):
        part_of(data[: int(len(data) * left)])


def test_what_follows_a_sound_does_no_harm() -> None:
    """Tags, other chunks and an odd byte that nothing fills up."""
    for form, more in (("WAV", b"LIST\x04\0\0\0INFO"), ("OGG", b"more"), ("MP3", b"TAG" + bytes(125))):
        data = written(sound(1.0), form=form, kind={"WAV": "PCM_U8", "OGG": "VORBIS", "MP3": "MPEG_LAYER_III"}[form])
        assert samples_of(part_of(data + more)).tobytes() == part_of(data).samples
    odd = written(sound(1.0)[:-1], kind="PCM_U8")
    assert len(samples_of(part_of(odd.removesuffix(b"\0")))) == RATE - 1


def test_an_mp3_before_whose_sound_tags_grew() -> None:
    """Its header counts bytes that belong to the tag, or frames that are damaged: nothing is missing."""
    data = written(sound(2.0), form="MP3", kind="MPEG_LAYER_III")
    at = data.index(b"Xing" if b"Xing" in data else b"Info") + 8
    frames, size = (int.from_bytes(data[place : place + 4], "big") for place in (at, at + 4))
    for claimed in ((frames, size + 1000), (frames + 5, size), (frames + 1, size + 1000)):
        changed = data[:at] + b"".join(one.to_bytes(4, "big") for one in claimed) + data[at + 8 :]
        assert len(samples_of(part_of(changed))) >= 2 * RATE


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("length", [1, 160, 4096, 4097, 48_000, 700_000])
def test_a_flac_that_does_not_say_its_length(length: int, channels: int) -> None:
    """As a program writes it to a pipe: the number of samples is 0."""
    samples = np.stack([sound(length / RATE + 1)[:length]] * channels, axis=1)
    told = written(samples, form="FLAC")
    data = untold(told)
    part = part_of(data)
    assert part.seconds == pytest.approx(length / RATE)
    np.testing.assert_array_equal(samples_of(part), samples_of(part_of(told)))
    assert part_of(data + b"TAG" + bytes(125)).seconds == part.seconds
    assert part_of(data, most=length / RATE * 0.9).samples == b""
    assert part_of(data * 2).seconds == pytest.approx(2 * length / RATE)
    with pytest.raises(ValueError, match="its length is unknown"):
        part_of(data[:-3])


@pytest.mark.parametrize("length", [80_000, 79_999])
def test_blocks_of_a_part_are_the_whole(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is read and multiplied at a time."""
    data = written(sound(2.0, 48_000)[:length], 48_000)
    whole = samples_of(part_of(data))
    assert len(whole) == -(-length // 3)
    monkeypatch.setattr(decoding, "_MOST_FRAMES", 10_000)
    monkeypatch.setattr(resampling, "_NUMBERS", 5_000)
    np.testing.assert_allclose(samples_of(part_of(data)), whole, atol=2e-6)
    np.testing.assert_allclose(samples_of(part_of(data, 100, 4_000)), whole[100:4_100], atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [48_000, 96_000])
def test_a_worker_decodes_as_much_as_is_asked_at_a_time(rate: int) -> None:
    """Rates that are multiples of the model's, within a worker's memory."""
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", rate, 2, "PCM_16", format="FLAC") as out:
        for _ in range(PART):
            out.write(np.zeros((rate, 2), dtype=np.int16))

    async def run() -> DecodedPart:
        pool = WorkerPool()
        try:
            return await pool.run("sound", SoundPart(file.getvalue(), RATE, 0, PART * RATE, PART), DecodedPart, 200.0)
        finally:
            pool.close()

    assert len(samples_of(asyncio.run(run()))) == PART * RATE


def test_broken_frames_write_nothing_into_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """libsndfile's decoder of MP3 has lines for each."""
    assert len(samples_of(part_of(b"\xff\xfb\x90" * 20_000))) > RATE
    assert capfd.readouterr().err == ""
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


def test_a_worker_decodes() -> None:
    samples = sound(1.0)
    asked = SoundPart(written(samples, form="FLAC"), RATE, 0, 60 * RATE, 60.0)

    async def run() -> DecodedPart:
        pool = WorkerPool()
        try:
            with pytest.raises(RefusedError, match="decoded as audio"):
                await pool.run("sound", SoundPart(b"x" * 100, RATE, 0, RATE, 60.0), DecodedPart, 20.0)
            return await pool.run("sound", asked, DecodedPart, 20.0)
        finally:
            pool.close()

    np.testing.assert_allclose(samples_of(asyncio.run(run())), samples, atol=1e-4)


def log_mel() -> LogMel:
    return LogMel(rate=RATE)


def test_a_long_sound_takes_little_memory() -> None:
    """This process holds one part at a time of a file of eight minutes."""

    async def run() -> tuple[int, int]:
        pool, samples = WorkerPool(), 0
        content = written(np.zeros(480 * RATE, dtype=np.int16), form="FLAC")
        tracemalloc.start()
        try:
            async for window in windows(content, log_mel(), 600.0, FairSlots(2).of("key"), pool):
                samples += len(window.samples)
            return samples, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            pool.close()

    samples, peak = asyncio.run(run())
    assert samples == 480 * RATE
    assert peak < 32e6


class SlowPool(WorkerPool):
    """Every part of a file takes all the time that it may have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.given: list[float] = []
        monkeypatch.setattr("server.answering.sound.monotonic", lambda: sum(self.given))

    async def run(self, name: str, payload: Any, kind: Any, seconds: float, memory: int = 0) -> Any:
        self.given.append(seconds)
        return DecodedPart(bytes(4 * payload.count), 900.0)


def test_a_file_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """15 seconds, and 5% of its 900: four parts of at most 15 seconds."""

    async def run(pool: WorkerPool) -> None:
        async for _ in windows(b"", log_mel(), 1000.0, FairSlots(2).of(None), pool):
            pass

    pool = SlowPool(monkeypatch)
    with pytest.raises(ApiError, match=r"decoding it takes more than 15 seconds plus 5% of its length"):
        asyncio.run(run(pool))
    assert pool.given == [15.0, 15.0, 15.0, 15.0]


async def test_keys_take_turns() -> None:
    """One key's many parts leave a slot, and whoever waits is served by key in turn."""
    slots, served = FairSlots(2), list[str]()
    go_on = asyncio.Event()

    async def ask(tenant: str | None, name: str, go_on: asyncio.Event) -> None:
        async with slots.of(tenant):
            served.append(name)
            await go_on.wait()

    tasks = [asyncio.create_task(ask("a", f"a{number}", go_on)) for number in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert served == ["a0"]
    tasks.append(asyncio.create_task(ask("b", "b0", asyncio.Event())))
    tasks += [asyncio.create_task(ask("c", "c0", go_on))]
    await asyncio.sleep(0.01)
    assert served == ["a0", "b0"]
    tasks[2].cancel()
    go_on.set()
    await asyncio.sleep(0.01)
    assert served == ["a0", "b0", "a1", "c0", "a3"]
    tasks[4].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not slots._held
    assert not slots._waiting


async def test_tasks_that_are_cancelled_together_keep_no_slot() -> None:
    """A waiting task may be cancelled and not have run yet when a slot becomes free."""
    slots = FairSlots(2)

    async def ask() -> None:
        async with slots.of(None):
            await asyncio.sleep(60)

    tasks = [asyncio.create_task(ask()) for _ in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert slots._held == {None: 2}
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert not slots._held
    assert not slots._waiting


async def test_without_keys_all_slots_are_used() -> None:
    slots = FairSlots(2)
    async with slots.of(None), slots.of(None):
        assert slots._held == {None: 2}


JOINED = {("MP3", "MPEG_LAYER_III"): 0.1, ("OGG", "VORBIS"): 0.05, ("OGG", "OPUS"): 0.05, ("FLAC", "PCM_16"): 1e-4}


@pytest.mark.parametrize(("form", "kind"), JOINED)
def test_joined_files_are_read_to_their_end(form: str, kind: str) -> None:
    """As `cat a b c` joins them, with a tag between them where the format has tags."""
    one = written(sound(3.0), form=form, kind=kind)
    length = len(samples_of(part_of(one)))
    tag = b"TAG" + bytes(125) + b"ID3\x04\0\0\0\0\0\x10" + b"\xff\xfb\x90\xc4" * 4 if form == "MP3" else b""
    data = (one + tag) * 3
    part = part_of(data)
    found = samples_of(part)
    assert part.seconds == pytest.approx(9.0, abs=0.5)
    assert abs(len(found) - 3 * length) <= 3 * 2400
    step = len(found) // 3
    loudness = [float(np.sqrt((found[i * step : (i + 1) * step] ** 2).mean())) for i in range(3)]
    assert loudness == pytest.approx([loudness[0]] * 3, rel=0.05)
    if form != "MP3":
        np.testing.assert_allclose(found[step : 2 * step], found[:step], atol=JOINED[form, kind])
    parts = [samples_of(part_of(data, start, 50_000)) for start in range(0, len(found) + 1, 50_000)]
    np.testing.assert_allclose(np.concatenate(parts), found, atol=1e-3)
    assert part_of(data, most=8.0).samples == b""


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_mp3_without_a_header(rate: int, channels: int) -> None:
    """Quiet at first: by the first frame's size the file would be far shorter."""
    samples = np.stack([np.concatenate([np.zeros(rate, np.float32), sound(3.0, rate)])] * channels, axis=1)
    data = written(samples, rate, "MP3", "MPEG_LAYER_III")
    whole = samples_of(part_of(data))
    bare = data[data.index(data[:2], 100) :]
    assert data.index(b"Xing") < len(data) - len(bare)
    found = samples_of(part_of(bare))
    assert len(whole) <= len(found) <= len(whole) + 0.2 * RATE
    joined = samples_of(part_of(data + bare))
    assert len(joined) == pytest.approx(2 * len(found), abs=0.1 * RATE)


def test_a_joined_file_that_breaks_off_does_not_end_the_rest() -> None:
    """A page of the first is broken: its decoder gives less than the file says."""
    one = written(sound(3.0), form="OGG", kind="VORBIS")
    at = one.rindex(b"OggS")
    broken = bytearray(one)
    before = one.rindex(b"OggS", 0, at)
    broken[before + 40 : at] = bytes(at - before - 40)
    part = part_of(bytes(broken) + one)
    found = samples_of(part)
    assert part.seconds == pytest.approx(6.0)
    assert len(found) == 6 * RATE
    np.testing.assert_allclose(found[-2 * RATE :], samples_of(part_of(one))[-2 * RATE :], atol=1e-4)


@pytest.mark.parametrize(("form", "kind"), JOINED)
def test_joined_files_that_differ_are_refused(form: str, kind: str) -> None:
    data = written(sound(1.0), form=form, kind=kind) + written(sound(1.0, 24_000), 24_000, form, kind)
    with pytest.raises(ValueError, match=r"several files|changes in the middle") as caught:
        part_of(data)
    assert "separately" in str(caught.value)
