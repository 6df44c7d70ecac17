"""A folder that represents a GGUF file, or one with its image projector: configs, a tokenizer and links to the files,
laid out like any checkpoint.

It is stored in this user's cache, under a name that changes with the file, and made only once, because reading a
vocabulary without merges takes a second. Finding an existing one does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.host.folders import cache_folder, make_private, make_spare
from engine.model.gguf.files import projector_for, projectors_beside

if TYPE_CHECKING:
    from engine.model.gguf.container import Gguf

logger = logging.getLogger("octavo.model")

LINK = "model.gguf"
"""The name of the link to the file."""
PROJECTOR_LINK = "mmproj.gguf"
"""The name of the link to the image projector."""
NO_TOKENIZER = "no_tokenizer.txt"
"""The file with the reason if there is no tokenizer."""
NO_IMAGES = "no_images.txt"
"""The name of the file with the reason why a projector is not used."""
_FORMAT = 6
"""Changes with the contents of the folder."""
_UNFINISHED = ".octavo-writing-"
_SHOWN = 5
_KEPT_SECONDS = 30 * 24 * 3600


def lacks_tokenizer(folder: Path) -> str:
    """The reason why the tokenizer of the GGUF file behind a folder cannot be built, and what to do; "" if it can, or
    if the folder does not represent a GGUF file."""
    return _reason(folder / NO_TOKENIZER)


def _reason(file: Path) -> str:
    return " ".join(file.read_text(encoding="utf-8").split()) if file.is_file() else ""


def stand_in(path: Path, mmproj: str | None = None) -> Path:
    """The folder that represents a GGUF file; made if it does not exist. Raises ModelLoadError if the file cannot be
    read, or the folder cannot be made; UnsupportedModelError if this kind of model is not supported.

    Args:
        mmproj: the file's image projector, or "none". By default, the only one beside the file is used if it fits; if
            not, the log says why.
    """
    projector = projector_for(path, mmproj)
    folder = _stand_in(path, projector)
    reason = _reason(folder / NO_IMAGES)
    if mmproj is not None and reason:
        raise UnsupportedModelError(reason)
    beside = projectors_beside(path) if mmproj is None and projector is None else []
    if beside:
        names = ", ".join(file.name for file in beside[:_SHOWN])
        reason = f"{path.parent} contains {len(beside)} image projectors ({names}). Choose one: --mmproj {beside[0]}."
    if reason:
        logger.warning("Requests with images are refused: %s", reason)
    return folder


def _stand_in(path: Path, projector: Path | None) -> Path:
    whole, name = _identified(path, projector)
    problem: OSError | RuntimeError | None = None
    for place in (_usual, _spare):
        try:
            folder = place() / name
            if not folder.is_dir():
                _tidy(folder.parent)
                _make(folder, whole, None if projector is None else projector.resolve())
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


def made_before(path: Path, mmproj: str | None = None) -> Path | None:
    """The folder that represents a GGUF file, if it exists; `mmproj`: as in `stand_in`. Raises ModelLoadError if a file
    cannot be read."""
    folder = cache_folder("gguf") / _identified(path, projector_for(path, mmproj))[1]
    return folder if folder.is_dir() else None


def _identified(path: Path, projector: Path | None) -> tuple[Path, str]:
    """The file, and the name of the folder that represents it and its projector."""
    whole, identity = _identity(path)
    parts = [_FORMAT, *identity, *([] if projector is None else _identity(projector)[1])]
    return whole, f"{whole.stem[:64]}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


def _identity(path: Path) -> tuple[Path, list[Any]]:
    try:
        whole = path.resolve(strict=True)
        status = whole.stat()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error.strerror}).") from error
    return whole, [str(whole), status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _usual() -> Path:
    folder = cache_folder("gguf")
    make_private(folder)
    return folder


def _spare() -> Path:
    return make_spare("gguf")


def _make(folder: Path, path: Path, projector: Path | None) -> None:
    """Make the folder under a temporary name and rename it, so that no reader sees an incomplete one and two processes
    may make the same."""
    from engine.model.gguf.container import read_gguf  # brings torch

    contents = _contents(read_gguf(path), projector)
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
        if projector is not None and NO_IMAGES not in contents:
            (draft / PROJECTOR_LINK).symlink_to(projector)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _contents(file: Gguf, projector: Path | None) -> dict[str, Any]:
    from engine.model.gguf.architectures import describe, sentence_files
    from engine.model.gguf.container import read_gguf
    from engine.model.gguf.projectors import describe_pair
    from engine.model.gguf.sampling import sampling_fields
    from engine.model.gguf.vocabulary import end_ids, special_ids, tokenizer_files

    _, config = describe(file)
    roles, ends = special_ids(file), end_ids(file)
    ids = {f"{role}_token_id": roles.get(role) for role in ("bos", "pad")} | {"eos_token_id": ends or None}
    more: dict[str, Any] = {}
    if projector is not None:
        try:
            more = describe_pair(file, read_gguf(projector))
            config = more.pop("config.json")
            config["text_config"] |= ids
        except (ModelLoadError, UnsupportedModelError, PermissionError) as error:
            more[NO_IMAGES] = str(error)
    found: dict[str, Any] = {
        "config.json": config | ids | {"dtype": _dtype(file)},
        **more,
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
            gone = any(link.is_symlink() and not link.exists() for link in map(folder.joinpath, (LINK, PROJECTOR_LINK)))
            if old or gone or (not left and not (folder / LINK).exists()):
                shutil.rmtree(folder)
