"""Octavo serves transformer models: `from octavo import LLM`, or the `octavo` command.

In an installed package, `engine`, `server` and `cli` are subpackages: `octavo.engine` and so on. In a checkout they are
beside this package, and its names refer to the same modules (`octavo.checkout`).
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.dependencies import explain

if TYPE_CHECKING:
    from engine import *  # noqa: F403

if not (Path(__file__).parent / "engine").is_dir():
    from octavo.checkout import find_beside

    find_beside()


def __getattr__(name: str) -> Any:
    """Import the engine when one of its names is first used, because the command line does not need it."""
    if name == "__version__":
        return import_module(f"{__name__}.cli").version()
    if name == "__all__" or not name.startswith("_"):
        try:
            engine = import_module(f"{__name__}.engine")
            if name == "__all__" or name in engine.__all__:
                return getattr(engine, name)
        except ModuleNotFoundError as error:
            problem = explain(error)
            if problem is None:
                raise
            raise ImportError(problem) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The engine's public names, for completion."""
    return sorted([*__getattr__("__all__"), "__all__", "__version__"])
