"""Speech models against `transformers`, on tiny random checkpoints in float32: hidden states, and the tokens of
windows, greedy and by beam search, with timestamps and without, with prompts, languages and tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.driving import check_idle, finish, make_engine, preempt_all, tokens_of
from support.pages import Pages, close, load, scattered_tables
from support.reference import MIN_MARGIN
from support.speech import SECONDS, SHAPES, SpeechCheckpoint, make_speech_checkpoint, noise, sounds

from engine import AudioInput, Engine, InvalidRequestError, SamplingParams, Seq2SeqInput
from engine.audio.transcribing import Asking, Question, Transcription

LENGTH = 40
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "times": {"timestamps": True},
    "beams": {"beams": 3},
    "beams-times": {"beams": 4, "timestamps": True},
    "translate": {"task": "translate", "timestamps": True},
    "prompt": {"prompt": [40, 41, 42, 70], "timestamps": True},
}


@dataclass(frozen=True)
class Subject:
    model: SpeechCheckpoint
    engine: Engine


@pytest.fixture(scope="module", params=SHAPES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    model = make_speech_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    engine = make_engine(model.path, block_size=4, max_num_seqs=64, max_num_batched_tokens=512)
    yield Subject(model, engine)
    engine.close()


def question(
    engine: Engine, *, beams: int = 1, timestamps: bool = False, task: Any = "transcribe", prompt: Any = ()
) -> Question:
    """What is asked, as `LLM.transcribe` and the server do."""
    wanted = Transcription(task=task, language="de", prompt=prompt, timestamps=timestamps, num_beams=beams)
    return Asking(engine.info, wanted).text("de", 0.0)


def add(subject: Subject, name: str, samples: np.ndarray, way: dict[str, Any]) -> list[int]:
    asked = question(subject.engine, **way)
    params = {field: getattr(asked.params, field) for field in asked.params.__slots__} | {"max_tokens": LENGTH}
    features = subject.model.log_mel.features(samples)
    subject.engine.add_request(name, AudioInput(features, asked.begin), SamplingParams(**params))
    return asked.begin


def reference(model: SpeechCheckpoint, samples: np.ndarray, way: dict[str, Any]) -> tuple[list[int], list[int], float]:
    settings = dict(way)
    prompt = settings.pop("prompt", None)
    if prompt is not None:
        settings["prompt_ids"] = torch.tensor([model.model.generation_config.prev_sot_token_id, *prompt])
    return model.answer(samples, length=LENGTH, **({"language": "de", "task": "transcribe"} | settings))


def test_hidden_states_equal_reference(subject: Subject) -> None:
    """Of the encoder for several windows together; of the decoder, whole and in chunks."""
    spectra = [torch.from_numpy(subject.model.log_mel.features(samples)) for samples in sounds(3)]
    targets = [[subject.model.start, *range(3 * n, 5 * n)] for n in (9, 0, 17)]
    count = SECONDS * 50
    with torch.no_grad():
        encoded = subject.model.model.get_encoder()(torch.stack(spectra)).last_hidden_state
        decoder = subject.model.model.get_decoder()
        expected = [
            decoder(input_ids=torch.tensor([target]), encoder_hidden_states=one[None]).last_hidden_state[0]
            for target, one in zip(targets, encoded, strict=True)
        ]
    model = load(subject.model.path, max_model_len=64)
    tables = scattered_tables([len(target) for target in targets])
    more = 1 + max(map(max, tables))
    cross = [[more + page for page in table] for table in scattered_tables([count] * 3)]
    pages = Pages(model, tables, more=1 + max(map(max, cross)))
    for ours, theirs in zip(pages.encode([[0] * count] * 3, cross, padding=3, signals=spectra), encoded, strict=True):
        close(ours, theirs)
    for ours, theirs in zip(pages.step(targets), expected, strict=True):
        close(ours, theirs)


@pytest.mark.slow
def test_windows_equal_reference(subject: Subject) -> None:
    """All windows in all ways in one batch; what the decoder begins with is the reference's, too."""
    cases = [(name, index, samples) for name in WAYS for index, samples in enumerate(sounds(4))]
    begins = {(name, i): add(subject, f"{name}-{i}", samples, WAYS[name]) for name, i, samples in cases}
    found = finish(subject.engine)
    clear, times, answers = 0, 0, set()
    first_time = subject.engine.info.speech.first_timestamp_id if subject.engine.info.speech else 0
    for name, i, samples in cases:
        begin, tokens, margin = reference(subject.model, samples, WAYS[name])
        assert begins[name, i] == begin
        if margin < MIN_MARGIN:
            continue
        clear += 1
        (answer,) = tokens_of(found[f"{name}-{i}"])
        assert answer == tokens, (name, i)
        times += any(token >= first_time for token in answer)
        answers.add(tuple(answer))
    assert clear > 0.8 * len(cases)
    assert times > 8
    assert len(answers) > 0.7 * clear
    check_idle(subject.engine)


def test_preempted_windows_say_the_same(subject: Subject) -> None:
    samples = sounds(3, first=20)
    ways = [WAYS["times"], WAYS["beams-times"], WAYS["plain"]]
    for i, way in enumerate(ways):
        add(subject, f"calm-{i}", samples[i], way)
    calm = finish(subject.engine)
    for i, way in enumerate(ways):
        add(subject, f"rough-{i}", samples[i], way)
    for _ in range(5):
        subject.engine.step()
    before = subject.engine.stats().num_preemptions
    preempt_all(subject.engine)
    rough = finish(subject.engine)
    assert subject.engine.stats().num_preemptions > before
    for i in range(len(ways)):
        assert tokens_of(rough[f"rough-{i}"]) == tokens_of(calm[f"calm-{i}"])


def test_the_language_is_detected_as_there(subject: Subject) -> None:
    asking = Asking(subject.engine.info, Transcription())
    asked = asking.detection()
    for i, samples in enumerate(sounds(5)):
        features = subject.model.log_mel.features(samples)
        subject.engine.add_request(f"language-{i}", AudioInput(features, asked.begin), asked.params)
    found = finish(subject.engine)
    for i, samples in enumerate(sounds(5)):
        features = torch.from_numpy(subject.model.log_mel.features(samples))[None]
        expected = int(subject.model.model.detect_language(features))
        assert tokens_of(found[f"language-{i}"]) == [[expected]]


def test_the_probability_of_silence(subject: Subject) -> None:
    asked = Asking(subject.engine.info, Transcription(language="en")).silence()
    samples = noise(1.5, 3)
    features = subject.model.log_mel.features(samples)
    subject.engine.add_request("silence", AudioInput(features, asked.begin), asked.params)
    (answer,) = finish(subject.engine)["silence"].outputs
    with torch.no_grad():
        logits = subject.model.model(
            torch.from_numpy(features)[None], decoder_input_ids=torch.tensor([asked.begin])
        ).logits
    assert subject.engine.info.speech is not None
    expected = logits[0, -1].log_softmax(-1)[subject.engine.info.speech.no_speech_id]
    assert answer.cumulative_logprob == pytest.approx(float(expected), abs=1e-4)


def test_other_inputs_are_refused(subject: Subject) -> None:
    engine, params = subject.engine, SamplingParams(max_tokens=4)
    for wrong in ([1, 2, 3], Seq2SeqInput([1, 2])):
        with pytest.raises(InvalidRequestError, match="sound"):
            engine.add_request("wrong", wrong, params)
    with pytest.raises(InvalidRequestError, match=r"shape \[20, 200\], got \[20, 199\]"):
        engine.add_request("wrong", AudioInput(np.zeros((20, 199), np.float32)), params)
