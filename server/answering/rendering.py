"""Chat messages to a prompt, by the model's template, within a time limit.

A template is a program that came with the checkpoint, and messages can make a careless one slow. It runs
in a thread of its own and is stopped when its time is up, so that it can hold up neither the event loop
nor the threads that others need. What cannot be stopped is one long call into C (a string repeated a
billion times); such a thread ends by itself, or with the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.text import Tokenizer
from server.answering.prompt import Prompt, Room, encode_fitting
from server.errors import ApiError

logger = logging.getLogger("octavo.server")

TIME_LIMIT = 5.0  # seconds
MAX_AT_ONCE = 4  # templates are Python code: more would only slow each other down

T = TypeVar("T")
# A template that tells the role apart writes it as a string, which developers in its prose are not.
_KNOWS_DEVELOPER = re.compile(r"""["']developer["']""")


class _StopError(BaseException):
    """Raised inside a rendering thread; no Exception, so that nothing on the way takes it for an error."""


class ChatRenderer:
    """Renders with at most `MAX_AT_ONCE` threads; use from one event loop only.

    Args:
        time_limit: seconds that a template may take for one conversation.
    """

    def __init__(self, time_limit: float = TIME_LIMIT) -> None:
        self._time_limit = time_limit
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def prompt(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        longest: int | None = None,
    ) -> Prompt:
        """The rendered conversation and its token ids. The template writes the special tokens itself.

        The role developer is given to templates that know it; to all others it is system.

        Raises:
            ApiError: the template takes too long, or the conversation is far longer than `longest` tokens.
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        if not _KNOWS_DEVELOPER.search(tokenizer.chat_template or ""):
            messages = [{**item, "role": "system"} if item["role"] == "developer" else item for item in messages]

        def render() -> str:
            return tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)

        async with self._slots:
            try:
                text = await _run_limited(render, self._time_limit)
            except TimeoutError:
                logger.warning("The chat template was stopped after %g seconds.", self._time_limit)
                message = f"The model's chat template took more than {self._time_limit:g} seconds for these messages."
                raise ApiError(400, message, param="messages", code="chat_template_timeout") from None
        encode = functools.partial(tokenizer.encode, add_special_tokens=False)
        if longest is None:
            ids = await asyncio.to_thread(encode, text)
        else:
            ids = await asyncio.to_thread(encode_fitting, encode, text, Room(longest, "messages"))
        return Prompt(ids, text)


async def _run_limited(work: Callable[[], T], seconds: float) -> T:
    """Run `work` in a new thread; stop it when its time is up, or when the caller is cancelled.

    Raises:
        TimeoutError: its time was up.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from here on it cannot be cancelled, only completed

    def target() -> None:
        try:
            outcome.set_result(work())
        except BaseException as problem:
            outcome.set_exception(problem)

    thread = threading.Thread(target=target, name="octavo-template", daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(outcome), seconds)
    finally:
        if not outcome.done() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_StopError))
