"""Opens an engine's disk tier according to its settings."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from engine.config import EngineConfig, parse_bytes
from engine.disk.identity import identity, of_states
from engine.disk.store import PageStore
from engine.errors import ConfigError
from engine.execution.executor import Executor
from engine.execution.page_content import Content

logger = logging.getLogger("octavo.disk")


def open_stores(config: EngineConfig, executor: Executor) -> list[tuple[PageStore, Content]]:
    """The folder of an engine's pages, then that of its state snapshots if its layers carry a state, each with access
    to the content in memory. Empty if the settings name no folder, the model has no pages, or the disk fails. Raises
    ConfigError if the folder cannot be used."""
    if config.kv_disk is None:
        return []
    facts = executor.facts
    if facts.info.encoder_only or not facts.needs.paged:
        logger.info("kv_disk is not used: %s reads its inputs whole and keeps nothing in pages.", config.model)
        return []
    folder, limit = kv_folder(config.kv_disk), parse_bytes(config.kv_disk_size, "kv_disk_size")
    model, stores = identity(config, facts.info, facts.page_shape), list[tuple[PageStore, Content]]()
    for content, name, kind in zip(executor.contents(), ("page", "state"), (model, of_states(model)), strict=False):
        if content.size > limit:
            raise ConfigError(
                f"kv_disk_size is {limit} bytes, but one {name} takes {content.size}. Raise --kv-disk-size."
            )
        try:
            stores.append((PageStore(folder, limit, kind, content.size), content))
        except OSError as error:
            cause = error.strerror or str(error)
            if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):  # a full disk, or a lock that is not released
                logger.warning("Pages are not kept in %s until the next start: %s.", folder, cause)
                for store, _ in stores:
                    store.close()
                return []
            raise ConfigError(
                f"kv_disk is {folder}, but pages cannot be kept there: {cause}. Name a folder that this user can write "
                "to."
            ) from error
    if not all(store.writable for store, _ in stores):
        logger.warning("Pages in %s are read, but none are written: the folder cannot be written to.", folder)
    known = len(stores[0][0].known)
    logger.info("KV pages on disk: %s, at most %.1f GiB, %d pages of this model", folder, limit / 2**30, known)
    return stores


def check_kv_disk(config: EngineConfig) -> None:
    """Refuse settings that contradict `kv_disk`, if it is set. Raises ConfigError: names the settings."""
    if config.kv_disk is None:
        return
    if not config.enable_prefix_caching:
        raise ConfigError(
            "kv_disk needs the prefix cache, but enable_prefix_caching is false. Enable it, or remove kv_disk."
        )


def kv_folder(path: str) -> Path:
    """The folder that `kv_disk` names. Raises ConfigError if there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"kv_disk is {path}, but there is no such home folder. Name another folder.") from error
