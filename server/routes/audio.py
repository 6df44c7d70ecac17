"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from engine import EngineInfo
from engine.audio import Asking, SpeechTask, Thresholds, Transcription, check_alignment
from engine.text.processor import Tokenizer
from server.answering.endpoints import kind_of
from server.answering.sound import find_log_mel
from server.answering.transcription import TranscriptionRun
from server.api.multipart import read_form
from server.api.speech_schemas import (
    SpeechForm,
    TranscriptionForm,
    TranscriptionResponse,
    TranslationForm,
    VerboseTranscription,
    read_fields,
)
from server.context import Service, ServiceDep
from server.errors import ApiError
from server.routes.task_router import TaskRouter

router = TaskRouter("generating", route_class=APIRoute)

_TRANSCRIPTIONS, _TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
_PROMPT_END = 16_384  # maximum characters of a prompt: more than half of a decoder's context in any language


def _document(form: type[SpeechForm]) -> dict[str, Any]:
    schema = form.model_json_schema()
    file = {"type": "string", "format": "binary", "description": "The sound: wav, flac, mp3 or ogg."}
    schema["properties"] = {"file": file, **schema["properties"]}
    schema["required"] = ["file"]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


@router.post(
    _TRANSCRIPTIONS,
    response_model=TranscriptionResponse | VerboseTranscription,
    openapi_extra=_document(TranscriptionForm),
    summary="Transcribe speech",
)
async def create_transcription(request: Request, service: ServiceDep) -> Response:
    """Transcribe an audio file in the language that is spoken, unless the model's generation_config.json sets the task
    to translate."""
    return await _respond(request, service, None, TranscriptionForm)


@router.post(
    _TRANSLATIONS,
    response_model=TranscriptionResponse | VerboseTranscription,
    openapi_extra=_document(TranslationForm),
    summary="Translate speech into English",
)
async def create_translation(request: Request, service: ServiceDep) -> Response:
    """Translate the speech of an audio file into English text."""
    return await _respond(request, service, "translate", TranslationForm)


def _lacks_transcriptions(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if info.speech is None:
        return f"{kind_of(info)}, and it does not accept audio"
    found = find_log_mel(info.model_path)
    if isinstance(found, str):
        return found
    return None if tokenizer is not None else "it has no tokenizer, so it cannot write texts"


def _lacks_translations(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if (reason := _lacks_transcriptions(info, tokenizer)) is not None:
        return reason
    assert info.speech is not None
    return None if "translate" in info.speech.tasks else "its generation_config.json does not name the task translate"


router.lacks |= {_TRANSCRIPTIONS: _lacks_transcriptions, _TRANSLATIONS: _lacks_translations}


async def _respond(request: Request, service: Service, task: SpeechTask | None, kind: type[SpeechForm]) -> Response:
    arrival = time.monotonic()
    service.require(_TRANSCRIPTIONS if task is None else _TRANSLATIONS)
    content = await request.body()
    async with service.reading:
        form = await asyncio.to_thread(read_form, content, request.headers.get("content-type", ""))
    del content
    fields, file = read_fields(form, kind)
    service.check_model(fields.model)
    fields.refuse()
    tokenizer, log_mel = service.tokenizer, find_log_mel(service.client.info.model_path)
    assert tokenizer is not None  # `require` has refused both
    assert not isinstance(log_mel, str)
    most = service.client.info.max_num_beams
    if fields.num_beams is not None and fields.num_beams > most:
        message = f"num_beams is {fields.num_beams}, but at most {most} are allowed (max_num_beams)."
        raise ApiError(400, message, param="num_beams", code="invalid_value")
    words, speech = "word" in fields.granularities(), service.client.info.speech
    if words and speech is not None:
        check_alignment(speech, "timestamp_granularities")
    prompt: list[int] = []
    if fields.prompt and fields.prompt.strip():
        text = f" {fields.prompt.strip()}"[-_PROMPT_END:]
        prompt = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)
    wanted = Transcription(
        task=task,
        language=getattr(fields, "language", None),
        prompt=prompt,
        timestamps=fields.response_format in ("srt", "vtt", "verbose_json"),
        word_timestamps=words,
        temperature=fields.temperature,
        num_beams=fields.num_beams,
        seed=fields.seed,
        thresholds=Thresholds(
            compression_ratio=fields.compression_ratio_threshold,
            logprob=fields.logprob_threshold,
            no_speech=fields.no_speech_threshold,
        ),
    )
    run = TranscriptionRun(
        service=service,
        tokenizer=tokenizer,
        form=fields,
        content=file.content,
        asking=Asking(service.client.info, wanted),
        log_mel=log_mel,
        arrival=arrival,
    )
    return await run.respond(request)
