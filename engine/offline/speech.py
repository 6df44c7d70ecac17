"""The offline API of speech models: sounds to texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.audio.cutting import Cutter, Window
from engine.audio.features import LogMel, load_log_mel
from engine.audio.resampling import Samples
from engine.audio.transcribing import Answer, Asking, Placing, Question, Segment, Transcription, said, segments_of
from engine.audio.words import Word, words_of
from engine.errors import InvalidRequestError
from engine.interface.outputs import CompletionOutput, EngineInfo, Pooled, RequestOutput
from engine.interface.request import AudioInput, PoolingParams, SamplingParams
from engine.text.processor import Tokenizer

# From inputs and their parameters to answers.
Answers = Callable[[list[AudioInput], list[SamplingParams]], list[RequestOutput]]
Places = Callable[[list[AudioInput], list[PoolingParams]], list[Pooled]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSegment(Segment):
    """A coherent piece of speech and its text."""

    text: str


@dataclass(slots=True, kw_only=True)
class Transcript:
    """The text of a sound.

    Attributes:
        text: the whole text.
        language: the code of the spoken language; None for a model with one language.
        segments: its parts, with times in seconds.
        words: the words with times, if requested.
    """

    text: str
    language: str | None
    segments: list[TextSegment]
    words: list[Word] = field(default_factory=list)


@dataclass(slots=True)
class _Hearing:
    """The state of one window."""

    sound: int
    window: Window
    input: AudioInput
    no_speech: float = 0.0
    question: Question | None = None
    answer: Answer | None = None
    positions: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Transcriber:
    """Turns sounds into texts. The windows of all sounds run in the same batches.

    Args:
        answers: computes a model's answers.
        places: finds where tokens are spoken.
    """

    info: EngineInfo
    tokenizer: Tokenizer
    answers: Answers
    places: Places
    log_mel: LogMel = field(init=False)

    def __post_init__(self) -> None:
        self.log_mel = load_log_mel(Path(self.info.model_path))

    def transcribe(self, sounds: Sequence[Samples], wanted: Transcription) -> list[Transcript]:
        """One transcript for each sound, in order."""
        asking = Asking(self.info, wanted)
        hearings = [hearing for number, sound in enumerate(sounds) for hearing in self._windows(number, sound)]
        languages = self._languages(asking, hearings, len(sounds))
        waiting = hearings
        for temperature in asking.temperatures():
            questions = [asking.text(languages[hearing.sound], temperature) for hearing in waiting]
            if temperature == asking.temperatures()[0]:
                questions += [asking.silence()] * len(waiting)
            outputs = self._ask([*waiting, *waiting], questions)
            for hearing, question, output in zip(waiting, questions, outputs, strict=False):
                hearing.question, hearing.answer = question, self._read(output, temperature)
            for hearing, output in zip(waiting, outputs[len(waiting) :], strict=False):
                hearing.no_speech = math.exp(output.cumulative_logprob or 0.0)
            waiting = [hearing for hearing in waiting if not self._is_done(asking, hearing)]
            if not waiting:
                break
        hearings = [hearing for hearing in hearings if not self._is_silent(asking, hearing)]
        if wanted.word_timestamps:
            self._place(asking, hearings)
        return [self._joined(hearings, number, languages[number], asking.wanted) for number in range(len(sounds))]

    def _windows(self, number: int, sound: Samples) -> list[_Hearing]:
        cutter = Cutter(self.log_mel.window_samples, self.log_mel.rate)
        windows = [*cutter.add(sound), *cutter.end()]
        features = self.log_mel.features_of_all(window.samples for window in windows)
        return [_Hearing(number, window, AudioInput(of)) for window, of in zip(windows, features, strict=True)]

    def _languages(self, asking: Asking, hearings: Sequence[_Hearing], count: int) -> list[str | None]:
        if not asking.detects:
            return [asking.wanted.language] * count
        firsts = [hearing for hearing in hearings if hearing.window.start == 0]
        found: list[str | None] = [None] * count
        outputs = self._ask(firsts, [asking.detection()] * len(firsts))
        for hearing, output in zip(firsts, outputs, strict=True):
            found[hearing.sound] = asking.language_of(output.token_ids[0])
        return found

    def _ask(self, hearings: Sequence[_Hearing], questions: Sequence[Question]) -> list[CompletionOutput]:
        inputs = [
            AudioInput(hearing.input.input_features, question.begin)
            for hearing, question in zip(hearings, questions, strict=False)
        ]
        return [output.outputs[0] for output in self.answers(inputs, [question.params for question in questions])]

    def _read(self, output: CompletionOutput, temperature: float) -> Answer:
        tokens, speech = output.token_ids, self.info.speech
        assert speech is not None
        return Answer(
            tokens=tokens,
            text=self.tokenizer.decode(said(tokens, speech, self._ends)),
            mean_logprob=(output.cumulative_logprob or 0.0) / max(len(tokens), 1),
            temperature=temperature,
        )

    @property
    def _ends(self) -> Sequence[int]:
        end = self.tokenizer.eos_token_id
        return () if end is None else (end,)

    def _place(self, asking: Asking, hearings: Sequence[_Hearing]) -> None:
        """Find out where the tokens of answers are spoken."""
        asked: list[tuple[_Hearing, Placing]] = []
        for hearing in hearings:
            assert hearing.question is not None
            assert hearing.answer is not None
            frames = self.log_mel.frames_of(len(hearing.window.samples))
            placing = asking.placing(hearing.question, hearing.answer, frames)
            if placing is not None:
                asked.append((hearing, placing))
        inputs = [AudioInput(hearing.input.input_features, placing.tokens) for hearing, placing in asked]
        for (hearing, _), found in zip(asked, self.places(inputs, [one.params for _, one in asked]), strict=True):
            hearing.positions = found.values()[:, 0].tolist()

    @staticmethod
    def _is_silent(asking: Asking, hearing: _Hearing) -> bool:
        assert hearing.answer is not None
        return asking.is_silence(hearing.answer, hearing.no_speech)

    @staticmethod
    def _is_done(asking: Asking, hearing: _Hearing) -> bool:
        assert hearing.answer is not None
        return asking.takes(hearing.answer) or asking.is_silence(hearing.answer, hearing.no_speech)

    def _joined(
        self, hearings: Sequence[_Hearing], number: int, language: str | None, wanted: Transcription
    ) -> Transcript:
        rate, speech, decode = self.log_mel.rate, self.info.speech, self.tokenizer.decode
        assert speech is not None
        segments: list[TextSegment] = []
        words: list[Word] = []
        for hearing in hearings:
            answer, window = hearing.answer, hearing.window
            assert answer is not None
            if hearing.sound != number:
                continue
            start, end = window.start / rate, (window.start + len(window.samples)) / rate
            segments += [
                TextSegment(start=s.start, end=s.end, tokens=s.tokens, text=decode(s.tokens))
                for s in segments_of(answer.tokens, speech, self._ends, start, end)
            ]
            if wanted.word_timestamps:
                spoken = None if wanted.task == "translate" else language
                words += words_of(answer.tokens, hearing.positions, speech, decode, spoken, start, end)
        text = "".join(segment.text for segment in segments).strip()
        return Transcript(text=text, language=language, segments=segments, words=words)


def need_speech(info: EngineInfo, tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer of a speech model.

    Raises:
        InvalidRequestError: the model is not a speech model, or has no tokenizer.
    """
    if info.speech is None or tokenizer is None:
        reason = "is not a speech model" if info.speech is None else "has no tokenizer, so it cannot write texts"
        raise InvalidRequestError(f"{info.model} {reason}.", param="model", code="unsupported_endpoint")
    return tokenizer
