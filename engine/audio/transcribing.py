"""From windows of sound to text: the requests to a speech model, and the use of its answers (arXiv:2212.04356).

Nothing here runs a model; `LLM.transcribe` and the server do.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from engine.audio.languages import language_code
from engine.errors import InvalidRequestError
from engine.interface.outputs import SECONDS_PER_TIMESTAMP, EngineInfo, SpeechInfo, SpeechTask
from engine.interface.request import PoolingParams, SamplingParams
from engine.interface.values import NumberRange, brief, check_number, fail

_TASKS: tuple[SpeechTask, ...] = get_args(SpeechTask)
_MOST_TEMPERATURE = 2.0
STEP, HOTTEST = 0.2, 1.0  # maximum number of temperatures to try


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The conditions for rejecting an answer; None disables one.

    Attributes:
        compression_ratio: bytes of the text divided by bytes of the compressed text; above it, the text repeats itself.
        logprob: mean log-probability of the tokens; below it, the answer is a guess.
        no_speech: probability of silence; above it, an answer below `logprob` counts as silence.
    """

    compression_ratio: float | None = 2.4
    logprob: float | None = -1.0
    no_speech: float | None = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcription:
    """A request to a speech model.

    Attributes:
        task: "transcribe" for text in the spoken language, "translate" for English; None: the task in the model's
            generation_config.json, or else "transcribe".
        language: a code or a name; None: the language in the model's generation_config.json, or else detected in the
            first window.
        prompt: tokens of a text that could have come before each window; the last ones count.
        timestamps: whether the answer has timestamps.
        word_timestamps: whether each word gets times, derived from the decoder's attention to the sound.
        temperature: 0 begins with greedy or beam search, and samples at higher temperatures if the answer is rejected.
        num_beams: beams at temperature 0; None: the number in the model's generation_config.json.
        seed: the seed for sampling.
    """

    task: SpeechTask | None = None
    language: str | None = None
    prompt: Sequence[int] = ()
    timestamps: bool = True
    word_timestamps: bool = False
    temperature: float = 0.0
    num_beams: int | None = None
    seed: int | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass(frozen=True, slots=True)
class Question:
    """The beginning of the decoder's text, and the parameters for the rest."""

    begin: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Placing:
    """All tokens of a decoder, and the requested result: the encoder positions at which they are spoken."""

    tokens: list[int]
    params: PoolingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A coherent piece of speech. `start`, `end`: seconds from the beginning of the whole sound."""

    start: float
    end: float
    tokens: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The model's answer to a window."""

    tokens: list[int]  # all tokens, including the end
    text: str  # their text, without timestamps
    # mean log-probability of `tokens` under the model's own distribution; for beams, the search's sum divided by their
    # number
    mean_logprob: float
    temperature: float  # the temperature at which they were sampled

    @property
    def compression_ratio(self) -> float:
        return compression_ratio(self.text)


class Asking:
    """The requests for a transcription. Raises InvalidRequestError if a value is invalid, or the model does not support
    the request. `info`: facts about the model. `wanted`: the request, with the model's own task and language where it
    names none."""

    def __init__(self, info: EngineInfo, wanted: Transcription):
        if info.speech is None or info.decoder_start_token_id is None:
            raise InvalidRequestError(
                "this is not a speech model: its generation_config.json has no no_timestamps_token_id.",
                param="model",
                code="unsupported_endpoint",
            )
        _check_values(wanted, info.vocab_size)
        self.wanted = wanted = _completed(wanted, info.speech)
        self._info, self._speech, self._start = info, info.speech, info.decoder_start_token_id
        check_task(self._speech, wanted)
        if wanted.word_timestamps:
            check_alignment(self._speech)
        room = info.max_model_len // 2 - 1
        self._before: list[int] = []
        if len(wanted.prompt):
            if self._speech.prompt_id is None:
                message = "this model's generation_config.json names no prev_sot_token_id, which prompts need."
                raise InvalidRequestError(message, param="prompt", code="unsupported_parameter")
            self._before = [self._speech.prompt_id, *wanted.prompt[-room:]]

    @property
    def detects(self) -> bool:
        """Whether the language must be detected first."""
        return bool(self._speech.languages) and self.wanted.language is None

    def language_of(self, token: int) -> str:
        """The code of a language's token."""
        return next(code for code, known in self._speech.languages.items() if known == token)

    def detection(self) -> Question:
        """A request whose answer is the token of the language."""
        return self._single([self._start], list(self._speech.languages.values()))

    def silence(self) -> Question:
        """A request for the log-probability of silence: that of its answer's only token."""
        return self._single([*self._before, self._start], [self._speech.no_speech_id])

    def temperatures(self) -> list[float]:
        """The temperatures to try, in order."""
        if self.wanted.temperature > 0.0:
            return [self.wanted.temperature]
        return [round(i * STEP, 1) for i in range(round(HOTTEST / STEP) + 1)]

    def text(self, language: str | None, temperature: float) -> Question:
        """A request whose answer is the spoken text."""
        wanted, speech = self.wanted, self._speech
        begin = [*self._before, self._start]
        if speech.languages:
            begin.append(speech.languages[language or ""])
            if speech.tasks:
                begin.append(speech.tasks[wanted.task or "transcribe"])
        if not wanted.timestamps:
            begin.append(speech.no_timestamps_id)
        room = self._info.max_model_len - len(begin)
        limit = self._info.default_max_new_tokens or self._info.default_max_length or room
        params = SamplingParams(
            max_tokens=max(min(limit, room), 1),
            temperature=temperature,
            num_beams=wanted.num_beams if temperature == 0.0 else 1,
            seed=wanted.seed,
            timestamps=wanted.timestamps,
            decoder_start_token_id=begin[0],
        )
        return Question(begin, params)

    def placing(self, question: Question, answer: Answer, frames: int) -> Placing | None:
        """A request for the times of an answer's tokens; None if there is nothing to ask.

        Args:
            question: the request that was answered.
            frames: the number of the window's feature frames that contain sound.
        """
        signal = self._info.signal
        assert signal is not None  # it is a speech model
        if len(answer.tokens) < 2:
            return None
        params = PoolingParams(
            task="align",
            skip_tokens=len(question.begin),
            encoder_length=max(frames * signal.positions // signal.shape[-1], 1),
        )
        return Placing([*question.begin, *answer.tokens[:-1]], params)

    def takes(self, answer: Answer) -> bool:
        """Whether the answer is acceptable, be it speech or silence."""
        limits = self.wanted.thresholds
        repeats = limits.compression_ratio is not None and answer.compression_ratio > limits.compression_ratio
        guesses = limits.logprob is not None and answer.mean_logprob < limits.logprob
        return not (repeats or guesses)

    def is_silence(self, answer: Answer, no_speech: float) -> bool:
        """Whether the window is silent, so that the answer has no meaning."""
        limits = self.wanted.thresholds
        if limits.no_speech is None or limits.logprob is None:
            return False
        return no_speech > limits.no_speech and answer.mean_logprob < limits.logprob

    def _single(self, begin: list[int], allowed: list[int]) -> Question:
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            num_beams=1,
            logprobs=0,
            allowed_token_ids=allowed,
            suppress_tokens=(),
            begin_suppress_tokens=(),
            ignore_eos=True,
            decoder_start_token_id=begin[0],
        )
        return Question(begin, params)


