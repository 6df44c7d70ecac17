"""Answers requests for the text of a sound; its windows run through the engine in parallel."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from engine import AudioInput, InvalidRequestError, RequestFailedError
from engine.audio import (
    Answer,
    Asking,
    LogMel,
    Placing,
    Question,
    Window,
    Word,
    language_name,
    said,
    segments_of,
    words_of,
)
from engine.text.processor import ChoiceText, Tokenizer
from server.answering.captions import srt, vtt
from server.answering.observation import RequestRecord
from server.answering.prompt import Prompt
from server.answering.sound import windows
from server.answering.streaming import COMMENT, ClientGoneError, EventStream, Wanted, sse
from server.answering.terms import DeadlineError, Terms, read_terms
from server.api.fields import ignored_header
from server.api.speech_schemas import (
    DurationUsage,
    SpeechForm,
    SpokenSegment,
    SpokenWord,
    TextDelta,
    TextDone,
    TranscriptionResponse,
    VerboseTranscription,
)
from server.context import Service
from server.errors import ApiError
from server.gates import Reservation

T = TypeVar("T")

AT_ONCE = 32  # windows of one request in the engine at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The result of one window."""

    seconds: float  # the end of the window in the whole sound
    segments: list[SpokenSegment]  # the spoken segments, without their numbers
    words: list[SpokenWord]  # the words, if requested


