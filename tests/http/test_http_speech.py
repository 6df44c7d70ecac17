"""Speech over HTTP, as a process of its own: texts are the reference's, in every format; files that cannot be used are
refused within bounded time."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from support.reference import MIN_MARGIN
from support.service import PATIENCE, Service, serving
from support.speech import IDS, RATE, SECONDS, SpeechCheckpoint, make_speech_checkpoint, make_tokenizer, nearly, noise

from engine import LLM, Thresholds, Transcription
from engine.audio import Cutter, Window

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
# Answers of random weights are taken as they are.
TAKEN = {"compression_ratio_threshold": "1000", "logprob_threshold": "-1000", "no_speech_threshold": "1"}
SOUND = noise(7.3, 5)


def wav(samples: np.ndarray, form: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format=form, subtype="FLOAT" if form == "WAV" else "PCM_16")
    return file.getvalue()


@dataclass
class Api:
    service: Service
    model: SpeechCheckpoint

    def post(self, path: str = TRANSCRIPTIONS, content: bytes | None = None, **fields: Any) -> httpx.Response:
        file = ("sound.wav", wav(SOUND) if content is None else content, "application/octet-stream")
        return httpx.post(f"{self.service.url}{path}", data=TAKEN | fields, files={"file": file}, timeout=PATIENCE)

    def refused(self, status: int = 400, **asked: Any) -> dict[str, Any]:
        answer = self.post(**asked)
        assert answer.status_code == status, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error

    def expected(self, windows: list[Window], **how: Any) -> list[tuple[str, bool]]:
        """The reference's text of each window, and whether it is clear."""
        tokenizer, found = make_tokenizer(), []
        for window in windows:
            _, tokens, margin = self.model.answer(window.samples, length=60, **how)
            text = tokenizer.decode([t for t in tokens if t < IDS["<|0.00|>"]], skip_special_tokens=True)
            found.append((text, margin > MIN_MARGIN))
        return found


def windows_of(samples: np.ndarray) -> list[Window]:
    cutter = Cutter(SECONDS * RATE, RATE)
    return [*cutter.add(samples), *cutter.end()]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("speech")
    model = make_speech_checkpoint("whisper", folder / "whisper")
    settings = ("--dtype", "float32", "--max-audio-seconds", "300", "--kv-cache-memory", "64MiB")
    with serving(str(model.path), "--served-model-name", "whisper", *settings, log=folder / "service.log") as service:
        yield Api(service, model)


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_the_text_is_the_references(api: Api, beams: int) -> None:
    answer = api.post(language="German", num_beams=str(beams))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    expected = api.expected(windows_of(SOUND), beams=beams, language="de", task="transcribe")
    assert sum(clear for _, clear in expected) >= 2
    assert found["usage"] == {"type": "duration", "seconds": 8}
    place = 0
    for text, clear in expected:  # all clear windows are there, in their order
        if clear:
            place = found["text"].find(text.strip(), place)
            assert place >= 0
    assert api.post(language="de", num_beams=str(beams), response_format="text").text == found["text"] + "\n"


@pytest.mark.slow
def test_segments_in_all_formats(api: Api) -> None:
    verbose = api.post(language="de", response_format="verbose_json").json()
    assert (verbose["task"], verbose["language"], verbose["duration"]) == ("transcribe", "german", 7.3)
    segments = verbose["segments"]
    assert [segment["id"] for segment in segments] == list(range(len(segments)))
    assert len(segments) >= 4
    assert "".join(segment["text"] for segment in segments).strip() == verbose["text"]
    times = [time for segment in segments for time in (segment["start"], segment["end"])]
    assert times == sorted(times)
    assert times[-1] <= 7.3
    expected = api.expected(windows_of(SOUND), timestamps=True, language="de", task="transcribe")
    for window, (text, clear) in zip(windows_of(SOUND), expected, strict=True):
        seek = round(window.start / RATE * 100)
        if clear:
            assert "".join(s["text"] for s in segments if s["seek"] == seek) == text
    for segment in segments:
        assert segment["temperature"] == 0.0
        assert segment["avg_logprob"] < 0 <= segment["no_speech_prob"] <= 1
    srt = api.post(language="de", response_format="srt")
    assert srt.headers["content-type"].startswith("text/plain")
    cues = re.findall(r"(\d+)\n(\d\d:\d\d:\d\d,\d{3}) --> (\d\d:\d\d:\d\d,\d{3})\n", srt.text)
    assert [int(number) for number, _, _ in cues] == list(range(1, len(segments) + 1))
    assert cues[0][1] == f"00:00:{segments[0]['start']:06.3f}".replace(".", ",")
    vtt = api.post(language="de", response_format="vtt").text
    assert vtt.startswith("WEBVTT\n\n00:00:0")
    assert vtt.count(" --> ") == len(segments)


