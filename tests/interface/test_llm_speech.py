"""`LLM.transcribe`: sounds of any length in windows beside each other, each like the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.reference import MIN_MARGIN
from support.speech import RATE, SECONDS, SpeechCheckpoint, make_speech_checkpoint, make_tokenizer, noise

from engine import LLM, InvalidRequestError, Thresholds, Transcription
from engine.audio.cutting import Cutter
from engine.audio.transcribing import compression_ratio

EVERYTHING = Thresholds(compression_ratio=None, logprob=None, no_speech=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpeechCheckpoint:
    return make_speech_checkpoint("whisper", tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(model: SpeechCheckpoint) -> Iterator[LLM]:
    found = LLM(str(model.path), device="cpu", dtype="float32", num_gpu_blocks_override=2048, show_progress=False)
    yield found
    found.close()


@pytest.mark.slow
def test_a_long_sound(llm: LLM, model: SpeechCheckpoint) -> None:
    """Its windows are the reference's texts, one after the other, and times go on through all of them."""
    sound = noise(7.3, 5)
    wanted = Transcription(language="de", thresholds=EVERYTHING)
    (found,) = llm.transcribe(sound, wanted)
    cutter = Cutter(SECONDS * RATE, RATE)
    windows = [*cutter.add(sound), *cutter.end()]
    assert len(windows) >= 4
    expected, clear = [], True
    tokenizer = make_tokenizer()
    for window in windows:
        _, tokens, margin = model.answer(window.samples, timestamps=True, length=60, language="de", task="transcribe")
        clear = clear and margin > MIN_MARGIN
        first = llm.engine.info.speech.first_timestamp_id if llm.engine.info.speech else 0
        expected.append(tokenizer.decode([t for t in tokens if t < first], skip_special_tokens=True))
    assert clear
    assert found.text == "".join(expected).strip()
    times = [time for segment in found.segments for time in (segment.start, segment.end)]
    assert times == sorted(times)
    assert 5.0 < times[-1] <= 7.3 + 1e-6
    assert found.language == "de"


def test_several_sounds(llm: LLM) -> None:
    """Together as alone, whatever their length; the language of each is detected."""
    wanted = Transcription(thresholds=EVERYTHING)
    sounds = [noise(3.0, 1), noise(0.4, 2), noise(5.0, 3), np.zeros(0, np.float32)]
    together = llm.transcribe(sounds, wanted)
    for sound, found in zip(sounds, together, strict=True):
        assert llm.transcribe(sound, wanted) == [found]
    assert together[3].text == ""
    assert {found.language for found in together[:3]} <= {"en", "de", "fr"}