def _completed(wanted: Transcription, speech: SpeechInfo) -> Transcription:
    """The request with the language's code and the model's defaults, as in `transformers`."""
    if wanted.language is not None:
        wanted = replace(wanted, language=language_code(wanted.language))
    if speech.defaults_are_forced and (wanted.task is not None or wanted.language is not None):
        return replace(wanted, task=wanted.task or "transcribe")
    return replace(wanted, task=wanted.task or speech.task, language=wanted.language or speech.language)


def _check_values(wanted: Transcription, vocab_size: int) -> None:
    """Refuse values that no model supports. Raises InvalidRequestError: names the field and the value."""
    if wanted.task not in (None, *_TASKS):
        fail("task", f"task must be {' or '.join(_TASKS)}, got {brief(wanted.task)}.")
    if not isinstance(wanted.language, str | None):
        fail("language", f"language must be a code such as de or a name such as german, got {brief(wanted.language)}.")
    check_number("temperature", wanted.temperature, NumberRange(low=0.0, high=_MOST_TEMPERATURE, optional=False))
    check_number("num_beams", wanted.num_beams, NumberRange(low=1, integer=True))
    prompt: object = wanted.prompt
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        fail("prompt", f"prompt must be a list of token ids, as a tokenizer returns, got {brief(prompt)}.")
    for token in wanted.prompt:
        if type(token) is not int or not 0 <= token < vocab_size:
            message = (
                f"prompt contains {brief(token)}, which is not a token id of the vocabulary (0 to {vocab_size - 1})."
            )
            fail("prompt", message)
    for name in ("compression_ratio", "logprob", "no_speech"):
        check_number(name, getattr(wanted.thresholds, name), NumberRange())


def check_task(speech: SpeechInfo, wanted: Transcription) -> None:
    """Refuse a language or a task that the model does not support. Raises InvalidRequestError: lists the supported
    ones."""
    languages = speech.languages or ("en",)  # a model for one language is a model for English
    if wanted.language is not None and wanted.language not in languages:
        known = ", ".join(sorted(languages))
        message = f"this model does not know the language {wanted.language!r}. Languages: {known}."
        raise InvalidRequestError(message, param="language", code="invalid_value")
    if wanted.task == "translate" and "translate" not in speech.tasks:
        message = "this model does not translate: its generation_config.json does not name the task translate."
        raise InvalidRequestError(message, param="model", code="unsupported_endpoint")


def check_alignment(speech: SpeechInfo, param: str = "word_timestamps") -> None:
    """Refuse word times for a model whose config does not list alignment heads. Raises InvalidRequestError: names the
    missing setting."""
    if speech.alignment is None:
        raise InvalidRequestError(
            f"{param}: word timestamps need alignment_heads, but for this model {speech.no_alignment}. Request "
            f"segments, or correct the file: Whisper's published files list these heads.",
            param=param,
            code="unsupported_parameter",
        )


def compression_ratio(text: str) -> float:
    """Bytes of a text divided by bytes of the compressed text; 0 for an empty text."""
    written = text.encode()
    return len(written) / len(zlib.compress(written)) if written else 0.0


def said(tokens: Sequence[int], speech: SpeechInfo, ends: Sequence[int]) -> list[int]:
    return [token for token in tokens if token < speech.first_timestamp_id and token not in ends]


def segments_of(
    tokens: Sequence[int], speech: SpeechInfo, ends: Sequence[int], start: float, end: float
) -> list[Segment]:
    """The segments of a window's text, with their times.

    Args:
        tokens: the model's answer; without timestamps it is one segment.
        start, end: bounds of the window, in seconds of the whole sound.
    """
    segments: list[Segment] = []
    since, text = start, list[int]()
    for token in tokens:
        if token < speech.first_timestamp_id:
            if token not in ends:
                text.append(token)
            continue
        time = min(start + (token - speech.first_timestamp_id) * SECONDS_PER_TIMESTAMP, end)
        if text:
            segments.append(Segment(start=since, end=time, tokens=text))
            text = []
        since = time
    if text:  # its end has no timestamp
        segments.append(Segment(start=since, end=end, tokens=text))
    return segments