@dataclass(slots=True, kw_only=True)
class TranscriptionRun:
    """A request being answered."""

    service: Service
    tokenizer: Tokenizer
    form: SpeechForm
    content: bytes  # the file's bytes
    asking: Asking
    log_mel: LogMel
    arrival: float  # seconds of `time.monotonic()`
    request_id: str = field(init=False)
    record: RequestRecord = field(init=False)
    terms: Terms = field(init=False)
    language: str | None = None  # the language of the sound, once known; None for a model with one language
    _reservation: Reservation | None = None
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _detected: asyncio.Future[str] | None = None
    _count: int = 0  # requests to the engine so far

    def __post_init__(self) -> None:
        self.request_id = f"transcription-{uuid.uuid4().hex}"
        self.language = self.asking.wanted.language

    async def respond(self, request: Request) -> Response:
        """Answer in the form that the request asks for."""
        headers = ignored_header(self.form.ignored_fields())
        self.terms = read_terms(self.form, request, self.service.settings, self.arrival, self.service.client.adapters)
        self.record = RequestRecord(
            id=self.request_id,
            path=request.url.path,
            model=self.service.name_of(self.terms),
            stream=bool(self.form.stream),
            n=1,
            arrival=self.arrival,
            log_prompts=self.service.settings.log_prompts,
        )
        self.record.belongs_to(request)
        with self.record.refusals():
            self._reservation = reservation = await self.service.admit(
                1, self.service.client.info.max_encoder_len or 1, self.terms
            )
        wanted = Wanted(self.service.drain, self._interrupted)
        if self.form.stream:
            return EventStream(self.record.streamed(self._events(reservation)), wanted, headers, held=reservation)
        try:
            with reservation:
                whole = self.record.whole(self._answer(reservation))
                content, kind = await wanted.run(request.scope, request.receive, whole)
        except ClientGoneError:
            return Response(status_code=499)  # nothing reads it any more
        return Response(content, media_type=kind, headers=headers)

    def _interrupted(self, reason: str) -> None:
        self.service.metrics.aborted(reason)
        self.record.abort(reason)

    async def _answer(self, reservation: Reservation) -> tuple[str, str]:
        segments: list[SpokenSegment] = []
        words: list[SpokenWord] = []
        seconds = 0.0
        async with aclosing(self._heard(reservation)) as heard:
            async for part in heard:
                segments += part.segments
                words += part.words
                seconds = part.seconds
        for number, segment in enumerate(segments):
            segment.id = number
        text = _joined(segments)
        usage = DurationUsage(seconds=math.ceil(seconds))
        match self.form.response_format:
            case "text":
                return f"{text}\n", "text/plain"
            case "srt":
                return srt(segments), "text/plain"
            case "vtt":
                return vtt(segments), "text/vtt"
            case "json":
                return _json(TranscriptionResponse(text=text, usage=usage))
            case "verbose_json":
                granularities = self.form.granularities()
                return _json(
                    VerboseTranscription(
                        task=self.asking.wanted.task or "transcribe",
                        language=language_name(self.language or "en"),
                        duration=round(seconds, 3),
                        text=text,
                        segments=segments if "segment" in granularities else None,
                        words=words if "word" in granularities else None,
                        usage=usage,
                    )
                )

    async def _events(self, reservation: Reservation) -> AsyncGenerator[str, None]:
        """The final text, segment by segment, in the order of the sound."""
        text, seconds = "", 0.0
        patience = self.service.settings.stream_keepalive or None
        async with aclosing(self._heard(reservation)) as heard:
            part: Heard | None = await anext(heard)
            while part is not None:
                seconds, news = part.seconds, []
                for segment in part.segments:
                    piece = segment.text if text else segment.text.lstrip()
                    text += piece
                    if piece:
                        news.append(_event(TextDelta(delta=piece)))
                yield "".join(news)
                coming = asyncio.ensure_future(anext(heard, None))
                try:
                    while not (await asyncio.wait({coming}, timeout=patience))[0]:
                        yield COMMENT
                    part = await coming
                finally:
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
        yield _event(TextDone(text=text.rstrip(), usage=DurationUsage(seconds=math.ceil(seconds))))

    # ---------------------------------------------------------------- windows

    async def _heard(self, reservation: Reservation) -> AsyncGenerator[Heard, None]:
        """The transcript of each window, in order, `AT_ONCE` windows at a time."""
        room = asyncio.Semaphore(AT_ONCE)
        found: asyncio.Queue[asyncio.Task[Heard] | None] = asyncio.Queue()
        self._detected = asyncio.get_running_loop().create_future()
        listening = self._task(self._listen(room, found))
        try:
            with reservation:
                while (task := await found.get()) is not None:
                    heard = await task
                    reservation.started(0)
                    yield heard
                await listening
                reservation.finished(0)
        except (ApiError, InvalidRequestError):  # refused
            raise
        except Exception:
            self._interrupted("error")
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, room: asyncio.Semaphore, found: asyncio.Queue[asyncio.Task[Heard] | None]) -> None:
        """Start the windows one after the other."""
        try:
            limit = self.service.settings.max_audio_seconds
            turn = self.service.decoding.of(self.terms.tenant)
            async with aclosing(windows(self.content, self.log_mel, limit, turn)) as parts:
                async for window in parts:
                    await room.acquire()
                    task = self._task(self._hear(window))
                    task.add_done_callback(lambda _: room.release())
                    found.put_nowait(task)
        finally:
            found.put_nowait(None)

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    async def _hear(self, window: Window) -> Heard:
        """The transcript of a window: its first acceptable answer at rising temperatures."""
        features = await asyncio.to_thread(self.log_mel.features, window.samples)
        language = await self._language(features, first=window.start == 0)
        silence = self._task(self._ask(features, self.asking.silence(), counted=False))
        answer, no_speech = None, 0.0
        for temperature in self.asking.temperatures():
            question = self.asking.text(language, temperature)
            choice = await self._ask(features, question)
            answer = self._read(choice, temperature)
            no_speech = math.exp((await silence).cumulative_logprob or 0.0)
            if self.asking.takes(answer) or self.asking.is_silence(answer, no_speech):
                break
        assert answer is not None
        if self.asking.is_silence(answer, no_speech):
            return Heard(seconds=self._end(window), segments=[], words=[])
        words: list[Word] = []
        if self.asking.wanted.word_timestamps:
            words = await self._words(window, features, question, answer, language)
        return self._placed(window, answer, no_speech, words)

    async def _language(self, features: Any, *, first: bool) -> str | None:
        """The spoken language: the request's, else the first window's."""
        if not self.asking.detects:
            return self.language
        assert self._detected is not None
        if first:
            try:
                choice = await self._ask(features, self.asking.detection(), counted=False)
            except BaseException:
                self._detected.cancel()
                raise
            self.language = self.asking.language_of(choice.token_ids[0])
            self._detected.set_result(self.language)
        return await asyncio.shield(self._detected)

    def _read(self, choice: ChoiceText, temperature: float) -> Answer:
        speech, ends = self.service.client.info.speech, self._ends
        assert speech is not None
        return Answer(
            tokens=choice.token_ids,
            text=self.tokenizer.decode(said(choice.token_ids, speech, ends)),
            mean_logprob=(choice.cumulative_logprob or 0.0) / max(len(choice.token_ids), 1),
            temperature=temperature,
        )

    @property
    def _ends(self) -> Sequence[int]:
        end = self.tokenizer.eos_token_id
        return () if end is None else (end,)

    def _end(self, window: Window) -> float:
        return (window.start + len(window.samples)) / self.log_mel.rate

    async def _words(
        self, window: Window, features: Any, question: Question, answer: Answer, language: str | None
    ) -> list[Word]:
        """The words of an answer; a second request to the model gives their times."""
        speech, decode = self.service.client.info.speech, self.tokenizer.decode
        assert speech is not None
        placing = self.asking.placing(question, answer, self.log_mel.frames_of(len(window.samples)))
        positions = [] if placing is None else await self._place(features, placing)
        spoken = None if self.asking.wanted.task == "translate" else language
        start, end = window.start / self.log_mel.rate, self._end(window)
        return await asyncio.to_thread(words_of, answer.tokens, positions, speech, decode, spoken, start, end)

    def _placed(self, window: Window, answer: Answer, no_speech: float, words: Sequence[Word]) -> Heard:
        speech, rate = self.service.client.info.speech, self.log_mel.rate
        assert speech is not None
        start, end = window.start / rate, self._end(window)
        found = segments_of(answer.tokens, speech, self._ends, start, end)
        segments = [
            SpokenSegment(
                id=0,
                seek=round(start * 100),
                start=round(segment.start, 3),
                end=round(segment.end, 3),
                text=self.tokenizer.decode(segment.tokens),
                tokens=segment.tokens,
                temperature=answer.temperature,
                avg_logprob=answer.mean_logprob,
                compression_ratio=answer.compression_ratio,
                no_speech_prob=no_speech,
            )
            for segment in found
        ]
        spoken = [
            SpokenWord(word=word.text.strip(), start=round(word.start, 3), end=round(word.end, 3))
            for word in words
            if word.text.strip()
        ]
        return Heard(seconds=end, segments=segments, words=spoken)

    # ---------------------------------------------------------------- questions

    async def _place(self, features: Any, placing: Placing) -> list[float]:
        self._count += 1
        request_id, source = f"{self.request_id}-{self._count}", AudioInput(features, placing.tokens)
        work = self.service.client.generate(request_id, source, placing.params, **self.terms.keywords())
        async with aclosing(work) as deltas:
            async for delta in deltas:
                if delta.pooled is not None:
                    positions: list[float] = delta.pooled.values()[:, 0].tolist()
                    return positions
                if delta.error == "deadline":
                    raise DeadlineError
                if delta.error is not None:
                    raise self.service.failure(delta.error, self.terms.adapter)
        raise RequestFailedError("the engine ended the request")

    async def _ask(self, features: Any, question: Question, *, counted: bool = True) -> ChoiceText:
        self._count += 1
        request_id, metrics = f"{self.request_id}-{self._count}", self.service.metrics
        answer = ChoiceText(index=0, token_ids=[])
        times = self.record.prompt(Prompt([], None, question.begin), 1) if counted else None
        if times is not None:
            metrics.watch(request_id, times)
        source = AudioInput(features, question.begin)
        work = self.service.client.generate(request_id, source, question.params, **self.terms.keywords())
        try:
            async with aclosing(work) as deltas:
                async for delta in deltas:
                    if delta.error is not None:
                        raise self.service.failure(delta.error, self.terms.adapter)
                    for choice in delta.choices:
                        news = ChoiceText(
                            index=0,
                            token_ids=list(choice.token_ids),
                            finish_reason=choice.finish_reason,
                            stop_reason=choice.stop_reason,
                            cumulative_logprob=choice.cumulative_logprob,
                        )
                        answer.extend(news)
                        if times is not None:
                            self.record.answer(times, 0, news)
        finally:
            metrics.unwatch(request_id)
        if answer.finish_reason == "abort":
            if answer.stop_reason == "deadline":
                raise DeadlineError
            raise RequestFailedError("the engine ended the request")
        if times is not None:
            metrics.finished(answer.finish_reason or "stop")
            metrics.prompt_done(times)
        return answer


def _joined(segments: Sequence[SpokenSegment]) -> str:
    return "".join(segment.text for segment in segments).strip()


def _json(answer: BaseModel) -> tuple[str, str]:
    return answer.model_dump_json(exclude_none=True), "application/json"


def _event(content: BaseModel) -> str:
    return sse(content.model_dump_json())
