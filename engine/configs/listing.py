"""The list of `transformers`' modules, cached in the user's cache folder.

Each import of `transformers` reads the 1,600 source files of its models to find their names. This takes half a second
of CPU time. The list stays the same until one of these files changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

from engine.host.folders import cache_folder, make_private

logger = logging.getLogger("octavo.configs")

_MODULE = "transformers.utils.import_utils"

Names = dict[frozenset[str], dict[str, set[str]]]
"""The names in each module, such as llama.configuration_llama, by the packages that they need."""


def list_models_once() -> None:
    """Let `transformers`, when it is imported, read its list of modules from the cache or write it there.

    This changes nothing if `transformers` is imported already.
    """
    if _MODULE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds the module that makes the list, and replaces its loader."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module.define_import_structure = _with_list(  # type: ignore[attr-defined]
            module.define_import_structure, Path(self.path).parents[1] / "models"
        )


def _with_list(define: Callable[..., Names], models: Path) -> Callable[..., Names]:
    """The function that lists the modules of a folder; for the folder of all models it returns the cached list."""
    made: dict[str | None, Names] = {}

    def define_import_structure(module_path: str, prefix: str | None = None) -> Names:
        if Path(module_path) not in (models, models / "__init__.py"):
            return define(module_path, prefix)
        if None not in made:
            made[None] = _kept(models, lambda: define(str(models)))
        if prefix is not None and prefix not in made:
            made[prefix] = {
                needed: {f"{prefix}.{module}": names for module, names in modules.items()}
                for needed, modules in made[None].items()
            }
        return made[prefix]

    return define_import_structure


def _kept(models: Path, make: Callable[[], Names]) -> Names:
    """The list in the cache if it was made from the same files, else a new one."""
    try:
        folder = cache_folder("transformers")
        make_private(folder)
        state = _state(models)
    except (OSError, RuntimeError) as error:
        logger.debug("transformers lists its modules itself: %s", error)
        return make()
    file = folder / f"{hashlib.sha256(str(models).encode()).hexdigest()[:16]}.json"
    try:
        kept = json.loads(file.read_bytes())
        if kept["state"] == state:
            return {
                frozenset(needed): {module: set(names) for module, names in modules.items()}
                for needed, modules in kept["names"]
            }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.debug("there is no list of the modules of transformers: %s", error)
    made = make()
    names = [
        [sorted(needed), {module: sorted(each) for module, each in modules.items()}] for needed, modules in made.items()
    ]
    try:
        _write(file, json.dumps({"state": state, "names": names}))
    except OSError as error:
        logger.debug("the next process lists the modules of transformers again: %s", error)
    return made


def _state(models: Path) -> str:
    """A digest that changes when one of the files changes."""
    state = hashlib.sha256()
    for folder in sorted(entry.path for entry in os.scandir(models) if entry.is_dir()):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                status = entry.stat()
                state.update(f"{entry.path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return state.hexdigest()


def _write(file: Path, text: str) -> None:
    """Write a temporary file and rename it, so that no reader sees an incomplete file."""
    descriptor, draft = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(draft, file)
    except BaseException:
        os.unlink(draft)
        raise
