"""A folder that represents a GGUF file: a config, a tokenizer and a link to the file, laid out like any checkpoint.

It is stored in this user's cache, under a name that changes with the file, and made only once, because reading a
vocabulary without merges takes a second. Finding an existing one does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.host.folders import cache_folder, make_private, make_spare

if TYPE_CHECKING:
    from engine.model.gguf.container import Gguf

LINK = "model.gguf"
"""The name of the link to the file."""
NO_TOKENIZER = "no_tokenizer.txt"
"""The file with the reason if there is no tokenizer."""
_FORMAT = 5
"""Changes with the contents of the folder."""
_UNFINISHED = ".octavo-writing-"
_KEPT_SECONDS = 30 * 24 * 3600


def lacks_tokenizer(folder: Path) -> str:
    """The reason why the tokenizer of the GGUF file behind a folder cannot be built, and what to do; "" if it can, or
    if the folder does not represent a GGUF file."""
    file = folder / NO_TOKENIZER
    return " ".join(file.read_text(encoding="utf-8").split()) if file.is_file() else ""


def stand_in(path: Path) -> Path:
    """The folder that represents a GGUF file; made if it does not exist. Raises ModelLoadError if the file cannot be
    read, or the folder cannot be made; UnsupportedModelError if this kind of model is not supported."""
    whole, name = _identified(path)
    problem: OSError | RuntimeError | None = None
    for place in (_usual, _spare):
        try:
            folder = place() / name
            if not folder.is_dir():
                _tidy(folder.parent)
                _make(folder, whole)
            with contextlib.suppress(OSError):
                os.utime(folder)
            return folder
        except PermissionError as error:
            if error.filename == str(whole):
                raise
            problem = error
        except (OSError, RuntimeError) as error:
            problem = error
    raise ModelLoadError(
        f"The config and the tokenizer of {path} cannot be written to this user's cache ({problem}). Set "
        f"XDG_CACHE_HOME to a writable folder."
    )


def made_before(path: Path) -> Path | None:
    """The folder that represents a GGUF file, if it exists. Raises ModelLoadError if the file cannot be read."""
    folder = cache_folder("gguf") / _identified(path)[1]
    return folder if folder.is_dir() else None


def _identified(path: Path) -> tuple[Path, str]:
    """The file itself, and the name of the folder that represents it."""
    try:
        whole = path.resolve(strict=True)
        status = whole.stat()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error.strerror}).") from error
    identity = [_FORMAT, str(whole), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return whole, f"{whole.stem[:64]}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}"


def _usual() -> Path:
    folder = cache_folder("gguf")
    make_private(folder)
    return folder


def _spare() -> Path:
    return make_spare("gguf")


def _make(folder: Path, path: Path) -> None:
    """Make the folder under a temporary name and rename it, so that no reader sees an incomplete one and two processes
    may make the same."""
    from engine.model.gguf.container import read_gguf  # brings torch

    contents = _contents(read_gguf(path))
    draft = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
    try:
        for name, content in contents.items():
            (draft / name).parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                (draft / name).write_bytes(content)
                continue
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            (draft / name).write_text(text, encoding="utf-8", errors="backslashreplace")
        (draft / LINK).symlink_to(path)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _contents(file: Gguf) -> dict[str, Any]:
    from engine.model.gguf.architectures import describe, sentence_files
    from engine.model.gguf.sampling import sampling_fields
    from engine.model.gguf.vocabulary import end_ids, special_ids, tokenizer_files

    _, config = describe(file)
    roles, ends = special_ids(file), end_ids(file)
    ids = {f"{role}_token_id": roles.get(role) for role in ("bos", "pad")} | {"eos_token_id": ends or None}
    found: dict[str, Any] = {
        "config.json": config | ids | {"dtype": _dtype(file)},
        "generation_config.json": {name: value for name, value in ids.items() if value is not None}
        | sampling_fields(file),
        **sentence_files(file),
    }
    try:
        found |= tokenizer_files(file)
    except UnsupportedModelError as error:
        found[NO_TOKENIZER] = str(error)
    return found


def _dtype(file: Gguf) -> str:
    """The format to compute in: that of the largest tensor, bfloat16 if it is quantised."""
    import torch

    largest = max(file.tensors.values(), key=lambda info: info.size, default=None)
    plain = None if largest is None else largest.format.plain
    return str(plain if plain in (torch.float32, torch.float16) else torch.bfloat16).removeprefix("torch.")


def _tidy(place: Path) -> None:
    """Remove folders whose files are gone or were not used for long, and remnants of killed processes."""
    now = time.time()
    for folder in place.iterdir():
        with contextlib.suppress(OSError):
            old = now - folder.stat().st_mtime > _KEPT_SECONDS
            left = folder.name.startswith(_UNFINISHED)
            if old or (not left and not (folder / LINK).exists()):
                shutil.rmtree(folder)
