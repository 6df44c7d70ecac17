"""The facts about a model that a client knows before its engine does."""

from __future__ import annotations

import logging
from pathlib import Path

from engine.configs.alone import take_configs_alone
from engine.configs.published import read
from engine.errors import OctavoError
from engine.model.gguf.files import SUFFIX, single_file
from engine.model.gguf.folder import made_before
from engine.process.messages import Known, can_send, decode_known, encode

__all__ = ["Known", "decode_known", "encode", "find_known", "known_folder"]

logger = logging.getLogger("octavo.client")


def known_folder(model: str, mmproj: str | None = None) -> Path | None:
    """The folder of a model on this machine. For a GGUF file, the folder that represents it and its image projector, if
    that exists. None if the engine has to find the folder."""
    try:
        place = Path(model).expanduser()
        file = single_file(place) if place.is_dir() else place if place.suffix == SUFFIX and place.is_file() else None
        folder = place if file is None else made_before(file, mmproj)
        return folder if folder is not None and (folder / "config.json").is_file() else None
    except (OctavoError, OSError, RuntimeError) as error:
        logger.debug("the engine will find %s itself: %s", model, error)
        return None


def find_known(model: str) -> Known:
    """The config of a model in a known folder. For any other model, and for a refused config, the result is empty: the
    engine reads the config itself and reports the error. After this call, `transformers` works without torch in this
    process."""
    folder = known_folder(model)
    if folder is None:
        return Known()
    take_configs_alone()
    try:
        known = Known(str(folder), read(folder, known=True))
    except (OctavoError, OSError) as error:
        logger.debug("the engine will read %s itself: %s", folder, error)
        return Known()
    return known if can_send(known) else Known()
