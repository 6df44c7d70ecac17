"""The first lines of the `octavo` command; `python -m octavo` does the same as the command."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from octavo.dependencies import explain


def main() -> int:
    """Entry point; returns the exit status of `cli.main.main`, or 1 if it cannot be imported."""
    if "octavo.checkout" in sys.modules:
        problem = sys.modules["octavo.checkout"].shadowed()
        if problem is not None:
            print(f"octavo: {problem}", file=sys.stderr)
            return 1
    # numpy's thread pool would have a thread for each CPU and nothing to do.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        status: int = import_module("octavo.cli.main").main()
    except ModuleNotFoundError as error:
        problem = explain(error)
        if problem is None:
            raise
        print(f"octavo: {problem}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
