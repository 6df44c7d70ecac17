"""Estimates the memory that an answer takes while it is built, mainly for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine import DEFAULT_MAX_TOKENS, EngineInfo, parse_bytes
from server.answering.generation import BYTES_PER_TOKEN
from server.answering.pieces import AnswerShape
from server.answering.prompt import Prompt
from server.config.settings import ServerSettings
from server.errors import ApiError


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """The memory of an answer, estimated from the request."""

    shape: AnswerShape  # the number of answers, tokens and log-probabilities
    bytes_per_logprob: int  # bytes in the endpoint's shape
    info: EngineInfo  # facts about the model

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token, for all answers to a prompt together."""
        listed = len(self.shape.params.logprob_token_ids or ()) * self.bytes_per_logprob
        return self.shape.params.n * (BYTES_PER_TOKEN + self._logprobs(self.shape.params.logprobs) + listed)

    def most_tokens(self, settings: ServerSettings) -> int:
        return max(_limit(settings) // self.bytes_per_token, 1)

    def check(self, prompts: Sequence[Prompt], settings: ServerSettings, *, stream: bool) -> int:
        """The maximum bytes of the answer to these prompts. A stream holds the data about prompts, and only the parts
        of answers that have not been read. Raises ApiError if this exceeds the limit in the settings."""
        params = self.shape.params
        size = sum(len(prompt.continued) for prompt in prompts) * self._logprobs(params.prompt_logprobs)
        if not stream:
            size += sum(self._max_tokens(len(prompt.continued)) for prompt in prompts) * self.bytes_per_token
        if size > _limit(settings):
            name = "logprobs" if params.logprobs is not None else "max_tokens"
            name = "prompt_logprobs" if params.prompt_logprobs is not None else name
            message = (
                f"The answer might take {size} bytes of memory (prompts x n x max_tokens x log-probabilities), but "
                f"the limit is {_limit(settings)} (max_answer_size). Ask for less at once, or raise "
                "--max-answer-size."
            )
            raise ApiError(400, message, param=name, code="answer_too_large")
        return size

    def _logprobs(self, count: int | None) -> int:
        return 0 if count is None else (1 + count) * self.bytes_per_logprob

    def _max_tokens(self, length: int) -> int:
        info, asked, constraint = self.info, self.shape.params.max_tokens, self.shape.params.constraint
        if asked is None and constraint is not None:
            named = [found.most_tokens for found in info.catalogues if found.name == constraint["catalogue"]]
            asked = max([self.shape.params.min_tokens or 0, *named])  # nothing is answered for an unknown prompt
        if asked is None:
            asked = info.default_max_new_tokens
        if asked is None:
            asked = max((info.default_max_length or 0) - length, DEFAULT_MAX_TOKENS)
        return max(min(asked, info.max_model_len - length), 1)


def _limit(settings: ServerSettings) -> int:
    return parse_bytes(settings.max_answer_size, "max_answer_size")
