"""The life of the service: bind, load, serve, drain, stop."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine import ConfigError, EngineConfig, default_topic
from engine.host.logs import LogFormat
from server import logs
from server.alone import run_server, serve_alone
from server.config.settings import ServerSettings
from server.door.listening import Listener, check_certificate, is_public, raise_file_limit
from server.facts import check_source, served_model_id

if TYPE_CHECKING:
    from server.models.declared import Declared

logger = logging.getLogger("octavo.server")

_READABLE = (
    "stderr is not a terminal, so the log is JSON, one record per line. --log-format console (OCTAVO_LOG_FORMAT) "
    "writes plain text."
)


def serve(
    config: EngineConfig,
    settings: ServerSettings,
    version: str,
    *,
    notes: Sequence[str] = (),
    several: Sequence[Declared] = (),
) -> int:
    """Load the model, serve until SIGTERM or Ctrl-C, stop cleanly; returns the exit status, which is 1 if the engine
    crashed too often. Raises StartupError if the address cannot be bound, or the certificate cannot be used;
    OctavoError if the model cannot be loaded, or the file with API keys cannot be read.

    Args:
        settings: the service's settings.
        version: version shown in the API's documentation.
        notes: warnings to log first.
        several: the models, if there are several; `config` is not used then.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nothing has been read yet that could be reloaded
    log_format = _set_up_logging(settings)
    if log_format == "json":
        config = replace(config, show_progress=False)  # a progress bar is not a log line
    for note in notes:
        logger.warning(note)
    check_certificate(settings)
    if not several:  # `prepare` checks several models
        check_source(config)
    raise_file_limit()
    # Bound before the model loads, so that a taken port is reported at once.
    with Listener(settings) as listener:
        if is_public(settings) and not (settings.api_key or settings.api_key_file):
            logger.warning(
                "%s is open to other machines without an API key: every client that can reach it may use it. "
                "Set --api-key (OCTAVO_API_KEY) or --api-key-file, or listen on 127.0.0.1.",
                listener.url,
            )
        if settings.rate_limit_storage is not None:
            from server.door.rates import check_storage  # slow to import

            check_storage(settings.rate_limit_storage)
        if several:
            from server.models.starting import prepare  # slow to import

            return run_server(prepare(several, settings, version, listener, log_format), listener)
        model_id = served_model_id(config.model, settings.served_model_name)
        if model_id in config.adapters:
            raise ConfigError(f"lora_modules has an adapter with the model's own name, {model_id}. Rename it.")
        config = config.with_kv_topic(default_topic(model_id, None if settings.uds else settings.port, os.environ))
        serve_it = serve_alone
        if settings.api_server_count > 1:
            from server.processes.service import serve_several as serve_it
        return serve_it(config, settings, model_id, version, listener, log_format)


def _set_up_logging(settings: ServerSettings) -> LogFormat:
    log_format = logs.choose_format(settings.log_format)
    logs.configure(settings.log_level, log_format, log_prompts=settings.log_prompts)
    if log_format == "json" and settings.log_format == "auto":
        logger.info("%s", _READABLE)
    return log_format
