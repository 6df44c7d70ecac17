"""Whether a thread lets others run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def lets_others_run(work: Callable[[], object]) -> bool:
    """Whether this thread gets some turns while another one works. A busy machine may give them to another process,
    so that it is tried several times."""
    return any(_turns_beside(work) > 5 for _ in range(20))


def _turns_beside(work: Callable[[], object]) -> int:
    thread, turns = threading.Thread(target=work), 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    return turns
