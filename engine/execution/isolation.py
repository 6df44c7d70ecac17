"""A step that failed, once more request by request: only those at fault are to end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.execution.runner import ModelRunner
from engine.scheduling.plan import StepPlan, StepResult, TokenScores

Number = TypeVar("Number", bound=np.generic)

logger = logging.getLogger("octavo.execution")


def run_apart(runner: ModelRunner, parts: Mapping[str, StepPlan]) -> tuple[dict[str, StepResult], dict[str, Exception]]:
    """Run the parts of a step one by one.

    That some of it may have been computed already does no harm: no progress was recorded, and the same
    positions are written again. All copies come before anything is computed, as in the whole step: a
    page's last holder writes in place what others have copied.

    Returns:
        The answers of the parts that could be run, and why the others could not, each in the parts' order.
    """
    results: dict[str, StepResult] = {}
    failures: dict[str, Exception] = {}
    for name, plan in parts.items():
        try:
            runner.cache.copy_pages(plan.copies)
        except Exception as error:
            failures[name] = error
    for name, plan in parts.items():
        if name in failures:
            continue
        try:
            results[name] = runner.execute(replace(plan, copies=plan.copies[:0]))
        except Exception as error:
            logger.exception("request %s cannot be computed", name)
            failures[name] = error
    return results, failures


def join(results: Sequence[StepResult]) -> StepResult:
    """The answer of a whole step from those of its parts, in their order."""
    prompts = [result.prompt_logprobs for result in results if result.prompt_logprobs is not None]
    return StepResult(
        tokens=_stack([result.tokens for result in results]),
        scores=_stack([result.scores for result in results]),
        logprobs=_stack([result.logprobs for result in results]),
        ranks=_stack([result.ranks for result in results]),
        top_ids=_stack([result.top_ids for result in results]),
        top_logprobs=_stack([result.top_logprobs for result in results]),
        prompt_logprobs=_join_scores(prompts) if prompts else None,
        pooled=tuple(row for result in results for row in result.pooled),
    )


def _join_scores(scores: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(
        logprobs=np.concatenate([part.logprobs for part in scores]),
        ranks=np.concatenate([part.ranks for part in scores]),
        top_ids=_stack([part.top_ids for part in scores]),
        top_logprobs=_stack([part.top_logprobs for part in scores]),
    )


def _stack(arrays: Sequence[NDArray[Number]]) -> NDArray[Number]:
    """Rows of different widths under each other; columns that a row does not have are 0."""
    width = max(array.shape[1] for array in arrays)
    return np.concatenate([np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in arrays])
