"""Renders chat messages to a prompt with the model's template, within limits of time and memory.

A template is a program from the checkpoint, and messages can make a careless one slow or memory-hungry. A worker
process runs it. The process is killed when its time is up, and its memory is separate from the service's.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from engine.text.conversations import fit_messages
from engine.text.processor import Tokenizer
from engine.text.writing import Writing
from server.admission import CHARACTERS_PER_TOKEN
from server.answering.formats import Formats
from server.answering.prompt import Prompt, Room, encode_fitting, most_characters
from server.answering.remembered import RememberedTokens
from server.answering.terms import Terms
from server.answering.tools import Tools
from server.api.structure import check_value
from server.api.template_fields import TemplateFields
from server.errors import ApiError, shown
from server.workers.pool import RefusedError, WorkerLostError, WorkerPool, shared_workers
from server.workers.templates import RenderedTemplate, TemplateInput

logger = logging.getLogger("octavo.server")

TIME_LIMIT = 5.0  # seconds
MAX_AT_ONCE = 4  # workers; more would only slow each other down

# Names that a template gets from the body's own fields or that rendering itself needs.
_RESERVED = frozenset(
    {
        "messages", "conversations", "tools", "documents", "add_generation_prompt", "continue_final_message",
        "chat_template", "return_assistant_tokens_mask", "tokenize",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """The inputs of a template besides the messages, and the end of the prompt."""

    tools: list[dict[str, Any]] | None = None  # {"type": "function", "function": {...}} each, or None
    documents: list[dict[str, Any]] | None = None  # objects in the template's form, or None
    variables: Mapping[str, Any] = field(default_factory=dict)  # further variables, such as enable_thinking
    add_generation_prompt: bool = True  # open the assistant's answer
    continue_final_message: bool = False  # leave the last message open instead
    characters: int = 0  # the total characters of all strings in these

    @property
    def num_tokens(self) -> int:
        """An estimate of the tokens that these add to the messages."""
        return self.characters // CHARACTERS_PER_TOKEN


def read_rendering(body: TemplateFields, tools: Tools | None) -> Rendering:
    """Read the body's fields about rendering. `tools`: the tools that the answer may call. Raises ApiError: names the
    invalid field, or the field that contradicts another."""
    variables: dict[str, Any] = {}
    characters = 0 if tools is None else tools.characters
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if body.chat_template_kwargs:
        characters += check_variables(body.chat_template_kwargs)
        variables |= body.chat_template_kwargs
    if body.documents:
        characters += check_value(body.documents, "documents")
        for index, document in enumerate(body.documents):
            if not isinstance(document, dict):
                where = f"documents[{index}]"
                _fail(where, f"{where} must be an object, for example with title and text, got {shown(document)}.")
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt contradict each other. Send only one of them."
        _fail("continue_final_message", message)
    opens = body.add_generation_prompt
    return Rendering(
        tools=None if tools is None else tools.shown,
        documents=body.documents or None,
        variables=variables,
        add_generation_prompt=not body.continue_final_message if opens is None else opens,
        continue_final_message=bool(body.continue_final_message),
        characters=characters,
    )


def check_variables(given: Mapping[str, Any]) -> int:
    """Check the field chat_template_kwargs.

    Returns: The characters of its strings.

    Raises:
        ApiError: it is too large, or has a name that the template gets from elsewhere.
    """
    characters = check_value(given, "chat_template_kwargs")
    for name in given:
        if not name.isidentifier() or name in _RESERVED:
            message = f"chat_template_kwargs must not contain {shown(name)}: it is not a name"
            _fail(
                "chat_template_kwargs",
                f"{message} of a variable that can be set there. Some variables have separate fields in the body.",
            )
    return characters


def _fail(param: str, message: str) -> NoReturn:
    raise ApiError(400, message, param=param, code="invalid_value")


@dataclass(frozen=True, slots=True)
class ImageMarks:
    """The images of a conversation, in its texts."""

    mark: str  # stands for an image in the messages
    token: str
    expand: Callable[[str], str]  # puts texts around the crops of the images in a rendered text


class ChatRenderer:
    """Renders with at most `MAX_AT_ONCE` workers; use it from one event loop only.

    Args:
        time_limit: seconds that a template may take for one conversation.
        workers: the pool (default: the process's shared pool).
    """

    def __init__(self, time_limit: float = TIME_LIMIT, workers: WorkerPool | None = None) -> None:
        self._time_limit = time_limit
        self._workers = workers or shared_workers()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._remembered: RememberedTokens | None = None

    async def prompt(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        room: Room,
        rendering: Rendering | None = None,
        formats: Formats | None = None,
        terms: Terms | None = None,
        marks: ImageMarks | None = None,
    ) -> Prompt:
        """The rendered conversation and its token ids. The template writes the special tokens itself.

        Templates that know the role developer get it; others get system instead. Messages that a template would refuse
        or lose are rearranged so that it shows them (`engine.text.fitting`). Raises ApiError if the template takes too
        much time or memory or does not support tools or documents, or the conversation is far too long;
        InvalidRequestError if there is no template.

        Args:
            formats: the model's call format, and whether a system message describes the tools.
            terms: the request's terms. Requests with the same salt share remembered tokens; with None nothing is
                remembered.
            marks: of the images in the messages; None: there are none.
        """
        rendering, formats = rendering or Rendering(), formats or Formats()
        template = tokenizer.need_chat_template(tools=rendering.tools is not None)
        for name, given in (("tools", rendering.tools), ("documents", rendering.documents)):
            if given is not None and name not in template and not (name == "tools" and formats.prompted):
                message = f"The model's chat template does not support {name}, so the model would not see them."
                hint = " Leave them out, or start the server with --tool-prompt auto." if name == "tools" else ""
                raise ApiError(400, f"{message}{hint or ' Leave them out.'}", param=name, code="unsupported_parameter")
        conversation = TemplateInput(
            template=template,
            messages=fit_messages(messages, template, rendering.tools),
            special=tokenizer.template_variables,
            variables=dict(rendering.variables),
            add_generation_prompt=rendering.add_generation_prompt,
            longest=most_characters(room.tokens),
            tools=rendering.tools,
            documents=rendering.documents,
            continue_final_message=rendering.continue_final_message,
            writing=_writing(formats),
            prompted=formats.prompted,
            image_mark=None if marks is None else marks.mark,
            image_text=None if marks is None else marks.token,
        )
        async with self._slots:
            rendered = await self._render(conversation)
        if rendered.text is None:
            raise room.refusal_of_characters(rendered.length)
        text = rendered.text if marks is None else marks.expand(rendered.text)
        if terms is None:
            encode = functools.partial(tokenizer.encode, add_special_tokens=False)
            return Prompt(await asyncio.to_thread(encode_fitting, encode, text, room), rendered.text)
        if self._remembered is None or self._remembered.tokenizer is not tokenizer:
            self._remembered = RememberedTokens(tokenizer)
        ids = await asyncio.to_thread(self._remembered.encode, text, room, terms.cache_salt)
        return Prompt(ids, rendered.text)

    async def _render(self, conversation: TemplateInput) -> RenderedTemplate:
        try:
            return await self._workers.run("render", conversation, RenderedTemplate, self._time_limit)
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


def _writing(formats: Formats) -> Writing | None:
    written = None if formats.calls is None else formats.calls.writing
    return written if written is not None and written.as_json else None  # else the template writes them
