"""The code that all endpoints with messages share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from engine import CHAT_ROOM, room_for_answer
from engine.text.pictures import Pictures
from server.admission import estimate_tokens
from server.answering.answer import Run
from server.answering.chat import ChatPieces
from server.answering.enforcing import enforce
from server.answering.messages import Message, estimate_messages, read_messages
from server.answering.parsed_chat import ParsedChatPieces
from server.answering.parsing import Parsing
from server.answering.pieces import Choice
from server.answering.prediction import encode_prediction, read_prediction
from server.answering.prompt import MAX_TOKENIZED, Prompt, Room
from server.answering.reading import Ignored
from server.answering.rendering import Rendering, read_rendering
from server.answering.tools import Tools, read_tools
from server.api.chat_schemas import ChatCompletionRequest, ChatPiece
from server.api.parameters import shape_of
from server.context import Service
from server.errors import ApiError


async def render_chat(service: Service, chat: ChatCompletionRequest) -> Prompt:
    """The prompt of a chat request that is rendered, not answered. Raises ApiError, InvalidRequestError if the request
    cannot be rendered, or is far too long."""
    pictures = pictures_for(service)
    messages = read_messages(chat.messages, pictures)
    rendering = read_rendering(chat, read_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls))
    room = Room(service.client.info.max_model_len, "messages")
    with await service.tokenizing.admit(1, estimate_messages(messages) + rendering.num_tokens):
        return await service.render(messages, room, rendering, pictures=pictures)


def pictures_for(service: Service) -> Pictures | None:
    """Takes the images of a conversation; None if the model reads none."""
    return Pictures() if service.sees else None


@dataclass(slots=True)
class ConversationRun(Run[ChatPiece, Choice]):
    """Answers a chat request in any endpoint's shape."""

    bytes_per_logprob = 400
    usual_answer = CHAT_ROOM
    body: ChatCompletionRequest
    messages: list[Message] = field(kw_only=True)
    rendering: Rendering = field(kw_only=True)
    tools: Tools | None = field(kw_only=True)
    prediction: str | None = field(default=None, kw_only=True)  # a text that the answer is expected to repeat
    # names of fields of the endpoint's own shape that the chat request lacks
    ignored: Ignored = field(default_factory=Ignored, kw_only=True)
    # the images in the messages; None: the model reads none
    pictures: Pictures | None = field(default=None, kw_only=True)
    parsing: Parsing | None = None
    lowered: bool = False  # whether the prompt leaves less room than max_tokens; the answer gets the room that is left

    @classmethod
    def of(cls, body: ChatCompletionRequest, service: Service, arrival: float, **more: Any) -> Self:
        """The run that answers a request. Raises ApiError, InvalidRequestError if the body contains an invalid or
        unsupported field.

        Args:
            arrival: `time.monotonic()` seconds.
            more: further attributes of the run.
        """
        if body.top_logprobs and not body.logprobs:
            message = f"top_logprobs ({body.top_logprobs}) needs logprobs to be true."
            raise ApiError(400, message, param="top_logprobs", code="invalid_value")
        shape = shape_of(body, service)
        pictures = pictures_for(service)
        messages = read_messages(body.messages, pictures)
        if pictures is not None and service.chat_images is not None:
            service.chat_images.check_count(pictures)
        tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        rendering = read_rendering(body, tools)
        prediction = read_prediction(body.prediction)
        return cls(
            service,
            body,
            shape,
            arrival,
            messages=messages,
            rendering=rendering,
            tools=tools,
            prediction=prediction,
            pictures=pictures,
            **more,
        )

    def size(self) -> tuple[int, int]:
        tokens = estimate_messages(self.messages) + self.rendering.num_tokens
        if self.prediction:
            tokens += estimate_tokens(self.prediction)
        if self.pictures is not None and self.service.chat_images is not None:
            tokens += self.service.chat_images.count_tokens(self.pictures)
        info = self.service.client.info
        seen = info.signal.positions if info.signal is not None and info.writes_of_images else 0
        return 1, min(tokens, info.max_model_len) + seen

    async def prompts(self) -> list[Prompt]:
        if self.tools is not None:  # a later turn may force a call
            self.service.client.warm_grammars()
        truncation = self.truncation
        longest = self.service.client.info.max_model_len
        room = Room(longest if truncation is None else max(longest, MAX_TOKENIZED), "messages")
        prompt = await self.rendered(room)
        if self.prediction and self.service.tokenizer is not None:
            ids = await encode_prediction(self.service.tokenizer, self.prediction, longest)
            self.shape = replace(self.shape, params=replace(self.shape.params, predicted_token_ids=ids))
        if truncation is not None:
            kept = truncation.ids(prompt.token_ids)
            if prompt.images and len(kept) < len(prompt.token_ids):
                message = "truncate_prompt_tokens does not cut prompts with images. Shorten the messages."
                raise ApiError(400, message, param="truncate_prompt_tokens", code="invalid_value")
            prompt = replace(prompt, token_ids=kept)
        final = self.messages[-1]["content"] if self.rendering.continue_final_message else None
        self.parsing = self.service.answers.parsing(self.tools, prompt.text or "", final)
        if self.parsing is not None:
            self.shown_special = self.parsing.shown_special
        self.shape = await enforce(self.service, self.shape, self.tools, self.parsing)
        self._limit_reasoning()
        params = self.shape.params
        most = room_for_answer(params, self.service.client.info, len(prompt.token_ids))
        if params.max_tokens is not None and max(params.min_tokens or 0, 1) <= most < params.max_tokens:
            # Agents ask for as many tokens as a model could write.
            self.shape, self.lowered = replace(self.shape, params=replace(params, max_tokens=most)), True
            self.leave_out(self.public_name("max_tokens") or "")
        self.fill_room(len(prompt.token_ids))
        return [prompt]

    async def rendered(self, room: Room) -> Prompt:
        """The prompt as the chat template writes it."""
        return await self.service.render(self.messages, room, self.rendering, self.terms, self.pictures)

    def _limit_reasoning(self) -> None:
        asked, answers, params = self.body.reasoning_budget, self.service.answers, self.shape.params
        if asked is None:  # the server's default does not apply where the engine would refuse a budget
            limited = params.allowed_token_ids is not None or params.constraint is not None
            without = limited or (params.num_beams or 1) > 1
            asked = -1 if without else self.service.settings.reasoning_budget
        if asked >= 0 and self.parsing is not None and answers.limits_reasoning:
            budget = answers.budget(asked, self.parsing)
            self.shape = replace(self.shape, params=replace(params, reasoning_budget=budget))

    def maker(self, prompts: list[Prompt]) -> ChatPieces:
        # As in vLLM: unless an answer is opened, the last message is continued.
        last = self.messages[-1]
        role = "assistant" if self.rendering.add_generation_prompt else last["role"]
        echoed = last["content"] if self.body.echo and last["role"] == role else ""
        if self.parsing is None:
            return ChatPieces(prompts, self.shape, self.service.tokenizer, role=role, echoed=echoed)
        return ParsedChatPieces(
            prompts, self.shape, self.service.tokenizer, role=role, echoed=echoed, parsing=self.parsing
        )

    def ignored_fields(self) -> list[str]:
        tools = self.tools.ignored if self.tools is not None else ()
        budget = self.body.reasoning_budget
        unlimited = budget is not None and budget >= 0 and not self.service.answers.limits_reasoning
        names = ["reasoning_budget"] if unlimited else []
        if self.tools is not None and self.tools.forced:  # there is no text to which the format could apply
            names += self.body.format_fields()
        return [*self.body.ignored_fields(), *self.ignored, *tools, *(self.public_name(name) or "" for name in names)]

    def public_name(self, param: str | None) -> str | None:
        if param == "max_tokens" and self.body.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "messages" if param == "prompt" else param
