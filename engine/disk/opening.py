"""Opens an engine's disk tier according to its settings."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from engine.config import EngineConfig, parse_bytes
from engine.disk.identity import identity
from engine.disk.store import PageStore
from engine.errors import ConfigError
from engine.execution.executor import Executor, LocalExecutor
from engine.execution.page_content import PageContent

logger = logging.getLogger("octavo.disk")


def open_store(config: EngineConfig, executor: Executor) -> tuple[PageStore, PageContent] | None:
    """The folder of an engine's pages, and access to their content; None if the settings name no folder, the model has
    no pages that prompts share, or the disk fails. Raises ConfigError if the folder cannot be used."""
    if config.kv_disk is None:
        return None
    info, needs = executor.facts.info, executor.facts.needs
    if info.encoder_only or not needs.paged or info.max_encoder_len is not None or needs.state_size:
        logger.info("kv_disk is not used: it needs a decoder-only model without a state; %s is another.", config.model)
        return None
    if executor.facts.num_states:
        logger.info("kv_disk is not used: layers of %s carry a state, which is not kept on disk.", config.model)
        return None
    assert isinstance(executor, LocalExecutor)
    cache = executor.runner.cache
    content = PageContent(cache)
    folder, limit = kv_folder(config.kv_disk), parse_bytes(config.kv_disk_size, "kv_disk_size")
    if content.size > limit:
        raise ConfigError(f"kv_disk_size is {limit} bytes, but one page takes {content.size}. Raise --kv-disk-size.")
    try:
        store = PageStore(folder, limit, identity(config, info, cache.key_centres), content.size)
    except OSError as error:
        cause = error.strerror or str(error)
        if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):  # a full disk, or a lock that is not released
            logger.warning("Pages are not kept in %s until the next start: %s.", folder, cause)
            return None
        raise ConfigError(
            f"kv_disk is {folder}, but pages cannot be kept there: {cause}. Name a folder that this user can write to."
        ) from error
    if not store.writable:
        logger.warning("Pages in %s are read, but none are written: the folder cannot be written to.", folder)
    logger.info(
        "KV pages on disk: %s, at most %.1f GiB, %d pages of this model", folder, limit / 2**30, len(store.known)
    )
    return store, content


def check_kv_disk(config: EngineConfig) -> None:
    """Refuse settings that contradict `kv_disk`, if it is set. Raises ConfigError: names the settings."""
    if config.kv_disk is None:
        return
    if not config.enable_prefix_caching:
        raise ConfigError(
            "kv_disk needs the prefix cache, but enable_prefix_caching is false. Enable it, or remove kv_disk."
        )
    if config.distributed_executor_backend != "uni":
        raise ConfigError(
            f"kv_disk needs distributed_executor_backend uni, got {config.distributed_executor_backend}. Set uni, or "
            "remove kv_disk."
        )


def kv_folder(path: str) -> Path:
    """The folder that `kv_disk` names. Raises ConfigError if there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"kv_disk is {path}, but there is no such home folder. Name another folder.") from error