@pytest.mark.slow
def test_what_is_not_taken_is_drawn_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer of random weights is a guess: all temperatures are tried; the same seed gives the same text."""
    asked: list[float] = []
    generate = llm.generate

    def watched(inputs, params, **more):  # type: ignore[no-untyped-def]
        asked.extend(one.temperature for one in params if one.allowed_token_ids is None)
        return generate(inputs, params, **more)

    monkeypatch.setattr(llm, "generate", watched)
    guess = Thresholds(compression_ratio=None, logprob=-1e-9, no_speech=None)
    wanted = Transcription(language="en", seed=3, thresholds=guess)
    first = llm.transcribe(noise(1.0), wanted)
    assert asked == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert llm.transcribe(noise(1.0), wanted) == first
    asked.clear()
    llm.transcribe(noise(1.0), Transcription(language="en", temperature=0.7, thresholds=guess))
    assert asked == [0.7]


def test_silence_has_no_text(llm: LLM) -> None:
    silent = Thresholds(compression_ratio=None, logprob=-1e-9, no_speech=0.0)
    (found,) = llm.transcribe(noise(1.0), Transcription(language="en", thresholds=silent))
    assert (found.text, found.segments) == ("", [])


def test_what_cannot_be_done_is_refused(llm: LLM) -> None:
    for wanted, words in ((Transcription(language="tlh"), "does not know the language 'tlh'. Languages: de, en, fr"),):
        with pytest.raises(InvalidRequestError, match=words):
            llm.transcribe(noise(0.5), wanted)


@pytest.mark.parametrize(
    ("wanted", "param", "words"),
    [
        ({"task": "foo"}, "task", "task must be transcribe or translate, got 'foo'"),
        ({"temperature": -1}, "temperature", "temperature must be at least 0.0 and at most 2.0, got -1"),
        ({"temperature": float("nan")}, "temperature", "must be finite"),
        ({"num_beams": 0}, "num_beams", "num_beams must be at least 1"),
        ({"language": 7}, "language", "a code such as de .* got 7"),
        ({"prompt": "hello"}, "prompt", "must be a list of token ids, .* got 'hello'"),
        ({"prompt": [5, 9999]}, "prompt", "prompt contains 9999, .*0 to 373"),
        ({"thresholds": Thresholds(logprob=float("nan"))}, "logprob", "logprob must be finite"),
    ],
    ids=str,
)
def test_impossible_values_are_refused(llm: LLM, wanted: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        llm.transcribe(noise(0.5), Transcription(**wanted))
    assert caught.value.param == param


def test_a_language_by_its_name(llm: LLM) -> None:
    named, coded = (Transcription(language=how, thresholds=EVERYTHING) for how in ("German", "de"))
    assert llm.transcribe(noise(1.0), named) == llm.transcribe(noise(1.0), coded)


def test_sounds_as_a_file_gives_them(llm: LLM, tmp_path: Path) -> None:
    """Of several channels, and of integers: the same as the file's own floats, mono."""
    wanted = Transcription(language="de", thresholds=EVERYTHING)
    whole = np.round(noise(1.0) * 2**15).astype(np.int16)
    expected = llm.transcribe(whole.astype(np.float32) / 2**15, wanted)
    assert len(expected[0].text) > 5
    for form in (
        whole,
        whole.astype(np.int32) << 16,
        whole / 2**15,
        np.stack([whole, whole], axis=1),
        np.stack([whole / 2**15 * 2, np.zeros(len(whole))], axis=1),
        whole[:, None],
    ):
        assert llm.transcribe(form, wanted) == expected
    octets = np.asarray(whole // 2**8 + 128, np.uint8)
    assert llm.transcribe(octets, wanted) == llm.transcribe((octets.astype(np.float32) - 128) / 128, wanted)
    assert llm.transcribe([whole, whole], wanted) == expected * 2


@pytest.mark.parametrize(
    ("sound", "words"),
    [
        (torch.zeros(99), "sounds must be a numpy array, got tensor.*its .numpy"),
        ([0.0, 0.1], "sounds must be a numpy array, got .0.0, 0.1.*asarray"),
        ("a.wav", "sounds must be a numpy array, got 'a.wav' .*soundfile.read"),
        ([np.zeros(9, np.float32), Path("a.wav")], r"sounds\[1\] must be a numpy array, got .*a.wav"),
        (None, "sounds must be a numpy array, got None"),
        (np.zeros((2, 16_000), np.float32), r"at most 32 channels, got \[2, 16000\]. .*transpose"),
        (np.zeros((2, 2, 2), np.float32), r"got \[2, 2, 2\]"),
        (np.zeros(9, np.int64), "or uint8, int8, int16, int32, got int64"),
        (np.zeros(9, np.complex64), "got complex64"),
        (np.array(["a"]), "got str"),
        (np.full(9, np.nan, np.float32), "not a number"),
        (np.full(9, 1e300), "infinite"),
        (np.full(9, 3e38, np.float32), r"contains 3e\+38, but samples"),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_what_is_no_sound_is_refused(llm: LLM, sound: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        llm.transcribe(sound)
    assert (caught.value.param, caught.value.code) == ("sounds", "invalid_audio")


def test_models_for_one_language(tmp_path: Path) -> None:
    make_speech_checkpoint("whisper-distilled", tmp_path, is_multilingual=False)
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", num_gpu_blocks_override=512, show_progress=False)
    (found,) = llm.transcribe(noise(1.0), Transcription(timestamps=False, thresholds=EVERYTHING))
    assert found.language is None
    assert len(found.segments) == 1
    with pytest.raises(InvalidRequestError, match="does not translate"):
        llm.transcribe(noise(1.0), Transcription(task="translate"))
    llm.close()


def test_compression() -> None:
    assert compression_ratio("") == 0.0
    assert compression_ratio("again " * 100) > 10 > 2.4 > compression_ratio("A sentence of its own.")