def test_words(api: Api) -> None:
    """Beside segments, or alone; those of the engine offline, whose times golden tests compare."""
    fields: dict[str, Any] = {"language": "de", "response_format": "verbose_json"}
    plain = api.post(**fields).json()
    assert "words" not in plain
    both = api.post(**fields, **{"timestamp_granularities[]": ["word", "segment"]}).json()
    assert both["segments"] == nearly(plain["segments"])
    alone = api.post(**fields, **{"timestamp_granularities[]": "word"}).json()
    assert "segments" not in alone
    assert alone["words"] == both["words"]
    assert alone["text"] == plain["text"]
    llm = LLM(str(api.model.path), device="cpu", dtype="float32", num_gpu_blocks_override=1024, show_progress=False)
    everything = Thresholds(compression_ratio=None, logprob=None, no_speech=None)
    (found,) = llm.transcribe(SOUND, Transcription(language="de", word_timestamps=True, thresholds=everything))
    llm.close()
    assert len(found.words) > 8
    assert alone["words"] == [
        {"word": word.text.strip(), "start": round(word.start, 3), "end": round(word.end, 3)} for word in found.words
    ]


def test_translation_and_prompt(api: Api) -> None:
    found = api.post(TRANSLATIONS, response_format="verbose_json", prompt="the tone").json()
    assert found["task"] == "translate"
    assert found["language"] in ("english", "german", "french")
    assert found != api.post(response_format="verbose_json", prompt="the tone").json()
    assert api.post(prompt="the tone").json()["text"] != api.post().json()["text"]


def test_of_a_long_prompt_the_end_counts(api: Api) -> None:
    end = "the answer is in one " * 20
    expected = api.post(prompt=end).json()
    for longer in (f"{'before, ' * 100}{end}", f"{'before, ' * 7000}{end}"):
        answer = api.post(prompt=longer)
        assert answer.status_code == 200, answer.text
        assert answer.json() == expected


