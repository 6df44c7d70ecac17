"""Times of words against `transformers`: paths through weights, tokens of windows in all ways, and words of texts."""

from __future__ import annotations

import asyncio
import io
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import torch
from support.driving import check_idle, finish, make_engine, preempt_all, watching
from support.local_client import LocalClient
from support.speech import (
    IDS,
    RATE,
    SECONDS,
    SHAPES,
    SPEECH,
    TEXTS,
    VOCAB,
    SpeechCheckpoint,
    TimedAnswer,
    make_speech_checkpoint,
    make_tokenizer,
    noise,
    sounds,
    timed_answer,
)
from transformers.models.whisper import generation_whisper, tokenization_whisper

from engine import (
    LLM,
    AudioInput,
    Engine,
    EngineConfig,
    InvalidRequestError,
    PoolingParams,
    SamplingParams,
    Thresholds,
    Transcription,
)
from engine.audio.cutting import Cutter
from engine.audio.transcribing import Answer, Asking
from engine.audio.words import split_words, words_of
from engine.execution.alignment import first_positions, smoothed
from engine.interface.speech import read_speech
from engine.text.processor import load_tokenizer
from server.app import create_app

EVERYTHING = Thresholds(compression_ratio=None, logprob=None, no_speech=None)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"return_timestamps": False},
    "times": {"return_timestamps": True},
    "beams": {"return_timestamps": False, "num_beams": 3},
    "beams-times": {"return_timestamps": True, "num_beams": 4},
    "prompt": {"return_timestamps": True, "prompt_ids": torch.tensor([IDS["<|startofprev|>"], 40, 41, 42, 70])},
    "short": {"return_timestamps": True, "max_new_tokens": 2},
}

# ---------------------------------------------------------------- parts


def test_paths_equal_reference() -> None:
    """Where several ways cost the same, too."""
    for seed in range(100):
        numbers = np.random.default_rng(seed)
        costs = numbers.standard_normal((numbers.integers(1, 20), numbers.integers(1, 40)))
        costs = costs.round() if seed % 2 else costs
        tokens, positions = generation_whisper._dynamic_time_warping(costs)
        begins = np.flatnonzero(np.diff(tokens, prepend=-1))
        np.testing.assert_array_equal(first_positions(costs), positions[begins])


