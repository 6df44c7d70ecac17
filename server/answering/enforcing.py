"""What a request asks of the calls in its answer, as a grammar that the engine holds it to."""

from __future__ import annotations

from dataclasses import replace

from engine import InvalidRequestError, StructuredOutputsParams
from server.answering.call_grammar import call_grammar
from server.answering.parsing import Parsing
from server.answering.pieces import Shape
from server.answering.tools import Tools
from server.context import Service
from server.errors import ApiError


async def enforce_calls(service: Service, shape: Shape, tools: Tools | None, parsing: Parsing | None) -> Shape:
    """What is asked of the engine, so that the answer holds the calls that it must, and strict functions get arguments
    of their schemas.

    Args:
        shape: what the request asks besides.
        parsing: how the answer is read; None where it is text as it is.

    Raises:
        ApiError: the model's way to write calls is not known, or cannot be enforced, or something else is asked of the
            whole answer.
        InvalidRequestError: a function's schema cannot be compiled.
    """
    if tools is None or not (tools.forced or any(function.strict for function in tools.functions)):
        return shape
    param = "tool_choice" if tools.forced else "tools"
    if parsing is None or parsing.tools is None:
        if not tools.forced:
            return shape  # calls are text here, whatever they say
        message = "how this model writes calls is not known, so that none can be enforced; name it with"
        raise ApiError(400, f"{message} --tool-call-parser.", param=param, code="unsupported_parameter")
    try:
        grammar = call_grammar(parsing, service.answers.special)
    except ValueError as problem:
        if not tools.forced:
            return shape
        message = f"{problem}; send tool_choice auto."
        raise ApiError(400, message, param=param, code="unsupported_parameter") from None
    if shape.params.structured_outputs is not None:
        message = f"{param} cannot be used with another demand on what the whole answer looks like."
        raise ApiError(400, message, param=param, code="invalid_value")
    structured = StructuredOutputsParams(grammar=grammar)
    try:
        params = replace(shape.params, structured_outputs=structured)
        await service.grammars.check(structured, service.settings.grammar_timeout)
    except InvalidRequestError as problem:
        raise InvalidRequestError(f"tools: {problem}", param="tools", code=problem.code) from problem
    return replace(shape, params=params)
