"""The offline face of speech models: sounds in, texts out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.audio.cutting import Cutter, Window
from engine.audio.features import LogMel, load_log_mel
from engine.audio.resampling import Samples
from engine.audio.transcribing import Answer, Asking, Question, Segment, Transcription, said, segments_of
from engine.errors import InvalidRequestError
from engine.interface.outputs import CompletionOutput, EngineInfo, RequestOutput
from engine.interface.request import AudioInput, SamplingParams
from engine.text.processor import Tokenizer

# Inputs and their parameters to answers.
Answers = Callable[[list[AudioInput], list[SamplingParams]], list[RequestOutput]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSegment(Segment):
    """Something that is said in one go, and its text."""

    text: str


@dataclass(slots=True, kw_only=True)
class Transcript:
    """The text of a sound.

    Attributes:
        text: all of it.
        language: the code of what is spoken; None of a model for one language.
        segments: its parts, with times in seconds.
    """

    text: str
    language: str | None
    segments: list[TextSegment]


@dataclass(slots=True)
class _Hearing:
    """A window on its way."""

    sound: int
    window: Window
    input: AudioInput
    no_speech: float = 0.0
    answer: Answer | None = None


@dataclass(slots=True)
class Transcriber:
    """Turns sounds into texts, the windows of all of them beside each other.

    Args:
        answers: of a model.
    """

    info: EngineInfo
    tokenizer: Tokenizer
    answers: Answers
    log_mel: LogMel = field(init=False)

    def __post_init__(self) -> None:
        self.log_mel = load_log_mel(Path(self.info.model_path))

    def transcribe(self, sounds: Sequence[Samples], wanted: Transcription) -> list[Transcript]:
        """One transcript for each sound, in their order."""
        asking = Asking(self.info, wanted)
        hearings = [hearing for number, sound in enumerate(sounds) for hearing in self._windows(number, sound)]
        languages = self._languages(asking, hearings, len(sounds))
        waiting = hearings
        for temperature in asking.temperatures():
            questions = [asking.text(languages[hearing.sound], temperature) for hearing in waiting]
            if temperature == asking.temperatures()[0]:
                questions += [asking.silence()] * len(waiting)
            outputs = self._ask([*waiting, *waiting], questions)
            for hearing, output in zip(waiting, outputs, strict=False):
                hearing.answer = self._read(output, temperature)
            for hearing, output in zip(waiting, outputs[len(waiting) :], strict=False):
                hearing.no_speech = math.exp(output.cumulative_logprob or 0.0)
            waiting = [hearing for hearing in waiting if not self._is_done(asking, hearing)]
            if not waiting:
                break
        return [self._joined(asking, hearings, number, languages[number]) for number in range(len(sounds))]

    def _windows(self, number: int, sound: Samples) -> list[_Hearing]:
        cutter = Cutter(self.log_mel.window_samples, self.log_mel.rate)
        windows = [*cutter.add(sound), *cutter.end()]
        return [_Hearing(number, window, AudioInput(self.log_mel.features(window.samples))) for window in windows]

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

    @staticmethod
    def _is_done(asking: Asking, hearing: _Hearing) -> bool:
        assert hearing.answer is not None
        return asking.takes(hearing.answer) or asking.is_silence(hearing.answer, hearing.no_speech)

    def _joined(self, asking: Asking, hearings: Sequence[_Hearing], number: int, language: str | None) -> Transcript:
        rate, speech = self.log_mel.rate, self.info.speech
        assert speech is not None
        segments: list[TextSegment] = []
        for hearing in hearings:
            answer, window = hearing.answer, hearing.window
            assert answer is not None
            if hearing.sound != number or asking.is_silence(answer, hearing.no_speech):
                continue
            start, end = window.start / rate, (window.start + len(window.samples)) / rate
            segments += [
                TextSegment(start=s.start, end=s.end, tokens=s.tokens, text=self.tokenizer.decode(s.tokens))
                for s in segments_of(answer.tokens, speech, self._ends, start, end)
            ]
        text = "".join(segment.text for segment in segments).strip()
        return Transcript(text=text, language=language, segments=segments)


def need_speech(info: EngineInfo, tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer of a speech model.

    Raises:
        InvalidRequestError: the model is none, or has no tokenizer.
    """
    if info.speech is None or tokenizer is None:
        reason = "is no speech model" if info.speech is None else "has no tokenizer, so it cannot write texts"
        raise InvalidRequestError(f"{info.model} {reason}.", param="model", code="unsupported_endpoint")
    return tokenizer
