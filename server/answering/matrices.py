"""Answers requests for vectors or matrices: the allowed inputs and the formats of the numbers.

The formats besides lists of numbers are vLLM's: base64 in JSON, and bytes whose layout the header `metadata` describes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from engine import Pooled, PoolingParams, TokenInput
from engine.pooled import PLAIN, SideReading, prompt_tokens, read_side, sparse_of, token_input
from engine.pooled.vectors import json_base64, json_matrix, packed
from engine.text.processor import Encoding
from server.answering.encoding import check_boxes, estimate, need_tokenizer, read_images, read_inputs, too_long
from server.answering.messages import Message, estimate_messages, read_messages
from server.answering.pooling import PoolingInput, PoolingRun, image_input, joined
from server.answering.prompt import MAX_TOKENIZED, Room
from server.answering.rendering import Rendering, read_rendering
from server.answering.tools import read_tools
from server.api.embedding_schemas import MatrixBody
from server.api.pooling_schemas import Image
from server.context import Service
from server.errors import ApiError

MOST_IN_HEADER = 256  # maximum vectors that the header metadata describes: clients accept headers of 64 or 32 KiB
_BY_TOKEN = ("token_classify", "token_embed")
_FOR_MESSAGES = ("tools", "documents", "chat_template_kwargs", "reasoning_effort", "continue_final_message")


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation that becomes one input."""

    messages: list[Message]
    rendering: Rendering

    @property
    def num_tokens(self) -> int:
        """An estimate of its number of tokens."""
        return estimate_messages(self.messages) + self.rendering.num_tokens


def read_conversation(body: MatrixBody, service: Service) -> Asked | None:
    """The conversation of a request; None if the request has other inputs. Raises ApiError if the conversation is
    invalid, there are both or neither, or the body has a field that no model here supports."""
    if body.input is None and body.messages is None:
        raise ApiError(400, "input or messages is required.", param="input", code="missing_required_parameter")
    if body.input is not None and body.messages is not None:
        message = "messages and input exclude each other. Send only one of them."
        raise ApiError(400, message, param="messages", code="invalid_value")
    if body.padding == "max_length" and service.client.info.filler is None:
        message = f"padding max_length is not supported: {service.model_id} reads each input without any padding."
        raise ApiError(400, message, param="padding", code="unsupported_parameter")
    if body.input is not None:
        check_boxes(service, body.bbox, body.input)
    count = len(body.input or ())
    if body.encoding_format == "bytes" and count > MOST_IN_HEADER:
        message = (
            f"encoding_format bytes describes each answer in a header, which has room for {MOST_IN_HEADER} "
            f"answers, but there are {count}. Send fewer inputs, or use bytes_only."
        )
        raise ApiError(400, message, param="encoding_format", code="invalid_value")
    if body.messages is None:
        for name in (*_FOR_MESSAGES, "add_generation_prompt"):
            if getattr(body, name):
                raise ApiError(
                    400, f"{name} is only allowed with messages, not with input.", param=name, code="invalid_value"
                )
        return None
    if body.bbox is not None:
        message = "bbox is only allowed with token ids in input, not with messages. Remove it."
        raise ApiError(400, message, param="bbox", code="invalid_value")
    if body.add_special_tokens:
        message = "add_special_tokens cannot be used with messages: the chat template writes the special tokens."
        raise ApiError(400, message, param="add_special_tokens", code="invalid_value")
    need_tokenizer(service, "messages").need_chat_template()
    opens = bool(body.add_generation_prompt)
    rendering = replace(read_rendering(body, read_tools(body.tools)), add_generation_prompt=opens)
    return Asked(read_messages(body.messages), rendering)


class _Whole(Room):
    """The length limit of a conversation that is one input."""

    def refusal(self, length: str, tokens: int = 0) -> ApiError:
        return too_long(self.param, "the conversation", None, f"{length} tokens", self.tokens)


