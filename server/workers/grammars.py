"""The job of a worker that compiles the format of an answer once, to see whether that can be done in time."""

from __future__ import annotations

import functools

from engine import StructuredOutputsParams
from engine.text.grammars import Trial


def try_grammar(params: StructuredOutputsParams) -> None:
    """Compile it, and begin an answer.

    Raises:
        ValueError: it cannot be used; why.
    """
    load_trial().check(params)


@functools.cache
def load_trial() -> Trial:
    """The library that compiles grammars. It takes longer to load than most grammars to compile."""
    return Trial()
