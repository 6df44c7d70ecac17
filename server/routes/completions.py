"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fastapi import Response
from pydantic import BaseModel

from server.answering.answer import encode_prompts, estimate_size
from server.answering.completion import TextRun
from server.answering.endpoints import lacks_completions
from server.answering.events import ChunkEvents, Extra
from server.answering.infilling import Infilling
from server.answering.pieces import PieceMaker
from server.answering.prompt import Prompt, Room
from server.answering.seq2seq import DecoderFields, read_decoder, refuse_echo
from server.api import examples
from server.api.parameters import shape_of
from server.api.schemas import CompletionChoice, CompletionRequest, CompletionResponse, Usage
from server.context import Service
from server.errors import ApiError
from server.routes.task_router import TaskCall, TaskRouter

_DECODER = {
    "decoder_prompt", "decoder_start_token_id", "forced_bos_token", "forced_bos_token_id", "src_lang", "tgt_lang",
    "add_special_tokens",
}  # fmt: skip

router = TaskRouter("generating")


@router.endpoint(
    "/v1/completions",
    "/completions",
    response_model=CompletionResponse,
    examples=examples.COMPLETIONS,
    events=examples.EVENT_STREAM,
    lacks=lacks_completions,
    refuses=False,  # `shape_of` refuses unsupported fields
    summary="Complete a prompt",
)
async def create_completion(call: TaskCall[CompletionRequest]) -> Response:
    """Complete one or several prompts. The answer comes as a whole or as a stream."""
    if call.body.echo:
        refuse_echo(call.service)
    return await CompletionRun.of(call.body, call.service, call.arrival).respond(call.request)


@dataclass(slots=True)
class CompletionRun(TextRun):
    """The prompts of a body and their answers."""

    id_prefix = "cmpl-"
    body: CompletionRequest
    decoder: DecoderFields | None = field(kw_only=True)
    infilling: Infilling | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, body: CompletionRequest, service: Service, arrival: float) -> CompletionRun:
        """The run that answers a body.

        Raises:
            ApiError, InvalidRequestError: fields contradict each other, are out of range or are not supported.
        """
        infilling = Infilling.need(service, "suffix") if body.suffix else None
        shape = shape_of(body, service, echo=bool(body.echo))
        decoder = read_decoder(body.model_dump(exclude_none=True, include=_DECODER), body.prompt, service)
        if decoder is not None:
            shape = replace(shape, params=decoder.force(shape.params))
        if infilling is not None:
            shape = replace(shape, params=infilling.ending(shape.params))
        return cls(service, body, shape, arrival, decoder=decoder, infilling=infilling)

    def size(self) -> tuple[int, int]:
        given, info = self.body.prompt, self.service.client.info
        tokens = estimate_size(given, Room.of_prompt(info).tokens)
        if self.infilling is not None:
            tokens += len(given) * estimate_size([self.body.suffix or ""], info.max_model_len)
        if self.decoder is not None and self.decoder.prompt is not None:
            tokens += len(given) * estimate_size([self.decoder.prompt], info.max_model_len)
        return len(given), tokens

    async def prompts(self) -> list[Prompt]:
        if self.infilling is not None:
            return [await self._around(self.infilling, prompt) for prompt in self.body.prompt]
        special = self.body.add_special_tokens is not False
        decoder = self.decoder
        source = None if decoder is None else decoder.marked
        param = self.public_name("prompt") or "prompt"
        prompts = await encode_prompts(
            self.service,
            self.body.prompt,
            param,
            add_special_tokens=special,
            src_lang=source,
            truncation=self.truncation,
        )
        if decoder is None:
            return prompts
        begin = await decoder.tokens(self.service, self.shape.params)
        return [replace(prompt, decoder_ids=begin) for prompt in prompts]

    async def _around(self, infilling: Infilling, prompt: str | list[int]) -> Prompt:
        if not isinstance(prompt, str):
            raise ApiError(
                400, "suffix is only allowed with prompts that are texts.", param="suffix", code="invalid_value"
            )
        room = Room.of_prompt(self.service.client.info, "prompt")
        return await infilling.prompt_in_thread(prompt, self.body.suffix or "", room)

    def whole(self, choices: list[CompletionChoice], usage: Usage) -> BaseModel:
        return self._chunk(choices, {"usage": usage})

    def events(self, maker: PieceMaker[CompletionChoice]) -> ChunkEvents[CompletionChoice]:
        return ChunkEvents(maker, self._chunk, self.body.stream_options)

    def _chunk(self, pieces: list[CompletionChoice], extra: Extra) -> CompletionResponse:
        return CompletionResponse(
            id=self.request_id,
            object="text_completion",
            created=self.created,
            model=self.service.name_of(self.terms),
            choices=pieces,
            system_fingerprint=self.service.fingerprint,
            **extra,
            **self.timed(pieces),
        )
