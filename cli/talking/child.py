"""`octavo serve` as the child of a command that needs a model: it ends with its parent, however that ends."""

from __future__ import annotations

import os
import signal
import sys
import threading


def _end_with_the_parent() -> None:
    while os.read(0, 4096):  # the other end is the parent's; it is closed when the parent has gone
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """`octavo serve` with this process's arguments."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    from cli.main import main as octavo

    sys.argv[1:1] = ["serve"]
    return octavo()


if __name__ == "__main__":
    sys.exit(main())