def test_what_is_settled_is_streamed(api: Api) -> None:
    whole = api.post(language="en").json()
    file = {"file": ("sound.flac", wav(SOUND, "FLAC"))}
    fields = TAKEN | {"language": "en", "stream": "true"}
    with httpx.stream(
        "POST", f"{api.service.url}{TRANSCRIPTIONS}", data=fields, files=file, timeout=PATIENCE
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert [event["type"] for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert len(events) > 3
    done = events[-1]
    assert done["type"] == "transcript.text.done"
    assert "".join(event["delta"] for event in events[:-1]).rstrip() == done["text"]
    assert done["usage"] == whole["usage"]


def test_openai_client(api: Api) -> None:
    client = openai.OpenAI(base_url=f"{api.service.url}/v1", api_key="none", max_retries=0)
    plain = client.audio.transcriptions.create(
        model="whisper", file=("a.wav", wav(SOUND)), language="de", extra_body=TAKEN
    )
    assert plain.text == api.post(language="de").json()["text"]
    verbose = client.audio.transcriptions.create(
        model="whisper", file=("a.wav", wav(SOUND)), response_format="verbose_json",
        timestamp_granularities=["segment", "word"], extra_body=TAKEN,
    )  # fmt: skip
    assert verbose.segments
    assert verbose.words
    assert verbose.words[0].start <= verbose.words[0].end
    translated = client.audio.translations.create(model="whisper", file=("a.wav", wav(SOUND)), extra_body=TAKEN)
    assert translated.text
    with pytest.raises(openai.BadRequestError, match="chunking_strategy is not supported"):
        client.audio.transcriptions.create(
            model="whisper", file=("a.wav", wav(SOUND)), chunking_strategy={"type": "server_vad"}
        )
    stream = client.audio.transcriptions.create(
        model="whisper", file=("a.wav", wav(SOUND)), language="de", stream=True, extra_body=TAKEN
    )
    assert [event.type for event in stream][-1] == "transcript.text.done"


@pytest.mark.slow
def test_guesses_are_drawn_again(api: Api) -> None:
    asked = {"logprob_threshold": "-0.000001", "language": "en", "response_format": "verbose_json", "seed": "5"}
    first = api.post(content=wav(noise(1.0)), **asked).json()
    assert {segment["temperature"] for segment in first["segments"]} == {1.0}
    assert api.post(content=wav(noise(1.0)), **asked).json() == first
    silent = api.post(content=wav(noise(1.0)), **asked | {"no_speech_threshold": "0"}).json()
    assert (silent["text"], silent["segments"]) == ("", [])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"language": "klingon"}, "language", "this model does not know the language 'klingon'"),
        ({"response_format": "xml"}, "response_format", "'verbose_json'"),
        ({"temperature": "warm"}, "temperature", "'warm'"),
        ({"temperature": "3"}, "temperature", "less than or equal to 2"),
        ({"num_beams": "1000"}, "num_beams", "1000"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "stream needs"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "needs response_format verbose_json"),
        ({"timestamp_granularities[]": "letter"}, "timestamp_granularities", "'segment' or 'word'"),
        ({"include[]": "logprobs"}, "include", "not supported"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy", "{'type': 'server_vad'}"),
        ({"known_speaker_names[]": ["a", "b"]}, "known_speaker_names", "not supported"),
        ({"temperature[x]": "1"}, "temperature", "number"),
        ({"model": "other"}, "model", "does not exist"),
        ({"content": b""}, "file", "decoded as audio"),
        ({"content": b"not a sound" * 100}, "file", "decoded as audio"),
        ({"content": wav(SOUND)[:9000]}, "file", "is truncated"),
        ({"content": wav(np.zeros(0, np.float32))}, "file", "contains no sound"),
        ({"content": wav(np.full(99, 3e38, np.float32))}, "file", "contains 3e+38, but samples"),
    ],
    ids=lambda part: "" if isinstance(part, dict) else part,  # a file's bytes hold the time at which it was made
)
def test_what_is_refused(api: Api, fields: dict[str, Any], param: str, words: str) -> None:
    error = api.refused(404 if param == "model" else 400, **fields)
    assert error["param"] == param
    assert words in error["message"]
    assert not error["message"].endswith("..")


def test_long_sounds_are_refused(api: Api) -> None:
    """An hour of silence, whose file is small."""
    error = api.refused(413, content=wav(np.zeros(3600 * RATE, np.float32), "FLAC"))
    assert error["code"] == "audio_too_long"
    assert "3600 seconds" in error["message"]
    assert "300 (max_audio_seconds)" in error["message"]


@pytest.mark.parametrize("fields", [{}, {"stream": "true"}], ids=["whole", "stream"])
def test_long_sounds_that_do_not_say_their_length(api: Api, fields: dict[str, str]) -> None:
    """As a program writes them to a pipe. The engine is asked nothing."""
    told = wav(np.zeros(600 * RATE, np.float32), "FLAC")
    untold = told[:21] + bytes((told[21] & 0xF0, 0, 0, 0, 0)) + told[26:]
    runs = api.service.metric("octavo_encoder_runs_total")
    error = api.refused(413, content=untold, **fields)
    assert (error["code"], error["param"]) == ("audio_too_long", "file")
    assert "600 seconds" in error["message"]
    assert api.service.metric("octavo_encoder_runs_total") == runs


def test_a_sound_that_does_not_say_its_length(api: Api) -> None:
    told = wav(SOUND, "FLAC")
    untold = told[:21] + bytes((told[21] & 0xF0, 0, 0, 0, 0)) + told[26:]
    assert api.post(content=untold).json() == api.post(content=told).json()


def test_other_bodies_and_endpoints(api: Api) -> None:
    url = api.service.url
    answer = httpx.post(f"{url}{TRANSCRIPTIONS}", json={"file": "x"}, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_body")
    answer = httpx.post(f"{url}{TRANSCRIPTIONS}", files={"sound": b"x"}, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE)
    assert "reads sound" in answer.json()["error"]["message"]
    assert api.service.get("/v1/models").json()["data"][0]["inputs"] == ["audio"]