@pytest.mark.parametrize("width", [1, 3, 7, 199, 201])
def test_medians_equal_reference(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, too, and where there are too few positions for them."""
    weights = torch.rand(9, 100, generator=torch.Generator().manual_seed(3))
    normal = (weights - weights.mean(0)) / weights.std(0, unbiased=False)
    expected = generation_whisper._median_filter(normal[None, None], width)[0, 0]
    torch.testing.assert_close(smoothed(weights, width), expected)
    monkeypatch.setattr("engine.execution.alignment._AT_ONCE", 2 * width * weights.shape[1])
    torch.testing.assert_close(smoothed(weights, width), expected)


def test_weights_that_are_all_the_same() -> None:
    """Such a position, or a single token, says nothing; the reference's quotients are no numbers there."""
    weights = torch.rand(4, 20)
    weights[:, 3] = 0.0
    assert smoothed(weights, 1)[:, 3].tolist() == [0.0] * 4
    assert not smoothed(weights[:1], 7).any()


def test_words_equal_reference() -> None:
    """Of any tokens: spaces, marks, characters of several tokens, and halves of such."""
    tokenizer = make_tokenizer()
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    texts = (" the", ' "', '"', " (", ")", ".", " ", "é", "日", "”", "，", " in", "on", "-", "'", " -", "\n", "an")
    known = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    for seed in range(300):
        draw = random.Random(seed)
        ids: list[int] = []
        for _ in range(draw.randint(0, 12)):
            part = draw.choice(known)
            ids += draw.choice([part, part, part, part[:1], [draw.randrange(TEXTS)]])
        for language, code in (("english", None), ("english", "en"), ("chinese", "zh")):
            words, _, places = tokenization_whisper._combine_tokens_into_words(tokenizer, list(ids), language)
            expected = list(zip(words, places, strict=True))
            assert split_words(ids, decode, code) == expected


@pytest.mark.parametrize(
    ("heads", "width", "words"),
    [
        (None, 7, "does not name alignment_heads"),
        ([], 7, "does not name alignment_heads"),
        ("all", 7, "not a list of pairs"),
        ([[0, 1], [2, 0]], 7, r"2 layers and 4 heads: \[2, 0\]"),
        ([[0, True]], 7, "not pairs"),
        ([[0, 1], [1, 0], [0, 1]], 7, "twice"),
        ([[0, 1]], 6, "sets median_filter_width to 6"),
    ],
)
def test_heads_that_are_of_no_use(heads: Any, width: int, words: str) -> None:
    """They keep no model from being served; times of words are refused with the reason."""
    config = SimpleNamespace(decoder_layers=2, decoder_attention_heads=4, median_filter_width=width)
    speech = read_speech(SPEECH | {"alignment_heads": heads}, VOCAB, config)
    assert speech is not None
    assert speech.alignment is None
    assert re.search(words, speech.no_alignment)


# ---------------------------------------------------------------- windows


@dataclass(frozen=True)
class Subject:
    model: SpeechCheckpoint
    engine: Engine


@pytest.fixture(scope="module", params=SHAPES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    model = make_speech_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    engine = make_engine(model.path, block_size=4, max_num_seqs=64, max_num_batched_tokens=100)
    yield Subject(model, engine)
    engine.close()


def place(subject: Subject, name: str, samples: np.ndarray, answer: TimedAnswer) -> None:
    """Ask when the tokens of an answer are said."""
    asking = Asking(subject.engine.info, Transcription(language="de", word_timestamps=True))
    question = SimpleNamespace(begin=answer.begin)
    own = Answer(tokens=answer.tokens, text="", mean_logprob=0.0, temperature=0.0)
    placing = asking.placing(question, own, subject.model.log_mel.frames_of(len(samples)))  # type: ignore[arg-type]
    assert placing is not None
    features = subject.model.log_mel.features(samples)
    subject.engine.add_request(name, AudioInput(features, placing.tokens), placing.params)


def positions_of(output: Any) -> list[float]:
    return output.pooled.values()[:, 0].tolist()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_times_of_tokens_equal_reference(subject: Subject) -> None:
    """All windows in all ways in one batch with text in the making, on a step's few tokens: some are computed in
    parts. Words and their times follow."""
    engine, decode = subject.engine, partial(make_tokenizer().decode, skip_special_tokens=True)
    cases = [(name, samples) for name in WAYS for samples in sounds(3)]
    answers = [
        timed_answer(subject.model, samples, language="de", task="transcribe", **{"max_new_tokens": 30} | WAYS[name])
        for name, samples in cases
    ]
    with watching(engine) as plans:
        for number, ((_, samples), answer) in enumerate(zip(cases, answers, strict=True)):
            place(subject, str(number), samples, answer)
        writing = AudioInput(subject.model.log_mel.features(sounds(1)[0]), answers[0].begin)
        engine.add_request("writing", writing, SamplingParams(temperature=0.0, max_tokens=12))
        found = finish(engine)
    rows = [row for plan in plans for row in plan.pooling]
    assert any(not row.complete for row in rows)
    assert any(plan.pooling and plan.sampling is not None for plan in plans)
    assert engine.info.speech is not None
    texts = 0
    for number, ((name, samples), answer) in enumerate(zip(cases, answers, strict=True)):
        positions = positions_of(found[str(number)])
        np.testing.assert_allclose(0.02 * np.array([*positions, positions[-1]]), answer.times, atol=1e-4, err_msg=name)
        words = words_of(answer.tokens, positions, engine.info.speech, decode, None, 0.0, len(samples) / RATE)
        assert [(word.text, round(word.start, 2), round(word.end, 2)) for word in words] == answer.words
        texts += len(words)
    assert texts > len(cases)
    assert len({tuple(positions_of(found[str(number)])) for number in range(len(cases))}) > 0.6 * len(cases)
    engine.add_request("alone", writing, SamplingParams(temperature=0.0, max_tokens=12))
    assert finish(engine)["alone"].outputs[0].token_ids == found["writing"].outputs[0].token_ids
    check_idle(engine)


def test_preempted_and_after_eviction(subject: Subject) -> None:
    """Between the parts of its tokens a request loses all that it has; the encoder's pages may be gone, too."""
    engine, window = subject.engine, sounds(3)[2]
    answer = timed_answer(
        subject.model, window, language="de", task="transcribe", return_timestamps=True, max_new_tokens=30
    )
    assert engine.reset_prefix_cache()
    for number in range(4):
        place(subject, str(number), window, answer)
    with watching(engine) as plans:
        engine.step()
        assert any(not row.complete for plan in plans for row in plan.pooling)
        assert preempt_all(engine)
        assert engine.reset_prefix_cache()
        found = finish(engine)
    assert sum(plan.encoder is not None for plan in plans) == 2
    expected = [round(50 * time) for time in answer.times[:-1]]
    assert len(set(expected)) > 3
    for output in found.values():
        assert positions_of(output) == expected


def test_what_cannot_be_aligned(subject: Subject) -> None:
    features = np.zeros((20, 200), np.float32)
    for given, params, words in (
        (AudioInput(features), PoolingParams(task="align"), "needs decoder_token_ids"),
        (AudioInput(features, [1, 2]), PoolingParams(task="align", skip_tokens=2), "below the decoder's 2 tokens"),
        (AudioInput(features, [1] * 65), PoolingParams(task="align"), "takes at most 64"),
        ([1, 2], PoolingParams(task="align"), "accepts sound"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            subject.engine.add_request("wrong", given, params)
    with pytest.raises(InvalidRequestError, match="encoder_length must be at least 1"):
        PoolingParams(task="align", encoder_length=0)


# ---------------------------------------------------------------- sounds


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_speech_checkpoint("whisper", tmp_path_factory.mktemp("whisper")).path
    found = LLM(str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=1024, show_progress=False)
    yield found
    found.close()


def test_words_of_a_long_sound(llm: LLM) -> None:
    """Those of its windows, moved to where these lie; nothing else changes."""
    sound = noise(5.3, 5)
    wanted = Transcription(language="de", thresholds=EVERYTHING, word_timestamps=True)
    (found,) = llm.transcribe(sound, wanted)
    cutter = Cutter(SECONDS * RATE, RATE)
    windows = [*cutter.add(sound), *cutter.end()]
    assert len(windows) >= 3
    expected = []
    for window, alone in zip(windows, llm.transcribe([w.samples for w in windows], wanted), strict=True):
        moved = window.start / RATE
        expected += [(word.text, word.tokens, word.start + moved, word.end + moved) for word in alone.words]
    assert [(word.text, word.tokens) for word in found.words] == [(text, tokens) for text, tokens, *_ in expected]
    times = [time for word in found.words for time in (word.start, word.end)]
    assert times == pytest.approx([time for *_, start, end in expected for time in (start, end)])
    assert times == sorted(times)
    assert 3.0 < times[-1] <= 5.3
    assert "".join(word.text for word in found.words).strip() == found.text
    (without,) = llm.transcribe(sound, Transcription(language="de", thresholds=EVERYTHING))
    assert (without.words, without.segments) == ([], found.segments)


def test_no_words_of_silence_and_of_nothing(llm: LLM) -> None:
    silent = Thresholds(compression_ratio=None, logprob=-1e-9, no_speech=0.0)
    wanted = Transcription(language="en", thresholds=silent, word_timestamps=True)
    assert [found.words for found in llm.transcribe([noise(1.0), np.zeros(0, np.float32)], wanted)] == [[], []]
    # 10 samples are less than a position of the encoder.
    wanted = Transcription(language="en", thresholds=EVERYTHING, word_timestamps=True)
    (found,) = llm.transcribe(noise(1.0)[:10], wanted)
    assert {time for word in found.words for time in (word.start, word.end)} == {0.0}


def test_models_without_heads_refuse(tmp_path: Path) -> None:
    """Offline and over HTTP, with the name of what is missing; segments are served."""
    make_speech_checkpoint("whisper", tmp_path, alignment_heads=None)
    client = LocalClient(EngineConfig(model=str(tmp_path), dtype="float32", num_gpu_blocks_override=512))
    with pytest.raises(InvalidRequestError, match=r"word_timestamps: .* does not name alignment_heads"):
        Asking(client.info, Transcription(word_timestamps=True))
    with pytest.raises(InvalidRequestError, match="cannot serve align: its generation_config"):
        client.engine.add_request("a", AudioInput(np.zeros((20, 200)), [1, 2]), PoolingParams(task="align"))
    file = io.BytesIO()
    soundfile.write(file, noise(1.0), RATE, format="WAV")

    async def ask(granularity: str) -> httpx.Response:
        transport = httpx.ASGITransport(create_app(client, load_tokenizer(str(tmp_path)), "tiny"))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(
                "/v1/audio/transcriptions",
                data={"response_format": "verbose_json", "timestamp_granularities[]": granularity},
                files={"file": ("a.wav", file.getvalue())},
            )

    answer = asyncio.run(asyncio.wait_for(ask("word"), 60))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "timestamp_granularities"
    assert "does not name alignment_heads" in error["message"]
    client.engine.close()
