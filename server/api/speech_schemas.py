"""The forms and answers of /v1/audio/transcriptions and /v1/audio/translations, in OpenAI's shapes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.api.fields import Name
from server.api.multipart import MultipartForm, Upload
from server.api.schemas import ServedBody
from server.errors import ApiError, describe_validation, shown

MAX_SPEECH_BEAMS = 64

ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]
Granularity = Literal["segment", "word"]
# OpenAI's fields that would change the answer, with their neutral values.
_UNSUPPORTED: dict[str, tuple[str, ...]] = {
    "include": (),
    "chunking_strategy": ("auto",),
    "known_speaker_names": (),
    "known_speaker_references": (),
}
_LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")


class SpeechForm(ServedBody):
    """The fields of both endpoints besides the file. A form's fields are texts, so "0.5" counts as a number here."""

    model_config = ConfigDict(strict=False, extra="allow", protected_namespaces=())

    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")
    prompt: str | None = Field(None, description="A text that might have come before; its last tokens count.")
    response_format: ResponseFormat = Field("json", description="json, text, srt, vtt or verbose_json.")
    temperature: float = Field(
        0.0,
        ge=0.0,
        le=2.0,
        description="0: decode greedily, or with beams. If an answer repeats itself or is improbable, try again with "
        "temperatures from 0.2 to 1. Above 0, this temperature is used throughout.",
    )
    num_beams: int | None = Field(
        None,
        ge=1,
        le=MAX_SPEECH_BEAMS,
        description="Number of beams at temperature 0 (default: the model's own files).",
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="Seed for sampling: the same seed gives the same text.")
    compression_ratio_threshold: float = Field(
        2.4, gt=0, description="An answer whose text can be compressed by more than this factor counts as repetitive."
    )
    logprob_threshold: float = Field(
        -1.0, le=0, description="An answer whose tokens have a lower mean log-probability counts as a guess."
    )
    no_speech_threshold: float = Field(
        0.6, ge=0, le=1, description="If the probability of silence is higher than this, a guess counts as silence."
    )
    stream: bool | None = Field(None, description="Stream finished parts as server-sent events (json and text only).")

    def refuse(self) -> None:
        """Refuse fields that would change the answer and are not supported. Raises ApiError: names the first such
        field."""
        self.refuse_unsupported()
        for name, nothing in _UNSUPPORTED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in nothing:
                message = f"{name} is not supported; leave it out, got {shown(value)}."
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        if self.stream and self.response_format not in ("json", "text"):
            message = f"stream needs response_format json or text, got {self.response_format}."
            raise ApiError(400, message, param="response_format", code="unsupported_parameter")

    def granularities(self) -> tuple[Granularity, ...]:
        """The parts that get times in verbose_json."""
        return ("segment",)

    def ignored_fields(self) -> list[str]:
        return [name for name in super().ignored_fields() if name not in _UNSUPPORTED]


class TranscriptionForm(SpeechForm):
    """Fields of POST /v1/audio/transcriptions besides `file`."""

    language: Name | None = Field(
        None, description="Spoken language: a code such as en, or a name such as english. Default: detected."
    )
    timestamp_granularities: list[Granularity] | None = Field(
        None, max_length=2, description="Times in verbose_json: per segment (default), per word."
    )

    def refuse(self) -> None:
        super().refuse()
        if self.timestamp_granularities is None:
            return
        if self.response_format != "verbose_json":
            message = (
                f"timestamp_granularities needs response_format verbose_json, got {self.response_format}: srt and "
                "vtt always contain times, and the other formats have no place for them."
            )
            raise ApiError(400, message, param="timestamp_granularities", code="unsupported_parameter")

    def granularities(self) -> tuple[Granularity, ...]:
        return tuple(self.timestamp_granularities or super().granularities())


class TranslationForm(SpeechForm):
    """Fields of POST /v1/audio/translations besides `file`: the text is English."""


def read_fields(form: MultipartForm, kind: type[SpeechForm]) -> tuple[SpeechForm, Upload]:
    """Parse the fields and the file of a form. Raises ApiError if a field is invalid, or there is no file."""
    given: dict[str, Any] = {}
    for sent, values in form.texts.items():
        name, _, member = sent.removesuffix("]").partition("[")  # a list is sent as field[], an object as field[member]
        if member:
            given[name] = (given[name] if isinstance(given.get(name), dict) else {}) | {member: values[0]}
        elif name in _LISTS:
            given[name] = (given[name] if isinstance(given.get(name), list) else []) + values
        elif len(values) > 1:
            raise ApiError(400, f"{name} was sent {len(values)} times; send it once.", param=name, code="invalid_value")
        elif values[0] or name == "prompt":  # an empty field counts as missing
            given[name] = values[0]
    file = form.files.get("file")
    if file is None:
        raise ApiError(
            400, "file is required: send the audio as a part with a filename.", param="file",
            code="missing_required_parameter",
        )  # fmt: skip
    try:
        return kind.model_validate(given), file
    except ValidationError as problem:
        errors = problem.errors(include_url=False)
        raise describe_validation([{**error, "loc": ("body", *error["loc"])} for error in errors]) from None


class DurationUsage(BaseModel):
    """Length of the audio, in whole seconds."""

    type: Literal["duration"] = "duration"
    seconds: int


class SpokenSegment(BaseModel):
    """A segment of speech.

    Attributes:
        seek: start of the window that contains the segment, in hundredths of a second.
        start, end: seconds.
        tokens: the tokens of its text.
        temperature, avg_logprob, compression_ratio, no_speech_prob: values of its whole window.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class SpokenWord(BaseModel):
    """A word with its punctuation.

    Attributes:
        start, end: seconds.
    """

    word: str
    start: float
    end: float


class TranscriptionResponse(BaseModel):
    """The text (json)."""

    text: str
    usage: DurationUsage


class VerboseTranscription(BaseModel):
    """The text with its segments, its words, or both (verbose_json)."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[SpokenSegment] | None = None
    words: list[SpokenWord] | None = None
    usage: DurationUsage


class TextDelta(BaseModel):
    """An event with more of the text, which will not change."""

    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TextDone(BaseModel):
    """The last event, with the whole text."""

    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: DurationUsage
