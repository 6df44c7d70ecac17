"""The log line about one request for generated text, collected from its arrival to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import structlog
from fastapi import Request

from engine import InvalidRequestError, PixelInput, TokenInput
from engine.text.processor import ChoiceText
from server.answering.prompt import Prompt
from server.errors import ApiError
from server.metrics.times import PromptTimes

T = TypeVar("T")

_SHOWN_CHARACTERS = 2000  # maximum characters of a prompt or an answer, if they are logged
_SHOWN_TOKENS = 200
_SHOWN_INPUTS = 16  # maximum logged items of a request that has many

logger = structlog.get_logger("octavo.request")


class RequestListener(Protocol):
    """A listener that is told the end of each request, like the log."""

    def tell(self, record: RequestRecord, outcome: str, facts: Mapping[str, Any]) -> None:
        """The request ended with this outcome; `facts` belong to the outcome, such as an error's code."""


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """The resources that a request used."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    # draft_tokens, accepted_draft_tokens: drafted tokens, and those of them that came
    draft_tokens: int
    accepted_draft_tokens: int
    finish_reasons: list[str | None]  # why each answer ended; None while it runs
    first_token: float | None  # the time of the first token of any answer, in seconds of `time.monotonic()`


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Collects facts about a request. It reports them in one log line at the end, and to its listener.

    The line's request_id comes from where requests get their public ids. The line contains prompts and answers only if
    `log_prompts` is set.
    """

    id: str  # the answer's id, `cmpl-...`
    path: str
    model: str
    stream: bool
    n: int
    arrival: float  # `time.monotonic()` seconds
    log_prompts: bool = False
    listener: RequestListener | None = None  # the tracer of the request, if there is one
    ignored: str | None = None  # names of ignored fields, as in the answer's header
    _cut: str | None = None  # the engine's reason for ending an answer
    _said: bool = False
    _times: list[PromptTimes] = field(default_factory=list)
    _prompts: list[Prompt] = field(default_factory=list)
    _texts: dict[tuple[int, int], list[str]] = field(default_factory=dict)

    # ---------------------------------------------------------------- while it runs

    def belongs_to(self, request: Request) -> None:
        """This record alone reports how the HTTP request ended."""
        request.state.recorded = True
        self.listener = getattr(request.state, "trace", None)

    async def whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the unstreamed answer and record it as the whole request."""
        with self:
            return await work

    async def streamed(self, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Pass a stream's events on; the end of the stream ends the request."""
        with self:
            async with aclosing(events):
                async for event in events:
                    yield event

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Errors raised in this block end the request before its work begins."""
        try:
            yield
        except Exception as problem:
            self.__exit__(type(problem), problem, None)
            raise

    def prompt(self, prompt: Prompt, num_answers: int) -> PromptTimes:
        """Record that a prompt goes to the engine. Returns its record, which is filled during the answer."""
        times = PromptTimes(self.arrival, prompt.num_tokens, num_answers)
        self._times.append(times)
        if self.log_prompts:
            self._prompts.append(prompt)
        return times

    def answer(self, times: PromptTimes, prompt_index: int, choice: ChoiceText) -> None:
        """Record results of one answer on their way to the client."""
        times.generated[choice.index] += len(choice.token_ids)
        if choice.finish_reason is not None:
            times.reasons[choice.index] = choice.finish_reason
            if choice.finish_reason in ("abort", "error"):
                self._cut = "deadline" if choice.stop_reason == "deadline" else "error"
        if self.log_prompts and choice.text:
            self._texts.setdefault((prompt_index, choice.index), []).append(choice.text)

    # ---------------------------------------------------------------- its end

    def __enter__(self) -> RequestRecord:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: Any) -> None:
        if isinstance(problem, GeneratorExit | asyncio.CancelledError):
            return  # the code that ended it knows the reason and reports it with `abort`
        if isinstance(problem, ApiError) and self._cut is not None:
            self._say(f"aborted:{self._cut}", status=problem.status_code, code=problem.code)
        elif isinstance(problem, ApiError):
            self._say("refused", status=problem.status_code, code=problem.code, param=problem.param)
        elif isinstance(problem, InvalidRequestError):
            self._say("refused", status=400, code=problem.code, param=problem.param)
        elif problem is not None:
            self._say("error", error=type(problem).__name__)
        else:
            self._say("ok" if self._cut is None else f"aborted:{self._cut}")

    def abort(self, reason: str) -> None:
        """Record that the request ended before its answer was complete, for example because of a disconnect."""
        self._say(f"aborted:{reason}")

    def _say(self, outcome: str, **facts: Any) -> None:
        if not self._said:
            self._said = True
            log = logger.warning if outcome == "error" else logger.info
            log("request finished", outcome=outcome, **self._facts(), **facts)
            if self.listener is not None:
                self.listener.tell(self, outcome, facts)

    def usage(self) -> RequestUsage:
        """The tokens read, found in the cache and written, over all prompts."""
        first = _known([times.first_token for times in self._times])
        return RequestUsage(
            prompt_tokens=sum(times.num_prompt for times in self._times),
            cached_tokens=sum(times.num_cached for times in self._times),
            completion_tokens=sum(sum(times.generated) for times in self._times),
            draft_tokens=sum(times.num_drafted for times in self._times),
            accepted_draft_tokens=sum(times.num_accepted for times in self._times),
            finish_reasons=[reason for times in self._times for reason in times.reasons],
            first_token=min(first, default=None),
        )

    def phases(self) -> dict[str, tuple[float, float | None]]:
        """The beginning and end of each phase of the whole request, in seconds of `time.monotonic()`. The request
        queues until its first prompt is in a step, is prefilled until the first token of any prompt, and decodes until
        the last token. The end is None if it was not reached; phases that did not begin are missing."""
        scheduled = min(_known([times.scheduled for times in self._times]), default=None)
        sampled = min(_known([times.sampled or times.first_token for times in self._times]), default=None)
        last = max(_known([times.last_token for times in self._times]), default=None)
        begun = {"queue": self.arrival if self._times else None, "prefill": scheduled, "decode": sampled}
        ends = {"queue": scheduled, "prefill": sampled, "decode": last}
        return {name: (start, ends[name]) for name, start in begun.items() if start is not None}

    def _facts(self) -> dict[str, Any]:
        usage = self.usage()
        facts: dict[str, Any] = {
            "id": self.id, "path": self.path, "model": self.model, "stream": self.stream, "n": self.n,
            "prompts": len(self._times),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reasons": usage.finish_reasons,
            **self._seconds(usage.completion_tokens),
        }  # fmt: skip
        if usage.draft_tokens:
            facts["draft_tokens"], facts["accepted_draft_tokens"] = usage.draft_tokens, usage.accepted_draft_tokens
        if self.ignored is not None:
            facts["ignored"] = self.ignored
        if self.log_prompts:
            facts["prompt"] = [_cut_prompt(prompt) for prompt in self._prompts]
            facts["answer"] = ["".join(self._texts[key])[:_SHOWN_CHARACTERS] for key in sorted(self._texts)]
        return facts

    def _seconds(self, tokens: int) -> dict[str, float]:
        total = time.monotonic() - self.arrival
        phases = self.phases().items()
        seconds = {f"{name}_seconds": end - start for name, (start, end) in phases if end is not None}
        shown = {name: round(max(0.0, value), 6) for name, value in {"total_seconds": total, **seconds}.items()}
        if tokens and total > 0:
            shown["tokens_per_second"] = round(tokens / total, 3)
        return shown


class PoolingRecord(RequestRecord):
    """The record of a request whose answer is numbers: vectors, classes, masked tokens."""

    __slots__ = ()

    def __init__(self, *, id: str, path: str, model: str, arrival: float, log_prompts: bool):
        RequestRecord.__init__(
            self, id=id, path=path, model=model, stream=False, n=1, arrival=arrival, log_prompts=log_prompts
        )

    def input(self, source: TokenInput | PixelInput, num_tokens: int) -> PromptTimes:
        """Record that an input with this many tokens goes to the engine. Returns its record, which is filled during the
        answer."""
        times = PromptTimes(self.arrival, num_tokens, 0)
        self._times.append(times)
        if self.log_prompts and len(self._prompts) < _SHOWN_INPUTS:
            if isinstance(source, TokenInput):
                self._prompts.append(Prompt(list(source.token_ids), source.text))
            else:
                self._prompts.append(Prompt([], "[image]"))
        return times

    def phases(self) -> dict[str, tuple[float, float | None]]:
        """The request queues until a step has room for one of its inputs. It is then computed until the last input is
        answered."""
        scheduled = min(_known([times.scheduled for times in self._times]), default=None)
        sampled = max(_known([times.sampled for times in self._times]), default=None)
        begun = {"queue": self.arrival if self._times else None, "compute": scheduled}
        ends = {"queue": scheduled, "compute": sampled}
        return {name: (start, ends[name]) for name, start in begun.items() if start is not None}

    def _facts(self) -> dict[str, Any]:
        usage = self.usage()
        facts: dict[str, Any] = {
            "id": self.id, "path": self.path, "model": self.model,
            "inputs": len(self._times),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            **self._seconds(sum(times.num_prompt for times in self._times if times.sampled is not None)),
        }  # fmt: skip
        if self.log_prompts:
            facts["input"] = [_cut_prompt(prompt) for prompt in self._prompts]
        return facts


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _cut_prompt(prompt: Prompt) -> str | list[int]:
    return prompt.token_ids[:_SHOWN_TOKENS] if prompt.text is None else prompt.text[:_SHOWN_CHARACTERS]
