"""POST /v1/decisions (OpenAI's) and /v1/systemone (vLLM's): questions about one input, answered with probabilities."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from fastapi import Response

from server.answering.decisions import LETTERS, DecisionRun, LabelQuestion, LabelReading, described
from server.answering.endpoints import lacks_decisions
from server.answering.rendering import check_variables
from server.api import examples
from server.api.decision_schemas import (
    MAX_SPECS,
    ChoiceAnswer,
    ChoiceProbability,
    ChoiceQuestion,
    DecisionInputDetails,
    DecisionOutputDetails,
    DecisionQuestion,
    DecisionRequest,
    DecisionResponse,
    DecisionUsage,
    LevelProbability,
    PredicateAnswer,
    PredicateQuestion,
    QuestionDiagnostics,
    QuestionSpec,
    ScoreAnswer,
    SystemOneRequest,
    SystemOneResponse,
    SystemOneUsage,
)
from server.api.schemas import Usage
from server.api.structure import check_value
from server.errors import ApiError
from server.routes.task_router import TaskCall, TaskRouter

_TYPES = ("choice", "noul", "score")

router = TaskRouter("generating", one_text=True)


@router.endpoint(
    "/v1/decisions",
    response_model=DecisionResponse,
    examples=examples.DECISIONS,
    lacks=lacks_decisions,
    summary="Create decisions",
)
async def create_decision(call: TaskCall[DecisionRequest]) -> Response:
    """Answer up to 400 questions (predicates, choices, scores) about one input with probabilities, in one batch."""
    body = call.body
    questions = [_question(f"questions.{place}", question) for place, question in enumerate(body.questions)]

    def respond(readings: Sequence[LabelReading], usage: Usage, run: DecisionRun) -> DecisionResponse:
        return DecisionResponse(
            model=run.service.name_of(run.terms),
            answers=[_answer(*pair) for pair in zip(body.questions, readings, strict=True)],
            usage=DecisionUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=DecisionInputDetails(
                    cached_tokens=usage.prompt_tokens_details.cached_tokens, cache_write_tokens=0
                ),
                output_tokens=usage.completion_tokens,
                output_tokens_details=DecisionOutputDetails(reasoning_tokens=0),
                total_tokens=usage.total_tokens,
            ),
        )

    return await _run(call, state=body.input, questions=questions, answer=respond).respond(call.request)


def _run(call: TaskCall[Any], **fields: Any) -> DecisionRun:
    return DecisionRun(call.service, *DecisionRun.request(call.body), call.arrival, given=call.body, **fields)


def _question(where: str, question: DecisionQuestion) -> LabelQuestion:
    if isinstance(question, PredicateQuestion):
        return LabelQuestion(question.instructions, ("false", "true"), LETTERS[:2])
    if isinstance(question, ChoiceQuestion):
        pairs = [(json.dumps(choice.value, ensure_ascii=False), choice.description) for choice in question.choices]
    else:
        pairs = [(level.label, level.description) for level in question.levels]
    if len(pairs) > len(LETTERS):
        where += ".choices"
        message = f"{where} has {len(pairs)} items, but at most {len(LETTERS)} choices are supported."
        _fail(where, f"{message} Ask several questions.")
    return LabelQuestion(question.instructions, tuple(described(*pair) for pair in pairs), LETTERS[: len(pairs)])


def _answer(question: DecisionQuestion, reading: LabelReading) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    name, shares = question.name, reading.shares
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(type="predicate", name=name, probability=shares[1])
    if isinstance(question, ChoiceQuestion):
        return ChoiceAnswer(
            type="choice",
            name=name,
            choice=question.choices[reading.best].value,
            probabilities=[
                ChoiceProbability(value=choice.value, probability=share)
                for choice, share in zip(question.choices, shares, strict=True)
            ],
            confidence=reading.confidence,
        )
    return ScoreAnswer(
        type="score",
        name=name,
        score=_expected(shares),
        probabilities=[
            LevelProbability(value=value, label=level.label, probability=share)
            for value, (level, share) in enumerate(zip(question.levels, shares, strict=True))
        ],
        confidence=reading.confidence,
    )


def _expected(shares: Sequence[float]) -> float:
    return sum(value * share for value, share in enumerate(shares))


@router.endpoint(
    "/v1/systemone",
    response_model=SystemOneResponse,
    examples=examples.SYSTEM_ONE,
    lacks=lacks_decisions,
    summary="Create decisions (vLLM's format)",
)
async def create_structured_decision(call: TaskCall[SystemOneRequest]) -> Response:
    """Answer choices, yes-or-no questions and scores about a state, which is text or JSON."""
    body = call.body
    variables = body.chat_template_kwargs or {}
    check_variables(variables)
    if variables.get("enable_thinking"):
        message = "the first token of the reply is the answer, so thinking must be off. Remove enable_thinking."
        _fail("chat_template_kwargs", message)
    if not 0 < len(body.questions) <= MAX_SPECS:
        _fail("questions", f"questions must hold at least one and at most {MAX_SPECS}, got {len(body.questions)}.")
    questions = {name: _spec(f"questions.{name}", spec) for name, spec in body.questions.items()}
    if not isinstance(body.state, str):
        check_value(body.state, "state")

    def respond(readings: Sequence[LabelReading], usage: Usage, run: DecisionRun) -> SystemOneResponse:
        named = dict(zip(body.questions, readings, strict=True))
        return SystemOneResponse(
            id=run.request_id,
            object="structured_decision",
            created=run.created,
            model=run.service.name_of(run.terms),
            answers={name: _named(body.questions[name], reading) for name, reading in named.items()},
            usage=SystemOneUsage(input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens),
            diagnostics={
                name: QuestionDiagnostics(label_mass=reading.mass, argmax_is_label=reading.is_label)
                for name, reading in named.items()
            },
            joint=None,
        )

    run = _run(
        call,
        state=body.state if isinstance(body.state, str) else json.dumps(body.state, ensure_ascii=False),
        questions=list(questions.values()),
        answer=respond,
        instructions=body.instructions,
        variables=variables,
        param="state",
    )
    return await run.respond(call.request)


def _spec(where: str, spec: QuestionSpec) -> LabelQuestion:
    """A question in vLLM's shape, in the form that the model reads. Raises ApiError if the question is invalid."""
    if spec.model_extra:
        _fail(where, f"{where}: unknown field(s) {', '.join(sorted(spec.model_extra))}.")
    instructions = spec.instructions if isinstance(spec.instructions, str) else str(spec.instructions or "")
    criteria = spec.criteria
    if spec.type == "choice":
        if not isinstance(criteria, dict) or not criteria:
            _fail(where, f"{where}: criteria must be an object that maps each option to a description or null.")
        if len(criteria) > len(LETTERS):
            _fail(where, f"{where}: at most {len(LETTERS)} options are possible, got {len(criteria)}.")
        lines = tuple(described(name, text and str(text)) for name, text in criteria.items())
        return LabelQuestion(instructions, lines, LETTERS[: len(lines)])
    if spec.type == "noul":
        if criteria is not None and (not isinstance(criteria, dict) or not criteria.keys() <= {"true", "false"}):
            _fail(where, f"{where}: criteria must be an object with true and false.")
        lines = tuple(str((criteria or {}).get(side) or "") for side in ("true", "false"))
        return LabelQuestion(instructions, lines, ("yes", "no"), "Reply with yes or no.")
    if spec.type == "score":
        most = len(string.digits)
        if not isinstance(criteria, list) or not 2 <= len(criteria) <= most:
            _fail(where, f"{where}: criteria must be an ordered list of levels, from 2 to {most}.")
        lines = tuple(map(str, criteria))
        return LabelQuestion(
            instructions, lines, tuple(string.digits[: len(lines)]), "Reply with the number of one level."
        )
    _fail(where, f"{where}: type must be one of {', '.join(_TYPES)}, got {spec.type!r}.")


def _named(spec: QuestionSpec, reading: LabelReading) -> dict[str, Any]:
    shares, confidence = reading.shares, reading.confidence
    if spec.type == "noul":
        yes, no = shares
        return {"type": "noul", "noul": yes, "probabilities": {"yes": yes, "no": no}, "confidence": confidence}
    if spec.type == "choice":
        options = list(spec.criteria)
        found: Mapping[str, float] = dict(zip(options, shares, strict=True))
        return {"type": "choice", "choice": options[reading.best], "probabilities": found, "confidence": confidence}
    return {
        "type": "score",
        "score": _expected(shares),
        "legend": {str(value): str(level) for value, level in enumerate(spec.criteria)},
        "probabilities": {str(value): share for value, share in enumerate(shares)},
        "confidence": confidence,
    }


def _fail(param: str, message: str) -> NoReturn:
    raise ApiError(400, message, param=param, code="invalid_value")