@dataclass(slots=True)
class MatrixRun(PoolingRun):
    """A request for vectors or matrices."""

    param: ClassVar[str] = "input"  # the request's field with the inputs

    body: MatrixBody
    params: PoolingParams = field(kw_only=True)  # the parameters of all inputs, except for the prompt's tokens
    asked: Asked | None = field(kw_only=True)  # the conversation, if there is one
    prompt: str = field(default="", kw_only=True)  # a prefix for each text
    truncate: int | None = field(kw_only=True)  # the number of tokens to cut an input to, if any
    # a template for an item of the answer, with placeholders for its index and numbers
    shape: bytes = field(kw_only=True)

    @property
    def given(self) -> list[str | Image | list[int]]:
        """The inputs as sent; empty if there is a conversation."""
        return self.body.input or []

    @property
    def texts(self) -> bool:
        """Whether there are texts among the inputs."""
        return any(isinstance(item, str) and not isinstance(item, Image) for item in self.given)

    def side(self) -> SideReading:
        """The way of reading texts: as queries or as documents, if a prompt of that name is requested."""
        if self.params.task != "token_embed":
            return PLAIN
        return read_side(self.service.client.info, self.service.tokenizer, self.body.prompt_name)

    def size(self) -> int:
        if self.asked is not None:
            return min(self.asked.num_tokens, self.service.client.info.max_model_len)
        return estimate(self.given, self.service.client.info)

    async def inputs(self) -> Sequence[PoolingInput]:
        if self.asked is not None:
            return [PoolingInput(await self._rendered(self.asked), self.params)]
        special, info = self.body.add_special_tokens is not False, self.service.client.info
        images = await read_images(self.service, self.given)
        others = [item for item in self.given if not isinstance(item, Image)]
        params, read, side = self.params, list[TokenInput](), self.side()
        if others:
            read = await read_inputs(
                self.service,
                others,
                self.param,
                add_special_tokens=special,
                truncate=self.truncate,
                prompt=self.prompt,
                marker=side.marker,
                most=side.limit(self.truncate),
                advice=self.advice,
                boxes=self.body.bbox,  # a model that takes boxes takes no images
            )
        if self.texts and params.task == "embed":  # for token vectors no token is left out
            tokenizer = need_tokenizer(self.service, self.param)
            count = prompt_tokens(tokenizer, info, self.prompt, add_special_tokens=special)
            params = replace(params, skip_tokens=count)
        rest = iter(read)
        found = list[PoolingInput]()
        for place, item in enumerate(self.given):
            if place in images:
                found.append(image_input(images[place], self.params, info))
            elif isinstance(item, str):
                found.append(PoolingInput(*side.complete(next(rest), params, self.truncate)))
            else:
                found.append(PoolingInput(next(rest), self.params))
        return found

    async def _rendered(self, asked: Asked) -> TokenInput:
        service, limit = self.service, self.service.client.info.max_model_len
        room = _Whole(limit if self.truncate is None else max(limit, MAX_TOKENIZED), "messages")
        prompt = await service.render(asked.messages, room, asked.rendering)
        assert service.tokenizer is not None
        found = Encoding.of_ids(prompt.token_ids, self.truncate, service.tokenizer.truncation_side)
        if len(found.ids) > limit:
            raise room.refusal(str(len(found.ids)))
        return token_input(found, service.client.info, prompt.text)

    def render(self, answers: Sequence[Pooled]) -> bytes:
        dtype, big = self.body.embed_dtype or "float32", self.body.endianness == "big"
        form, rows = self.body.encoding_format or "float", self.params.task in _BY_TOKEN
        if self.params.task == "sparse_embed":
            return joined(self, (self.shape % entry for entry in enumerate(self.sparse(answers))))
        if form == "float":
            written = (json_matrix(answer.values(), rows=rows) for answer in answers)
        elif form == "base64":
            written = (json_base64(packed(answer.values(), dtype, big_endian=big)) for answer in answers)
        else:
            parts = [packed(answer.values(), dtype, big_endian=big) for answer in answers]
            self.media_type = "application/octet-stream"
            if form == "bytes":
                self.headers["metadata"] = self._metadata(answers, parts)
            return b"".join(parts)
        return joined(self, (self.shape % entry for entry in enumerate(written)))

    def sparse(self, answers: Sequence[Pooled], *, named: bool = True) -> Iterator[bytes]:
        """The JSON of sparse vectors in text-embeddings-inference's shape, with the tokens' texts if `named`."""
        info, tokenizer = self.service.client.info, self.service.tokenizer
        for answer in answers:
            found = sparse_of(answer, info, tokenizer)
            items: list[dict[str, Any]] = [{"index": entry.token_id, "value": entry.weight} for entry in found]
            if named and tokenizer is not None:
                items = [item | {"token": tokenizer.written(item["index"])} for item in items]
            yield json.dumps(items, separators=(",", ":"), allow_nan=False).encode()

    def _metadata(self, answers: Sequence[Pooled], parts: Sequence[bytes]) -> str:
        items, end = [], 0
        for index, (answer, part) in enumerate(zip(answers, parts, strict=True)):
            start, end = end, end + len(part)
            items.append(
                {
                    "index": index,
                    "embed_dtype": self.body.embed_dtype or "float32",
                    "endianness": self.body.endianness or "native",
                    "start": start,
                    "end": end,
                    "shape": answer.shape if self.params.task in _BY_TOKEN else answer.shape[1:],
                }
            )
        facts = {"id": self.request_id, "created": self.created, "model": self.service.name_of(self.terms)}
        return json.dumps({**facts, "data": items, "usage": self.usage.model_dump()}, separators=(",", ":"))
