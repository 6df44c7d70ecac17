"""The worker's side: one JSON order a line on the input, one answer a line on the output.

This module needs nothing but the standard library: it runs in every peer's own environment.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Handler = Callable[..., dict[str, Any]]


def serve(handlers: dict[str, Handler]) -> None:
    """Answer until the input ends.

    An order {"op": name, keywords...} calls the handler of that name; what it returns is the answer. An exception is
    answered with {"error": its text}, and the next order is read.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = handlers[order.pop("op")](**order)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
