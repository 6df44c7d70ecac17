"""The job of a worker that compiles an answer's format once, to check that it can be done in time."""

from __future__ import annotations

import functools

from engine import StructuredOutputsParams
from engine.text.grammars import Trial


def try_grammar(params: StructuredOutputsParams) -> None:
    """Compile the format, and begin an answer. Raises ValueError if it cannot be used; gives the reason."""
    load_trial().check(params)


@functools.cache
def load_trial() -> Trial:
    """Load the library that compiles grammars. It takes longer to load than most grammars to compile."""
    return Trial()
