"""Sound: spectra as `transformers` makes them, and other rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import signal
from transformers import WhisperFeatureExtractor
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from engine import ModelLoadError
from engine.audio.cutting import Cutter
from engine.audio.features import LogMel, load_log_mel, mel_filters
from engine.audio.languages import language_code, language_name
from engine.audio.resampling import Resampler
from engine.audio.transcribing import segments_of
from engine.interface.outputs import SpeechInfo
from server.answering.sound import find_log_mel


def sound(seconds: float, rate: int = 16_000, seed: int = 0) -> np.ndarray:
    """Tones that come and go in noise."""
    random = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    tones = sum(
        np.sin(2 * np.pi * f * time) * np.sin(2 * np.pi * time / p) for f, p in ((220, 3), (1310, 2), (2900, 5))
    )
    return (0.2 * tones + 0.02 * random.standard_normal(len(time))).astype(np.float32)


@pytest.mark.parametrize("size", [{}, {"feature_size": 128}, {"chunk_length": 4, "feature_size": 20}], ids=str)
@pytest.mark.parametrize("seconds", [30.0, 3.21, 0.01])
def test_features_are_those_of_transformers(size: dict[str, int], seconds: float, tmp_path: Path) -> None:
    extractor = WhisperFeatureExtractor(**size)
    extractor.save_pretrained(tmp_path)
    own = load_log_mel(tmp_path)
    samples = sound(min(seconds, own.seconds))
    padded = np.pad(samples, (0, own.window_samples - len(samples)))
    expected = extractor._np_extract_fbank_features(padded[None], "cpu")[0]
    found = own.features(samples)
    assert found.shape == expected.shape == (own.bins, own.frames)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # What torch makes of it in float32 is itself 1.5e-5 from that here and there.
    by_torch = extractor(samples, sampling_rate=16_000, return_tensors="np").input_features[0]
    np.testing.assert_allclose(found, by_torch, atol=3e-5)
    assert np.mean(np.abs(found - by_torch) > 1e-5) < 1e-3


def test_languages_are_those_of_transformers() -> None:
    assert {code: language_name(code) for code in LANGUAGES} == LANGUAGES
    assert {name: language_code(name.title()) for name in TO_LANGUAGE_CODE} == TO_LANGUAGE_CODE
    assert language_code("EN") == "en"
    assert language_name("xx") == language_code("xx") == "xx"


def test_windows_beside_each_other_have_the_features_of_each() -> None:
    generator = np.random.default_rng(0)
    windows = [generator.normal(size=size).astype(np.float32) for size in (480_000, 1000, 90_000, 480_000, 7, 0)]
    found = LogMel().features_of_all(windows)
    for features, window in zip(found, windows, strict=True):
        np.testing.assert_array_equal(features, LogMel().features(window))
    with pytest.raises(ValueError, match="at most 480000 samples, got 480001"):
        LogMel().features_of_all([windows[1], np.zeros(480_001, np.float32)])


def test_silence_has_features() -> None:
    expected = WhisperFeatureExtractor()(np.zeros(100, np.float32), sampling_rate=16_000, return_tensors="np")
    np.testing.assert_allclose(LogMel().features(np.zeros(100, np.float32)), expected.input_features[0], atol=1e-5)


def test_filters_are_those_of_transformers() -> None:
    np.testing.assert_allclose(mel_filters(80, 400, 16_000).T, WhisperFeatureExtractor().mel_filters, atol=1e-7)


def test_too_long_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="480000 samples, got 480001"):
        LogMel().features(np.zeros(480_001, np.float32))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"feature_extractor_type": "Other"}, "WhisperFeatureExtractor"),
        ({"do_normalize": True}, "do_normalize"),
        ({"dither": 0.1}, "dither"),
        ({"hop_length": 0}, "hop_length"),
        ({"chunk_length": "30"}, "chunk_length"),
    ],
)
def test_other_preparations_are_refused(wrong: dict[str, Any], word: str, tmp_path: Path) -> None:
    WhisperFeatureExtractor().save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(ModelLoadError, match=word):
        load_log_mel(tmp_path)
    file.unlink()
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_log_mel(tmp_path)
    told = find_log_mel(str(tmp_path))  # to clients, whom the server's paths do not concern
    assert isinstance(told, str)
    assert told.startswith("preprocessor_config.json, which defines how audio is prepared, cannot be read")
    assert str(tmp_path) not in told


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 16_000, 96_000])
def test_other_rates(rate: int) -> None:
    """Tones stay what they are; a long sound in blocks is the same to the bit as in one."""
    time = np.arange(2 * rate) / rate
    tones = [220.0, 1310.0, 2900.0]
    source = sum(np.sin(2 * np.pi * f * time) for f in tones).astype(np.float32)
    resampler = Resampler(rate, 16_000)
    count = resampler.length(len(source))
    assert count == 32_000
    whole = resampler.block(source, 0, 0, count)
    expected = sum(np.sin(2 * np.pi * f * np.arange(count) / 16_000) for f in tones)
    middle = slice(2_000, -2_000)
    assert np.abs(whole - expected)[middle].max() < 2e-3
    parts = []
    for start in range(0, count, 7_001):
        end = min(start + 7_001, count)
        first, last = resampler.first_needed(start), resampler.last_needed(end)
        parts.append(resampler.block(source[first:last], first, start, end))
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=2e-6)


def test_what_is_too_high_is_left_out() -> None:
    time = np.arange(48_000) / 48_000
    source = np.sin(2 * np.pi * 11_000 * time).astype(np.float32)  # would be 5,000 Hz
    found = Resampler(48_000, 16_000).block(source, 0, 0, 16_000)
    assert np.abs(found)[500:-500].max() < 1e-3
    kept = signal.resample_poly(source, 1, 3)
    assert np.abs(kept)[500:-500].max() < 1e-2  # as the reference has it


def test_windows_are_cut_where_it_is_quiet() -> None:
    rate, longest = 1_000, 6_000
    samples = np.random.default_rng(1).standard_normal(14_500).astype(np.float32)
    for quiet in (5_350, 10_900):
        samples[quiet : quiet + 200] *= 0.001
    whole = Cutter(longest, rate)
    windows = [*whole.add(samples), *whole.end()]
    np.testing.assert_array_equal(np.concatenate([window.samples for window in windows]), samples)
    starts = [window.start for window in windows]
    assert starts[0] == 0
    assert 5_350 <= starts[1] <= 5_550
    assert 10_900 <= starts[2] <= 11_100
    assert all(len(window.samples) <= longest for window in windows)
    pieces = Cutter(longest, rate)
    again = [window for at in range(0, len(samples), 777) for window in pieces.add(samples[at : at + 777])]
    assert [window.start for window in (*again, *pieces.end())] == starts


@pytest.mark.parametrize(("length", "count"), [(0, 0), (1, 1), (6_000, 1), (6_001, 2)])
def test_short_sounds_are_one_window(length: int, count: int) -> None:
    cutter = Cutter(6_000, 1_000)
    assert len([*cutter.add(np.zeros(length, np.float32)), *cutter.end()]) == count


SPEECH = SpeechInfo(no_timestamps_id=99)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([100, 5, 6, 150, 150, 7, 200, 60], [(10.0, 11.0, [5, 6]), (11.0, 12.0, [7])]),
        ([100, 5, 60], [(10.0, 13.0, [5])]),  # its end was not said
        ([5, 6, 60], [(10.0, 13.0, [5, 6])]),  # no times
        ([110, 5, 350, 60], [(10.2, 13.0, [5])]),  # none is after the end of the sound
        ([100, 120, 5, 150, 160, 6, 170, 60], [(10.4, 11.0, [5]), (11.2, 11.4, [6])]),
        ([60], []),
    ],
)
def test_segments(tokens: list[int], expected: list[tuple[float, float, list[int]]]) -> None:
    found = segments_of(tokens, SPEECH, [60], 10.0, 13.0)
    assert [(round(s.start, 6), round(s.end, 6), s.tokens) for s in found] == expected
