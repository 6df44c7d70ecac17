"""The start of a service with several models: it listens at once, and loads each model when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastapi import FastAPI

from engine import OctavoError
from engine.host.logs import LogFormat
from server.app import create_app
from server.commons import own_commons
from server.config.settings import ServerSettings
from server.door.drain import Drain
from server.door.keys import KeyRing, read_api_keys
from server.door.listening import Listener
from server.door.reload import KeyReload
from server.facts import check_source
from server.lone import LoneServer
from server.memory import MemoryGuard, find_limit
from server.metrics.exposition import encode_metrics
from server.metrics.registry import Metrics
from server.models.declared import Declared
from server.models.exposition import ModelMetrics
from server.models.registry import Registry
from server.response_store import open_store
from server.tracing.start import start_tracing


def prepare(
    models: Sequence[Declared], settings: ServerSettings, version: str, listener: Listener, log_format: LogFormat
) -> LoneServer:
    """The server, before its first connection. A model whose files are missing has failed; the others are served.

    Raises:
        ConfigError: a setting is wrong.
        OctavoError: no model can be found.
    """
    missing = find_missing(models)
    api_keys = KeyRing()
    reload = KeyReload(settings, api_keys)
    reload.listen()  # before the file is read, so that no change of it is missed
    api_keys.replace(read_api_keys(settings))
    drain = Drain()
    app, registry = make_app(models, settings, version, log_format, drain, api_keys)
    for name, reason in missing.items():
        registry.fail(name, reason)
    names = ", ".join(model.name for model in models)
    return LoneServer(app, registry.engines, drain, listener, names, reload, settings)


def find_missing(models: Sequence[Declared]) -> dict[str, str]:
    """The models whose files are missing, with the reasons.

    Raises:
        OctavoError: there is no other model.
    """
    missing: dict[str, str] = {}
    for model in models:
        try:
            check_source(model.engine)
        except OctavoError as problem:
            missing[model.name] = str(problem)
            if len(missing) == len(models):
                raise
    return missing


def make_app(
    models: Sequence[Declared],
    settings: ServerSettings,
    version: str,
    log_format: LogFormat,
    drain: Drain,
    api_keys: KeyRing,
) -> tuple[FastAPI, Registry]:
    """The app, and the models behind it, none of which is loaded.

    Raises:
        ConfigError: a setting is wrong.
    """
    registry = Registry(models, settings, log_format)
    commons = own_commons(registry.engines, settings, models[0].name, version)
    assert isinstance(commons.metrics, Metrics)
    shown = ModelMetrics(commons.metrics.registry, registry.served).registry()

    async def render(accept: str | None) -> tuple[bytes, str]:
        return encode_metrics(shown, accept)

    app = create_app(
        registry.engines,
        None,
        models[0].name,
        version=version,
        settings=settings.model_copy(update={"enable_cache_map": False}),  # a cache map is one model's
        drain=drain,
        api_keys=api_keys,
        tracing=start_tracing(settings, version),
        memory=MemoryGuard(find_limit(settings.max_api_memory)),
        response_store=open_store(settings),
        commons=replace(commons, render=render),
        several=registry,
    )
    registry.attach(app.state.service)
    return app, registry
