"""What a client knows of a model before its engine does."""

from __future__ import annotations

import logging
from pathlib import Path

from engine.config import EngineConfig
from engine.configs.alone import take_configs_alone
from engine.configs.published import read
from engine.errors import OctavoError
from engine.process.messages import Known, can_send

logger = logging.getLogger("octavo.client")


def find_known(config: EngineConfig) -> Known:
    """The config of a model in a local folder. Of any other model, and of one whose config is refused, nothing: the
    engine finds that itself, and says so."""
    folder = Path(config.model).expanduser()
    if config.distributed_executor_backend != "uni" or not (folder / "config.json").is_file():
        return Known()
    take_configs_alone()
    try:
        known = Known(str(folder), read(folder, known=True))
    except (OctavoError, OSError) as error:
        logger.debug("the engine will read %s itself: %s", folder, error)
        return Known()
    return known if can_send(known) else Known()
