"""Questions about one input, answered by log-probabilities of labels.

Each question is a separate prompt that ends where the reply begins. All questions share the input's cached pages.
"""

from __future__ import annotations

import asyncio
import math
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from engine import SamplingParams
from engine.text.processor import Tokenizer
from server.admission import estimate_tokens
from server.answering.completion import TextRun
from server.answering.events import Events
from server.answering.pieces import AnswerShape, PieceMaker
from server.answering.prompt import Prompt, Room
from server.answering.remembered import RememberedTokens
from server.answering.rendering import Rendering
from server.answering.shared_reservation import SharedReservation
from server.api.schemas import CompletionChoice, CompletionRequest, ServedBody, Usage
from server.errors import ApiError
from server.gates import Reservation

LETTERS = tuple(string.ascii_uppercase)
_SPLIT = f"<{uuid.uuid4().hex}>"  # placeholder for the question when the conversation is rendered


@dataclass(frozen=True, slots=True)
class LabelQuestion:
    """A question in the form that the model reads."""

    instructions: str
    lines: tuple[str, ...]
    labels: tuple[str, ...]  # the accepted replies, each one token
    reply: str = "Reply with the letter of one option."  # tells the model to reply with a label; ends with a full stop

    @property
    def text(self) -> str:
        """The question's part of the prompt."""
        options = (f"{label}: {line}" if line else label for label, line in zip(self.labels, self.lines, strict=True))
        asked = [f"Question: {self.instructions}"] if self.instructions else []
        return "\n".join([*asked, *options, self.reply])


@dataclass(frozen=True, slots=True)
class LabelReading:
    """The model's answer to a question."""

    shares: list[float]  # the probability of each label, relative to all labels
    mass: float  # the total probability of all labels over the vocabulary
    is_label: bool  # whether the most probable token is a label

    @property
    def best(self) -> int:
        """The index of the likeliest label."""
        return self.shares.index(max(self.shares))

    @property
    def confidence(self) -> float:
        """The likeliest label's probability over the whole vocabulary."""
        return self.shares[self.best] * self.mass


def described(name: str, description: str | None) -> str:
    """The meaning of a label."""
    return f"{name} - {description}" if description else name


@dataclass(slots=True)
class DecisionRun(TextRun):
    """Asks all questions in one batch."""

    id_prefix = "decision-"
    given: ServedBody = field(kw_only=True)  # the request in the endpoint's shape
    state: str = field(kw_only=True)
    questions: Sequence[LabelQuestion] = field(kw_only=True)
    # makes the response from the readings, the usage and this run
    answer: Callable[[Sequence[LabelReading], Usage, DecisionRun], BaseModel] = field(kw_only=True)
    instructions: str | None = field(default=None, kw_only=True)  # a system message, or None
    variables: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # further variables for the template
    param: str = field(default="input", kw_only=True)
    ids: dict[str, int] = field(default_factory=dict)  # of labels

    @staticmethod
    def request(given: ServedBody) -> tuple[CompletionRequest, AnswerShape]:
        """The equivalent completion request, and the shape of its choices."""
        terms = {name: getattr(given, name) for name in ServedBody.model_fields}
        params = SamplingParams(max_tokens=1, temperature=0.0, num_beams=1, logprobs=0, ignore_eos=True)
        return CompletionRequest(prompt="-", **terms), AnswerShape(params=params, n=1, logprobs=0, tokens_as_ids=True)

    def size(self) -> tuple[int, int]:
        most, state = self.service.client.info.max_model_len, estimate_tokens(self.state)
        tokens = sum(min(state + estimate_tokens(question.text), most) for question in self.questions)
        return self._slots, tokens

    @property
    def _slots(self) -> int:
        """The number of questions that are answered at the same time. The other questions wait for the same slots."""
        return min(len(self.questions), self.service.client.info.max_num_seqs)

    async def begin(self, request: Request) -> tuple[dict[str, str], Reservation]:
        headers, reservation = await TextRun.begin(self, request)
        self._reservation = SharedReservation(reservation, self._slots, len(self.questions))
        return headers, self._reservation

    async def prompts(self) -> list[Prompt]:
        room = Room(self.service.client.info.max_model_len, self.param)
        messages = [{"role": "user", "content": f"{self.state}\n\n{_SPLIT}"}]
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        rendering = Rendering(variables={"enable_thinking": False} | dict(self.variables))
        rendered = await self.service.render(messages, room, rendering)
        before, *after = (rendered.text or "").split(_SPLIT)
        tokenizer = self.service.tokenizer
        if len(after) != 1 or tokenizer is None:
            message = (
                "The model's chat template does not show the question exactly once, so the question cannot be asked."
            )
            raise ApiError(400, message, param=self.param, code="invalid_messages")
        return await asyncio.to_thread(self._encode, tokenizer, before, after[0], room)

    def _encode(self, tokenizer: Tokenizer, before: str, after: str, room: Room) -> list[Prompt]:
        labels = dict.fromkeys(label for question in self.questions for label in question.labels)
        self.ids = label_ids(tokenizer, f".{after}", labels)
        params = replace(self.shape.params, logprob_token_ids=[*self.ids.values()])
        self.shape = replace(self.shape, params=params)
        remembered = RememberedTokens(tokenizer)
        texts = [f"{before}{question.text}{after}" for question in self.questions]
        return [Prompt(remembered.encode(text, room, None), text) for text in texts]

    def whole(self, choices: list[CompletionChoice], usage: Usage) -> BaseModel:
        readings = [self._read(*pair) for pair in zip(self.questions, choices, strict=True)]
        return self.answer(readings, usage, self)

    def _read(self, question: LabelQuestion, choice: CompletionChoice) -> LabelReading:
        assert choice.logprobs is not None
        top, (token,) = choice.logprobs.top_logprobs[0] or {}, choice.logprobs.tokens
        names = [f"token_id:{self.ids[label]}" for label in question.labels]
        values = [top[name] for name in names]
        weights = [math.exp(value - max(values)) for value in values]
        return LabelReading(
            shares=[weight / math.fsum(weights) for weight in weights],
            mass=math.fsum(map(math.exp, values)),
            is_label=token in names,
        )

    def events(self, maker: PieceMaker[CompletionChoice]) -> Events[CompletionChoice]:
        raise NotImplementedError("decisions are not streamed")

    def ignored_fields(self) -> list[str]:
        return self.given.ignored_fields()

    def public_name(self, param: str | None) -> str | None:
        return self.param if param == "prompt" else param


def label_ids(tokenizer: Tokenizer, context: str, labels: Sequence[str] | Mapping[str, Any]) -> dict[str, int]:
    """The token of each label after the prompt. Raises ApiError if a label is not a single token there."""
    base, found = tokenizer.encode(context, add_special_tokens=False), dict[str, int]()
    for label in labels:
        ids = tokenizer.encode(context + label, add_special_tokens=False)
        if ids[:-1] != base or ids[-1] in found.values():
            message = (
                f"This model's tokenizer does not encode the label {label!r} as a single token, so its "
                f"probability is unknown. Use another type of question."
            )
            raise ApiError(400, message, param="questions", code="unsupported_parameter")
        found[label] = ids[-1]
    return found
