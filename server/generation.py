"""Several prompts through the engine at once, as one stream of updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from engine import InvalidRequestError, RequestDelta, RequestFailedError, SamplingParams, TokenInput, TokenLogprobs
from engine.text import ChoiceText, OutputProcessor
from server.context import Service
from server.prompt import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """News of one prompt.

    Attributes:
        prompt_index: which prompt.
        choices: its answers with news.
        prompt_logprobs: as in `RequestDelta`, with texts, once they are known.
        num_cached_tokens: as in `RequestDelta`.
        finished: no more will come for this prompt.
    """

    prompt_index: int
    choices: Sequence[ChoiceText]
    prompt_logprobs: list[TokenLogprobs | None] | None
    num_cached_tokens: int
    finished: bool


async def run_prompts(
    service: Service, request_id: str, prompts: Sequence[Prompt], params: SamplingParams, arrival: float
) -> AsyncGenerator[Update, None]:
    """Run all prompts concurrently and merge what they bring.

    Nothing is yielded before every prompt has been accepted, so that a refused one fails the whole
    request while the answer can still be an error. Closing the generator aborts what still runs.

    Args:
        request_id: prefix of the engine's request ids, one per prompt.
        arrival: `time.perf_counter()` seconds, from which the time to the first token counts.

    Raises:
        InvalidRequestError: a prompt was refused; the others are aborted.
        RequestFailedError, EngineDeadError: from the engine.
    """
    queue: asyncio.Queue[Update | Exception] = asyncio.Queue()
    runs = [
        _Run(service, f"{request_id}-{index}", index, prompt, params, arrival) for index, prompt in enumerate(prompts)
    ]
    tasks = [asyncio.create_task(run.pump(queue)) for run in runs]
    try:
        held: list[Update] = []
        unheard = set(range(len(prompts)))
        unfinished = len(prompts)
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            unheard.discard(item.prompt_index)
            unfinished -= item.finished
            held.append(item)
            if not unheard:
                for update in held:
                    yield update
                held.clear()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Run:
    """One prompt's way through the engine."""

    def __init__(
        self, service: Service, request_id: str, index: int, prompt: Prompt, params: SamplingParams, arrival: float
    ):
        self.service = service
        self.request_id = request_id
        self.index = index
        self.prompt = prompt
        self.params = params
        self.arrival = arrival
        self.processor = OutputProcessor(service.tokenizer, prompt.token_ids, params)
        self.unfinished = set(range(params.n))
        self.first_token_seen = False

    async def pump(self, queue: asyncio.Queue[Update | Exception]) -> None:
        """Put every update, or the exception that ended the run, into the queue."""
        outcome = "abort"
        try:
            await self._pump(queue)
        except InvalidRequestError as problem:
            self.unfinished.clear()  # never accepted: it counts as nothing
            queue.put_nowait(problem)
        except Exception as problem:
            outcome = "error"
            queue.put_nowait(problem)
        finally:
            if self.unfinished:
                self.service.metrics.finished(outcome, len(self.unfinished))

    async def _pump(self, queue: asyncio.Queue[Update | Exception]) -> None:
        source = TokenInput(self.prompt.token_ids, self.prompt.text)
        deltas = self.service.client.generate(self.request_id, source, self.params)
        try:
            async for delta in deltas:
                update = self._update(delta)
                queue.put_nowait(update)
                if update.finished:
                    return
            raise RequestFailedError(f"The engine ended request {self.request_id} without finishing it.")
        finally:
            await _close(deltas)

    def _update(self, delta: RequestDelta) -> Update:
        if delta.error is not None:
            raise RequestFailedError(delta.error)
        choices = self.processor.process(delta)
        for choice in choices:
            if choice.token_ids and not self.first_token_seen:
                self.first_token_seen = True
                self.service.metrics.first_token(time.perf_counter() - self.arrival)
            if choice.finish_reason is not None:
                self.unfinished.discard(choice.index)
                self.service.metrics.finished(choice.finish_reason)
            if choice.stopped_by_text and not delta.finished:
                self.service.client.abort(self.request_id, choice=choice.index)
        finished = delta.finished or not self.unfinished
        return Update(
            prompt_index=self.index,
            choices=choices,
            prompt_logprobs=self.processor.prompt_logprobs,
            num_cached_tokens=self.processor.num_cached_tokens,
            finished=finished,
        )


async def _close(deltas: AsyncIterator[RequestDelta]) -> None:
    # The interface promises an iterator; closing it early is what aborts the request.
    close = getattr(deltas, "aclose", None)
    if close is not None:
        await close()
