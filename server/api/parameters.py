"""Checks the fields of a request for generated text together and turns them into parameters for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from engine import FILTERS, SamplingParams
from engine.text.processor import spell_bad_words
from server.answering.pieces import AnswerShape
from server.api.schemas import GenerationBody
from server.context import Service
from server.errors import ApiError

# Fields that beam search does not use, with their neutral values.
_NOT_WITH_BEAMS = {column.name: column.nothing for column in FILTERS}


def shape_of(body: GenerationBody, service: Service, *, echo: bool = False) -> AnswerShape:
    """The body's request to the engine, and the form of the answer. Raises ApiError, InvalidRequestError: fields
    contradict each other, are out of range or are not supported."""
    body.refuse_unsupported()
    if body.stream_options is not None and not body.stream:
        _fail("stream_options", "stream_options is only allowed when stream is true.")
    fields = body.sampling()
    # OpenAI's way to score a text: only the prompt, without an answer. The engine generates one token, which is not
    # shown.
    prompt_only = echo and fields.get("max_tokens") == 0
    if prompt_only:
        fields["max_tokens"] = 1
    asked = SamplingParams(**fields)  # also checks the fields, before any work is done with them
    best_of = body.best_of if body.best_of is not None else asked.n
    _check_counts(asked.n, best_of, service.settings.max_n)
    if body.use_beam_search:
        fields["num_beams"] = max(asked.num_beams or 0, best_of, 2)
    elif (asked.num_beams or 1) > 1:
        fields["num_beams"] = max(asked.num_beams or 0, best_of)
    elif best_of > asked.n:
        if body.stream:
            message = (
                f"best_of ({best_of}) above n ({asked.n}) cannot be streamed: the best answers are known only "
                "at the end."
            )
            _fail("best_of", message)
        fields["n"] = best_of
        fields["logprobs"] = asked.logprobs or 0  # needed to choose among them
    if fields.get("num_beams", 1) > 1:
        _check_beams(fields, asked, service.client.info.max_num_beams)
    _check_rows(fields.get("n", 1), asked.n, service.client.info.max_num_seqs)
    if echo and asked.logprobs is not None:
        fields["prompt_logprobs"] = max(asked.prompt_logprobs or 0, asked.logprobs)
    return AnswerShape(
        params=spell_bad_words(SamplingParams(**fields), service.tokenizer),
        n=asked.n,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        echo=echo,
        prompt_only=prompt_only,
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        timings="each" if body.timings_per_token else "end" if body.timings else None,
    )


def _check_counts(n: int, best_of: int, limit: int) -> None:
    for name, value in (("n", n), ("best_of", best_of)):
        if value > limit:
            message = f"{name} is {value}, but at most {limit} answers are allowed (max_n). Ask for fewer, or raise "
            _fail(name, f"{message}--max-n.")
    if best_of < n:
        _fail("best_of", f"best_of ({best_of}) must be at least n ({n}).")


def _check_beams(fields: Mapping[str, Any], asked: SamplingParams, limit: int) -> None:
    num_beams = fields["num_beams"]
    if num_beams > limit:
        name = "num_beams" if (asked.num_beams or 0) > limit else "n" if asked.n > limit else "best_of"
        message = f"{name} is {num_beams}, but at most {limit} beams are allowed (max_num_beams). Ask for fewer, or "
        _fail(name, f"{message}raise --max-num-beams.")
    for name, nothing in _NOT_WITH_BEAMS.items():
        if name in fields and fields[name] not in nothing:
            message = (
                f"{name} ({fields[name]}) cannot be used with beam search (num_beams is {num_beams}), "
                f"which does not sample; leave it out or send {nothing[0]}."
            )
            _fail(name, message)


def _check_rows(generated: int, n: int, limit: int) -> None:
    """The engine checks this too, but only after memory has been spent."""
    if generated > limit:
        name = "n" if n > limit else "best_of"
        message = f"{name} is {generated}, but a step holds at most {limit} sequences (max_num_seqs). Ask for fewer, or"
        _fail(name, f"{message} raise --max-num-seqs.")


def _fail(param: str, message: str) -> NoReturn:
    raise ApiError(400, message, param=param, code="invalid_value")
