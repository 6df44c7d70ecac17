"""`octavo serve` as the child of a command that needs a model. The child ends when its parent does, even if the parent
is killed."""

from __future__ import annotations

import os
import signal
import sys
import threading


def _end_with_the_parent() -> None:
    while os.read(0, 4096):  # the parent holds the other end; it closes when the parent ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Run `octavo serve` with this process's arguments."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    from cli.main import main as octavo

    sys.argv[1:1] = ["serve"]
    return octavo()


if __name__ == "__main__":
    sys.exit(main())
