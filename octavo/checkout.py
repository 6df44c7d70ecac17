"""Names of the installed package in a checkout: `octavo.engine` is `engine`, beside the package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType

PACKAGES = ("engine", "server", "cli")
_HOME = Path(__file__).resolve().parent.parent


def find_beside() -> None:
    """Make the packages beside `octavo` available under its name."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # otherwise modules of `engine` would be found twice


def shadowed() -> str | None:
    """The reason why one of the packages is not this project's (their names are common), or None if all are."""
    return next(filter(None, map(_shadow, PACKAGES)), None)


def _shadow(name: str) -> str | None:
    spec = find_spec(name)
    found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if found == _HOME / name / "__init__.py":
        return None
    return (
        f"Octavo's package {name!r} ({_HOME / name}) is shadowed by another package of that name: "
        f"{found or 'a folder without __init__.py'}. Start Python in another folder, remove the other package from "
        "PYTHONPATH, or install Octavo (pip install .), which gives its packages unique names."
    )


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        outer, _, name = fullname.partition(".")
        if outer != __package__ or name.partition(".")[0] not in PACKAGES:
            return None
        if name in PACKAGES and (problem := _shadow(name)) is not None:
            raise ImportError(problem)
        spec = find_spec(name)
        if spec is None:
            return None
        return spec_from_loader(
            fullname, _Same(spec), origin=spec.origin, is_package=spec.submodule_search_locations is not None
        )


class _Same(Loader):
    """Returns the module itself, which keeps its own name."""

    def __init__(self, spec: ModuleSpec):
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(self._spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType:
        """The code for `python -m`."""
        code: CodeType = self._spec.loader.get_code(self._spec.name)  # type: ignore[union-attr]
        return code
