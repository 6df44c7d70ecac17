"""Chat messages to a prompt, by the model's template, within limits of time and memory.

A template is a program that came with the checkpoint, and messages can make a careless one slow or greedy. A worker
runs it: a process that is killed when its time is up, in whatever it is, and whose memory is not the service's.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.text.processor import Tokenizer
from server.answering.prompt import Prompt, Room, encode_fitting, most_characters
from server.errors import ApiError
from server.workers.pool import RefusedError, WorkerLostError, WorkerPool, shared_workers
from server.workers.templates import Conversation, Rendered

logger = logging.getLogger("octavo.server")

TIME_LIMIT = 5.0  # seconds
MAX_AT_ONCE = 4  # workers; more would only slow each other down

# A template that tells the role apart writes it as a string, which developers in its prose are not.
_KNOWS_DEVELOPER = re.compile(r"""["']developer["']""")


class ChatRenderer:
    """Renders with at most `MAX_AT_ONCE` workers; use from one event loop only.

    Args:
        time_limit: seconds that a template may take for one conversation.
        workers: the pool (default: that of this process).
    """

    def __init__(self, time_limit: float = TIME_LIMIT, workers: WorkerPool | None = None) -> None:
        self._time_limit = time_limit
        self._workers = workers or shared_workers()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def prompt(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        room: Room,
        *,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """The rendered conversation and its token ids. The template writes the special tokens itself.

        The role developer is given to templates that know it; to all others it is system.

        Raises:
            ApiError: the template takes too much time or memory, or the conversation is far longer than there is room.
            InvalidRequestError: there is no template.
        """
        template = tokenizer.need_chat_template()
        if not _KNOWS_DEVELOPER.search(template):
            messages = [{**item, "role": "system"} if item["role"] == "developer" else item for item in messages]
        conversation = Conversation(
            template=template,
            messages=[dict(message) for message in messages],
            variables=tokenizer.template_variables,
            add_generation_prompt=add_generation_prompt,
            longest=most_characters(room.tokens),
        )
        async with self._slots:
            rendered = await self._render(conversation)
        if rendered.text is None:
            raise room.refusal_of_characters(rendered.length)
        encode = functools.partial(tokenizer.encode, add_special_tokens=False)
        return Prompt(await asyncio.to_thread(encode_fitting, encode, rendered.text, room), rendered.text)

    async def _render(self, conversation: Conversation) -> Rendered:
        try:
            return await self._workers.run("render", conversation, Rendered, self._time_limit)
        except TimeoutError:
            logger.warning("The chat template was stopped after %g seconds.", self._time_limit)
            message = f"The model's chat template took more than {self._time_limit:g} seconds for these messages."
            code = "chat_template_timeout"
        except WorkerLostError:
            logger.warning("The chat template was stopped: it took too much memory.")
            message, code = "The model's chat template took too much memory for these messages.", "chat_template_memory"
        except RefusedError as problem:
            message, code = f"The model's chat template does not accept these messages: {problem}", "invalid_messages"
        raise ApiError(400, message, param="messages", code=code)
