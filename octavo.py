"""The `octavo` command's first lines, under a name of its own.

`engine`, `server` and `cli` are common names. Before any is imported, this makes sure that they are this
project's; `python -m octavo` works as the command does.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def shadowed() -> str | None:
    """Why one of the packages is not this project's, or None if all are."""
    home = Path(__file__).resolve().parent
    for name in ("engine", "server", "cli"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if found != home / name / "__init__.py":
            return (
                f"Octavo's package {name!r} ({home / name}) is shadowed by another package of that name: "
                f"{found or 'a folder without __init__.py'}. Install Octavo in an environment of its own, "
                "or take the other package off PYTHONPATH."
            )
    return None


def main() -> int:
    """Entry point; returns the exit status of `cli.main.main`, or 1 if that cannot be reached."""
    problem = shadowed()
    if problem is not None:
        print(f"octavo: {problem}", file=sys.stderr)
        return 1
    # numpy's pool would have a thread for each CPU, and nothing to multiply.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
