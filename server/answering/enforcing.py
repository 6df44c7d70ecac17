"""Grammars for a request's constraints on its answer: required calls, and a format for the text beside reasoning and
calls."""

from __future__ import annotations

from dataclasses import replace

from engine import InvalidRequestError, StructuredOutputsParams
from server.answering.call_grammar import call_grammar
from server.answering.parsing import Parsing
from server.answering.pieces import AnswerShape
from server.answering.tools import Tools
from server.context import Service
from server.errors import ApiError


async def enforce(service: Service, shape: AnswerShape, tools: Tools | None, parsing: Parsing | None) -> AnswerShape:
    """The constraints for the engine: the answer has the required calls, arguments of strict functions match their
    schemas, and a requested format applies only to the text. Raises ApiError if the model's call format is unknown or
    cannot be enforced; InvalidRequestError if a function's schema cannot be compiled. `parsing`: how the answer is
    parsed; None for plain text."""
    forced = tools is not None and tools.forced
    form = None if forced else shape.params.structured_outputs  # if only calls are allowed there is no text
    if parsing is None or (tools is not None and parsing.tools is None):
        if forced:
            message = "tool calls cannot be enforced, because this model's format of calls is unknown. Set"
            raise ApiError(400, f"{message} --tool-call-parser.", param="tool_choice", code="unsupported_parameter")
        if parsing is None:
            return shape
    try:
        grammar = call_grammar(parsing, service.answers.special, formed=form is not None)
    except ValueError as problem:
        if forced:
            message = f"{problem}; send tool_choice auto."
            raise ApiError(400, message, param="tool_choice", code="unsupported_parameter") from None
        if form is None:
            return shape  # strict is then only a hint
        message = f"{problem}, so tools cannot be combined with a format of the answer. Send only one of them."
        raise ApiError(400, message, param="tools", code="unsupported_parameter") from None
    if grammar is None:
        return shape
    try:
        structured = StructuredOutputsParams(grammar=grammar) if form is None else replace(form, around=grammar)
        params = replace(shape.params, structured_outputs=structured)
        if tools is not None:
            await service.grammars.check(structured, service.settings.grammar_timeout)
    except InvalidRequestError as problem:
        raise InvalidRequestError(f"tools: {problem}", param="tools", code=problem.code) from problem
    return replace(shape, params=params)
